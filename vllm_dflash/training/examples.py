"""Where a step's rows come from: examples in a seeded order, with features from the cache or from the target itself.

Nothing here has state: which examples a step gets is a function of the seed and the step's number, so a run that goes
on from a checkpoint sees what it would have seen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_dflash.training.blocks import PackedRow, pack
from vllm_dflash.training.data import Example
from vllm_dflash.training.target_features import SequenceFeatures, TargetFeatures


class FeatureReader(Protocol):
    """Gives the features of an example."""

    def read(self, example: Example) -> SequenceFeatures:
        """Features of all its tokens."""
        ...


class OnlineFeatures:
    """Features straight from the target, in every step anew."""

    def __init__(self, target: TargetFeatures) -> None:
        self._target = target

    def read(self, example: Example) -> SequenceFeatures:
        """Features of an example; one target pass."""
        return self._target.extract([example.input_ids])[0]


class ExampleOrder:
    """An endless sequence of examples: every epoch is a new permutation."""

    def __init__(self, examples: Sequence[Example], seed: int) -> None:
        self._examples, self._seed = examples, seed

    def __getitem__(self, number: int) -> Example:
        epoch, place = divmod(number, len(self._examples))
        return self._examples[self._permutation(epoch)[place]]

    @functools.lru_cache(maxsize=4)  # noqa: B019  # An order lives as long as its run.
    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(len(self._examples), generator=generator).tolist()


def packed_row(examples: Sequence[Example], features: FeatureReader) -> PackedRow:
    """Several examples in one row."""
    documents = []
    for example in examples:
        ids, mask = torch.tensor(example.input_ids), torch.tensor(example.loss_mask)
        documents.append((ids, mask, features.read(example)))
    return pack(documents)


def hold_out(examples: Sequence[Example], number: int) -> tuple[list[Example], list[Example]]:
    """(training, held out): the held-out ones lie evenly over the data, so all its sources are among them."""
    number = min(number, len(examples) // 5)
    held = {i * len(examples) // number for i in range(number)} if number else set()
    return [e for i, e in enumerate(examples) if i not in held], [examples[i] for i in sorted(held)]
