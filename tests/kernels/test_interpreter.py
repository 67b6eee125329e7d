"""The interpreter that the kernel tests rely on computes bfloat16 as torch does."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")

SIZE = 16


@triton.jit
def _every_operation_kernel(a_ptr, b_ptr, out_ptr, dot_ptr, sum_ptr, argmax_ptr, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = row * SIZE + column
    a, b = tl.load(a_ptr + place), tl.load(b_ptr + place)
    tl.store(out_ptr + place, a + b)
    tl.store(out_ptr + SIZE * SIZE + place, a * b)
    tl.store(out_ptr + 2 * SIZE * SIZE + place, tl.maximum(a, b))
    tl.store(out_ptr + 3 * SIZE * SIZE + place, (a.to(tl.float32) * 1.001).to(tl.bfloat16))
    tl.store(out_ptr + 4 * SIZE * SIZE + place, tl.where(a < b, a, -b))
    tl.store(dot_ptr + place, tl.dot(a, b))
    tl.store(sum_ptr + tl.arange(0, SIZE), tl.sum(a.to(tl.float32), axis=1))
    tl.store(argmax_ptr + tl.arange(0, SIZE), tl.argmax(a, axis=1))


def test_bfloat16_is_computed_as_torch_computes_it():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, SIZE, SIZE, generator=generator).bfloat16()
    out = torch.full((5, SIZE, SIZE), float("nan"), dtype=torch.bfloat16)
    dot, total, best = torch.empty(SIZE, SIZE), torch.empty(SIZE), torch.empty(SIZE, dtype=torch.int32)
    _every_operation_kernel[(1,)](a, b, out, dot, total, best, SIZE=SIZE)
    expected = [a + b, a * b, torch.maximum(a, b), (a.float() * 1.001).bfloat16(), torch.where(a < b, a, -b)]
    for computed, wanted in zip(out, expected, strict=True):
        assert torch.equal(computed, wanted)
    assert torch.allclose(dot, a.float() @ b.float(), atol=1e-5)
    assert torch.allclose(total, a.float().sum(dim=1), atol=1e-5)
    assert best.tolist() == a.argmax(dim=1).tolist()


@triton.jit
def _fp8_kernel(values_ptr, out_ptr, back_ptr, SIZE: tl.constexpr, FP8: tl.constexpr):
    place = tl.arange(0, SIZE)
    narrow = tl.load(values_ptr + place).to(FP8)
    tl.store(out_ptr + place, narrow.to(tl.uint8, bitcast=True))
    tl.store(back_ptr + place, narrow.to(tl.bfloat16))


@pytest.mark.parametrize(
    ("fp8", "dtype"), [(tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e4b8, torch.float8_e4m3fnuz)]
)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_eight_bit_formats_are_rounded_to_nearest_and_saturate(fp8, dtype, source):
    largest = torch.finfo(dtype).max
    values = torch.linspace(-20, 20, 256).to(source)
    values[:2] = torch.tensor([1e4, -1e4], dtype=source)
    out, back = torch.empty(256, dtype=torch.uint8), torch.empty(256, dtype=torch.bfloat16)
    _fp8_kernel[(1,)](values, out, back, SIZE=256, FP8=fp8)
    expected = values.float().clamp(-largest, largest).to(dtype)
    assert torch.equal(out, expected.view(torch.uint8))
    assert torch.equal(back, expected.bfloat16())
