"""Rows of plain steps wait, come out whole and in order, and never reach a page that is no longer theirs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_dflash.context_backlog import ContextBacklog, ContextRows
from vllm_dflash.draft_length import BACKLOG_ROWS
from vllm_dflash.length_control import StepBatch

PAGE = 40  # no page is full before the backlog is, in tests with four requests


class Steps:
    """Steps of requests "a", "b", ...; the slot of a row is 100 times its request's number plus its position."""

    def __init__(self) -> None:
        self.backlog = ContextBacklog(PAGE)
        self.lengths: dict[str, int] = {}

    def written(
        self, ids: str, num_rows: int = 1, rejected: int = 0, drafts: bool = False, exact: bool = True
    ) -> list[int] | None:
        """Slots that a step writes in which each request gets `num_rows` rows; None if its rows wait."""
        rows = [(i, self.lengths.get(i, 0) + row) for i in ids for row in range(num_rows)]
        slots = torch.tensor([100 * (ord(i) - ord("a")) + position for i, position in rows])
        step = ContextRows(slots[:, None] * torch.ones(3), torch.tensor([position for _, position in rows]), slots)
        self.lengths |= {i: self.lengths.get(i, 0) + num_rows - rejected for i in ids}
        batch = StepBatch(
            request_ids=tuple(ids),
            num_rows=np.full(len(ids), num_rows),
            num_rejected=np.full(len(ids), rejected),
            context_lens=np.array([self.lengths[i] for i in ids]),
            has_exact_lens=exact,
            caps=np.full(len(ids), 7),
            is_seeded=np.zeros(len(ids), dtype=bool),
        )
        due = self.backlog.rows_due(step, batch, is_drafting=drafts)
        found = None if due is None else due.slots.tolist()
        if due is not None:
            assert due.positions.tolist() == [slot % 100 for slot in due.slots.tolist()]
            assert due.features.tolist() == [[slot] * 3 for slot in due.slots.tolist()]
        for part in step:
            part.fill_(-7)  # as vLLM does with its buffers
        return found


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_rows_wait_until_somebody_drafts(steps):
    assert steps.written("ab", num_rows=2) == [0, 1, 100, 101]
    assert [steps.written("ab"), steps.written("ba")] == [None, None]
    assert len(steps.backlog) == 4
    assert steps.written("ab", drafts=True) == [2, 102, 103, 3, 4, 104]
    assert len(steps.backlog) == 0
    assert steps.written("ab") is None


def test_a_prompt_ends_the_wait(steps):
    assert [steps.written("a"), steps.written("a")] == [None, None]
    assert steps.written("a", num_rows=5) == [0, 1, 2, 3, 4, 5, 6]


def test_a_row_that_completes_a_page_ends_the_wait_for_all(steps):
    steps.lengths |= {"a": PAGE - 2, "b": 3}
    assert steps.written("ab") is None
    assert steps.written("ab") == [PAGE - 2, 103, PAGE - 1, 104]


def test_no_more_rows_wait_than_one_pass_takes_cheaply(steps):
    for _ in range(BACKLOG_ROWS // 4):
        assert steps.written("abcd") is None
    written = steps.written("abcd")
    assert written is not None
    assert len(written) == BACKLOG_ROWS + 4
    many = "".join(chr(ord("a") + i) for i in range(BACKLOG_ROWS + 1))
    assert steps.written(many) is not None


def test_rows_wait_only_where_lengths_are_exact(steps):
    assert steps.written("a", exact=False) == [0]


@pytest.mark.parametrize("drafts", [True, False])
def test_rows_of_a_request_that_left_are_dropped(steps, drafts):
    """Its pages may be another's already."""
    assert steps.written("ab") is None
    assert steps.written("ab") is None
    steps.written("b", drafts=drafts)
    assert steps.written("b", drafts=True) == ([102 + 1] if drafts else [100, 101, 102, 103])


def test_rows_of_a_request_that_comes_back_with_other_pages_are_dropped(steps):
    """Preempted, it begins anew; the pages that its rows were meant for are gone."""
    steps.lengths["a"] = 5
    assert steps.written("ab") is None
    steps.lengths["a"] = 0
    assert steps.written("ab") is None
    assert steps.written("ab", drafts=True) == [100, 0, 101, 1, 102]


def test_the_step_behind_a_verified_block_goes_on_where_the_block_was_accepted_to(steps):
    assert steps.written("a", num_rows=4, rejected=3, drafts=True) is not None
    assert steps.written("a") is None
    assert steps.written("a", drafts=True) == [1, 2]
