"""Repairs as changes of config.json: in either dialect they read back as the way that was tried."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from broken_drafters import SHIPPED, read_subject
from safetensors.torch import load_file
from tiny_models import drafter_config, drafter_tensors
from tiny_rows import drawn_row

from vllm_dflash.config import DFlashConfig
from vllm_dflash.doctor.fix import edited, write_repaired
from vllm_dflash.doctor.hypotheses import hypotheses
from vllm_dflash.doctor.probe import Probe
from vllm_dflash.doctor.replay import pair_rows
from vllm_dflash.doctor.subject import Subject, as_is
from vllm_dflash.training.dialects import TargetName, to_speculators

TOKENIZER = SimpleNamespace(
    all_special_ids=[1, 2], added_tokens_decoder={1: "", 2: "", 5: ""}, convert_ids_to_tokens=lambda i: f"<{i}>"
)


def subject(raw: dict[str, Any]) -> Subject:
    config = DFlashConfig.from_dict(raw, "tiny")
    return Subject(Path("tiny"), raw, config, drafter_tensors(drafter_config()), 7, 5e4, 8.0)


def probe() -> Probe:
    row = drawn_row("..xxxx", feature_size=4 * 64, vocab_size=128)
    table = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    return Probe(row, 6, [("d", "probe")], [[1, 2]], table, table)


Z_LAB = drafter_config(dflash_config={"mask_token_id": 3, "target_layer_ids": [1, 2]})


@pytest.mark.case("F7", "F29", "F31")
@pytest.mark.parametrize("dialect", ["z-lab", "speculators"])
def test_edits_read_back_as_what_was_tried(dialect):
    raw = Z_LAB
    if dialect == "speculators":
        raw = to_speculators(DFlashConfig.from_dict(Z_LAB, "tiny"), TargetName("small/target"))
    one = subject(raw)
    setup = as_is(one, probe())
    with_edits = [h for h in hypotheses(one, probe(), setup, TOKENIZER) if h.edits]
    assert {h.name for h in with_edits} >= {"target-layers", "rope", "mask-token", "block-length", "embedding-scale"}
    for tried in with_edits:
        if "is_neox_style" in tried.repair:
            continue  # DFlashConfig does not hold it
        assert tried.edits is not None
        read = DFlashConfig.from_dict(edited(raw, tried.edits), "tiny")
        assert read.target_layer_ids == (tried.setup.layer_ids or one.config.target_layer_ids), tried
        assert read.rope_theta == tried.setup.config.rope_theta, tried
        assert read.input_embedding_scale == tried.setup.config.input_embedding_scale, tried
        assert read.mask_token_id == tried.setup.config.mask_token_id, tried
        assert read.layer_causal == tried.setup.config.layer_causal, tried
        assert read.max_speculative_tokens == tried.setup.num_drafted, tried


@pytest.mark.case("F32")
@pytest.mark.parametrize(
    ("changes", "tried"),
    [
        ({}, [8.0]),
        ({"input_embedding_scale": 3.0}, [8.0, 1.0]),
        ({"input_embedding_scale": 8.03}, [1.0]),  # rounded to bf16, the target's own
    ],
    ids=["unscaled", "wrong", "the target's"],
)
def test_scales_that_are_tried(changes, tried):
    """The target's own factor, and none; where config.json says it at the top, both places are set."""
    raw = Z_LAB | changes
    one = subject(raw)
    found = [h for h in hypotheses(one, probe(), as_is(one, probe()), TOKENIZER) if h.name == "embedding-scale"]
    assert [h.setup.config.input_embedding_scale for h in found] == tried
    for hypothesis, scale in zip(found, tried):
        assert hypothesis.edits is not None
        assert DFlashConfig.from_dict(edited(raw, hypothesis.edits), "tiny").input_embedding_scale == scale
        assert f'"input_embedding_scale": {scale} in dflash_config of config.json' in hypothesis.repair
    if 8.0 in tried:
        assert found[0].cause.endswith("trained with 8, the target's own factor")


def test_rows_of_pairs_come_back_in_halves():
    """Interleaving queries and keys and undoing it is the identity; other tensors are left alone."""
    from broken_drafters import interleave_rotary_rows

    tensors = load_file(SHIPPED / "model.safetensors")
    mixed = dict(tensors)
    interleave_rotary_rows({"head_dim": 64}, mixed, probe())
    names = {name for name in tensors if not torch.equal(tensors[name], mixed[name])}
    assert len(names) == 8
    back = pair_rows(mixed, 64)
    assert all(torch.equal(tensors[name], back[name]) for name in tensors)


def test_neox_flag_of_the_config_is_followed(tmp_path):
    raw = json.loads((SHIPPED / "config.json").read_text())
    shipped = read_subject(SHIPPED)
    big = Probe(probe().row, 30, [], [], torch.zeros(49152, 576), torch.zeros(49152, 576))
    assert not as_is(shipped, big).rotates_pairs
    other = Subject(SHIPPED, raw | {"is_neox_style": False}, shipped.config, shipped.tensors, 7, 1e5)
    assert as_is(other, big).rotates_pairs


def test_repaired_copy_is_whole_or_absent(tmp_path):
    raw = json.loads((SHIPPED / "config.json").read_text())
    edits = {("dflash_config", "mask_token_id"): 5, ("rope_theta",): 2e5}
    write_repaired(SHIPPED, raw, edits, tmp_path / "repaired")
    written = json.loads((tmp_path / "repaired" / "config.json").read_text())
    assert written["dflash_config"]["mask_token_id"] == 5
    assert written["rope_theta"] == 2e5
    assert raw["dflash_config"]["mask_token_id"] == 16
    assert (tmp_path / "repaired" / "model.safetensors").read_bytes() == (SHIPPED / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        write_repaired(SHIPPED, raw, edits, tmp_path / "repaired")
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="could not be written"):
        write_repaired(SHIPPED, raw, edits, tmp_path / "file" / "repaired")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "repaired"]
