"""Our kernels in the drafter's place of vLLM's operations: fed and read rightly, and refused where they differ.

On a CPU nothing is admitted, and what is called here are the kernels' twins, with the weights of a drafter that vLLM
has loaded and caches as GPU backends lay them out; tests/kernels compares kernels and twins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from vllm_dflash.fused import FusedAttention, FusedContext, FusedHead, UnsupportedError, cache_views, compare_context

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are in use there")

NUM_PAGES, PAGE = 6, 16


def stand_in(**attributes: Any) -> Any:
    """An object with some attributes of one of vLLM's."""
    return SimpleNamespace(**attributes)


@pytest.fixture(scope="module")
def drafter(engine, tiny_target, tiny_drafter) -> Any:
    """The served drafter; the CPU backend has packed its weights away."""
    return engine(tiny_target, drafter=tiny_drafter, num_drafted=4).runner.drafter.model


@pytest.fixture(scope="module")
def tensors(tiny_drafter) -> dict[str, torch.Tensor]:
    return load_file(tiny_drafter / "model.safetensors")


@pytest.fixture
def context(drafter, tensors, monkeypatch) -> Any:
    """The drafter's ContextKV with the weights of its projection, as they are on a GPU."""
    context = drafter.model.context_kv
    rows = [
        tensors[f"layers.{layer}.self_attn.{part}_proj.weight"]
        for layer in range(len(context.attentions))
        for part in "kv"
    ]
    whole = SimpleNamespace(weight=torch.cat(rows), bias=None)

    class Projection:
        weight, bias = whole.weight, None

        def __call__(self, normed: torch.Tensor) -> torch.Tensor:
            return linear(normed, self.weight)

    monkeypatch.setattr(context, "projection", Projection())
    return context


@pytest.fixture
def fc(tensors) -> Any:
    module = nn.Linear(tensors["fc.weight"].shape[1], tensors["fc.weight"].shape[0], bias=False)
    module.weight.data = tensors["fc.weight"]
    return module.requires_grad_(False)


def gpu_caches(context: Any, layout: str) -> list[Any]:
    """Layers with caches [pages, heads, page, 2 * D] in the order in memory that a GPU backend chooses."""
    shape = (NUM_PAGES, context.num_kv_heads, PAGE, 2 * context.head_dim)
    if layout == "HND":
        return [SimpleNamespace(kv_cache=torch.zeros(shape)) for _ in context.attentions]
    by_row = (NUM_PAGES, PAGE, context.num_kv_heads, 2 * context.head_dim)
    return [SimpleNamespace(kv_cache=torch.zeros(by_row).transpose(1, 2)) for _ in context.attentions]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_context_rows_are_those_of_vllms_operations(context, fc, layout):
    fused = FusedContext(context, fc.weight, num_features=2)
    for num_rows in (5, 64):
        compare_context(fused, context, fc, gpu_caches(context, layout), num_rows)


def test_value_scale_and_slots_per_layer(context, fc, monkeypatch):
    monkeypatch.setattr(context, "value_scale", 0.5)
    fused, layers = FusedContext(context, fc.weight, num_features=2), gpu_caches(context, "NHD")
    for layer, attention in zip(layers, context.attentions):
        monkeypatch.setattr(attention.attn, "kv_cache", layer.kv_cache)
    features, positions = torch.randn(3, fc.weight.shape[0]), torch.arange(3)
    slots = [torch.tensor([16, 17, -1]), None, torch.tensor([40, 41, 42])]
    fused.store(features, None, positions, slots)
    keys, values = context.project(features, positions)
    expected = [torch.zeros(2, NUM_PAGES, PAGE, context.num_kv_heads, context.head_dim) for _ in layers]
    for row, (page, place) in enumerate([(1, 0), (1, 1)]):
        expected[0][:, page, place] = torch.stack([keys[0, row], values[0, row]])
    for row, (page, place) in enumerate([(2, 8), (2, 9), (2, 10)]):
        expected[2][:, page, place] = torch.stack([keys[2, row], values[2, row]])
    for layer, wanted in zip(layers, expected):
        torch.testing.assert_close(torch.stack(cache_views(layer.kv_cache)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", ["fusion", "projection", "k_norm"])
def test_what_differs_is_refused(context, fc, wrong):
    weight = fc.weight.roll(1, 0) if wrong == "fusion" else fc.weight
    fused = FusedContext(context, weight, num_features=2)
    if wrong == "projection":
        fused._weight = fused._weight.roll(1, 0)
    if wrong == "k_norm":
        fused._context = stand_in(**vars(context) | {"k_norm_weights": context.k_norm_weights.flip(0)})
    with pytest.raises(UnsupportedError, match="differ by"):
        compare_context(fused, context, fc, gpu_caches(context, "HND"), 5)


def test_the_drafter_uses_what_was_admitted(drafter, context, fc, monkeypatch):
    fused, layers = FusedContext(context, fc.weight, num_features=2), gpu_caches(context, "HND")
    states, positions = torch.randn(4, fc.weight.shape[1]), torch.arange(4)
    expected = drafter.combine_hidden_states(states)
    keys, _ = context.project(expected, positions)
    monkeypatch.setattr(context, "fused", fused)
    for layer, attention in zip(layers, context.attentions):
        monkeypatch.setattr(attention.attn, "kv_cache", layer.kv_cache)
    torch.testing.assert_close(drafter.combine_hidden_states(states), expected, rtol=1e-4, atol=1e-5)
    drafter.store_context(states, positions, torch.tensor([3, 2, 1, 0]))
    for layer, cached in enumerate(layers):
        torch.testing.assert_close(cache_views(cached.kv_cache)[0][0, :4].flip(0), keys[layer], rtol=1e-4, atol=1e-5)


def test_head_drafts_the_same_tokens_with_the_same_confidence(drafter, tensors, tiny_target, monkeypatch):
    head = load_file(tiny_target / "model.safetensors")["lm_head.weight"]
    served = stand_in(
        vllm_config=drafter.vllm_config,
        logits_processor=drafter.logits_processor,
        lm_head=SimpleNamespace(weight=nn.Parameter(head)),
        draft_id_to_target_id=None,
    )
    hidden = torch.randn(9, head.shape[1])
    tokens, confidences = drafter.confident_tokens(hidden)
    assert torch.equal(tokens, drafter.greedy_tokens(hidden))
    assert torch.allclose(confidences, (hidden @ head.T).softmax(-1).amax(-1), atol=1e-5)
    fused = FusedHead(served)
    found, probabilities = fused.confident_tokens(hidden)
    assert torch.equal(found, tokens)
    assert torch.allclose(probabilities, confidences, atol=1e-5)
    by_torch, by_kernel = drafter.candidates(hidden, 5), fused.candidates(hidden, 5)
    assert torch.equal(by_kernel.tokens, by_torch.tokens)
    assert torch.equal(by_torch.tokens[:, 0], tokens)
    torch.testing.assert_close(by_kernel.logits, by_torch.logits)
    torch.testing.assert_close(by_kernel.confidences, confidences)
    monkeypatch.setattr(drafter, "fused_head", fused)
    assert torch.equal(drafter.greedy_tokens(hidden), tokens)


class FlashAttentionImpl:
    """Stands for vLLM's, which needs a GPU."""

    alibi_slopes = logits_soft_cap = kv_sharing_target_layer_name = None
    scale = 0.2


@pytest.mark.parametrize("causal", [False, True])
def test_attention_reads_the_cache_and_takes_the_block_from_its_inputs(causal):
    """Two requests with 19 and 3 tokens in the cache and a padded one, blocks of 4."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(NUM_PAGES, 2, PAGE, 2 * 32, generator=generator)
    impl: Any = FlashAttentionImpl()
    layer = SimpleNamespace(impl=impl, kv_cache=cache)
    options = {"causal": causal, "sliding_window": None, "attention_sink_bias": None}
    FusedAttention(SimpleNamespace(attn=layer, head_dim=32, **options)).install()
    before = cache.clone()
    rows = torch.randn(12, 4 + 2 + 2, 32, generator=generator)
    query, key, value = rows.split([4, 2, 2], dim=1)
    metadata = SimpleNamespace(
        max_query_len=4,
        num_actual_tokens=12,
        block_table=torch.tensor([[4, 1], [2, 0], [99, 99]], dtype=torch.int32),
        seq_lens=torch.tensor([23, 7, 0], dtype=torch.int32),
    )
    output = torch.full((14, 4 * 32), float("nan"))
    impl.do_kv_cache_update(layer, key, value, cache, None)
    impl.forward(layer, query, key, value, cache, metadata, output)
    assert torch.equal(cache, before)
    assert bool((output[8:12] == 0).all())
    assert bool(output[12:].isnan().all())
    for request, pages, context_len in ((0, [4, 1], 19), (1, [2], 3)):
        block = slice(4 * request, 4 * request + 4)
        tokens = cache[pages].transpose(1, 2).flatten(0, 1)[:context_len]  # [tokens, heads, 2 * D]
        keys = torch.cat([tokens[..., :32], key[block]]).repeat_interleave(2, 1)
        values = torch.cat([tokens[..., 32:], value[block]]).repeat_interleave(2, 1)
        sees = torch.ones(4, context_len + 4, dtype=torch.bool)
        if causal:
            sees = sees.tril(context_len)
        expected = scaled_dot_product_attention(
            query[block].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=sees, scale=0.2
        )
        torch.testing.assert_close(output[block].view(4, 4, 32), expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_other_backends_keep_their_attention():
    attention = SimpleNamespace(attn=SimpleNamespace(impl=object()))
    with pytest.raises(UnsupportedError, match="attention backend object has a cache layout of its own"):
        FusedAttention(attention)
