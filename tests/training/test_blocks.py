"""Packed rows, where anchors may lie, and what their blocks predict. Rows are drawn with characters: tiny_rows.py."""

from __future__ import annotations

import random

import torch
from tiny_rows import drawn_row

from vllm_dflash.training.blocks import AnchorRule, PackedRow, draw_anchors, make_blocks, pack
from vllm_dflash.training.target_features import SequenceFeatures


def anchors_of(
    row: PackedRow, per_document: int = 100, length: int = 4, rule: AnchorRule = "random", seed: int = 0
) -> list[int]:
    return draw_anchors(row, per_document, length, rule, torch.Generator().manual_seed(seed)).tolist()


def test_documents_lie_one_after_another() -> None:
    def features(values: list[int]) -> SequenceFeatures:
        column = torch.tensor(values)[:, None]
        return SequenceFeatures(column.float(), column.int() + 1, -column.float())

    row = pack(
        [
            (torch.tensor([7, 8, 9]), torch.tensor([False, True, True]), features([1, 2, 3])),
            (torch.tensor([5, 6]), torch.tensor([True, False]), features([4, 5])),
        ]
    )
    assert row.input_ids.tolist() == [7, 8, 9, 5, 6]
    assert row.loss_mask.tolist() == [False, True, True, True, False]
    assert row.document.tolist() == [0, 0, 0, 1, 1]
    assert row.position.tolist() == [0, 1, 2, 0, 1]
    assert row.features.tolist() == [[1.0], [2.0], [3.0], [4.0], [5.0]]
    assert row.top_ids is not None
    assert row.top_logprobs is not None
    assert row.top_ids.tolist() == [[2], [3], [4], [5], [6]]
    assert row.top_logprobs.tolist() == [[-1.0], [-2.0], [-3.0], [-4.0], [-5.0]]


def test_row_without_soft_labels_has_none() -> None:
    row = drawn_row("xx", "xx")
    assert row.top_ids is None
    assert row.top_logprobs is None


def test_anchor_and_its_successor_are_supervised_and_of_one_document() -> None:
    """Rows 6 and 7, 9 and 10, 10 and 12 are supervised neighbours of different documents."""
    row = drawn_row("..xxx.x", "xxx", "x", "xxx.x")
    #                0123456    789   10   11 12 13 14 15
    assert anchors_of(row) == [2, 3, 7, 8, 11, 12]


def test_all_positions_where_there_are_fewer_than_asked_for() -> None:
    row = drawn_row(".xxxxx")
    assert anchors_of(row, per_document=4) == anchors_of(row, per_document=4, seed=1) == [1, 2, 3, 4]


def test_limit_counts_per_document() -> None:
    """The trap of trainers that draw per row: a long document leaves nothing to a short one."""
    row = drawn_row("x" * 41, "x" * 4, "x" * 21)
    for seed in range(20):
        anchors = anchors_of(row, per_document=5, seed=seed)
        documents = row.document[anchors].tolist()
        assert [documents.count(document) for document in range(3)] == [5, 3, 5]
        assert anchors == sorted(set(anchors))


def test_random_anchors_are_fresh_with_every_seed_and_reach_every_position() -> None:
    row = drawn_row(".." + "x" * 31)
    drawn = [anchors_of(row, per_document=3, seed=seed) for seed in range(300)]
    assert drawn[0] == anchors_of(row, per_document=3, seed=0)
    assert len({tuple(anchors) for anchors in drawn}) > 250
    counts = [sum(position in anchors for anchors in drawn) for position in range(2, 32)]
    # 900 draws on 30 positions: 30 each, with a standard deviation of 5.2.
    assert min(counts) > 30 - 5 * 5.2
    assert max(counts) < 30 + 5 * 5.2


def test_uniform_rule_cuts_runs_into_blocks_that_follow_each_other() -> None:
    row = drawn_row(".xxxxxxxxxx..xxxxxx.x", "xxxxxx")
    # Runs of possible anchors: rows 1 to 9, rows 13 to 17, and rows 21 to 25 of the second document.
    assert anchors_of(row, rule="uniform", length=4) == [1, 5, 9, 13, 17, 21, 25]
    assert anchors_of(row, rule="uniform", length=3) == [1, 4, 7, 13, 16, 21, 24]


def test_uniform_rule_is_limited_per_document_too() -> None:
    row = drawn_row("x" * 41, "x" * 5)
    anchors = anchors_of(row, per_document=3, length=4, rule="uniform")
    assert len(anchors) == 4
    assert [anchor % 4 for anchor in anchors[:3]] == [0, 0, 0]
    assert anchors[3] == 41


def test_row_without_two_supervised_tokens_in_a_row_has_no_anchors() -> None:
    row = drawn_row(".x.x", "...", "x")
    assert anchors_of(row, rule="random") == anchors_of(row, rule="uniform") == []
    assert make_blocks(row, torch.tensor([], dtype=torch.int64), 4).labels.shape == (0, 3)


def test_labels_stop_at_unsupervised_tokens_and_at_the_end_of_the_document() -> None:
    """Row 7 is supervised but serving never gets from row 5 to it; rows 10 and 11 are another document's."""
    row = drawn_row("..xxxx.xxx", "xxx")
    row.input_ids.copy_(torch.arange(100, 113))
    blocks = make_blocks(row, torch.tensor([2, 4, 7, 8, 11]), 4)
    o = 0  # masked: any value
    labels = [[103, 104, 105], [105, o, o], [108, 109, o], [109, o, o], [112, o, o]]
    is_label = [[label != o for label in of_block] for of_block in labels]
    assert blocks.label_mask.tolist() == is_label
    assert blocks.labels.masked_fill(~blocks.label_mask, o).tolist() == labels
    assert blocks.positions.tolist() == [[2, 3, 4, 5], [4, 5, 6, 7], [7, 8, 9, 10], [8, 9, 10, 11], [1, 2, 3, 4]]
    assert blocks.document_start.tolist() == [0, 0, 0, 0, 10]
    assert blocks.label_rows[:2].tolist() == [[2, 3, 4], [4, 5, 6]]
    assert blocks.length == 4


def test_labels_against_loops() -> None:
    random.seed(0)
    for seed in range(50):
        drawings = ["".join(random.choice(".xxx") for _ in range(random.randrange(1, 12))) for _ in range(3)]
        row = drawn_row(*drawings, seed=seed)
        tokens, masks = row.input_ids.tolist(), "".join(drawings)
        ends = [sum(map(len, drawings[: i + 1])) for i in range(3)]
        anchors = anchors_of(row)
        blocks = make_blocks(row, torch.tensor(anchors, dtype=torch.int64), 5)
        for index, anchor in enumerate(anchors):
            end = next(end for end in ends if end > anchor)
            expected: list[int] = []
            while anchor + 1 + len(expected) < end and masks[anchor + 1 + len(expected)] == "x" and len(expected) < 4:
                expected.append(tokens[anchor + 1 + len(expected)])
            mask = blocks.label_mask[index]
            assert mask.tolist() == [slot < len(expected) for slot in range(4)], (drawings, anchor)
            assert blocks.labels[index][mask].tolist() == expected
            assert blocks.label_rows[index][mask].tolist() == list(range(anchor, anchor + len(expected)))


def test_blocks_lie_on_the_device_of_their_row() -> None:
    """`meta` stands for an accelerator: it refuses to compute with tensors that lie on the CPU."""
    row = drawn_row("..xxx").to(torch.device("meta"))
    blocks = make_blocks(row, torch.zeros(2, dtype=torch.int64, device="meta"), 4)
    tensors = [*vars(blocks).values(), blocks.label_rows]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 6
