"""Mends Triton's interpreter for bfloat16, so that kernels can be tested on a CPU.

The interpreter of triton 3.9 holds bfloat16 as raw uint16 and hands those bits to numpy: sums, products, maxima and
`tl.dot` are silently wrong, and float32 is cut instead of rounded on its way to bfloat16. Here operations on bfloat16
are computed in float32 and rounded to nearest even, as a GPU does. The 8-bit formats are converted by way of float32
too, rounded to nearest even and, as a GPU does, to the largest finite value where that is exceeded. Some `libdevice`
functions, which the interpreter leaves empty, get numpy's. `kernels/test_interpreter.py` says when a triton release
makes this needless or breaks it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}
LIBDEVICE = {"exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh}

FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz, tl.float8e5: torch.float8_e5m2}

Handle = interpreter.TensorHandle


def is_bfloat16(handle: Any) -> bool:
    """Whether a handle's elements are bfloat16 kept as bits."""
    return handle is not None and handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def to_float32(handle: Any) -> Any:
    """The handle with bfloat16 widened, which is exact; anything else as it is."""
    if not is_bfloat16(handle):
        return handle
    return Handle((np.ascontiguousarray(handle.data).astype(np.uint32) << 16).view(np.float32), tl.float32)


def to_bfloat16(values: np.ndarray) -> Any:
    """A bfloat16 handle of values rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return Handle(np.where(np.isnan(values), np.uint16(0x7FC0), rounded), tl.bfloat16)


def from_fp8(handle: Any) -> Any:
    """A float32 handle of values in an 8-bit format."""
    bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8))
    return Handle(bits.view(FP8[handle.dtype.scalar]).float().numpy(), tl.float32)


def to_fp8(values: np.ndarray, to: Any) -> Any:
    """A handle in an 8-bit format of float32 values."""
    dtype = FP8[to]
    largest = torch.finfo(dtype).max
    clamped = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp(-largest, largest)
    return Handle(clamped.to(dtype).view(torch.uint8).numpy(), to)


def install() -> None:
    """Replace what is wrong for bfloat16 in the interpreter. Calling it again changes nothing."""
    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "computes_bfloat16", False):
        return
    builder.computes_bfloat16 = True
    cast, fp_to_fp, binary, unary = builder.cast_impl, builder.create_fp_to_fp, builder.binary_op, builder.unary_op
    dot, fma, clamp = builder.create_dot, builder.create_fma, builder.create_clampf
    reduce = interpreter.ReduceOps.apply_impl

    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16 and to.scalar != tl.bfloat16:
            wide = to_float32(source)
            return wide if to.scalar == tl.float32 else cast(self, wide, to)
        if to.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            return to_bfloat16(
                cast(self, source, tl.float32).data if source.dtype.scalar != tl.float32 else source.data
            )
        return cast(self, source, to)

    def create_fp_to_fp(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        if source.dtype.scalar in FP8:
            return (
                create_fp_to_fp(self, from_fp8(source), to, rounding) if to.scalar != tl.float32 else from_fp8(source)
            )
        if to.scalar in FP8:
            wide = source if source.dtype.scalar == tl.float32 else create_fp_to_fp(self, source, tl.float32, rounding)
            return to_fp8(wide.data, to.scalar)
        if tl.bfloat16 in (source.dtype.scalar, to.scalar):
            return cast_impl(self, source, to)
        return fp_to_fp(self, source, to, rounding)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if is_bfloat16(left) and is_bfloat16(right) and op not in BITWISE:
            values = op(to_float32(left).data, to_float32(right).data)
            return Handle(values, tl.int1) if op in COMPARISONS else to_bfloat16(values)
        result = binary(self, left, right, op)
        # A comparison keeps the type of its left side, which later makes a mask that `store` refuses.
        return Handle(np.asarray(result.data, dtype=np.bool_), tl.int1) if op in COMPARISONS else result

    def unary_op(self: Any, value: Any, op: Any) -> Any:
        return to_bfloat16(op(to_float32(value).data)) if is_bfloat16(value) else unary(self, value, op)

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
        return dot(self, to_float32(a), to_float32(b), accumulator, *options)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_bfloat16(z):
            return fma(self, x, y, z)
        return to_bfloat16(to_float32(x).data.astype(np.float64) * to_float32(y).data + to_float32(z).data)

    def create_clampf(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if not is_bfloat16(x):
            return clamp(self, x, low, high, propagate_nan)
        return to_bfloat16(np.clip(to_float32(x).data, to_float32(low).data, to_float32(high).data))

    def apply_impl(self: Any, leaves: Any) -> Any:
        if not any(is_bfloat16(leaf.handle) for leaf in leaves):
            return reduce(self, leaves)
        wide = tuple(
            tl.tensor(to_float32(leaf.handle), tl.block_type(tl.float32, list(leaf.shape)))
            if is_bfloat16(leaf.handle)
            else leaf
            for leaf in leaves
        )
        result = reduce(self, wide)
        results = result if isinstance(result, (list, tuple)) else (result,)
        narrow = tuple(
            narrowed(one) if is_bfloat16(leaf.handle) and one.dtype == tl.float32 else one
            for one, leaf in zip(results, leaves)
        )
        return narrow if isinstance(result, (list, tuple)) else narrow[0]

    def narrowed(value: Any) -> Any:
        shape = list(value.handle.data.shape)
        return tl.tensor(
            to_bfloat16(value.handle.data), tl.block_type(tl.bfloat16, shape) if value.type.is_block() else tl.bfloat16
        )

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.create_dot, builder.create_fma, builder.create_clampf = create_dot, create_fma, create_clampf
    interpreter.ReduceOps.apply_impl = apply_impl
    for name, function in LIBDEVICE.items():
        setattr(libdevice, name, _elementwise(function))


def _elementwise(function: Any) -> Any:
    def apply(value: Any, **_: Any) -> Any:
        return tl.tensor(
            Handle(function(value.handle.data).astype(value.handle.data.dtype), value.dtype.scalar), value.type
        )

    return apply
