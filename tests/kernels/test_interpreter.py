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
