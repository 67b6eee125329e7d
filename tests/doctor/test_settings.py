"""Checks of config.json against the target: every refusal has a name, both sides and the repair; nothing is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from test_config import TARGET, speculators, z_lab

from vllm_dflash.doctor.finding import Finding
from vllm_dflash.doctor.settings import Pair, TargetFacts, check_settings, rope_theta_of

FACTS = TargetFacts(TARGET, 10000.0, num_tokens=120)  # of its 128 rows, 8 are padding
SLIDING, FULL = "sliding_attention", "full_attention"


def check(raw: dict[str, Any], requested: int | None = None) -> list[Finding]:
    return check_settings(Pair(raw, "my/drafter", FACTS, requested))[1]


def errors(raw: dict[str, Any]) -> list[Finding]:
    return [finding for finding in check(raw) if finding.level == "error"]


@pytest.mark.case("F29")
@pytest.mark.parametrize("raw", [z_lab(), speculators(), z_lab(block_size=None) | {"block_size": 8}])
def test_good_settings_of_either_dialect(raw):
    config, findings = check_settings(Pair(raw, "my/drafter", FACTS, None))
    assert findings == []
    assert config is not None
    assert config.target_layer_ids == (0, 2)


REFUSED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    # name of the case: config.json, name of the check, both sides and the repair
    "layers beyond": (z_lab({"target_layer_ids": [0, 7]}), "target-layers", ("[0, 7]", "4 layers", "this target")),
    "last layer": (z_lab({"target_layer_ids": [0, 3]}), "target-layers", ("[0, 3]", "last", "this target")),
    "embeddings as a layer": (
        speculators(aux_hidden_state_layer_ids=[0, 3]),
        "target-layers",
        ("[0, 3] (1 is the first)", "4 layers", "this target"),
    ),
    "layers in another order": (z_lab({"target_layer_ids": [2, 0]}), "target-layers", ("[2, 0]", "order", "[0, 2]")),
    "another depth": (z_lab(num_target_layers=36), "target-layers", ("36 layers", "has 4", "this target")),
    "no mask token": (z_lab({"mask_token_id": None}), "mask-token", ("no mask_token_id", "trained with")),
    "no mask token, speculators": (speculators(mask_token_id=None), "mask-token", ("no mask_token_id", "set")),
    "mask token beyond": (z_lab({"mask_token_id": 128}), "mask-token", ("128", "vocab_size is 128", "set")),
    "mask token of minus one": (z_lab({"mask_token_id": -1}), "mask-token", ("-1", "vocab_size is 128", "set")),
    "mask token in padding": (z_lab({"mask_token_id": 120}), "mask-token", ("padding row", "has 120 tokens", "set")),
    "another vocabulary": (z_lab(vocab_size=100) | {"draft_vocab_size": 101}, "vocabulary", ("101", "100", "set")),
    "two rope bases": (
        z_lab(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}),
        "rope",
        ("rope_theta 10000", "1e+06", "trained with"),
    ),
    "part of a head rotated": (z_lab(partial_rotary_factor=0.5), "rope", ("partial_rotary_factor 0.5", "serving")),
    "part, in rope_parameters": (
        z_lab(rope_theta=None, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        "rope",
        ("partial_rotary_factor 0.25", "whole heads", "serving"),
    ),
    "yarn": (z_lab(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope", ("'yarn'", "plain RoPE")),
    "yarn, speculators": (
        speculators({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        "rope",
        ("'yarn'", "unscaled", "plain RoPE"),
    ),
    "two causalities": (z_lab({"causal": True}, is_causal=False), "causality", ("False", "True", "set both")),
    "two block sizes": (z_lab({"block_size": 8}, block_size=16), "block-length", ("16", "8", "set both")),
    "no block size": (z_lab(block_size=None), "block-length", ("no K", "--num-speculative-tokens")),
    "predicts from its anchor": (speculators(sample_from_anchor=True), "heads", ("anchor", "masks", "retrain")),
    "anchor, z-lab": (z_lab({"sample_from_anchor": True}), "heads", ("anchor", "masks", "retrain")),
    "DFlash2": (z_lab(architectures=["DFlash2DraftModel"]), "heads", ("DFlash2DraftModel", "DFlashDraftModel", "set")),
    "DFlash2, speculators": (speculators(speculators_model_type="dflash2"), "heads", ("dflash2", "'dflash'")),
    "LiLiCorr": (z_lab(architectures=["LiLiCorrDraftModel"]), "heads", ("LiLiCorrDraftModel", "method of its own")),
    "Domino": (z_lab(domino_config={"rank": 4}), "heads", ("Domino", "plain DFlash has none", "train")),
    "another model": ({"architectures": ["Qwen3ForCausalLM"]}, "dialect", ("Qwen3ForCausalLM", "--draft")),
    "quantised": (z_lab(quantization_config={"quant_method": "gptq"}), "quantisation", ("gptq", "quantised from")),
    "no window": (z_lab(layer_types=[SLIDING] * 3), "config", ("sliding_window None", "3 of its layers")),
}


@pytest.mark.case("F7", "F8", "F18", "F27", "F29", "F30", "F31", "F33")
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_named(case):
    raw, name, fragments = REFUSED[case]
    found = errors(raw)
    assert [finding.name for finding in found] == [name]
    text = f"{found[0].message} / {found[0].repair}"
    assert "my/drafter" in text or name == "mask-token"
    for fragment in fragments:
        assert fragment in text


@pytest.mark.case("F31")
def test_an_absent_rope_base_is_worth_a_warning():
    """vLLM then takes a million, whatever the target has."""
    (found,) = check(z_lab(rope_theta=None))
    assert (found.name, found.level) == ("rope", "warning")
    assert "1000000" in found.message
    assert "10000.0" in found.message


@pytest.mark.case("F31")
def test_rope_base_of_a_target_in_either_spelling():
    from types import SimpleNamespace

    assert rope_theta_of(SimpleNamespace(rope_parameters={"rope_theta": 1e5})) == 1e5
    assert rope_theta_of(SimpleNamespace(rope_theta=5e5)) == 5e5
    assert rope_theta_of(SimpleNamespace()) is None


@pytest.mark.case("F27")
@pytest.mark.parametrize(("requested", "is_clamped"), [(3, False), (7, False), (8, True), (15, True)])
def test_k_beyond_the_block_is_a_warning(requested, is_clamped):
    config, findings = check_settings(Pair(z_lab(block_size=8), "my/drafter", FACTS, requested))
    assert config is not None
    assert [(f.name, f.level) for f in findings] == [("block-length", "warning")] * is_clamped


@pytest.mark.case("F33")
def test_what_the_v1_runner_refuses_is_a_warning():
    found = check(z_lab(layer_types=[SLIDING, FULL, SLIDING], sliding_window=64))
    assert [(f.name, f.level) for f in found] == [("runner", "warning")]
    assert "V2 runner" in found[0].repair


def test_every_error_of_the_reader_is_an_error_here():
    """What serving refuses, no check lets pass."""
    from test_config import OWN_REFUSALS
    from test_config_pair import TARGET_REFUSALS

    for case, (raw, _) in (OWN_REFUSALS | TARGET_REFUSALS).items():
        assert errors(raw), case
