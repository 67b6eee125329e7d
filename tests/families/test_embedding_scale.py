"""Embeddings of block tokens times a factor: in serving, in training, and as targets of many families have one."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from targets import granite, write_target
from tiny_chat import tiny_tokenizer
from tiny_models import HEAD_DIM, HIDDEN, INNER, drafter_config, write_tiny_drafter
from tiny_training import TinyTask, greedy, run

from vllm_dflash.config import DFlashConfig
from vllm_dflash.reference import ReferenceDrafter
from vllm_dflash.training.dialects import TargetName, to_speculators, to_z_lab
from vllm_dflash.training.pretrained import import_drafter
from vllm_dflash.training.setup import prepare_run
from vllm_dflash.training.target_features import embedding_scale

sys.path.append(str(Path(__file__).resolve().parent.parent / "engine"))
from test_reference import compare_drafts, load_reference

pytestmark = pytest.mark.case("F32")

DIALECTS = ["z-lab", "speculators"]
SCALE = 3.0
PROMPTS = [[3, 5, 7], [11, 2, 90, 41, 8], list(range(20, 60)), [100]]
SCALED = {"mask_token_id": 0, "target_layer_ids": [0, 2], "input_embedding_scale": SCALE}


@pytest.fixture(scope="module")
def scaled_drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny drafter with a scale in config.json, by dialect."""
    folder = tmp_path_factory.mktemp("scaled")
    drafters = {dialect: write_tiny_drafter(folder / dialect, dflash_config=SCALED) for dialect in DIALECTS}
    raw = to_speculators(DFlashConfig.from_dict(drafter_config(), "tiny"), TargetName("small/target"), "float32")
    (folder / "speculators" / "config.json").write_text(json.dumps(raw | {"input_embedding_scale": SCALE}))
    return drafters


def with_scale(reference: ReferenceDrafter, scale: float) -> ReferenceDrafter:
    """The same drafter on a table that is `scale` times the target's, with no scale of its own."""
    other = copy.copy(reference)
    other.config = dataclasses.replace(reference.config, input_embedding_scale=1.0)
    other.embed = reference.embed * scale
    return other


# ---- serving


@pytest.mark.feature("drafter with input_embedding_scale", "drafts of a reference on scaled embeddings; greedy text")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_drafts_equal_those_on_a_scaled_table(engine, tiny_target, scaled_drafters, dialect):
    drafter = scaled_drafters[dialect]
    served = engine(tiny_target, drafter=drafter, num_drafted=7)
    results = served.generate(PROMPTS, max_tokens=32)
    assert [r.token_ids for r in results] == engine(tiny_target).token_ids(PROMPTS, max_tokens=32)
    target, reference = load_reference(tiny_target, drafter)
    for scaling in (reference, with_scale(reference, SCALE)):
        num_cycles, ties, differences = compare_drafts(results, target, scaling)
        assert num_cycles > 100
        assert differences == []
        assert len(ties) <= num_cycles // 100
    num_cycles, _, differences = compare_drafts(results, target, with_scale(reference, 1.0))
    assert len(differences) > num_cycles, "the scale makes no difference to these drafts, so they prove nothing"


def test_graphs_compiled_for_another_scale_are_not_reused(engine, tiny_target, scaled_drafters, monkeypatch):
    """vLLM caches compiled graphs by a hash, and the scale is a constant in them."""
    served = engine(tiny_target, drafter=scaled_drafters["z-lab"], num_drafted=7)
    config = served.runner.drafter.draft_model_config
    before = config.compute_hash()
    monkeypatch.setitem(config.hf_config.dflash_config, "input_embedding_scale", 1.0)
    assert config.compute_hash() != before


def test_an_own_mask_embedding_is_scaled_as_the_row_it_stands_for(engine, tiny_target, scaled_drafters, monkeypatch):
    """As vLLM does it in DFlash2."""
    layers = engine(tiny_target, drafter=scaled_drafters["z-lab"], num_drafted=7).runner.drafter.model.model
    table, own = layers.embed_tokens.weight, torch.arange(HIDDEN, dtype=torch.float32)
    ids = torch.tensor([5, 0, 0, 7])
    assert torch.equal(layers.embed_input_ids(ids), SCALE * table[ids])
    monkeypatch.setattr(layers, "has_separate_mask_embedding", True)
    monkeypatch.setattr(layers.mask_embedding, "data", own)
    assert torch.equal(layers.embed_input_ids(ids), SCALE * torch.stack([table[5], own, own, table[7]]))


def test_native_vllm_overlooks_the_scale(engine, tiny_target, tmp_path):
    """When this fails, vLLM reads the scale for plain DFlash too, and `DrafterLayers` must no longer apply it."""
    drafter = write_tiny_drafter(tmp_path / "drafter", num_hidden_layers=1, dflash_config=SCALED)
    results = engine(tiny_target, drafter=drafter, num_drafted=7, native=True).generate(PROMPTS, max_tokens=24)
    target, reference = load_reference(tiny_target, drafter)
    num_cycles, _, differences = compare_drafts(results, target, reference)
    assert len(differences) > num_cycles
    assert compare_drafts(results, target, with_scale(reference, 1.0))[2] == []


# ---- targets

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "head_dim": HEAD_DIM,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[dict[str, Any], float]] = {
    "llama": ({}, 1.0),
    "qwen3": ({}, 1.0),
    "gemma": ({}, 8.0),
    "gemma2": ({}, 8.0),
    "gemma3_text": ({}, 8.0),
    "gemma4_text": ({"global_head_dim": HEAD_DIM, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, 8.0),
    "granite": ({"embedding_multiplier": 3.0}, 3.0),
    "granitemoe": ({"embedding_multiplier": 0.5, "num_local_experts": 2, "num_experts_per_tok": 1}, 0.5),
    "minicpm3": (
        {"scale_emb": 12, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
        12.0,
    ),
    "falcon_h1": ({"embedding_multiplier": 5.5}, 5.5),
    "afmoe": ({"mup_enabled": True, "num_dense_layers": 2}, 8.0),
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_scale_of_a_target_is_what_its_first_layer_gets(family):
    """Measured on Hugging Face's model of the family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes, expected = FAMILIES[family]
    config = AutoConfig.for_model(family, **SIZES | changes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    seen: list[torch.Tensor] = []
    model.get_decoder().layers[0].register_forward_pre_hook(
        lambda module, args, named: seen.append(args[0] if args else named["hidden_states"]), with_kwargs=True
    )
    ids = torch.tensor([[3, 5, 7]])
    model(ids, use_cache=False)
    torch.testing.assert_close(seen[0], model.get_input_embeddings().weight[ids] * expected)
    assert embedding_scale(model.config) == expected


# ---- training


def granite_of_64_tokens() -> tuple[Any, type]:
    config, model_class = granite()
    config.vocab_size = 64
    return config, model_class


@pytest.fixture(scope="module")
def granite_task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    """A Granite target, which multiplies its embeddings by 3, and greedy answers of its own."""
    folder = tmp_path_factory.mktemp("granite")
    target = write_target(granite_of_64_tokens, folder / "target")
    tiny_tokenizer().save_pretrained(target)
    prompts = torch.randint(3, 64, (16, 6), generator=torch.Generator().manual_seed(0))
    rows = [
        {"id": f"row-{i}", "prompt_ids": ids[:6].tolist(), "response_ids": ids[6:].tolist()}
        for i, ids in enumerate(greedy(target, prompts, 16))
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TinyTask(target, folder / "data.jsonl")


def test_a_new_drafter_takes_the_targets_scale_and_is_served_with_it(engine, granite_task, tmp_path):
    run(granite_task.settings(tmp_path / "run", eval_examples=2))
    trained = tmp_path / "run" / "last"
    assert import_drafter(trained)[0].input_embedding_scale == 3.0
    assert "input_embedding_scale: 3.0" in (trained / "settings.yaml").read_text()
    served = engine(granite_task.target, drafter=trained, num_drafted=3)
    results = served.generate([[3, 5, 7], [11, 2, 60, 41, 8], list(range(20, 60))], max_tokens=24)
    target, reference = load_reference(granite_task.target, trained.resolve())
    num_cycles, ties, differences = compare_drafts(results, target, reference)
    assert num_cycles > 30
    assert differences == []
    assert len(ties) <= 1
    assert compare_drafts(results, target, with_scale(reference, 1.0))[2] != []


def test_the_scale_can_be_chosen_and_is_kept_from_then_on(granite_task, tmp_path):
    cpu = torch.device("cpu")
    run(granite_task.settings(tmp_path / "run", eval_examples=2, input_embedding_scale=1.0))
    config, _ = import_drafter(tmp_path / "run" / "last")
    assert config.input_embedding_scale == 1.0
    assert "input_embedding_scale" not in to_z_lab(config)["dflash_config"]
    more = {"from_pretrained": str(tmp_path / "run" / "last"), "eval_examples": 2}
    kept = prepare_run(granite_task.settings(tmp_path / "more", **more), cpu)
    assert (kept.config.input_embedding_scale, kept.settings.input_embedding_scale) == (1.0, 1.0)
    with pytest.raises(ValueError, match=r"has input_embedding_scale 1.0, but --input-embedding-scale is 3.0; leave"):
        prepare_run(granite_task.settings(tmp_path / "other", input_embedding_scale=3.0, **more), cpu)
    with pytest.raises(ValueError, match=r"input_embedding_scale 1.0, now 3.0\); give the same to go on"):
        prepare_run(granite_task.settings(tmp_path / "run", eval_examples=2), cpu)
