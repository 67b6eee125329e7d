"""Our Triton kernels in the drafter, in place of vLLM's operations; each only where it computes the same here.

    feature fusion     fc over features, row statistics with it            Drafter.store_context
    context K/V        norm, projection, K-norm, RoPE, cache, all layers   ContextKV.store
    block attention    paged context and block, block K/V not stored       forward of the layers' attention
    draft head         most probable tokens, logits not written            Drafter.confident_tokens

`admit` builds what a drafter and a machine allow and compares each kernel with vLLM's operations on the loaded weights
(attention, which would need vLLM's metadata, with its twin), at start-up and before CUDA graphs are captured. What is
not supported, fails or differs is left to vLLM, with one line that says why. On a CPU nothing is admitted: vLLM's
oneDNN kernels are faster there than our twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dflash import LOGGER
from vllm_dflash.draft_sampling import CANDIDATES, Candidates
from vllm_dflash.triton_kernels import tuning
from vllm_dflash.triton_kernels.block_attention import block_attention, block_attention_torch
from vllm_dflash.triton_kernels.cache_table import CacheTable
from vllm_dflash.triton_kernels.context_kv import context_kv, fold_norm
from vllm_dflash.triton_kernels.draft_head import draft_head
from vllm_dflash.triton_kernels.feature_fusion import FusedFeatures, feature_fusion

if TYPE_CHECKING:
    from vllm_dflash.context_kv import ContextKV
    from vllm_dflash.drafter import Drafter

logger = init_logger(LOGGER)

#: Attention backends whose cache is one tensor [pages, heads, page, 2 * D], and whose metadata we know.
_BACKENDS = ("FlashAttentionImpl", "TritonAttentionImpl")
#: Root mean square of a difference by that of the value: bf16 keeps 8 bits, and sums are taken in another order.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
#: Rows of comparisons: of a decode step, and of a prompt chunk.
_ROWS = (5, 64)


class UnsupportedError(Exception):
    """A kernel does not serve this drafter or machine; the text says why."""


class FusedContext:
    """Feature fusion and context K/V of all layers, two launches.

    Raises:
        UnsupportedError: quantised weights, or layers without a common cache layout.
    """

    def __init__(self, context: ContextKV, fc_weight: torch.Tensor, num_features: int) -> None:
        if context.projection is None or not fc_weight.is_floating_point():
            raise UnsupportedError("the drafter's weights are quantised")
        self._context, self._fc_weight, self._num_features = context, fc_weight, num_features
        weight = context.projection.weight.data
        bias = None if context.projection.bias is None else context.projection.bias.data
        self._weight = fold_norm(weight, context.hidden_norm.weight.data)
        if context.value_scale is not None:
            self._weight, bias = _scale_values(self._weight, bias, context)
        self._bias = bias
        self._table: CacheTable | None = None
        self._addresses: tuple[int, ...] = ()

    def fuse(self, target_hidden_states: torch.Tensor) -> FusedFeatures:
        """Context features [T, hidden] of the target's [T, F * hidden], with their sums of squares."""
        return feature_fusion(target_hidden_states.chunk(self._num_features, dim=-1), self._fc_weight)

    def store(
        self,
        features: torch.Tensor,
        sum_squares: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor | Sequence[torch.Tensor | None],
        caches: CacheTable | None = None,
    ) -> None:
        """As `ContextKV.store`, with the sums of squares of `fuse` where they are known."""
        context = self._context
        if not isinstance(slots, torch.Tensor):
            unwritten = torch.full_like(positions, -1)
            slots = torch.stack([unwritten if of_layer is None else of_layer for of_layer in slots])
        context_kv(
            features,
            sum_squares,
            self._weight,
            self._bias,
            context.k_norm_weights,
            context.rotary_emb.cos_sin_cache,
            positions,
            slots,
            self._caches() if caches is None else caches,
            context.hidden_norm.variance_epsilon,
            context.k_norm_eps,
            context.rotary_emb.is_neox_style,
        )

    def _caches(self) -> CacheTable:
        layers = [attention.attn for attention in self._context.attentions]
        addresses = tuple(layer.kv_cache.data_ptr() for layer in layers)
        if self._table is None or addresses != self._addresses:  # vLLM allocates anew after it slept
            self._table, self._addresses = cache_table(layers), addresses
        return self._table


class FusedHead:
    """The drafter's LM head without logits.

    Raises:
        UnsupportedError: a head that is split over GPUs, quantised or reads its logits otherwise.
    """

    def __init__(self, drafter: Drafter) -> None:
        processor, head = drafter.logits_processor, drafter.lm_head
        if drafter.vllm_config.parallel_config.tensor_parallel_size > 1:
            raise UnsupportedError("the head is split over GPUs")
        weight = getattr(head, "weight", None)
        if processor.logits_as_input or weight is None or not weight.is_floating_point():
            raise UnsupportedError("the head is quantised")
        self._weight, self._bias = weight.data, getattr(head, "bias", None)
        self._options: dict[str, Any] = {
            "num_tokens": min(processor.org_vocab_size, len(self._weight)),
            "softcap": processor.soft_cap or 0.0,
            "logit_scale": processor.scale,
            "draft_to_target": drafter.draft_id_to_target_id,
        }

    def confident_tokens(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Drafter.confident_tokens`."""
        drafted = draft_head(hidden_states, self._weight, bias=self._bias, **self._options)
        return drafted.tokens[:, 0], (drafted.logits[:, 0] - drafted.log_sum_exp).exp()

    def candidates(self, hidden_states: torch.Tensor, count: int) -> Candidates:
        """As `Drafter.candidates`."""
        count = min(count, self._options["num_tokens"])
        drafted = draft_head(hidden_states, self._weight, bias=self._bias, top_k=count, **self._options)
        return Candidates(drafted.logits, drafted.tokens, drafted.log_sum_exp)


class FusedAttention:
    """Attention of one layer's block over its paged context, in place of its backend's.

    Block K/V are taken from the inputs, so they are not stored either: `install` replaces both calls of the layer.

    Raises:
        UnsupportedError: a backend with another cache layout, or an option that the kernel lacks.
    """

    def __init__(self, attention: Any) -> None:
        _require_known_layout(attention)
        impl = attention.attn.impl
        if impl.alibi_slopes is not None or impl.logits_soft_cap or impl.kv_sharing_target_layer_name is not None:
            raise UnsupportedError("ALiBi, a logits soft cap, or a cache shared between layers")
        self._impl = impl
        self._causal, self._sliding_window = attention.causal, attention.sliding_window or 0
        self._sinks = attention.attention_sink_bias

    def install(self) -> None:
        """Use it from now on."""
        self._impl.forward = self.forward
        self._impl.do_kv_cache_update = lambda *_, **__: None

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,  # [rows, heads, D]; rows beyond the requests' are padding
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In place of `AttentionImpl.forward`."""
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        num_query, num_rows = attn_metadata.max_query_len, attn_metadata.num_actual_tokens
        num_reqs = num_rows // num_query
        keys, values = cache_views(kv_cache)
        is_fp8 = keys.dtype != query.dtype
        block_attention(
            query[:num_rows],
            key[:num_rows],
            value[:num_rows],
            keys,
            values,
            attn_metadata.block_table[:num_reqs],
            attn_metadata.seq_lens[:num_reqs] - num_query,
            num_query_per_req=num_query,
            scale=self._impl.scale,
            causal=self._causal,
            sliding_window=self._sliding_window,
            sinks=self._sinks,
            k_scale=layer._k_scale if is_fp8 else None,
            v_scale=layer._v_scale if is_fp8 else None,
            out=output[:num_rows].view(num_rows, *query.shape[1:]),
        )
        return output


def _require_known_layout(attention: Any) -> None:
    backend = type(attention.attn.impl).__name__
    if backend not in _BACKENDS or attention.attn.kv_cache.shape[-1] != 2 * attention.head_dim:
        raise UnsupportedError(f"attention backend {backend} has a cache layout of its own")


def cache_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [pages, page, heads, D] of a layer's cache [pages, heads, page, 2 * D]."""
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values


def cache_table(layers: Sequence[Any], kv_caches: Sequence[torch.Tensor] | None = None) -> CacheTable:
    """The caches of vLLM's attention layers (or stand-ins for them) for one launch."""
    views = [cache_views(c) for c in (kv_caches or [layer.kv_cache for layer in layers])]
    keys, values = zip(*views)
    if keys[0].dtype != torch.uint8:
        return CacheTable(keys, values)
    scales = [torch.stack([getattr(layer, name).float() for layer in layers]) for name in ("_k_scale", "_v_scale")]
    return CacheTable(keys, values, current_platform.fp8_dtype(), *scales)


def admit(drafter: Drafter, tuning_folder: Any) -> list[str]:
    """Put the kernels that compute the same here in place; returns their names.

    Args:
        drafter: weights loaded, caches allocated.
        tuning_folder: keeps the measured tile sizes.
    """
    context = drafter.model.context_kv
    if context is None or not (current_platform.is_cuda() or current_platform.is_rocm()):
        return []
    admitted = []
    with tuning.measuring(tuning_folder):
        for name, put in (
            ("context K/V", lambda: _admit_context(drafter, context)),
            ("draft head", lambda: _admit_head(drafter)),
            ("block attention", lambda: _admit_attention(context)),
        ):
            try:
                put()
                admitted.append(name)
            except (UnsupportedError, NotImplementedError, ValueError, RuntimeError) as error:
                logger.warning("kernel for %s is not used (%s); vLLM's operations are.", name, error)
    return admitted


def _admit_context(drafter: Drafter, context: ContextKV) -> None:
    layers = [attention.attn for attention in context.attentions]
    _require_known_layout(context.attentions[0])
    fc = drafter.model.fc
    num_features = fc.weight.shape[1] // drafter.model.config.hidden_size
    fused = FusedContext(context, fc.weight.data, num_features)
    for num_rows in _ROWS:
        compare_context(fused, context, fc, layers, num_rows)
    context.fused = fused


def compare_context(fused: FusedContext, context: ContextKV, fc: Any, layers: Sequence[Any], num_rows: int) -> None:
    """Fused and stored rows against vLLM's operations, in caches of their own.

    Raises:
        UnsupportedError: they differ.
    """
    weight = fc.weight
    states = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    positions = torch.arange(num_rows, device=weight.device)
    features = fused.fuse(states)
    _compare("fused features", features.values, fc(states))
    page_size = layers[0].kv_cache.shape[2]
    num_pages = min(1 + num_rows // page_size, layers[0].kv_cache.shape[0])
    slots = positions.flip(0).clone()
    slots[positions >= num_pages * page_size] = -1
    caches = cache_table(layers, [torch.zeros_like(layer.kv_cache[:num_pages]) for layer in layers])
    fused.store(features.values, features.sum_squares, positions, slots, caches)
    kept = slots >= 0
    for name, stored, expected in zip("KV", (caches.keys, caches.values), context.project(features.values, positions)):
        for layer, cache in enumerate(stored):
            found = cache.view(caches.dtype)[slots[kept] // page_size, slots[kept] % page_size].float()
            if caches.is_fp8:  # three bits of mantissa: not more than that is compared
                found = found * getattr(layers[layer], f"_{name.lower()}_scale")
            _compare(f"{name} of layer {layer}", found, expected[layer][kept], 0.1 if caches.is_fp8 else None)


def _admit_head(drafter: Drafter) -> None:
    head = FusedHead(drafter)
    for num_rows in _ROWS:
        hidden = torch.randn(num_rows, drafter.config.hidden_size, device=head._weight.device).to(head._weight.dtype)
        tokens, confidences = head.confident_tokens(hidden)
        expected, probabilities = drafter.confident_tokens(hidden)
        _compare("probabilities", confidences, probabilities)
        likeliest, wanted = head.candidates(hidden, CANDIDATES), drafter.candidates(hidden, CANDIDATES)
        _compare("logits of candidates", likeliest.logits, wanted.logits)
        # Ties within rounding may go to another token; they are as good.
        if (tokens != expected).float().mean() > 0.1:
            raise UnsupportedError("it drafts other tokens")
    drafter.fused_head = head


def _admit_attention(context: ContextKV) -> None:
    fused = [FusedAttention(attention) for attention in context.attentions]
    attention = context.attentions[0]
    keys, values = (torch.randn_like(view[:8].float()) for view in cache_views(attention.attn.kv_cache))
    dtype, device = attention.qkv_proj.params_dtype, keys.device
    keys, values = keys.to(dtype), values.to(dtype)
    num_pages = len(keys)
    for num_query in (4, 16):
        shape = (2 * num_query, attention.num_heads + 2 * attention.num_kv_heads, attention.head_dim)
        rows = torch.randn(shape, device=device).to(dtype)
        q, k, v = rows.split([attention.num_heads, attention.num_kv_heads, attention.num_kv_heads], dim=1)
        table = torch.arange(num_pages, dtype=torch.int32, device=device).repeat(2, 1)
        lengths = torch.tensor([num_pages * keys.shape[1] - 3, 1], dtype=torch.int32, device=device)
        options: dict[str, Any] = {
            "num_query_per_req": num_query,
            "scale": attention.scaling,
            "causal": attention.causal,
            "sliding_window": attention.sliding_window or 0,
            "sinks": attention.attention_sink_bias,
        }
        found = block_attention(q, k, v, keys, values, table, lengths, **options)
        _compare("attention", found, block_attention_torch(q, k, v, keys, values, table, lengths, **options))
    for one in fused:
        one.install()


def _scale_values(
    weight: torch.Tensor, bias: torch.Tensor | None, context: ContextKV
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """V rows times the drafter's value scale."""
    shape = (len(context.attentions), 2, -1)
    weight = weight.clone()
    weight.view(*shape, weight.shape[1])[:, 1] *= context.value_scale
    if bias is not None:
        bias = bias.clone()
        bias.view(shape)[:, 1] *= context.value_scale
    return weight, bias


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    limit = _TOLERANCE[expected.dtype] if tolerance is None else tolerance
    difference = (found.float() - expected.float()).square().mean().sqrt()
    error = float(difference / expected.float().square().mean().sqrt().clamp_min(1e-12))
    if not error <= limit:  # NaN too
        raise UnsupportedError(f"{what} differ by {error:.2%}, more than {limit:.2%}")
