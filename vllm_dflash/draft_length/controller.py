"""The three calls of a proposer's step.

    decision = None
    every step:
        controller.observe(decision, verified, accepted, timed_step)     what became of the last decision
        plan = controller.plan(request_ids, context_lens, caps)          before the draft pass: who, how many positions
        decision = controller.choose(plan, confidences)                  after it: how many to verify

There are two decisions because the draft pass is paid before confidences are known. "Off" is an empty plan: the target
pass of the next step is then a plain one. Context K/V are written by the next draft pass at the latest, so that
switching back costs nothing. An empty plan holds for some steps, for which neither `plan` nor `observe` is called but
`rested` at their end: whoever does not draft should not pay for its being decided either.

While off, the estimate of acceptance grows old, and while on, so does the price of a plain step. Both are refreshed by
probes, paid from a small share of the time that has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dflash.draft_length.acceptance import AcceptanceEstimate
from vllm_dflash.draft_length.cost import CostModel
from vllm_dflash.draft_length.counters import DraftCounters
from vllm_dflash.draft_length.decision import DraftDecision, DraftPlan
from vllm_dflash.draft_length.memory import RequestMemory
from vllm_dflash.draft_length.plan import Prospect, best_draft_pass
from vllm_dflash.draft_length.policy import choose_lengths
from vllm_dflash.draft_length.seeded import after_verification, seeded_lengths_now
from vllm_dflash.draft_length.steps import TimedStep

#: Likely blocks over all requests that a plan is made from; 128 cost some 100 microseconds.
_MAX_SAMPLES = 128
_NOBODY = np.empty(0, dtype=np.int64)
_NO_FLAGS = np.empty(0, dtype=bool)
_NOTHING = Prospect(_NOBODY, 0, 0.0, 0.0)


@dataclass(frozen=True)
class DraftLengthSettings:
    """How cautious the controller is."""

    probe_share: float = 0.005  # of time, spent on draft passes while off and on plain steps while on
    switch_on_margin: float = 0.02  # expected gain over plain decoding before it is switched on; off again at 0
    probe_survival: float = 0.15  # a probe verifies positions at least this likely to be accepted, and at least one
    max_probe_length: int = 4
    all_positions_every: int = 32  # steps; in between, LM-head rows that do not pay are left out
    plain_every: int = 128  # steps on after which a plain one is timed, where speculation gains little
    plain_below: float = 1.3  # "little": expected rate over plain
    plan_every: int = 4  # steps for which a plan is kept while the same requests are decoded,
    plan_at_most_every: int = 16  # twice as many each time that the next is no other
    max_requests: int = 1024  # remembered at a time
    all_timed_until: int = 64  # steps whose times are all learnt from; then one in `timed_every`, or it costs too much
    timed_every: int = 5  # no multiple of what else comes round regularly


class DraftLengthController:
    """Decides draft lengths of every step.

    Args:
        num_speculative_tokens: K, the most that is ever drafted.
        cost: seconds of steps; corrected by `observe`.
        recorded_rates: of the checkpoint, see AcceptanceEstimate.
        draft_block_size: rows of a request in the draft pass; default K + 1.
        is_causal: the drafter predicts the same with fewer masks behind, so a block has one per position.
        settings: how cautious.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        cost: CostModel,
        recorded_rates: Sequence[float] | None = None,
        draft_block_size: int | None = None,
        settings: DraftLengthSettings | None = None,
        is_causal: bool = False,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_block_size = None if is_causal else draft_block_size or num_speculative_tokens + 1
        self.settings = settings or DraftLengthSettings()
        self.cost = cost
        self.acceptance = AcceptanceEstimate(num_speculative_tokens, recorded_rates)
        self.counters = DraftCounters()
        self._memory = RequestMemory(num_speculative_tokens, self.settings.max_requests)
        self._step = 0
        self._is_on = False
        self._prospect = _NOTHING
        self._planned_for: tuple[str, ...] = ()
        self._planned_until = 0  # step
        self._plan_steps = self.settings.plan_every
        self._outcomes: list[tuple[DraftDecision, np.ndarray, np.ndarray]] = []  # to be learnt from before a plan
        self._steps_drafting = 0  # in a row with a draft pass
        self._probe_seconds = 0.0  # saved up
        self._last_probe_price = 0.0

    def plan(
        self,
        request_ids: Sequence[str],
        context_lens: np.ndarray,  # [R] tokens in each request's cache after this step
        caps: np.ndarray,  # [R] most tokens that each may draft: room, dflash_max_draft; 0 = it cannot draft now
        is_seeded: np.ndarray | None = None,  # [R] bool: sampled with a seed, see seeded.py
    ) -> DraftPlan:
        """Who gets a draft pass, and for how many positions the LM head is computed."""
        self._step += 1
        ids, num_requests = tuple(request_ids), len(request_ids)
        slots = self._memory.slots(request_ids, self._step)
        caps = np.clip(caps, 0, self.num_speculative_tokens)
        fixed = np.zeros(num_requests, dtype=bool)
        if is_seeded is not None and is_seeded.any():
            state = self._memory.seeded_lengths[slots]
            seeded_caps = seeded_lengths_now(state, is_seeded & (caps > 0), caps)
            self._memory.seeded_lengths[slots] = state
            caps = np.where(is_seeded, seeded_caps, caps)
            fixed = is_seeded & (caps > 0)
        drafting, num_positions, is_probe = self._choose_requests(ids, slots, context_lens, np.where(fixed, 0, caps))
        if fixed.any():
            drafting = np.union1d(drafting, np.flatnonzero(fixed))
            num_positions = max(num_positions, int(caps[fixed].max()))
        if len(drafting) == 0:
            is_free = is_seeded is None or not is_seeded.any()  # lengths of seeded requests count every step
            rest_steps = self._planned_until - self._step - 1 if is_free else 0
            return DraftPlan(_NOBODY, 0, ids, context_lens, _NOBODY, _NO_FLAGS, False, self._step, max(rest_steps, 0))
        num_positions = min(num_positions, int(caps[drafting].max()))
        return DraftPlan(
            drafting=drafting,
            num_positions=num_positions,
            request_ids=ids,
            context_lens=context_lens,
            caps=np.minimum(caps[drafting], num_positions),
            fixed=fixed[drafting],
            is_probe=is_probe,
            step=self._step,
        )

    def choose(self, plan: DraftPlan, confidences: np.ndarray) -> DraftDecision:
        """How many drafted tokens each drafting request verifies.

        Args:
            plan: of this step.
            confidences: [D, P] maximum probability of the drafter's distribution at each position, by the plan's
                `drafting` and `num_positions`. Never a sampled token's probability: see policy.py.

        Raises:
            ValueError: confidences do not have the plan's shape.
        """
        num_drafting = len(plan.drafting)
        if confidences.shape != (num_drafting, plan.num_positions):
            raise ValueError(
                f"the plan asks for confidences of shape {(num_drafting, plan.num_positions)}, but they have"
                f" {confidences.shape}."
            )
        ids = tuple(plan.request_ids[row] for row in plan.drafting)
        if num_drafting == 0:
            return DraftDecision(ids, confidences, np.zeros(0, dtype=np.int64), plan.fixed)
        slots = self._memory.slots(ids, plan.step)
        survival = self.acceptance.survival(confidences, self._memory.offsets[slots])
        self._memory.remember(slots, confidences, plan.step)
        survival = survival[:, : plan.num_positions].copy()
        survival[np.arange(plan.num_positions) >= plan.caps[:, None]] = 0
        if plan.is_probe:
            likely = (survival >= self.settings.probe_survival).sum(1)
            lengths = np.minimum(np.clip(likely, 1, self.settings.max_probe_length), plan.caps)
        else:
            lengths = self._lengths_that_pay(plan, survival)
        return DraftDecision(ids, confidences, np.where(plan.fixed, plan.caps, lengths), plan.fixed)

    def observe(
        self,
        decision: DraftDecision | None,  # whose drafts the step verified; None for a step without
        verified: np.ndarray,  # [D] tokens verified in fact: 0 where a request was preempted, fewer where cut
        accepted: np.ndarray,  # [D]; both empty without a decision
        step: TimedStep,
    ) -> None:
        """Learn from a step: outcomes of an earlier decision, and what the step took.

        Args:
            step: target pass that verified the decision's drafts, with the draft pass that followed it.
        """
        is_learnt = self._step <= self.settings.all_timed_until or self._step % self.settings.timed_every == 0
        predicted = self.cost.observe(step) if is_learnt else self.cost.seconds(step.size)
        self.counters.add(step, predicted, int(verified.sum()), int(accepted.sum()))
        self._probe_seconds += self.settings.probe_share * step.seconds
        if decision is not None and len(decision.lengths):
            self._follow_seeds(decision, verified, accepted)
            self._outcomes.append((decision, verified, accepted))
            if len(self._outcomes) > self.settings.plan_at_most_every:  # nothing is planned for seeded requests
                self._learn()

    def rested(self, step: TimedStep, count: int) -> None:
        """Learn from `count` steps of an empty plan that went by without `plan` and `observe`; `step` is their mean."""
        self._step += count
        predicted = self.cost.observe(step)
        for _ in range(count):
            self.counters.add(step, predicted, 0, 0)
        self._probe_seconds += self.settings.probe_share * step.seconds * count

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is remembered of finished requests."""
        finished = list(request_ids)
        if finished:
            self._learn()
            self._memory.forget(finished)

    @property
    def num_remembered(self) -> int:
        """Requests in memory."""
        return len(self._memory)

    def _choose_requests(
        self, request_ids: tuple[str, ...], slots: np.ndarray, context_lens: np.ndarray, caps: np.ndarray
    ) -> tuple[np.ndarray, int, bool]:
        """Indices to draft for, positions, and whether it is a probe."""
        if not caps.any():
            self._planned_for, self._planned_until = (), self._step + self.settings.plan_at_most_every
            return _NOBODY, 0, False
        if request_ids != self._planned_for or self._step >= self._planned_until:
            before, was_on = self._prospect, self._is_on
            self._plan_anew(slots, context_lens, caps)
            is_same = request_ids == self._planned_for and was_on == self._is_on and self._prospect.is_like(before)
            longer = min(2 * self._plan_steps, self.settings.plan_at_most_every)
            self._plan_steps = longer if is_same else self.settings.plan_every
            self._planned_for, self._planned_until = request_ids, self._step + self._plan_steps
        if not self._is_on:
            self._steps_drafting = 0
            probed = self._probe(slots, context_lens, caps)
            return probed, self.num_speculative_tokens, len(probed) > 0
        if self._is_plain_step_due(len(slots)):
            self._steps_drafting = 0
            self._planned_until = self._step + 1  # it is one step
            return _NOBODY, 0, False
        self._steps_drafting += 1
        looks_at_all = self._step % self.settings.all_positions_every == 0
        drafting = self._prospect.drafting[caps[self._prospect.drafting] > 0]
        return drafting, self.num_speculative_tokens if looks_at_all else self._prospect.num_positions, False

    def _plan_anew(self, slots: np.ndarray, context_lens: np.ndarray, caps: np.ndarray) -> None:
        self._learn()
        num_samples = next(m for m in (8, 4, 2) if m * len(slots) <= _MAX_SAMPLES or m == 2)
        survival = self._memory.expected_survival(slots, num_samples, self.acceptance, self._step)
        survival *= (np.arange(self.num_speculative_tokens) < caps[:, None])[:, None]
        last_rate = None if self._prospect is _NOTHING else max(self._prospect.rate, self._prospect.plain_rate)
        prospect = best_draft_pass(survival, context_lens, self.cost, self.draft_block_size, last_rate)
        needed = prospect.plain_rate * (1 if self._is_on else 1 + self.settings.switch_on_margin)
        self._is_on = len(prospect.drafting) > 0 and prospect.rate > needed
        self._prospect = prospect

    def _probe(self, slots: np.ndarray, context_lens: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """Requests to draft for although it is not expected to pay; none until enough time has been saved up."""
        if self._probe_seconds < self._last_probe_price / 2:
            return _NOBODY
        possible = np.flatnonzero(caps)
        # Those that least is known of first. A draft pass costs much for one request and little more for some others.
        order = possible[np.argsort(-self._memory.unseen_for(slots[possible], self._step), kind="stable")]
        count, base = np.arange(1, len(order) + 1), len(slots)
        contexts = np.cumsum(context_lens[order])
        seconds = self.cost.draft_pass_seconds(count, self.num_speculative_tokens, self.draft_block_size, contexts)
        seconds += self.cost.token_seconds(base + 2.0 * count) - self.cost.token_seconds(np.array(base))
        seconds += self.cost.price("speculation") + 2 * self.cost.price("attended") * contexts
        num_probed = int(np.count_nonzero(seconds <= 2 * seconds[0]))
        price = self._last_probe_price = float(seconds[num_probed - 1])
        self._probe_seconds = min(self._probe_seconds, 2 * price)
        if self._probe_seconds < price:
            return _NOBODY
        self._probe_seconds -= price
        self._planned_until = self._step + 1  # what it tells is looked at in the next step
        self.counters.steps_probing += 1
        return np.sort(order[:num_probed])

    def _is_plain_step_due(self, num_requests: int) -> bool:
        gain = self._prospect.rate / self._prospect.plain_rate
        if self._steps_drafting < self.settings.plain_every or gain > self.settings.plain_below:
            return False
        price = (gain - 1) * num_requests / self._prospect.plain_rate
        self._probe_seconds = min(self._probe_seconds, 2 * price)
        if self._probe_seconds < price:
            return False
        self._probe_seconds -= price
        return True

    def _lengths_that_pay(self, plan: DraftPlan, survival: np.ndarray) -> np.ndarray:
        """[D] lengths; those of fixed rows are a given cost here."""
        cost, num_requests = self.cost, len(plan.context_lens)
        num_fixed = int(plan.caps[plan.fixed].sum())
        contexts = plan.context_lens[plan.drafting]
        row_prices = cost.price("attended") * contexts + cost.price("stored_row")
        fixed_survival = float(survival[plan.fixed].sum())
        survival[plan.fixed] = 0
        constant = cost.one_token_seconds(num_requests, float(plan.context_lens.sum()))
        constant += cost.storing_seconds(num_requests, is_plain=False)
        constant += float(row_prices[plan.fixed] @ plan.caps[plan.fixed])
        constant += float(
            cost.draft_pass_seconds(
                np.array(len(contexts)), plan.num_positions, self.draft_block_size, np.array(float(contexts.sum()))
            )
        )
        seconds = constant + cost.token_seconds(num_requests + num_fixed + np.arange(survival.size + 1))
        seconds[0 if num_fixed else 1 :] += cost.price("speculation")
        return choose_lengths(survival, seconds, row_prices, num_requests + fixed_survival)

    def _learn(self) -> None:
        """Learn from the outcomes since the last plan, all at once: per step it would cost as much as a plan."""
        if not self._outcomes:
            return
        num_positions = max(decision.confidences.shape[1] for decision, _, _ in self._outcomes)
        # Positions that were not drafted were not verified either, so what stands there is not looked at.
        confidences = np.concatenate(
            [np.pad(d.confidences, ((0, 0), (0, num_positions - d.confidences.shape[1]))) for d, _, _ in self._outcomes]
        )
        slots = self._memory.find([request for d, _, _ in self._outcomes for request in d.request_ids])
        verified = np.concatenate([verified for _, verified, _ in self._outcomes])
        accepted = np.concatenate([accepted for _, _, accepted in self._outcomes])
        self._outcomes.clear()
        self._memory.learn_outcomes(self.acceptance, slots, confidences, verified, accepted)

    def _follow_seeds(self, decision: DraftDecision, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Lengths of seeded requests follow their own outcomes at once, or their text would depend on neighbours."""
        rows = np.flatnonzero(decision.fixed & (verified > 0))
        if len(rows) == 0:
            return
        slots = self._memory.find([decision.request_ids[row] for row in rows])
        rows, slots = rows[slots >= 0], slots[slots >= 0]
        state, misses = self._memory.seeded_lengths[slots], self._memory.seeded_misses[slots]
        state, misses = after_verification(state, misses, verified[rows], accepted[rows], self.num_speculative_tokens)
        self._memory.seeded_lengths[slots], self._memory.seeded_misses[slots] = state, misses
