"""Rows of a draft step: kernel and twin against hand-written literals and against each other."""

from __future__ import annotations

import pytest
import torch

from vllm_dflash.triton_kernels import draft_inputs as module
from vllm_dflash.triton_kernels.draft_inputs import PAD_SLOT_ID as PAD
from vllm_dflash.triton_kernels.draft_inputs import DraftRows, draft_inputs_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASK = 99
IMPLEMENTATIONS = [
    pytest.param(draft_inputs_torch, id="twin", marks=pytest.mark.skipif(DEVICE != "cpu", reason="runs on CPUs")),
    pytest.param(module._launch, id="kernel"),
]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def longs(*values: int) -> torch.Tensor:
    return ints(*values, dtype=torch.int64)


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_rejected_rows_write_no_kv(run):
    """The figure in the module docstring: cache pages of 16 tokens, page 0 of the request is page 1 of the pool."""
    rows = run(ints(7), longs(10, 11, 12, 13), ints(0, 4), ints(2), ints(1, 5).view(1, 2), longs(0), 16, MASK, 4, 100)
    assert rows.context_positions[:2].tolist() == [10, 11]
    assert rows.context_slots.tolist() == [26, 27, PAD, PAD]
    assert rows.query_ids.tolist() == [7, MASK, MASK, MASK]
    assert rows.query_positions.tolist() == [12, 13, 14, 15]
    assert rows.query_slots.tolist() == [28, 29, 30, 31]
    assert rows.sample_indices.tolist() == [1, 2, 3]


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_block_crosses_into_the_next_page(run):
    rows = run(ints(7), longs(14), ints(0, 1), None, ints(3, 9).view(1, 2), longs(0), 16, MASK, 4, 100)
    assert rows.query_slots.tolist() == [3 * 16 + 15, 9 * 16 + 0, 9 * 16 + 1, 9 * 16 + 2]


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_only_drafting_requests_get_query_rows(run):
    """Three requests; the second (a prompt chunk) does not draft but has its context written."""
    rows = run(
        ints(70, 71, 72),
        longs(5, 0, 1, 2, 8, 9),
        ints(0, 1, 4, 6),
        ints(0, 0, 1),
        ints(1, 2, 3).view(3, 1),
        longs(0, 2),
        16,
        MASK,
        3,
        100,
    )
    assert rows.context_slots.tolist() == [21, 32, 33, 34, 56, PAD]
    assert rows.query_ids.tolist() == [70, MASK, MASK, 72, MASK, MASK]
    assert rows.query_positions.tolist() == [6, 7, 8, 9, 10, 11]
    assert rows.sample_indices.tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
def test_positions_beyond_the_drafters_limit_get_no_slot(run):
    rows = run(ints(7), longs(6, 7, 8, 9), ints(0, 4), None, ints(1).view(1, 1), longs(), 16, MASK, 4, 8)
    assert rows.context_slots.tolist() == [22, 23, PAD, PAD]
    assert rows.context_positions.tolist() == [6, 7, 0, 0]  # a position the drafter's RoPE table has
    assert [len(field) for field in rows[2:]] == [0, 0, 0, 0]


def random_step(generator: torch.Generator, num_reqs: int, num_query: int) -> list:
    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    counts = integers(1, 9, num_reqs)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    first = integers(0, 40, num_reqs)
    positions = torch.cat([torch.arange(f, f + c) for f, c in zip(first.tolist(), counts.tolist())])
    rejected = torch.stack([integers(0, int(c), 1)[0] for c in counts])
    table = torch.randperm(num_reqs * 8, generator=generator).view(num_reqs, 8)
    drafting = integers(0, 2, num_reqs).nonzero().flatten()
    tensors = [
        integers(0, 90, num_reqs).int(),
        positions,
        starts.int(),
        rejected.int(),
        table.int(),
        drafting,
    ]
    return [tensor.to(DEVICE) for tensor in tensors] + [16, MASK, num_query, 45]


def loop_oracle(anchors, positions, starts, rejected, table, drafting, page, mask, num_query, limit) -> DraftRows:
    """The rows, one by one."""
    fields: tuple[list[int], ...] = ([], [], [], [], [], [])
    context_positions, context_slots, ids, query_positions, query_slots, samples = fields
    for request in range(len(anchors)):
        rows = range(int(starts[request]), int(starts[request + 1]))
        valid = len(rows) - int(rejected[request])
        for index, row in enumerate(rows):
            position = int(positions[row])
            written = index < valid and position < limit
            context_positions.append(position if written else 0)
            slot = int(table[request, position // page]) * page + position % page
            context_slots.append(slot if written else PAD)
        if request in drafting.tolist():
            anchor_position = int(positions[rows[valid - 1]]) + 1
            for offset in range(num_query):
                if offset:
                    samples.append(len(ids))
                ids.append(mask if offset else int(anchors[request]))
                position = anchor_position + offset
                query_positions.append(position)
                query_slots.append(int(table[request, position // page]) * page + position % page)
    return DraftRows(*(torch.tensor(field, dtype=torch.int64) for field in fields))


@pytest.mark.parametrize("run", IMPLEMENTATIONS)
@pytest.mark.parametrize(("num_reqs", "num_query"), [(1, 2), (3, 4), (7, 8), (13, 16), (5, 11)])
def test_random_steps_equal_a_loop(run, num_reqs, num_query):
    step = random_step(torch.Generator().manual_seed(num_reqs), num_reqs, num_query)
    expected = loop_oracle(*step)
    for name, actual, right in zip(DraftRows._fields, run(*step), expected):
        assert actual.tolist() == right.tolist(), name


def test_launcher_chooses_by_device():
    """On a CPU the twin runs, even where triton is installed."""
    step = random_step(torch.Generator().manual_seed(0), 3, 4)
    for actual, right in zip(module.draft_inputs(*step), loop_oracle(*step)):
        assert actual.tolist() == right.tolist()
