"""Prometheus counters of draft length decisions, beside vLLM's own.

They are counted in the worker, whose process `/metrics` reads only in prometheus_client's multiprocess mode: start
`vllm serve` with PROMETHEUS_MULTIPROC_DIR set to an empty folder. vLLM's counters (`vllm:spec_decode_*`) count verified
tokens and know nothing of steps without drafts.
"""

from __future__ import annotations

from dataclasses import asdict

from prometheus_client import Counter

from vllm_dflash.draft_length import DraftCounters

#: Field of DraftCounters -> name and meaning of the counter.
_COUNTERS = {
    "steps": ("steps", "Steps of the engine."),
    "steps_off": ("steps_off", "Steps without a draft pass."),
    "steps_probing": ("steps_probing", "Steps with a draft pass that was made to learn."),
    "seconds": ("step_seconds", "Measured seconds of steps."),
    "seconds_off": ("step_seconds_off", "Measured seconds of steps without a draft pass."),
    "predicted_seconds": ("predicted_step_seconds", "Seconds that the cost model predicted for them."),
    "request_steps": ("request_steps", "Requests in steps; (this + accepted) / this is the acceptance length."),
    "drafted": ("drafted_tokens", "Rows through the drafter's LM head."),
    "verified": ("verified_tokens", "Drafted tokens that the target verified."),
    "accepted": ("accepted_tokens", "Drafted tokens that the target accepted."),
}
_registered: dict[str, Counter] = {}


class DraftMetrics:
    """Passes the growth of a DraftCounters on to Prometheus; engines of one process add up."""

    def __init__(self) -> None:
        for field, (name, meaning) in _COUNTERS.items():
            if field not in _registered:
                _registered[field] = Counter(f"vllm_dflash:{name}", meaning)
        self._last = asdict(DraftCounters())

    def update(self, counters: DraftCounters) -> None:
        """Count what was added since the last call."""
        now = asdict(counters)
        for field, counter in _registered.items():
            counter.inc(now[field] - self._last[field])
        self._last = now
