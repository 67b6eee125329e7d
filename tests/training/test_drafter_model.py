"""The drafter as trained against the reference that drafts as serving does, and the ablations of the method."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, drafter_config, drafter_tensors, write_tiny_drafter
from tiny_rows import drawn_row
from torch import Tensor

from vllm_dflash.checkpoint import expected_tensors
from vllm_dflash.config import DFlashConfig
from vllm_dflash.reference import ReferenceDrafter
from vllm_dflash.training.blocks import Blocks, PackedRow, make_blocks
from vllm_dflash.training.model import Drafter, Variant

#: Hidden states of size about 1 after three layers; float32, sums in another order.
TOLERANCE = 2e-5

SLIDING = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 4}

#: Two documents; anchors at the first possible row, next to each other, and where the block ends beyond the text.
ROW = drawn_row("..xxxxxxxxxxxx", "." * 9 + "x" * 20, feature_size=2 * HIDDEN)
ANCHORS = torch.tensor([1, 4, 5, 12, 23, 30, 41])
LENGTH = 8
EMBEDDING = torch.randn(128, HIDDEN, generator=torch.Generator().manual_seed(3))


def trained(config: dict[str, Any], variant: Variant = Variant(), tensors: dict[str, Tensor] | None = None) -> Drafter:
    """The drafter of tiny_models.py, or a variant of it."""
    drafter = Drafter(DFlashConfig.from_dict(config, "tiny"), variant)
    drafter.load_state_dict(drafter_tensors(config) | (tensors or {}))
    return drafter


def biases(seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
    return {
        f"layers.{layer}.self_attn.{projection}_proj.bias": torch.randn(size, generator=generator)
        for layer in range(3)
        for projection, size in sizes.items()
    }


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({}, {}),
        ({"is_causal": True}, {}),
        ({"is_causal": False} | SLIDING, {}),
        (SLIDING, {}),  # sliding layers are causal where nothing is said
        ({"attention_bias": True}, biases()),
    ],
    ids=["bidirectional", "causal", "bidirectional sliding", "causal sliding", "biases"],
)
def test_hidden_states_equal_the_reference(changes: dict[str, Any], tensors: dict[str, Tensor], tmp_path: Path) -> None:
    """The reference drafts one block at a time from the features of one document."""
    folder = write_tiny_drafter(tmp_path / "drafter", tensors, **changes)
    raw = json.loads((folder / "config.json").read_text())
    reference = ReferenceDrafter(folder, DFlashConfig.from_dict(raw, "tiny"), EMBEDDING, EMBEDDING)
    blocks = make_blocks(ROW, ANCHORS, LENGTH)
    with torch.no_grad():
        hidden = trained(raw, tensors=tensors)(ROW, blocks, EMBEDDING)
    for index, anchor in enumerate(ANCHORS.tolist()):
        context = reference.fuse(ROW.features[int(blocks.document_start[index]) : anchor])
        expected = reference.predict(context, int(ROW.input_ids[anchor]), LENGTH - 1)
        torch.testing.assert_close(hidden[index], expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.case("F32")
@pytest.mark.parametrize("variant", [Variant(), Variant(uses_features=False)], ids=["features", "tokens"])
def test_embedding_scale_is_a_factor_on_every_row_of_the_table(variant: Variant) -> None:
    raw = drafter_config(dflash_config={"mask_token_id": 0, "target_layer_ids": [0, 2], "input_embedding_scale": 3.0})
    blocks = make_blocks(ROW, ANCHORS, LENGTH)
    with torch.no_grad():
        scaled = trained(raw, variant)(ROW, blocks, EMBEDDING)
        expected = trained(drafter_config(), variant)(ROW, blocks, 3 * EMBEDDING)
        unscaled = trained(drafter_config(), variant)(ROW, blocks, EMBEDDING)
    assert torch.equal(scaled, expected)
    assert float((scaled - unscaled).abs().mean()) > 0.1


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=["no biases", "biases"])
def test_tensors_have_the_names_and_shapes_of_a_checkpoint(changes: dict[str, Any]) -> None:
    config = DFlashConfig.from_dict(drafter_config(**changes), "tiny")
    required, optional = expected_tensors(config)
    found = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    assert found == required
    found = {name: tuple(tensor.shape) for name, tensor in Drafter(config, has_lm_head=True).state_dict().items()}
    assert found == required | {"lm_head.weight": optional["lm_head.weight"]}


@pytest.mark.case("F44")
def test_drafts_do_not_depend_on_anything_from_the_anchor_on_nor_on_other_documents() -> None:
    """Through the whole drafter: not a bit of any slot changes."""
    drafter, blocks = trained(drafter_config()), make_blocks(ROW, ANCHORS, LENGTH)
    with torch.no_grad():
        before = drafter(ROW, blocks, EMBEDDING)
        for index, anchor in enumerate(ANCHORS.tolist()):
            hidden = torch.ones(len(ROW.input_ids), dtype=torch.bool)
            hidden[int(blocks.document_start[index]) : anchor] = False
            features = torch.where(hidden[:, None], ROW.features + 1, ROW.features)
            is_anchor = torch.arange(len(ROW.input_ids)) == anchor
            tokens = torch.where(is_anchor, ROW.input_ids, 127 - ROW.input_ids)
            changed = replace(ROW, features=features, input_ids=tokens)
            assert drafter(changed, make_blocks(changed, ANCHORS, LENGTH), EMBEDDING)[index].equal(before[index])


def test_causal_drafts_do_not_depend_on_how_many_slots_follow() -> None:
    """One causal drafter serves every K; a bidirectional one does not, which is why it is served with its own K."""
    for is_causal in (True, False):
        drafter = trained(drafter_config(is_causal=is_causal))
        with torch.no_grad():
            short, long = (drafter(ROW, make_blocks(ROW, ANCHORS, length), EMBEDDING) for length in (4, LENGTH))
        assert torch.allclose(short, long[:, :3], atol=TOLERANCE) == is_causal


AUTOREGRESSIVE = Variant(drafting="autoregressive")


def with_label_changed(blocks: Blocks, slot: int) -> Blocks:
    labels = blocks.labels.clone()
    labels[:, slot - 1] = 127 - labels[:, slot - 1]
    return replace(blocks, labels=labels)


@pytest.mark.parametrize("changes", [{}, {"is_causal": True}], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("slot", [1, 4, 7])
def test_autoregressive_slot_sees_the_true_tokens_before_it_and_not_its_own(slot: int, changes: dict[str, Any]) -> None:
    """Whatever the config says about a block: a slot that sees its own token learns nothing."""
    drafter, blocks = trained(drafter_config(**changes), AUTOREGRESSIVE), make_blocks(ROW, ANCHORS, LENGTH)
    with torch.no_grad():
        before = drafter(ROW, blocks, EMBEDDING)
        after = drafter(ROW, with_label_changed(blocks, slot), EMBEDDING)
    assert before.shape == (len(ANCHORS), LENGTH - 1, HIDDEN)
    # Row k - 1 of the output predicts slot k.
    assert after[:, :slot].equal(before[:, :slot])
    is_changed = (after[:, slot:] - before[:, slot:]).abs().amax(-1) > 1e-3
    assert is_changed.all()


VARIANTS = {
    "default": Variant(),
    "input": Variant(injection="input"),
    "no features": Variant(uses_features=False),
    "no features, input": Variant(injection="input", uses_features=False),
    "autoregressive": AUTOREGRESSIVE,
    "autoregressive, input": Variant(injection="input", drafting="autoregressive"),
}


def test_variants_differ_and_only_the_default_is_servable() -> None:
    blocks = make_blocks(ROW, ANCHORS, LENGTH)
    with torch.no_grad():
        outputs = [trained(drafter_config(), variant)(ROW, blocks, EMBEDDING) for variant in VARIANTS.values()]
    for index, output in enumerate(outputs):
        assert output.isfinite().all()
        assert all(not torch.allclose(output, other, atol=0.01) for other in outputs[:index])
    assert [variant.is_servable for variant in VARIANTS.values()] == [True] + [False] * 5


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_gradients_reach_every_trained_parameter(variant: Variant) -> None:
    drafter = trained(drafter_config(attention_bias=True), variant, biases())
    drafter(ROW, make_blocks(ROW, ANCHORS, LENGTH), EMBEDDING).pow(2).sum().backward()
    trained_ones = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    without = [name for name, p in trained_ones.items() if p.grad is None or not p.grad.any()]
    assert without == []
    frozen = drafter.state_dict().keys() - trained_ones.keys()
    assert frozen == (set() if variant.uses_features else {"fc.weight", "hidden_norm.weight"})


@pytest.mark.parametrize("variant", [VARIANTS["no features"], VARIANTS["no features, input"]], ids=["kv", "input"])
def test_drafter_without_features_ignores_them_and_reads_the_tokens_before_the_anchor(variant: Variant) -> None:
    drafter, blocks = trained(drafter_config(), variant), make_blocks(ROW, ANCHORS, LENGTH)
    with torch.no_grad():
        before = drafter(ROW, blocks, EMBEDDING)
        assert drafter(replace(ROW, features=ROW.features + 1), blocks, EMBEDDING).equal(before)
        tokens = ROW.input_ids.clone()
        tokens[2] = 127 - tokens[2]  # before the anchors of blocks 1 to 3
        after = drafter(replace(ROW, input_ids=tokens), blocks, EMBEDDING)
    assert [not torch.allclose(a, b, atol=1e-4) for a, b in zip(after, before)] == [False] + [True] * 3 + [False] * 3


@pytest.mark.parametrize("name", ["input", "autoregressive, input"])
def test_input_injection_runs_context_rows_through_the_layers_like_tokens(name: str) -> None:
    """Causal, such a drafter is an ordinary transformer on [context; block]: transformers' Qwen3 is the oracle."""
    drafter, blocks = trained(drafter_config(is_causal=True), VARIANTS[name]), make_blocks(ROW, ANCHORS, LENGTH)
    transformer = plain_causal_transformer(drafter)
    with torch.no_grad():
        hidden = drafter(ROW, blocks, EMBEDDING)
        for index, anchor in enumerate(ANCHORS.tolist()):
            context = drafter.fuse(ROW.features[int(blocks.document_start[index]) : anchor])
            following = [0] * (LENGTH - 1) if name == "input" else blocks.labels[index].tolist()
            rows = torch.cat([context, EMBEDDING[[int(ROW.input_ids[anchor]), *following]]])
            of_block = transformer(inputs_embeds=rows[None]).last_hidden_state[0, len(context) :]
            expected = of_block[1:] if name == "input" else of_block[:-1]
            torch.testing.assert_close(hidden[index], expected, rtol=TOLERANCE, atol=TOLERANCE)


def plain_causal_transformer(drafter: Drafter) -> Any:
    """Qwen3's decoder of transformers with the drafter's weights."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

    config = drafter.config
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=1,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_hidden_layers=config.num_layers,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    ).eval()
    own = {name: t for name, t in drafter.state_dict().items() if not name.startswith(("fc.", "hidden_norm."))}
    _, unexpected = model.load_state_dict(own, strict=False)
    assert not unexpected
    return model


def test_packed_documents_give_what_each_gives_alone() -> None:
    drawings = ("..xxxxxxxxxxxx", "." * 9 + "x" * 20)
    drafter = trained(drafter_config(), VARIANTS["input"])
    with torch.no_grad():
        packed = drafter(ROW, make_blocks(ROW, ANCHORS, LENGTH), EMBEDDING)
        for start, drawing, of_document in ((0, drawings[0], slice(0, 4)), (14, drawings[1], slice(4, 7))):
            rows = slice(start, start + len(drawing))
            alone = PackedRow(*(None if part is None else part[rows] for part in vars(ROW).values()))  # type: ignore[arg-type]
            expected = drafter(alone, make_blocks(alone, ANCHORS[of_document] - start, LENGTH), EMBEDDING)
            torch.testing.assert_close(packed[of_document], expected, rtol=TOLERANCE, atol=TOLERANCE)
