"""Top-k and top-p on a CPU without sorting the vocabulary.

vLLM sorts every row of logits for top-p: 350 to 500 ms for 15 verified rows of 152,000 tokens on one core. A nucleus is
small where text is predictable, which is where drafts are worth verifying, so here each row's most probable tokens are
looked at, and only rows whose nucleus is larger than that are sorted.
"""

from __future__ import annotations

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

#: Tokens of a row that are looked at; vocabularies below a few times as many are sorted at once.
_CANDIDATES = 1024
_MIN_VOCABULARY = 4 * _CANDIDATES


def apply_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Set logits outside each row's top-k and top-p to -inf, as vLLM's function of this name does, in place.

    Args:
        logits: [rows, vocabulary] float32 on the CPU.
        k: [rows] integers, the vocabulary's size where off; None = off for all.
        p: [rows] float32, 1 where off; None = off for all.

    Tokens of equal probability at the edge of top-p may be kept in another choice than a sort keeps, never in another
    number; equals at the edge of top-k are all kept, as there.
    """
    vocab_size = logits.shape[1]
    if p is None or vocab_size < _MIN_VOCABULARY:
        return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)
    if k is None:
        k = torch.full((len(logits),), vocab_size)
    k = k.long()
    has_k, has_p = k < vocab_size, p < 1
    values, tokens = logits.topk(_CANDIDATES)
    kth = values.gather(1, k.clamp(max=_CANDIDATES)[:, None] - 1)
    kept = (values >= kth) | ~has_k[:, None]
    total = torch.where(has_k, values.masked_fill(~kept, -torch.inf).logsumexp(-1), logits.logsumexp(-1))
    probs = (values - total[:, None]).exp() * kept
    mass = probs.cumsum(-1)
    kept &= (mass - probs < p[:, None]) | ~has_p[:, None]
    # A row is settled when what lies beyond the candidates is certainly outside.
    within_k = has_k & (k < _CANDIDATES) & (values[:, -1:] < kth)[:, 0]
    within_p = has_p & (mass[:, -1] >= p)
    settled = torch.where(has_k, within_k, within_p)
    unsettled = (~settled & (has_k | has_p)).nonzero()[:, 0]
    if len(unsettled):
        logits[unsettled] = apply_top_k_top_p_pytorch(logits[unsettled], k[unsettled], p[unsettled])
    rows = settled.nonzero()[:, 0]
    if len(rows):
        reduced = values[rows].masked_fill(~kept[rows], -torch.inf)
        logits[rows] = torch.full_like(logits[rows], -torch.inf).scatter_(1, tokens[rows], reduced)
    return logits
