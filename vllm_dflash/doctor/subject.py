"""The drafter under examination, and how it runs as it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.doctor.probe import Probe
from vllm_dflash.doctor.replay import Setup
from vllm_dflash.training.vocabulary import from_d2t


@dataclass(frozen=True)
class Subject:
    """The drafter under examination."""

    folder: Path
    raw: Mapping[str, Any]  # its config.json
    config: DFlashConfig
    tensors: Mapping[str, Tensor]
    num_drafted: int  # K
    target_rope_theta: float | None
    target_embedding_scale: float = 1.0  # what the target itself multiplies its embeddings by


def as_is(subject: Subject, probe: Probe) -> Setup:
    """The drafter as it is served."""
    device, tensors = probe.head.device, dict(subject.tensors)
    own_head, d2t = tensors.pop("lm_head.weight", None), tensors.pop("d2t", None)
    own_embedding = tensors.pop("embed_tokens.weight", None)
    ids = from_d2t(d2t) if d2t is not None else torch.arange(subject.config.draft_vocab_size)
    head = probe.head.float()[: subject.config.draft_vocab_size] if own_head is None else own_head
    neox = [
        section.get("is_neox_style") for section in (subject.raw, subject.raw.get("transformer_layer_config") or {})
    ]
    return Setup(
        config=subject.config,
        tensors={name: tensor.to(device) for name, tensor in tensors.items()},
        head=head.to(device),
        target_ids=inside(ids, len(probe.head)).to(device),
        num_drafted=subject.num_drafted,
        embedding=None if own_embedding is None else own_embedding.to(device),
        rotates_pairs=False in neox,
    )


def inside(ids: Tensor, vocab_size: int) -> Tensor:
    """Ids with -1, which no text has, for those that are no target token."""
    return torch.where((ids >= 0) & (ids < vocab_size), ids, -1)
