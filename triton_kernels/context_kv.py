"""KV injection: keys and values of all drafter layers from fused features, straight into vLLM's paged caches.

    r       = rsqrt(mean(features^2) + hidden_norm_eps)                        per row
    K_l, V_l = r * (W_l features) + bias                                       hidden-norm weight folded into W
    K_l     = RoPE(K_l * rsqrt(mean(K_l^2) + k_norm_eps) * k_norm_weight_l)    per head, at the row's own position
    cache_l[slot] = K_l / key_scale_l, V_l / value_scale_l                     slot -1 writes nothing

One launch serves all layers. A tile is one head of one layer, [D, rows] = W x^T (see `product_tiles`), because the
K-norm needs whole heads. Its rows of W are taken in an order that puts the first elements of all RoPE pairs into the
upper half and the second ones into the lower half, so that one split of the tile serves every RoPE style:

    NeoX          (j, j + R/2) for j < R/2, R = rotary size; elements from R on, which do not turn, pair likewise
    interleaved   (2j, 2j + 1)

With few rows and few heads the sum over the inputs may be split between programs, as in `feature_fusion`; then a
second launch adds the partials and does the rest. Everything after the product is float32, rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .cache_table import CacheTable
from .product_tiles import configs_of_product, precision_of
from .tuning import Config, best_config, power_of_two

try:
    import triton

    from . import context_kv_kernel as kernels
except ImportError:  # no triton on this platform: the twin is all there is
    triton = None

MERGED_ROWS = 8  # of one program that adds partials


class _Layers(NamedTuple):
    """What the drafter's layers compute with."""

    weight: torch.Tensor  # [L * 2 * n_kv * D, H]
    bias: torch.Tensor | None  # [L * 2 * n_kv * D]
    k_norm: torch.Tensor  # [L, D]
    cos_sin: torch.Tensor  # [max_position, R]
    hidden_norm_eps: float
    k_norm_eps: float


def fold_norm(weight: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
    """W diag(norm_weight) for W [N, H], computed in float32 and rounded once to W's dtype."""
    return (weight.float() * norm_weight.float()).to(weight.dtype)


def context_kv(
    features: torch.Tensor,  # [T, H], last stride 1, before the hidden norm
    sum_squares: torch.Tensor | None,  # [T, P] float32, sums over parts of each row; None = computed here
    weight: torch.Tensor,  # [L * 2 * n_kv * D, H], by layer K heads then V heads; see `fold_norm`
    bias: torch.Tensor | None,  # [L * 2 * n_kv * D]
    k_norm_weights: torch.Tensor,  # [L, D]
    cos_sin_cache: torch.Tensor,  # [max_position, R], cosines then sines of R / 2 frequencies
    positions: torch.Tensor,  # [T] int64
    slots: torch.Tensor,  # [T] or [L, T] int64, page * page_size + row in the page; -1 = write nothing
    caches: CacheTable,
    hidden_norm_eps: float,
    k_norm_eps: float,
    is_neox_style: bool,
) -> None:
    """Compute and store K/V of T rows in all layers; the kernel on a GPU, the twin elsewhere. See the docstring above.

    Raises:
        ValueError: shapes or strides that do not fit together.
        NotImplementedError: an fp8 cache on a GPU without fp8 (NVIDIA before sm_89), or a head size that is no power
            of two; the caller computes K/V in steps instead.
    """
    arguments = (features, sum_squares, weight, bias, k_norm_weights, cos_sin_cache, positions, slots, caches)
    _check(*arguments)
    if triton is None or not features.is_cuda:
        context_kv_torch(*arguments, hidden_norm_eps, k_norm_eps, is_neox_style)
        return
    capability = (9, 0) if torch.version.hip else torch.cuda.get_device_capability(features.device)
    _require_support(caches, capability)
    _launch(*arguments, hidden_norm_eps, k_norm_eps, is_neox_style)


def context_kv_torch(
    features: torch.Tensor,
    sum_squares: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: CacheTable,
    hidden_norm_eps: float,
    k_norm_eps: float,
    is_neox_style: bool,
) -> None:
    """The twin of the kernel: layer after layer, in float32."""
    num_rows, num_inputs = features.shape
    if sum_squares is None:
        sum_squares = features.float().square().sum(dim=1, keepdim=True)
    scale = torch.rsqrt(sum_squares.sum(dim=1) / num_inputs + hidden_norm_eps)  # [T]
    layer_weights = weight.view(caches.num_layers, -1, num_inputs)
    layer_slots = slots.expand(caches.num_layers, num_rows)
    for layer in range(caches.num_layers):
        flat = scale[:, None] * (features.float() @ layer_weights[layer].float().T)
        if bias is not None:
            flat += bias.view(caches.num_layers, -1)[layer].float()
        keys, values = flat.view(num_rows, 2, caches.num_kv_heads, caches.head_size).unbind(dim=1)
        keys = keys * torch.rsqrt(keys.square().mean(dim=-1, keepdim=True) + k_norm_eps)
        written = layer_slots[layer] >= 0
        keys = _rotated(
            (keys * k_norm_weights[layer].float())[written], cos_sin_cache[positions[written]].float(), is_neox_style
        )
        _store(caches, "keys", layer, keys, layer_slots[layer][written])
        _store(caches, "values", layer, values[written], layer_slots[layer][written])


def _rotated(keys: torch.Tensor, cos_sin: torch.Tensor, is_neox_style: bool) -> torch.Tensor:
    rotary_size = cos_sin.shape[-1]
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    turning, fixed = keys[..., :rotary_size], keys[..., rotary_size:]
    first, second = turning.chunk(2, dim=-1) if is_neox_style else (turning[..., ::2], turning[..., 1::2])
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(parts, dim=-1) if is_neox_style else torch.stack(parts, dim=-1).flatten(-2)
    return torch.cat([turned, fixed], dim=-1)


def _store(caches: CacheTable, side: str, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> None:
    cache, scales = getattr(caches, side)[layer], getattr(caches.device_table, side[:-1] + "_scales")
    if scales is not None:
        rows = rows / scales[layer]
    if caches.is_fp8:
        # torch turns what is too large into NaN, and indexes no fp8 tensor.
        rows = rows.clamp(-caches.fp8_max, caches.fp8_max).to(caches.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache[slots // caches.page_size, slots % caches.page_size] = rows.to(cache.dtype)


def _require_support(caches: CacheTable, capability: tuple[int, int]) -> None:
    """Refuse what the kernel cannot do on a GPU of this compute capability."""
    if caches.is_fp8 and capability < (8, 9):
        raise NotImplementedError("this GPU cannot convert to fp8, which the cache holds; that takes capability 8.9.")
    if caches.head_size != power_of_two(caches.head_size) or caches.head_size < 32:
        raise NotImplementedError(f"the kernel takes heads of 32, 64, 128, ... elements, not {caches.head_size}.")


def _check(
    features: torch.Tensor,
    sum_squares: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: CacheTable,
) -> None:
    num_rows, num_inputs = features.shape
    num_outputs = caches.num_layers * 2 * caches.num_kv_heads * caches.head_size
    shapes = {
        "weight": (weight, (num_outputs, num_inputs)),
        "bias": (bias, (num_outputs,)),
        "k_norm_weights": (k_norm_weights, (caches.num_layers, caches.head_size)),
        "positions": (positions, (num_rows,)),
        "slots": (slots, (num_rows,) if slots.dim() == 1 else (caches.num_layers, num_rows)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; {num_rows} rows and these caches need {shape}.")
        if tensor is not None and tensor.dim() and tensor.stride(-1) != 1:
            raise ValueError(f"{name} needs a last stride of 1.")
    if features.dtype != weight.dtype:
        raise ValueError(f"features are {features.dtype}, the weight is {weight.dtype}; give both one dtype.")
    if not weight.is_contiguous() or not k_norm_weights.is_contiguous() or not cos_sin_cache.is_contiguous():
        raise ValueError("weight, k_norm_weights and cos_sin_cache have to be contiguous.")
    if features.stride(-1) != 1 or (sum_squares is not None and not sum_squares.is_contiguous()):
        raise ValueError("features need a last stride of 1, sum_squares have to be contiguous.")
    if cos_sin_cache.shape[1] > caches.head_size or cos_sin_cache.shape[1] % 2:
        raise ValueError(f"RoPE turns {cos_sin_cache.shape[1]} elements of heads of {caches.head_size}.")


def _launch(
    features: torch.Tensor,
    sum_squares: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k_norm_weights: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: CacheTable,
    hidden_norm_eps: float,
    k_norm_eps: float,
    is_neox_style: bool,
    config: Config | None = None,
) -> None:
    """The kernel with a configuration, by default the one that was measured to be the fastest."""
    if features.shape[0] == 0:
        return
    rows = (features, sum_squares, positions, slots)
    layers = _Layers(weight, bias, k_norm_weights, cos_sin_cache, hidden_norm_eps, k_norm_eps)
    if config is None:
        shape = (power_of_two(features.shape[0]), *weight.shape, caches.head_size, str(weight.dtype), str(caches.dtype))
        configs = _configs(features.shape[0], features.shape[1], caches, weight.dtype)
        config = best_config("context_kv", shape, configs, lambda one: _run(rows, layers, caches, is_neox_style, one))
    _run(rows, layers, caches, is_neox_style, config)


def _configs(num_rows: int, num_inputs: int, caches: CacheTable, dtype: torch.dtype) -> list[Config]:
    """What may be measured for a shape; see `product_tiles`."""
    num_outputs = caches.num_layers * 2 * caches.num_kv_heads * caches.head_size
    return configs_of_product(num_rows, num_outputs, num_inputs, dtype, column_tile=caches.head_size)


def _run(
    rows: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
    layers: _Layers,
    caches: CacheTable,
    is_neox_style: bool,
    config: Config,
) -> None:
    features, sums, positions, slots = rows
    num_rows, num_inputs = features.shape
    num_outputs = layers.weight.shape[0]
    options = config.options
    split = options["SPLIT_K"]
    num_heads = num_outputs // caches.head_size
    slots_stride = slots.stride(0) if slots.dim() == 2 else 0
    constants = {
        "NUM_KV_HEADS": caches.num_kv_heads,
        "HEAD_SIZE": options.pop("COLUMN_TILE"),
        "ROTARY_SIZE": layers.cos_sin.shape[1],
        "IS_NEOX": is_neox_style,
        "CACHE_DTYPE": kernels.DTYPES[caches.dtype],
        "FP8_MAX": caches.fp8_max,
        "ALIGNMENT": caches.alignment,
    }
    partials = features.new_empty((split, num_rows, num_outputs), dtype=torch.float32) if split > 1 else None
    computes_sums = sums is None
    if computes_sums and split > 1:
        sums = features.new_empty((num_rows, split), dtype=torch.float32)
    kernels._context_kv_kernel[(triton.cdiv(num_rows, options["ROW_TILE"]) * num_heads, split)](
        features,
        sums,
        positions,
        slots,
        layers,
        caches.device_table,
        partials,
        num_rows,
        num_inputs,
        features.stride(0),
        slots_stride,
        NUM_SUMS=0 if sums is None else sums.shape[1],
        COMPUTES_SUMS=computes_sums,
        EVEN_K=num_inputs % options["K_TILE"] == 0,
        PRECISION=precision_of(layers.weight.dtype),
        **constants,
        **options,
    )
    if sums is not None and split > 1:
        kernels._context_kv_merge_kernel[(triton.cdiv(num_rows, MERGED_ROWS), num_heads)](
            sums,
            positions,
            slots,
            layers,
            caches.device_table,
            partials,
            num_rows,
            num_inputs,
            slots_stride,
            NUM_SUMS=sums.shape[1],
            SPLIT_K=split,
            ROW_TILE=MERGED_ROWS,
            num_warps=2,
            **constants,
        )
