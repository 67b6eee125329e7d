"""Packed rows drawn with characters: one string per document, `x` for a token that the target wrote, `.` for any other.

drawn_row("..xxx", ".xx")    two documents; anchors are possible at rows 2, 3 and 6
"""

from __future__ import annotations

import torch

from vllm_dflash.training.blocks import PackedRow, pack
from vllm_dflash.training.target_features import SequenceFeatures


def drawn_row(
    *documents: str, feature_size: int = 6, vocab_size: int = 128, top_k: int = 0, seed: int = 0
) -> PackedRow:
    """A row with random tokens, features and likeliest tokens."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for drawing in documents:
        length = len(drawing)
        ids = torch.randint(vocab_size, (length,), generator=generator)
        mask = torch.tensor([character == "x" for character in drawing], dtype=torch.bool)
        features = torch.randn(length, feature_size, generator=generator)
        top_ids = top_logprobs = None
        if top_k:
            logits = torch.randn(length, vocab_size, generator=generator)
            top_logprobs, top_ids = logits.log_softmax(-1).topk(top_k)
            top_ids = top_ids.int()
        parts.append((ids, mask, SequenceFeatures(features, top_ids, top_logprobs)))
    return pack(parts)
