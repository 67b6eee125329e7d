"""Top-k and top-p without sorting keep exactly the tokens that vLLM's sort keeps."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_dflash import cpu_sampling

VOCABULARY = 6000


def logits(kind: str, rows: int) -> torch.Tensor:
    torch.manual_seed(5)
    spread = {"peaked": 6.0, "usual": 3.0, "flat": 0.1}[kind]
    return torch.randn(rows, VOCABULARY) * spread


@pytest.mark.parametrize("kind", ["peaked", "usual", "flat"])
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        (None, [0.9, 0.5, 0.999, 1.0, 0.01]),
        ([VOCABULARY, 5, 1, 1024, 1023], [0.9, 0.9, 0.5, 1.0, 0.95]),
        ([2000, 5999, 1025, VOCABULARY, 40], [0.9, 1.0, 0.3, 1.0, 0.7]),
        ([3, 4, 5, 6, 7], None),
    ],
)
def test_kept_tokens_are_those_of_a_full_sort(kind, top_k, top_p):
    rows = logits(kind, 5)
    k = None if top_k is None else torch.tensor(top_k, dtype=torch.int32)
    p = None if top_p is None else torch.tensor(top_p)
    expected = apply_top_k_top_p_pytorch(rows.clone(), None if k is None else k.clone(), p)
    result = cpu_sampling.apply_top_k_top_p(rows.clone(), k, p)
    assert torch.equal(result, expected)
    assert torch.isinf(result).any()


def test_equals_at_the_edge_of_top_k_are_all_kept():
    rows = torch.zeros(1, VOCABULARY)
    rows[0, :10] = 5.0
    result = cpu_sampling.apply_top_k_top_p(rows, torch.tensor([4]), torch.tensor([1.0]))
    assert result[0].isfinite().nonzero()[:, 0].tolist() == list(range(10))
    rows = torch.zeros(1, VOCABULARY)  # more equals than are looked at
    assert cpu_sampling.apply_top_k_top_p(rows, torch.tensor([4]), torch.tensor([1.0])).isfinite().all()


def test_only_rows_with_a_large_nucleus_are_sorted(monkeypatch):
    sorted_rows = []

    def count(rows, k, p):
        sorted_rows.append(len(rows))
        return apply_top_k_top_p_pytorch(rows, k, p)

    monkeypatch.setattr(cpu_sampling, "apply_top_k_top_p_pytorch", count)
    rows = torch.cat([logits("peaked", 3), logits("flat", 2)])
    cpu_sampling.apply_top_k_top_p(rows, None, torch.full((5,), 0.9))
    assert sorted_rows == [2]
