"""Drafters with sliding windows draft by the window that they were trained with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny_drafter

sys.path.append(str(Path(__file__).resolve().parent.parent / "engine"))
from test_reference import compare_drafts, load_reference

WINDOW = 12
PROMPTS = [list(range(20, 60)), [11, 2, 90, 41, 8], list(range(3, 90, 2))]


@pytest.mark.case("F6")
@pytest.mark.feature("drafter with a sliding window", "drafts of the reference, contexts of seven windows")
@pytest.mark.parametrize(
    ("is_causal", "layers", "more"),
    [
        pytest.param(False, {"sliding_window": WINDOW}, {}, id="bidirectional"),
        pytest.param(True, {}, {"swa_window_size": WINDOW}, id="causal"),
    ],
)
def test_all_layers_slide(engine, tiny_target, tmp_path, is_causal, layers, more):
    """Checkpoints write the window in one of two places; the first is one that transformers drops for Qwen3."""
    config = {"mask_token_id": 0, "target_layer_ids": [0, 2], "causal": is_causal} | more
    layers = layers | {"layer_types": ["sliding_attention"] * 3}
    drafter = write_tiny_drafter(tmp_path / "drafter", dflash_config=config, **layers)
    served = engine(tiny_target, drafter=drafter, num_drafted=7)
    results = served.generate(PROMPTS, max_tokens=40)
    assert [r.token_ids for r in results] == engine(tiny_target).token_ids(PROMPTS, max_tokens=40)
    num_cycles, ties, differences = compare_drafts(results, *load_reference(tiny_target, drafter))
    assert num_cycles > 80
    assert differences == []
    assert len(ties) <= num_cycles // 100


@pytest.mark.case("F6")
@pytest.mark.feature("drafter with sliding and full layers on a CPU", "refused by vLLM's V1 runner, by name")
def test_mixed_windows_are_refused_on_the_v1_runner(engine, tiny_target, tmp_path):
    layers: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": WINDOW,
    }
    drafter = write_tiny_drafter(tmp_path / "drafter", **layers)
    with pytest.raises(ValueError, match="mixed sliding/full dflash drafts"):
        engine(tiny_target, drafter=drafter, num_drafted=7)
