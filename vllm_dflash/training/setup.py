"""From settings to a run: data, target, features, drafter; what can be refused is refused before it is loaded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.chat import load_tokenizer
from vllm_dflash.training.checkpoint import checkpoints, settings_of_last
from vllm_dflash.training.data import Example, load_examples
from vllm_dflash.training.dialects import to_z_lab
from vllm_dflash.training.examples import FeatureReader, OnlineFeatures, hold_out
from vllm_dflash.training.feature_cache import FeatureSource, extract
from vllm_dflash.training.initialise import drafter_config, feature_rms, find_mask_token, new_drafter
from vllm_dflash.training.model import Drafter, Variant
from vllm_dflash.training.pretrained import import_drafter
from vllm_dflash.training.run_record import run_record
from vllm_dflash.training.settings import NEW_DRAFTER, TrainSettings, differences
from vllm_dflash.training.step import TargetTables, tables_of
from vllm_dflash.training.target_features import (
    TargetFeatures,
    fingerprint,
    load_target,
    load_target_config,
    target_shape,
)
from vllm_dflash.training.trainer import Run, load_tensors
from vllm_dflash.training.vocabulary import coverage, from_d2t, most_frequent_tokens

#: A drafter to go on from: its config and tensors.
Pretrained = tuple[DFlashConfig, dict[str, Tensor]]

#: Relative error of weights that were stored in bf16, which has 8 bits of mantissa.
_BF16_ROUNDING = 2**-8

#: Rows that the scale of feature layers is measured on.
_ROWS_FOR_RMS = 4096


def prepare_run(settings: TrainSettings, device: torch.device) -> Run:
    """Load and check everything a run needs; cached features are extracted here where they are missing.

    Raises:
        ValueError: data, target, drafter or settings do not fit each other.
    """
    _check_output(settings)
    tokenizer = load_tokenizer(settings.target)
    pretrained = import_drafter(settings.from_pretrained) if settings.from_pretrained else None
    settings, config = _shape(settings, load_target_config(settings.target), pretrained)
    _check_resumed(settings)
    examples, held_out = _examples(settings, tokenizer)
    target = load_target(settings.target, device)
    if pretrained is None and settings.mask_token_id < 0:
        config = replace(config, mask_token_id=find_mask_token(tokenizer, target.get_input_embeddings().weight))
    vocabulary = _vocabulary(config, tokenizer, examples, pretrained)
    tables = tables_of(target, vocabulary)
    _check_head(settings, tables, pretrained)
    features = _features(settings, target, config, vocabulary, [*examples, *held_out])
    rms = _measure_rms(features, examples, len(config.target_layer_ids))
    # The cache needs no target in memory, but a drafter may be started from the layers that extraction leaves out.
    drafter = _drafter(settings, config, target, tables, rms, pretrained)
    return Run(settings, config, drafter, tables, features, examples, held_out, run_record(settings, examples))


def _check_output(settings: TrainSettings) -> None:
    folder = Path(settings.output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output '{folder}' is a file; give a folder.")
    if not settings.resume and checkpoints(folder):
        raise ValueError(
            f"--output '{folder}' holds checkpoints of an earlier run, which --no-resume would mix with new ones; give "
            f"another folder, or delete it."
        )


def _check_resumed(settings: TrainSettings) -> None:
    """Refuse to go on with a run as if it had been another."""
    earlier = settings_of_last(Path(settings.output)) if settings.resume else None
    changed = differences(settings, earlier) if earlier else {}
    if changed:
        pairs = ", ".join(f"{name} {before!r}, now {now!r}" for name, (before, now) in changed.items())
        raise ValueError(
            f"--output '{settings.output}' holds a run with other settings ({pairs}); give the same to go on with it, "
            f"or another folder, and --from-pretrained '{settings.output}/last' to start from what it learnt."
        )


def _examples(settings: TrainSettings, tokenizer: Any) -> tuple[list[Example], list[Example]]:
    """(training, held out)."""
    if not settings.data:
        raise ValueError("no data is given; name files, folders or Hub data sets of the target's answers with --data.")
    examples = load_examples(settings.data, tokenizer, settings.max_length, settings.max_examples or None)
    drafted = [e for e in examples if any(a and b for a, b in itertools.pairwise(e.loss_mask))]
    if not drafted:
        raise ValueError(
            f"none of the {len(examples)} examples has two answer tokens in a row within --max-length "
            f"{settings.max_length}, an anchor and a token to draft; give longer answers."
        )
    if settings.eval_data:
        held_out = load_examples(settings.eval_data, tokenizer, settings.max_length, settings.eval_examples)
        return drafted, held_out
    return hold_out(drafted, settings.eval_examples)


def _shape(
    settings: TrainSettings, target_config: Any, pretrained: Pretrained | None
) -> tuple[TrainSettings, DFlashConfig]:
    """Settings with the drafter's shape filled in, and that shape; a mask token of -1 is still open there (0)."""
    if pretrained is None:
        settings = settings.shaped(**NEW_DRAFTER)
        config = drafter_config(settings, target_config, max(settings.mask_token_id, 0))
        settings = settings.shaped(input_embedding_scale=config.input_embedding_scale)
    else:
        pretrained[0].check_target(target_shape(settings.target, target_config))
        config = _continued_config(settings, pretrained)
        settings = settings.shaped(
            num_layers=config.num_layers,
            num_features=len(config.target_layer_ids),
            draft_block_size=config.draft_block_size,
            in_block_attention="causal" if all(config.layer_causal) else "bidirectional",
            sliding_window=max(window or 0 for window in config.sliding_windows),
            input_embedding_scale=config.input_embedding_scale,
        )
    # What is not fit to be read back from a checkpoint is refused now.
    return settings, DFlashConfig.from_dict(to_z_lab(config), config.name)


def _vocabulary(
    config: DFlashConfig, tokenizer: Any, examples: Sequence[Example], pretrained: Pretrained | None
) -> Tensor | None:
    """Target tokens that the drafter can draft, [V'] int64; None for all."""
    if config.draft_vocab_size >= config.vocab_size:
        return None
    offsets = pretrained[1].get("d2t") if pretrained else None
    if offsets is not None:
        return from_d2t(offsets)
    vocabulary = most_frequent_tokens(examples, config.draft_vocab_size, [tokenizer.eos_token_id])
    print(f"draft vocabulary: {len(vocabulary)} tokens, {coverage(examples, vocabulary):.1%} of the target's answers")
    return vocabulary


def _check_head(settings: TrainSettings, tables: TargetTables, pretrained: Pretrained | None) -> None:
    """Refuse to lose a trained LM head."""
    head = pretrained[1].get("lm_head.weight") if pretrained else None
    if head is None:
        return
    if head.shape != tables.head.shape:
        raise ValueError(
            f"drafter '{settings.from_pretrained}' has an LM head of its own for {len(head)} tokens, which cannot be "
            f"cut down to {len(tables.head)}; leave --draft-vocab-size out."
        )
    if not settings.train_lm_head and not torch.allclose(head, tables.head.float().cpu(), rtol=_BF16_ROUNDING, atol=0):
        raise ValueError(
            f"drafter '{settings.from_pretrained}' has an LM head that differs from that of target "
            f"'{settings.target}'; go on with --train-lm-head, which keeps it."
        )


def _continued_config(settings: TrainSettings, pretrained: Pretrained) -> DFlashConfig:
    """A pretrained drafter's shape with what the settings may change about it: block, causality, window, vocabulary.

    Raises:
        ValueError: the settings ask for what its weights cannot give.
    """
    config, tensors = pretrained
    fixed = {
        "num_layers": config.num_layers,
        "num_features": len(config.target_layer_ids),
        "target_layer_ids": tuple(config.target_layer_ids),
        "input_embedding_scale": config.input_embedding_scale,
    }
    if settings.mask_token_id >= 0:
        fixed["mask_token_id"] = config.mask_token_id
    if "d2t" in tensors:
        fixed["draft_vocab_size"] = config.draft_vocab_size
    for name, own in fixed.items():
        asked = getattr(settings, name)
        if asked != own and asked not in (0, ()):
            raise ValueError(
                f"drafter '{settings.from_pretrained}' has {name} {own}, but --{name.replace('_', '-')} is {asked}; "
                f"leave it out."
            )
    changes: dict[str, Any] = {}
    if settings.draft_block_size:
        changes["draft_block_size"] = settings.draft_block_size
    if settings.in_block_attention != "auto":
        changes["layer_causal"] = (settings.in_block_attention == "causal",) * config.num_layers
    if settings.sliding_window >= 0:
        changes["sliding_windows"] = (settings.sliding_window or None,) * config.num_layers
    if settings.draft_vocab_size:
        changes["draft_vocab_size"] = settings.draft_vocab_size
    return replace(config, name=settings.output, dialect="z-lab", **changes)


def _features(
    settings: TrainSettings, target: Any, config: DFlashConfig, vocabulary: Tensor | None, examples: Sequence[Example]
) -> FeatureReader:
    reader = TargetFeatures(target, config.target_layer_ids, settings.soft_labels, vocabulary)
    if not settings.features:
        return OnlineFeatures(reader)
    source = FeatureSource(
        target=settings.target,
        fingerprint=fingerprint(target),
        target_layer_ids=config.target_layer_ids,
        feature_size=len(config.target_layer_ids) * config.target_hidden_size,
        top_k=settings.soft_labels,
        vocabulary_hash="" if vocabulary is None else hashlib.sha256(vocabulary.numpy().tobytes()).hexdigest(),
    )
    batch_size = 1 if reader.device.type == "cpu" else settings.batch_size
    return extract(Path(settings.features), source, reader, examples, batch_size=batch_size)


def _measure_rms(features: FeatureReader, examples: Sequence[Example], num_features: int) -> Tensor:
    rows: list[Tensor] = []
    for example in examples:
        rows.append(features.read(example).features[1:].float().cpu())  # the first token's state is an attention sink
        if sum(map(len, rows)) >= _ROWS_FOR_RMS:
            break
    return feature_rms(torch.cat(rows), num_features)


def _drafter(
    settings: TrainSettings,
    config: DFlashConfig,
    target: Any,
    tables: TargetTables,
    rms: Tensor,
    pretrained: Pretrained | None,
) -> Drafter:
    if pretrained is None:
        return new_drafter(settings, config, target, tables.head, rms)
    drafter = Drafter(config, Variant(), has_lm_head=settings.train_lm_head)
    tensors = dict(pretrained[1])
    if settings.train_lm_head:
        tensors.setdefault("lm_head.weight", tables.head.float().cpu())
    load_tensors(drafter, tensors)
    return drafter
