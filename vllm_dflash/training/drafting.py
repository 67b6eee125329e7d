"""Draft as serving does: the most probable token of each slot. And tau of a drafter on examples, by the walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vllm_dflash.training.acceptance import Acceptance, walk
from vllm_dflash.training.attention import Backend
from vllm_dflash.training.blocks import Blocks, PackedRow
from vllm_dflash.training.data import Example
from vllm_dflash.training.examples import FeatureReader, packed_row
from vllm_dflash.training.model import Drafter
from vllm_dflash.training.step import TargetTables


def propose(drafter: Drafter, row: PackedRow, blocks: Blocks, tables: TargetTables, backend: Backend) -> Tensor:
    """Drafted target tokens [A, length - 1] int64 of each block."""
    head = tables.head if drafter.lm_head is None else drafter.lm_head.weight
    target_ids = tables.target_ids

    def most_probable(hidden: Tensor) -> Tensor:
        return target_ids[(hidden @ head.to(hidden.dtype).T).argmax(-1)]

    if drafter.variant.drafting == "block":
        return most_probable(drafter(row, blocks, tables.embedding, backend))
    tokens = torch.zeros_like(blocks.labels)
    for slot in range(tokens.shape[1]):  # slot by slot, each seeing the ones drafted before
        hidden = drafter(row, replace(blocks, labels=tokens), tables.embedding, backend)
        tokens[:, slot] = most_probable(hidden[:, slot])
    return tokens


@torch.inference_mode()
def measure(
    drafter: Drafter,
    tables: TargetTables,
    examples: Sequence[Example],
    features: FeatureReader,
    backend: Backend,
    device: torch.device,
    num_drafted: int | None = None,
) -> Acceptance:
    """Acceptance of a drafter on examples.

    Args:
        examples: text that the target wrote greedily.
        num_drafted: K; the whole block by default.
    """
    num_drafted = num_drafted or drafter.config.max_speculative_tokens or 1
    acceptance = Acceptance()
    for example in examples:
        row = packed_row([example], features).to(device)
        acceptance.documents += walk(
            row,
            lambda row, blocks: propose(drafter, row, blocks, tables, backend),
            num_drafted,
            [(example.id, example.source)],
        )
    return acceptance
