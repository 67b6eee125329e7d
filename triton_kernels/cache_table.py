"""Where the paged key and value caches of all layers lie, for kernels that write them in one launch.

vLLM keeps a layer's cache as one tensor, packed logical [pages, heads, page, 2 * D] in 0.32, whose physical order is
NHD or HND; key and value caches are views [pages, page, heads, D] of it (see `do_kv_cache_update` of its attention
backends). So both orders are strides here. fp8 caches are stored as uint8 and hold values divided by a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Largest value of the fp8 formats of a cache. Larger ones are stored as this, as on NVIDIA GPUs and in vLLM.
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}


class DeviceCacheTable(NamedTuple):
    """What a kernel takes as one argument."""

    key_addresses: torch.Tensor  # [L] int64; a field named `values` would hide an attribute of triton's tuples
    value_addresses: torch.Tensor  # [L] int64
    key_scales: torch.Tensor | None  # [L] float32
    value_scales: torch.Tensor | None  # [L] float32
    page_size: int  # rows of a page
    page_stride: int  # strides in elements, the same for keys, values and all layers
    row_stride: int
    head_stride: int


class CacheTable:
    """Key and value caches of L layers. It holds the tensors, so that their addresses stay valid.

    Args:
        keys: L views [num_pages, page_size, num_kv_heads, D], last stride 1, same strides in all layers.
        values: the same for values.
        dtype: how to read the storage; None = the tensors' own. For uint8 storage, vLLM's
            `current_platform.fp8_dtype()`: e4m3fn, and e4m3fnuz on gfx94x.
        key_scales: [L] float32 on the caches' device: a stored key times its layer's scale is the key. None = 1.
        value_scales: the same for values.

    Raises:
        ValueError: views that no kernel can address with one set of strides, or a dtype of another size.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        dtype: torch.dtype | None = None,
        key_scales: torch.Tensor | None = None,
        value_scales: torch.Tensor | None = None,
    ) -> None:
        first, views = keys[0], [*keys, *values]
        self.keys, self.values = tuple(keys), tuple(values)
        self.dtype = first.dtype if dtype is None else dtype
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} key caches but {len(values)} value caches; give one of each per layer.")
        if any((view.shape[1:], view.stride()) != (first.shape[1:], first.stride()) for view in views):
            raise ValueError("caches of different page sizes, heads or strides; build one table for each kind.")
        if first.stride(-1) != 1:
            raise ValueError("the last stride of a cache has to be 1.")
        if self.dtype.itemsize != first.dtype.itemsize or not self.dtype.is_floating_point:
            raise ValueError(f"a cache stored as {first.dtype} cannot hold {self.dtype}; name the fp8 dtype it holds.")
        if (key_scales is None) != (value_scales is None):
            raise ValueError("give scales for keys and values, or for neither.")
        for scales in (key_scales, value_scales):
            if scales is not None and (scales.shape != (len(keys),) or scales.dtype != torch.float32):
                raise ValueError(f"scales are [{len(keys)}] float32, got {tuple(scales.shape)} {scales.dtype}.")
        _, self.page_size, self.num_kv_heads, self.head_size = first.shape
        self.num_layers = len(keys)
        self.is_fp8 = self.dtype in FP8_MAX
        self.fp8_max = FP8_MAX.get(self.dtype, 0.0)
        #: Bytes to which every row of a head is aligned as far as addresses go; strides are the kernel's to see.
        self.alignment = 16 if all(_address(view) % 16 == 0 for view in views) else first.dtype.itemsize
        page_stride, row_stride, head_stride, _ = first.stride()
        self.device_table = DeviceCacheTable(
            _addresses(keys),
            _addresses(values),
            key_scales,
            value_scales,
            self.page_size,
            page_stride,
            row_stride,
            head_stride,
        )


def _addresses(views: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([_address(view) for view in views], dtype=torch.int64, device=views[0].device)


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()
