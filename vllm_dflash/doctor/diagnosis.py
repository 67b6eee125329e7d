"""From checks, controls and repairs to one cause.

Order of what decides: an error of config.json or of the tensors that is certain by itself; the repair that brings the
drafter nearest to the target, or another rendering of the prompts, whichever has the higher tau; and where neither
helps, the controls. A repair counts when it gains at least `MIN_GAIN` nats per slot with a t of at least `MIN_T`;
anchors are paired, and neighbours count once. About 30 are tried, so less would be found by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vllm_dflash.doctor.finding import Finding, warning
from vllm_dflash.doctor.hypotheses import Edits, Hypothesis, hypotheses
from vllm_dflash.doctor.probe import Probe, ProbeSource
from vllm_dflash.doctor.prompts import Rendering, alternatives
from vllm_dflash.doctor.replay import DEPTH, Gain, Replay, Setup, gain, replay, screen
from vllm_dflash.doctor.subject import Subject, as_is
from vllm_dflash.training.acceptance import Acceptance
from vllm_dflash.training.bootstrap import tau_interval
from vllm_dflash.training.loops import loop_start

MIN_GAIN, MIN_T = 0.03, 2.5
#: Anchors by which the repairs are chosen that are tried in full, one in so many, and how many these are.
_STRIDE, _MAX_CONFIRMED = 3, 4
#: Gain on those anchors, in nats, from which a repair is worth trying in full; less than nothing, because they are few.
_LEAST = -0.03
#: Repairs that gain this share of the best one's nats are as good.
_SAME_GAIN = 0.98
#: A drafter below this tau does nothing useful, whatever the controls say.
_USELESS_TAU = 1.05
#: Slots accepted in a smaller share of cycles are not worth verifying.
_RARE = 0.02


@dataclass(frozen=True)
class Measurement:
    """tau of one way to run the drafter."""

    label: str
    tau: float
    interval: tuple[float, float] | None
    by_position: list[float]
    cycles: int

    @property
    def text(self) -> str:
        """tau with its interval."""
        return f"{self.tau:.2f}" + (f" ({self.interval[0]:.2f} to {self.interval[1]:.2f})" if self.interval else "")


@dataclass(frozen=True)
class Trial:
    """A repair that was tried."""

    name: str
    repair: str
    screened: Gain
    confirmed: Gain | None = None


@dataclass
class Diagnosis:
    """What is wrong, why that is believed, and what to do."""

    name: str  # "healthy", or the name of the check or hypothesis
    sentence: str
    repair: str = ""
    findings: list[Finding] = field(default_factory=list)
    served: Measurement | None = None  # as config.json says
    repaired: Measurement | None = None
    controls: list[Measurement] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    gain: Gain | None = None  # of the repair
    edits: Edits | None = None  # of config.json, where they are the whole repair
    num_loops: int = 0  # answers that end in a loop, which flatter every drafter

    @property
    def is_healthy(self) -> bool:
        """Nothing is wrong."""
        return self.name == "healthy"


def from_findings(findings: Sequence[Finding]) -> Diagnosis | None:
    """The diagnosis where a check before the probe has found an error; its first one is the cause."""
    first = next((f for f in findings if f.level == "error"), None)
    return None if first is None else Diagnosis(first.name, first.message, first.repair, list(findings))


def diagnose(subject: Subject, source: ProbeSource, rendering: Rendering, findings: Sequence[Finding]) -> Diagnosis:
    """Probe a drafter whose settings and tensors can be read.

    Args:
        findings: of the checks before; an error among them is the cause, and the probe says what it costs.

    Raises:
        ValueError: the questions cannot be rendered so, or the target answers none.
    """
    try:
        probe = source.get(rendering)
    except ValueError as problem:
        return _unanswered(subject, source, rendering, findings, problem)
    setup = as_is(subject, probe)
    served = replay(probe, setup, setup.num_drafted)
    found = from_findings(findings) or Diagnosis("healthy", "", findings=list(findings))
    found.served = _measurement("as it is", served.acceptance)
    found.num_loops = sum(loop_start(answer) is not None for answer in probe.answers)
    controls = _controls(probe, setup)
    found.controls = [_measurement(label, control.acceptance) for label, control in controls.items()]
    if found.is_healthy:
        _find_cause(found, subject, source, rendering, served, controls)
    if found.is_healthy:
        found.sentence = f"healthy: tau {found.served.text} at K = {setup.num_drafted}."
        found.findings += _advice(found.served)
    return found


def _unanswered(
    subject: Subject, source: ProbeSource, rendering: Rendering, findings: Sequence[Finding], problem: ValueError
) -> Diagnosis:
    """The target itself does not answer prompts rendered so; does it answer them in another way?"""
    if (certain := from_findings(findings)) is not None:
        return certain
    for other in alternatives(rendering, source.tokenizer):
        try:
            probe = source.get(other)
        except ValueError:
            continue
        setup = as_is(subject, probe)
        repaired = _measurement(other.label, replay(probe, setup, setup.num_drafted).acceptance)
        name = _rendering_name(other, rendering)
        sentence = f"{str(problem).partition(';')[0]}, but with the {other.label} it does"
        repair = f"send prompts with the {other.label}: tau is then {repaired.text}"
        return Diagnosis(name, sentence, repair, list(findings), repaired=repaired)
    raise problem


def _rendering_name(better: Rendering, rendering: Rendering) -> str:
    return "thinking" if better.template == rendering.template else "chat-template"


def _find_cause(
    found: Diagnosis,
    subject: Subject,
    source: ProbeSource,
    rendering: Rendering,
    served: Replay,
    controls: dict[str, Replay],
) -> None:
    """Fill in the cause, where there is one."""
    probe = source.get(rendering)
    setup = as_is(subject, probe)
    best = _best_repair(found, list(hypotheses(subject, probe, setup, source.tokenizer)), probe, setup, served)
    if best is not None:
        found.gain = max((t.confirmed for t in found.trials if t.repair == best.repair and t.confirmed), key=_nats)
        found.name, found.repair, found.edits = best.name, best.repair, best.edits
        repaired = replay(probe, best.setup, best.setup.num_drafted)
        found.repaired = _measurement("repaired", repaired.acceptance)
        found.sentence = best.cause
    # Other answers than the drafter learnt from look a little like any other fault, so both are held to what they gain.
    other = _other_rendering(subject, source, rendering, served)
    if other is not None and (found.repaired is None or other[1].tau > found.repaired.tau):
        better, found.repaired = other
        found.name, found.gain, found.edits = _rendering_name(better, rendering), None, None
        found.sentence = (
            f"prompts were rendered with {rendering.label}, but the drafter fits answers to prompts rendered with the "
            f"{better.label}"
        )
        found.repair = f"send prompts with the {better.label}: tau is then {found.repaired.text}"
    elif best is None:
        _judge_by_controls(found, served, controls)


def _best_repair(
    found: Diagnosis, tried: list[Hypothesis], probe: Probe, setup: Setup, served: Replay
) -> Hypothesis | None:
    quick = screen(probe, setup, _STRIDE)
    screened = [gain(screen(probe, hypothesis.setup, _STRIDE), quick) for hypothesis in tried]
    confirmed: dict[int, Gain] = {}
    taus: dict[int, float] = {}
    for i in _promising(tried, screened):
        replayed = replay(probe, tried[i].setup, min(DEPTH, setup.num_drafted))
        confirmed[i], taus[i] = gain(replayed, served), replayed.acceptance.tau
    found.trials = [Trial(h.name, h.repair, screened[i], confirmed.get(i)) for i, h in enumerate(tried)]
    # What leaves a drafter useless is no repair of it.
    good = {i: g for i, g in confirmed.items() if g.nats >= MIN_GAIN and g.t >= MIN_T and taus[i] >= _USELESS_TAU}
    most = max((g.nats for g in good.values()), default=0.0)
    # Of repairs that do the same, such as two tokens with the same embedding, the likelier one was listed first.
    return next((tried[i] for i in sorted(good) if good[i].nats >= _SAME_GAIN * most), None)


def _promising(tried: list[Hypothesis], screened: list[Gain]) -> list[int]:
    """The repairs to try in full: the best few, and of one kind the best two."""
    chosen: list[int] = []
    for i in sorted(range(len(tried)), key=lambda i: -screened[i].nats):
        name = tried[i].name
        if screened[i].nats > _LEAST and sum(tried[j].name == name for j in chosen) < 2:
            chosen.append(i)
    return chosen[:_MAX_CONFIRMED]


def _controls(probe: Probe, setup: Setup) -> dict[str, Replay]:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.ones_like(tensor)
        if tensor.dim() == 1
        else (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor)
        for name, tensor in setup.tensors.items()
    }
    depth = min(DEPTH, setup.num_drafted)
    return {
        "random drafter": replay(probe, replace(setup, tensors=drawn), depth),
        "features shifted by one row": replay(probe, replace(setup, features="shifted"), depth),
    }


def _other_rendering(
    subject: Subject, source: ProbeSource, rendering: Rendering, served: Replay
) -> tuple[Rendering, Measurement] | None:
    for other in alternatives(rendering, source.tokenizer):
        try:
            probe = source.get(other)
        except ValueError:  # the questions are token ids, or the target does not answer them so
            continue
        setup = as_is(subject, probe)
        there = replay(probe, setup, setup.num_drafted)
        if there.acceptance.tau > served.acceptance.tau and _unpaired_t(there, served) >= MIN_T:
            return other, _measurement(other.label, there.acceptance)
    return None


def _judge_by_controls(found: Diagnosis, served: Replay, controls: dict[str, Replay]) -> None:
    assert found.served is not None
    drawn, shifted = controls["random drafter"], controls["features shifted by one row"]
    low = found.served.interval[0] if found.served.interval else found.served.tau
    if found.served.tau < _USELESS_TAU or low <= drawn.acceptance.tau:
        found.name = "untrained-or-other-target"
        found.sentence = (
            f"it is hardly better than a random drafter (tau {found.served.text} against {drawn.acceptance.tau:.2f}), "
            f"and no repair helps: it was not trained, or for another target than this one"
        )
        found.repair = "give a drafter trained for this target, or train one (vllm-dflash train)"
    elif gain(served, shifted).t < MIN_T:
        found.name = "features-ignored"
        found.sentence = (
            f"the target's features make no difference to it: shifted by one row they give tau "
            f"{shifted.acceptance.tau:.2f}, as they are {found.served.text}"
        )
        found.repair = "re-export the checkpoint: fc, hidden_norm, k_proj or v_proj are not as trained"


def _advice(served: Measurement) -> list[Finding]:
    rare = next((slot for slot, share in enumerate(served.by_position) if share < _RARE), None)
    if rare is None or rare == 0:
        return []
    return [
        warning(
            "K",
            f"from slot {rare + 1} on, fewer than {_RARE:.0%} of cycles accept a draft, but K is "
            f"{len(served.by_position)}",
            f"num_speculative_tokens {rare} gives nearly the same tau for fewer verified tokens",
        )
    ]


def _measurement(label: str, acceptance: Acceptance) -> Measurement:
    documents = [d for d in acceptance.documents if d.runs]
    interval = tau_interval([sum(d.runs) for d in documents], [len(d.runs) for d in documents])
    return Measurement(label, acceptance.tau, interval, acceptance.by_position, acceptance.num_cycles)


def _nats(of: Gain) -> float:
    return of.nats


def _unpaired_t(one: Replay, other: Replay) -> float:
    """Welch's t of two replays on different texts; a divergence is comparable between texts, a likelihood is not."""
    from scipy.stats import ttest_ind

    units = [
        [u.mean() for u in np.array_split(scores, max(2, len(scores) // 8))]
        for scores in (one.scores.double().cpu().numpy(), other.scores.double().cpu().numpy())
    ]
    return float(ttest_ind(*units, equal_var=False).statistic)


def to_json(found: Diagnosis) -> dict[str, Any]:
    """Everything, for --json."""
    from dataclasses import asdict

    content = asdict(found)
    content["edits"] = {".".join(path): value for path, value in (found.edits or {}).items()}
    return {"healthy": found.is_healthy} | content
