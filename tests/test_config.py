"""What a drafter's config.json says, in both dialects, and which drafters are refused before anything is loaded."""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import drafter_config

from vllm_dflash.config import DFlashConfig, TargetShape, is_dflash_config

FULL, SLIDING = "full_attention", "sliding_attention"
TARGET = TargetShape(name="small/target", num_layers=4, hidden_size=64, vocab_size=128)


def naming(*fragments: str) -> str:
    """A pattern for `pytest.raises(match=...)`: every fragment is in the message, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(fragment)})" for fragment in fragments)


def z_lab(nested: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The tiny drafter's config.json with changes at the top and in `dflash_config`; None deletes a key."""
    raw = drafter_config()
    raw["dflash_config"] = without_none(raw["dflash_config"] | (nested or {}))
    return without_none(raw | changes)


def speculators(inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The same drafter as speculators writes it."""
    layers = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": [FULL, FULL, FULL],
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
    }
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 8,
        "mask_token_id": 0,
        "num_target_layers": 4,
        "transformer_layer_config": without_none(layers | (inner or {})),
    }
    return without_none(raw | changes)


def without_none(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def read(raw: dict[str, Any]) -> DFlashConfig:
    return DFlashConfig.from_dict(raw, "my/drafter")


# ---- the two dialects


def test_every_value_of_the_z_lab_dialect():
    assert read(z_lab(rms_norm_eps=1e-5, target_hidden_size=96, draft_vocab_size=50)) == DFlashConfig(
        name="my/drafter",
        dialect="z-lab",
        target_layer_ids=(0, 2),
        mask_token_id=0,
        draft_block_size=8,
        hidden_size=64,
        target_hidden_size=96,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=128,
        draft_vocab_size=50,
        num_target_layers=4,
        layer_causal=(False, False, False),
        sliding_windows=(None, None, None),
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=1024,
        attention_bias=False,
        has_attention_sinks=False,
        is_quantised=False,
        input_embedding_scale=1.0,
    )


@pytest.mark.case("F29")
def test_both_dialects_describe_the_same_drafter():
    """speculators counts a layer's output from 1, z-lab from 0."""
    assert dataclasses.replace(read(speculators()), dialect="z-lab") == read(z_lab())


@pytest.mark.parametrize(
    ("raw", "of_z_lab", "of_vllm"),
    [
        (z_lab({"target_layer_ids": [1, 9, 17, 25, 33]}), (1, 9, 17, 25, 33), (2, 10, 18, 26, 34)),
        (speculators(aux_hidden_state_layer_ids=[2, 10, 18, 26, 34]), (1, 9, 17, 25, 33), (2, 10, 18, 26, 34)),
        (z_lab({"target_layer_ids": [0]}), (0,), (1,)),
        (speculators(aux_hidden_state_layer_ids=[1]), (0,), (1,)),
    ],
)
@pytest.mark.case("F7")
def test_feature_layers_are_not_off_by_one(raw, of_z_lab, of_vllm):
    config = read(raw)
    assert config.target_layer_ids == of_z_lab
    assert config.aux_layer_ids == of_vllm


@pytest.mark.parametrize(
    ("flat", "nested", "expected"), [(16, None, 16), (None, 16, 16), (16, 16, 16), (None, None, None)]
)
def test_block_size_is_flat_or_nested(flat, nested, expected):
    assert read(z_lab({"block_size": nested}, block_size=flat)).draft_block_size == expected


def test_contradictory_block_sizes_are_refused():
    with pytest.raises(ValueError, match=naming("my/drafter", "block_size 16", "block_size 8", "trained with")):
        read(z_lab({"block_size": 8}, block_size=16))


@pytest.mark.parametrize("position", ["nested", "flat"])
def test_mask_token_is_nested_or_flat(position):
    raw = z_lab({"mask_token_id": 7}) if position == "nested" else z_lab({"mask_token_id": None}, mask_token_id=7)
    assert read(raw).mask_token_id == 7


@pytest.mark.case("F32")
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (z_lab({"input_embedding_scale": 3}), 3.0),
        (z_lab(input_embedding_scale=0.5), 0.5),
        (z_lab({"input_embedding_scale": 3.0}, input_embedding_scale=3), 3.0),
        (z_lab() | {"input_embedding_scale": None}, 1.0),
        (speculators(input_embedding_scale=3.0), 3.0),
        (speculators(), 1.0),
    ],
    ids=["nested", "flat", "both", "null", "speculators", "speculators, absent"],
)
def test_embedding_scale_in_each_place(raw, expected):
    assert read(raw).input_embedding_scale == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 2e5}}, 2e5),
        ({"rope_theta": None}, 1e6),
    ],
    ids=["flat", "transformers 5", "absent"],
)
@pytest.mark.case("F31")
def test_rope_base_in_each_spelling(changes, expected):
    assert read(z_lab(**changes)).rope_theta == expected


def test_absent_sizes_follow_from_the_others():
    config = read(z_lab(num_key_value_heads=None, head_dim=None, num_target_layers=None))
    assert (config.num_kv_heads, config.head_dim, config.num_target_layers) == (4, 16, None)
    assert (config.target_hidden_size, config.draft_vocab_size) == (64, 128)


@pytest.mark.parametrize("value", [{"quant_method": "gptq"}, None, {}])
def test_only_a_filled_quantization_config_makes_a_drafter_quantised(value):
    flat, nested = drafter_config(quantization_config=value), speculators()
    nested["transformer_layer_config"]["quantization_config"] = value
    assert [read(flat).is_quantised, read(nested).is_quantised] == [bool(value)] * 2


def test_attention_sinks_in_either_spelling():
    assert read(z_lab({"attention_sink_bias": True})).has_attention_sinks
    assert read(z_lab(add_swa_attention_sink_bias=True)).has_attention_sinks
    assert not read(z_lab({"attention_sink_bias": False}, add_swa_attention_sink_bias=True)).has_attention_sinks


# ---- which layers slide, and which let a block token see only what is before it

MIXED = [SLIDING, FULL, SLIDING]
T, F = True, False
Changes = dict[str, Any]
Z_LAB_ATTENTION: dict[str, tuple[Changes, Changes, tuple[bool, ...], tuple[int | None, ...]]] = {
    "full": ({}, {}, (F, F, F), (None,) * 3),
    "no list": ({"layer_types": None}, {}, (F, F, F), (None,) * 3),
    "mixed": ({"layer_types": MIXED, "sliding_window": 256}, {}, (T, F, T), (256, None, 256)),
    "sliding": ({"layer_types": [SLIDING] * 3, "sliding_window": 9}, {}, (T, T, T), (9, 9, 9)),
    "own window": ({"layer_types": MIXED, "sliding_window": 256}, {"swa_window_size": 64}, (T, F, T), (64, None, 64)),
    "is_causal": ({"is_causal": True}, {}, (T, T, T), (None,) * 3),
    "not is_causal": ({"layer_types": MIXED, "sliding_window": 9, "is_causal": F}, {}, (F, F, F), (9, None, 9)),
    "causal": ({}, {"causal": True}, (T, T, T), (None,) * 3),
    "not causal": ({"layer_types": MIXED, "sliding_window": 9}, {"causal": False}, (F, F, F), (9, None, 9)),
    "is_causal wins": ({"is_causal": False}, {"causal": True}, (F, F, F), (None,) * 3),
    "use_swa": ({}, {"use_swa": True, "swa_window_size": 128}, (F, F, F), (128,) * 3),
    "use_swa, no list": ({"layer_types": None, "sliding_window": 99}, {"use_swa": True}, (F, F, F), (99,) * 3),
    "use_swa, mixed": ({"layer_types": MIXED, "sliding_window": 9}, {"use_swa": True}, (T, F, T), (9, None, 9)),
    "use_swa, causal": ({"sliding_window": 9}, {"use_swa": True, "causal": True}, (T, T, T), (9, 9, 9)),
}


@pytest.mark.parametrize("case", Z_LAB_ATTENTION)
def test_attention_of_z_lab_drafters(case):
    changes, nested, causal, windows = Z_LAB_ATTENTION[case]
    config = read(z_lab(nested, **changes))
    assert config.layer_causal == causal
    assert config.sliding_windows == windows


@pytest.mark.parametrize("case", Z_LAB_ATTENTION)
def test_attention_of_z_lab_drafters_is_as_vllm_serves_it(case):
    """vLLM's own functions, compiled from their source, since importing them takes many seconds."""
    from transformers import Qwen3Config

    changes, nested, causal, windows = Z_LAB_ATTENTION[case]
    served = Qwen3Config(**z_lab(nested, use_sliding_window=True, **changes))
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    tree = ast.parse((Path(vllm.origin).parent / "model_executor" / "models" / "qwen3_dflash.py").read_text())
    names = {"_dflash_layer_causal", "_resolve_layer_attention"}
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    v2_runner = SimpleNamespace(use_v2_model_runner=True)  # the V1 runner serves no mixed layers
    namespace: dict[str, Any] = {
        "Qwen3Config": Qwen3Config,
        "_SLIDING_ATTENTION": SLIDING,
        "get_current_vllm_config": lambda: v2_runner,
    }
    exec(compile(tree, "qwen3_dflash.py", "exec"), namespace)
    layers = [namespace["_resolve_layer_attention"](served, layer) for layer in range(3)]
    assert layers == list(zip(windows, causal))


@pytest.mark.parametrize(
    ("non_causal", "expected"), [(False, (True, False, True)), (True, (False,) * 3), (None, (False,) * 3)]
)
def test_speculators_flag_is_about_sliding_layers_only(non_causal, expected):
    """vLLM applies it to all layers; full-attention layers are trained bidirectional whatever it says."""
    mixed = {"layer_types": MIXED, "sliding_window": 256}
    config = read(speculators(mixed, sliding_window_non_causal=non_causal))
    assert config.layer_causal == expected
    assert config.sliding_windows == (256, None, 256)
    full = read(speculators(sliding_window_non_causal=non_causal))
    assert full.layer_causal == (False, False, False)


# ---- files that contradict themselves

OWN_REFUSALS = {
    "unsorted layers": (z_lab({"target_layer_ids": [2, 0]}), ["[2, 0]", "increase", "Retrain with [0, 2]"]),
    "repeated layer": (z_lab({"target_layer_ids": [0, 2, 2]}), ["[0, 2, 2]", "repeats", "Retrain with [0, 2]"]),
    "unsorted aux layers": (speculators(aux_hidden_state_layer_ids=[3, 1]), ["[2, 0]", "Retrain with [0, 2]"]),
    "no layers": (z_lab({"target_layer_ids": []}), ["target_layer_ids []", "at least one layer"]),
    "no layer ids": (z_lab({"target_layer_ids": None}), ["target_layer_ids None", "at least one layer"]),
    "no aux layer ids": (speculators(aux_hidden_state_layer_ids=None), ["aux_hidden_state_layer_ids None"]),
    "layers in words": (z_lab({"target_layer_ids": ["0", "2"]}), ["target_layer_ids ['0', '2']"]),
    "aux layers in words": (speculators(aux_hidden_state_layer_ids=["1"]), ["aux_hidden_state_layer_ids ['1']"]),
    "no mask token": (z_lab({"mask_token_id": None}), ["mask_token_id None", "0 to 127"]),
    "no mask token, speculators": (speculators(mask_token_id=None), ["mask_token_id None", "0 to 127"]),
    "mask token too large": (z_lab({"mask_token_id": 128}), ["mask_token_id 128", "0 to 127"]),
    "mask token negative": (speculators(mask_token_id=-1), ["mask_token_id -1", "0 to 127"]),
    "too few layer types": (z_lab(layer_types=[FULL] * 2), [f"['{FULL}', '{FULL}']", "num_hidden_layers 3"]),
    "too many layer types": (speculators({"layer_types": [FULL] * 4}), ["layer_types", "num_hidden_layers 3"]),
    "layer types in one word": (z_lab(layer_types=FULL), [f"layer_types '{FULL}'", "num_hidden_layers 3"]),
    "no window": (z_lab(layer_types=MIXED), ["sliding_window None", "2 of its layers slide"]),
    "no window, speculators": (speculators({"layer_types": MIXED}), ["sliding_window None", "2 of its layers"]),
    "no window, use_swa": (z_lab({"use_swa": True}), ["sliding_window None", "3 of its layers slide"]),
    "larger draft vocabulary": (z_lab(draft_vocab_size=129), ["draft_vocab_size 129", "vocab_size 128"]),
    "empty block": (z_lab(block_size=1), ["block_size 1", "one anchor and at least one drafted token"]),
    "block in words": (speculators(block_size="8"), ["block_size '8'", "one anchor"]),
    "two embedding scales": (
        z_lab({"input_embedding_scale": 3}, input_embedding_scale=1),
        ["input_embedding_scale 1", "input_embedding_scale 3.0 in its dflash_config"],
    ),
    **{
        f"embedding scale {value!r}, {dialect}": (
            changed,
            [f"input_embedding_scale {value!r}", "positive number of at"],
        )
        for value in (0, -1.0, "8", True, float("nan"), float("inf"), 10**7)
        for dialect, changed in {
            "nested": z_lab({"input_embedding_scale": value}),
            "flat": z_lab(input_embedding_scale=value),
            "speculators": speculators(input_embedding_scale=value),
        }.items()
    },
    "rates that increase": (z_lab(acceptance_rates=[0.2, 0.3]), ["acceptance_rates [0.2, 0.3]", "do not increase"]),
    "rates in words": (speculators(acceptance_rates=["half"]), ["acceptance_rates ['half']", "shares of cycles"]),
    "rates above one": (z_lab(acceptance_rates=[1.5]), ["acceptance_rates [1.5]", "shares of cycles"]),
    "empty nested section": (z_lab() | {"dflash_config": None}, ["dflash_config None", "mapping"]),
    "no inner section": (speculators(transformer_layer_config=None), ["transformer_layer_config None", "mapping"]),
}


@pytest.mark.parametrize("case", OWN_REFUSALS)
@pytest.mark.case("F30")
def test_contradictory_file_is_refused(case):
    raw, fragments = OWN_REFUSALS[case]
    repair = next((f for f in fragments if f.startswith("Retrain")), "set the value that it was trained with")
    with pytest.raises(ValueError, match=naming("my/drafter", repair, *fragments)):
        read(raw)


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
)
@pytest.mark.parametrize("value", [None, 0, -3, "64", 64.0, True])
def test_size_that_is_no_positive_number_is_refused(key, value):
    message = naming("my/drafter", f"{key} {value!r}", "whole number of at least 1", "trained with")
    for raw in (z_lab() | {key: value}, speculators(speculators()["transformer_layer_config"] | {key: value})):
        if value is None:
            raw.get("transformer_layer_config", raw).pop(key, None)
        with pytest.raises(ValueError, match=message):
            read(raw)


WRONG_VALUES: list[Any] = [None, "x", "", [], ["x"], {}, {"x": 1}, -1, 0, 3.5, True, 10**9]


@pytest.mark.parametrize("raw", [z_lab({"block_size": 8}), speculators()], ids=["z-lab", "speculators"])
def test_no_wrong_value_crashes_the_reader(raw):
    """Whatever stands in one place of the file, the drafter is read or a ValueError names it."""
    places: list[tuple[str, ...]] = [(key,) for key in raw]
    places += [(outer, key) for outer in raw if isinstance(raw[outer], dict) for key in raw[outer]]
    assert len(places) > 15
    for place in places:
        for value in WRONG_VALUES:
            changed = copy.deepcopy(raw)
            section = changed if len(place) == 1 else changed[place[0]]
            section[place[-1]] = value
            message = refusal(changed)
            assert message is None or "my/drafter" in message, (place, value)


def refusal(raw: dict[str, Any]) -> str | None:
    try:
        config = read(raw)
        config.check_target(TARGET)
        config.resolve_num_speculative_tokens(None)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("architectures", [["Qwen3ForCausalLM"], ["LlamaForCausalLMEagle3"], None])
def test_file_of_another_model_is_refused(architectures):
    with pytest.raises(ValueError, match=naming("my/drafter", "not a DFlash drafter", str(architectures), "give a")):
        read({"architectures": architectures, "hidden_size": 64})


def test_speculators_checkpoint_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=naming("my/drafter", "'eagle3'", "'dflash'", "name its own method")):
        read(speculators(speculators_model_type="eagle3"))


@pytest.mark.case("F8")
def test_drafter_that_predicts_from_its_anchor_is_refused():
    with pytest.raises(ValueError, match=naming("sample_from_anchor is true", "retrain", "sample_from_anchor false")):
        read(speculators(sample_from_anchor=True))
    assert read(speculators(sample_from_anchor=False)).draft_block_size == 8


# ---- which files are ours


@pytest.mark.parametrize(
    ("raw", "ours"),
    [
        (z_lab(), True),
        (speculators(), True),
        (z_lab(architectures=["DFlash2DraftModel"]), False),
        (z_lab(architectures=["DFlashDraftModel", "Other"]), False),
        (z_lab(architectures=None), False),
        (z_lab() | {"dflash_config": None}, True),  # ours, and then refused with a reason
        (speculators(speculators_model_type="dflash2"), False),
        (speculators(speculators_model_type="dspark"), False),
        (speculators(speculators_model_type="eagle3"), False),
        ({"architectures": ["DFlashDraftModel"]}, False),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({}, False),
    ],
)
@pytest.mark.case("F33")
def test_only_plain_dflash_is_ours(raw, ours):
    assert is_dflash_config(raw) is ours
