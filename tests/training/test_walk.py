"""tau by the walk: literal runs of drafts right by a known pattern, and the cycles of real drafting and verifying."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import HIDDEN, write_tiny_drafter, write_tiny_target
from tiny_rows import drawn_row
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.reference import ReferenceDrafter, features_and_logits, generate
from vllm_dflash.training import acceptance
from vllm_dflash.training.acceptance import Acceptance, DocumentAcceptance, Draft, walk
from vllm_dflash.training.blocks import Blocks, PackedRow, make_blocks
from vllm_dflash.training.data import Example
from vllm_dflash.training.drafting import measure, propose
from vllm_dflash.training.model import Drafter, Variant
from vllm_dflash.training.step import tables_of
from vllm_dflash.training.target_features import SequenceFeatures

CPU = torch.device("cpu")


def right_for(agreeing: list[int]) -> Draft:
    """Drafts whose first `agreeing[anchor]` tokens are the text's and all others wrong: they cheat."""

    def draft(row: PackedRow, blocks: Blocks) -> Tensor:
        tokens = torch.full_like(blocks.labels, -1)
        for index, anchor in enumerate(blocks.anchors.tolist()):
            for slot in range(min(agreeing[anchor], blocks.length - 1)):
                # Behind the end of a document it goes on with whatever the row holds, as a lucky drafter would.
                tokens[index, slot] = row.input_ids[(anchor + slot + 1) % len(row.input_ids)]
        return tokens

    return draft


def runs_of(row: PackedRow, draft: Draft, num_drafted: int) -> list[tuple[int, ...]]:
    ids = [(f"d{i}", "s") for i in range(int(row.document[-1]) + 1)]
    found = walk(row, draft, num_drafted, ids)
    assert [(document.id, document.source) for document in found] == ids
    return [document.runs for document in found]


ALWAYS, NEVER = right_for([99] * 99), right_for([0] * 99)


def test_runs_of_a_known_pattern() -> None:
    """From row 2: 2 right, so on to row 5; none, row 6; 1, row 8; 3, row 12; none, row 13: the text's last token."""
    row = drawn_row("..xxxxxxxxxxxx")
    #     row:           0  1  2  3  4  5  6  7  8  9 10 11 12 13
    draft = right_for([9, 9, 2, 9, 9, 0, 1, 9, 3, 9, 9, 9, 0, 9])
    assert runs_of(row, draft, 3) == [(2, 0, 1, 3, 0)]


def test_right_drafts_gain_a_whole_block_per_cycle() -> None:
    row = drawn_row(".." + "x" * 13)
    assert runs_of(row, ALWAYS, 3) == [(3, 3, 3)]
    # The rest of the text is shorter than the block.
    assert runs_of(row, ALWAYS, 4) == [(4, 4, 2)]


def test_wrong_drafts_gain_one_token_per_cycle() -> None:
    assert runs_of(drawn_row("...xxxxx"), NEVER, 3) == [(0, 0, 0, 0)]


def test_every_turn_of_a_conversation_begins_anew() -> None:
    """A turn's last token is its end: no cycle starts there, and no draft reaches over it into the next turn."""
    row = drawn_row("..xxxxx..xxx.x")
    assert runs_of(row, ALWAYS, 3) == [(3, 2)]
    assert runs_of(row, ALWAYS, 2) == [(2, 1, 2)]
    assert runs_of(row, NEVER, 3) == [(0, 0, 0, 0, 0, 0)]


def test_documents_of_a_row_are_walked_apart() -> None:
    """The second begins with a token that the target wrote: it has no features to draft from before there is one."""
    row = drawn_row(".xxxx", "xxxxx", "...")
    assert runs_of(row, ALWAYS, 3) == [(3,), (3,), ()]
    assert runs_of(row, NEVER, 3) == [(0, 0, 0), (0, 0, 0), ()]


def test_row_without_a_possible_anchor() -> None:
    assert runs_of(drawn_row("x..", ".x"), lambda row, blocks: blocks.labels, 3) == [(), ()]


def test_blocks_are_drafted_in_bounded_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "_BLOCKS_AT_ONCE", 4)
    sizes = []

    def draft(row: PackedRow, blocks: Blocks) -> Tensor:
        sizes.append(len(blocks.anchors))
        return ALWAYS(row, blocks)

    assert runs_of(drawn_row("." + "x" * 11), draft, 3) == [(3, 3, 2)]
    assert sizes == [4, 4, 3]


def test_tau_is_pooled_over_documents() -> None:
    """vLLM counts accepted tokens and drafts of all requests: 1 + 9 / 6, not the mean of 3.25 and 1.0."""
    found = Acceptance(
        [
            DocumentAcceptance("a", "chat", (3, 2, 0, 4), 4),
            DocumentAcceptance("b", "maths", (0, 0), 4),
            DocumentAcceptance("c", "maths", (), 4),
        ]
    )
    assert found.num_cycles == 6
    assert found.tau == 2.5
    assert [document.tau for document in found.documents] == [3.25, 1.0, 1.0]
    assert found.by_position == [3 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert found.tau == pytest.approx(1 + sum(found.by_position))
    assert found.of(lambda document: document.source == "chat").tau == 3.25


def test_no_documents() -> None:
    assert Acceptance().tau == 1.0
    assert Acceptance().by_position == []


class Tiny:
    """A target of few tokens, so that a random drafter is often right, and a drafter for it.

    Args:
        draft_tokens: target tokens that the drafter can draft; None for all.
    """

    def __init__(self, folder: Path, draft_tokens: list[int] | None = None, **changes: Any) -> None:
        from transformers import AutoModelForCausalLM

        vocab_size = 10
        write_tiny_target(folder / "target", vocab_size=vocab_size, seed=4)
        self.target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
        embedding, head = (
            table.weight.data for table in (self.target.get_input_embeddings(), self.target.get_output_embeddings())
        )
        tensors = {}
        if draft_tokens is not None:
            offsets = torch.tensor(draft_tokens) - torch.arange(len(draft_tokens))
            tensors = {"lm_head.weight": head[draft_tokens].clone(), "d2t": offsets}
            changes["draft_vocab_size"] = len(draft_tokens)
        write_tiny_drafter(folder / "drafter", tensors, vocab_size=vocab_size, **changes)
        raw = json.loads((folder / "drafter" / "config.json").read_text())
        self.config = DFlashConfig.from_dict(raw, "tiny")
        self.reference = ReferenceDrafter(folder / "drafter", self.config, embedding, head)
        self.tables = tables_of(self.target, None if draft_tokens is None else torch.tensor(draft_tokens))

    def drafter(self, variant: Variant = Variant(), has_lm_head: bool = False) -> Drafter:
        """The trainer's drafter with the weights of the reference; a head only where it is its own."""
        drafter = Drafter(self.config, variant, has_lm_head)
        own = drafter.state_dict().keys()
        drafter.load_state_dict({name: t for name, t in self.reference.weights.items() if name in own})
        return drafter

    def read(self, example: Example) -> SequenceFeatures:
        """Features in float32 from the reference, so that nothing is rounded."""
        features, _ = features_and_logits(self.target, example.input_ids, self.config)
        return SequenceFeatures(features, None, None)

    def answer(self, prompt: list[int], num_tokens: int, num_drafted: int) -> tuple[Example, tuple[int, ...]]:
        """A greedy answer, and the runs of the cycles that wrote it, cut where the answer ends."""
        response, cycles = generate(self.target, self.reference, prompt, num_tokens, num_drafted)
        ids = prompt + response
        example = Example("a", "s", ids, [False] * len(prompt) + [True] * num_tokens)
        return example, tuple(min(c.num_accepted, len(ids) - 1 - c.start) for c in cycles)


@pytest.mark.parametrize(
    ("num_drafted", "changes", "draft_tokens"),
    [(7, {}, None), (2, {}, None), (4, {"is_causal": True}, None), (7, {}, [0, 2, 3, 5, 6, 9])],
    ids=["whole block", "fewer than trained", "causal", "reduced vocabulary"],
)
def test_walk_equals_drafting_and_verifying(
    num_drafted: int, changes: dict[str, Any], draft_tokens: list[int] | None, tmp_path: Path
) -> None:
    tiny = Tiny(tmp_path, draft_tokens, **changes)
    answers = [tiny.answer(prompt, 40, num_drafted) for prompt in ([3, 5, 7], [4] * 9)]
    drafter = tiny.drafter(has_lm_head=draft_tokens is not None)
    examples = [example for example, _ in answers]
    found = measure(drafter, tiny.tables, examples, tiny, "sdpa", CPU, num_drafted)
    assert [document.runs for document in found.documents] == [runs for _, runs in answers]
    # There is something to find: drafts that are accepted, in part and in whole, and drafts that are not.
    assert len({run for _, runs in answers for run in runs}) >= 3
    if draft_tokens is not None:
        frozen = measure(tiny.drafter(), tiny.tables, examples, tiny, "sdpa", CPU, num_drafted)
        assert frozen == found


def test_whole_block_is_drafted_by_default(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path)
    example, _ = tiny.answer([3, 5, 7], 12, 7)
    found = measure(tiny.drafter(), tiny.tables, [example], tiny, "sdpa", CPU)
    assert [document.num_drafted for document in found.documents] == [7]
    assert len(found.by_position) == 7


def test_autoregressive_drafter_sees_its_own_drafts_not_the_text(tmp_path: Path) -> None:
    """Slot by slot as serving would: every token is the likeliest behind those drafted before it."""
    tiny = Tiny(tmp_path)
    drafter = tiny.drafter(Variant(drafting="autoregressive"))
    row = drawn_row("..xxxxxxxxxx", feature_size=2 * HIDDEN, vocab_size=10)
    blocks = make_blocks(row, torch.tensor([2, 5, 9]), 5)
    with torch.no_grad():
        found = propose(drafter, row, blocks, tiny.tables, "sdpa")
        for index, anchor in enumerate(blocks.anchors.tolist()):
            drafted: list[int] = []
            while len(drafted) < 4:
                # The text behind the anchor is the drafts so far and nothing else.
                ids = torch.cat([row.input_ids[: anchor + 1], torch.tensor([*drafted, 0], dtype=torch.int64)])
                length = len(ids)
                features = torch.zeros(length, 2 * HIDDEN)
                features[:anchor] = row.features[:anchor]
                alone = PackedRow(
                    ids,
                    torch.ones(length).bool(),
                    torch.zeros(length).long(),
                    torch.arange(length),
                    features,
                    None,
                    None,
                )
                hidden = drafter(
                    alone, make_blocks(alone, torch.tensor([anchor]), len(drafted) + 2), tiny.tables.embedding
                )
                drafted.append(int((tiny.tables.head @ hidden[0, -1]).argmax()))
            assert found[index].tolist() == drafted
    assert found.unique().numel() > 2
