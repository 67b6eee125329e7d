"""What the controls say where no repair helps, on acceptances and scores written by hand."""

from __future__ import annotations

import torch

from vllm_dflash.doctor.diagnosis import Diagnosis, _advice, _judge_by_controls, _measurement
from vllm_dflash.doctor.replay import Replay, gain
from vllm_dflash.training.acceptance import Acceptance, DocumentAcceptance

ANCHORS = 160


def replayed(score: float, runs: tuple[int, ...]) -> Replay:
    """Scores about `score` that differ from anchor to anchor, and the same runs in five answers."""
    noise = 0.1 * torch.randn(ANCHORS, generator=torch.Generator().manual_seed(len(runs)))
    return Replay(score + noise, Acceptance([DocumentAcceptance(str(i), "probe", runs, 3) for i in range(5)]))


DRAWN = replayed(-9.0, (0,) * 20)


def judged(served: Replay, shifted: Replay) -> Diagnosis:
    found = Diagnosis("healthy", "", served=_measurement("as it is", served.acceptance))
    _judge_by_controls(found, served, {"random drafter": DRAWN, "features shifted by one row": shifted})
    return found


def test_a_drafter_that_loses_by_shifted_features_is_healthy():
    found = judged(replayed(-1.0, (2, 0, 1, 3)), replayed(-2.0, (0, 1, 0, 0)))
    assert found.name == "healthy"


def test_a_drafter_that_loses_nothing_ignores_them():
    served = replayed(-1.0, (2, 0, 1, 3))
    assert gain(served, served).t == 0
    found = judged(served, served)
    assert found.name == "features-ignored"
    assert "shifted by one row they give tau 2.50" in found.sentence
    assert "fc" in found.repair


def test_a_drafter_that_is_never_right_is_untrained_or_another_targets():
    found = judged(replayed(-8.0, (0,) * 19), replayed(-8.5, (0,) * 18))
    assert found.name == "untrained-or-other-target"
    assert "tau 1.00" in found.sentence


def test_late_slots_are_advised_against_and_unused_ones_are_not_mentioned_twice():
    rare = _measurement("", Acceptance([DocumentAcceptance("a", "s", (1,) * 50 + (0,) * 50, 7)] * 2))
    (advice,) = _advice(rare)
    assert advice.level == "warning"
    assert "from slot 2 on" in advice.message
    assert "num_speculative_tokens 1" in advice.repair
    often = _measurement("", Acceptance([DocumentAcceptance("a", "s", (3,) * 9, 3)] * 2))
    assert _advice(often) == []
