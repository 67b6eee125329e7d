"""Reduced draft vocabularies: the tokens that the target writes most often, so that the drafter's head is small.

A drafter with such a head carries `d2t`: target id of draft token d = d + d2t[d] (vLLM, speculators).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vllm_dflash.training.data import Example


def most_frequent_tokens(examples: Iterable[Example], size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` supervised tokens seen most often and the `always` ones (end of text), [size] int64, increasing.

    Where fewer are seen, the lowest unseen ids fill up: tokenizers number frequent tokens first.
    """
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(token for token, supervised in zip(example.input_ids, example.loss_mask) if supervised)
    ranked = [*always, *(token for token, _ in counts.most_common())]
    chosen = set(list(dict.fromkeys(ranked))[:size])
    unseen = (token for token in range(2 * size) if token not in chosen)
    chosen.update(itertools.islice(unseen, size - len(chosen)))
    return torch.tensor(sorted(chosen))


def coverage(examples: Iterable[Example], vocabulary: Tensor) -> float:
    """Share of supervised tokens that the vocabulary contains."""
    members = set(vocabulary.tolist())
    seen = [t in members for e in examples for t, supervised in zip(e.input_ids, e.loss_mask) if supervised]
    return sum(seen) / max(len(seen), 1)


def to_d2t(vocabulary: Tensor) -> Tensor:
    """Offsets [V'] int64 to add to a draft token for the target's."""
    return vocabulary - torch.arange(len(vocabulary))


def from_d2t(d2t: Tensor) -> Tensor:
    """Target id [V'] int64 of each draft token."""
    return d2t + torch.arange(len(d2t))
