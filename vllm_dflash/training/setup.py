"""From settings to a run: data, target, features, drafter; what can be refused is refused before it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.chat import load_tokenizer
from vllm_dflash.training.data import Example, load_examples
from vllm_dflash.training.examples import FeatureReader, OnlineFeatures, hold_out
from vllm_dflash.training.feature_cache import FeatureCache, FeatureSource, extract
from vllm_dflash.training.initialise import drafter_config, feature_rms, find_mask_token, new_drafter
from vllm_dflash.training.model import Drafter, Variant
from vllm_dflash.training.pretrained import import_drafter
from vllm_dflash.training.run_record import run_record
from vllm_dflash.training.settings import TrainSettings
from vllm_dflash.training.step import TargetTables, tables_of
from vllm_dflash.training.target_features import TargetFeatures, load_target, target_shape
from vllm_dflash.training.trainer import Run, load_tensors
from vllm_dflash.training.vocabulary import coverage, from_d2t, most_frequent_tokens

#: Rows that the scale of feature layers is measured on.
_ROWS_FOR_RMS = 4096


def prepare_run(settings: TrainSettings, device: torch.device) -> Run:
    """Load and check everything a run needs; cached features are extracted here where they are missing.

    Raises:
        ValueError: data, target, drafter or settings do not fit each other.
    """
    tokenizer = load_tokenizer(settings.target)
    examples = load_examples(settings.data, tokenizer, settings.max_length, settings.max_examples or None)
    if settings.eval_data:
        held_out = load_examples(settings.eval_data, tokenizer, settings.max_length, settings.eval_examples)
    else:
        examples, held_out = hold_out(examples, settings.eval_examples)
    pretrained = import_drafter(settings.from_pretrained) if settings.from_pretrained else None
    target = load_target(settings.target, device)
    embedding = target.get_input_embeddings().weight
    config, vocabulary = _config_and_vocabulary(settings, target, tokenizer, embedding, examples, pretrained)
    tables = tables_of(target, vocabulary)
    features = _features(settings, target, config, vocabulary, [*examples, *held_out])
    rms = _measure_rms(features, examples, len(config.target_layer_ids))
    # The cache needs no target in memory, but a drafter may be started from the layers that extraction leaves out.
    drafter = _drafter(settings, config, target, tables, rms, pretrained)
    return Run(settings, config, drafter, tables, features, examples, held_out, run_record(settings, examples))


def _config_and_vocabulary(
    settings: TrainSettings,
    target: Any,
    tokenizer: Any,
    embedding: Tensor,
    examples: Sequence[Example],
    pretrained: tuple[DFlashConfig, dict[str, Tensor]] | None,
) -> tuple[DFlashConfig, Tensor | None]:
    if pretrained is None:
        mask_token = settings.mask_token_id if settings.mask_token_id >= 0 else find_mask_token(tokenizer, embedding)
        config = drafter_config(settings, target.config, mask_token)
    else:
        config = _continued_config(settings, pretrained[0])
        config.check_target(target_shape(settings.target, target.config))
    if config.draft_vocab_size >= config.vocab_size:
        return config, None
    offsets = pretrained[1].get("d2t") if pretrained else None
    if offsets is not None:
        return config, from_d2t(offsets)
    vocabulary = most_frequent_tokens(examples, config.draft_vocab_size, [tokenizer.eos_token_id])
    print(f"draft vocabulary: {len(vocabulary)} tokens, {coverage(examples, vocabulary):.1%} of the target's answers")
    return config, vocabulary


def _continued_config(settings: TrainSettings, config: DFlashConfig) -> DFlashConfig:
    """A pretrained drafter's shape with what the settings may change about it: block, causality, window, vocabulary."""
    is_causal = settings.in_block_attention == "causal"
    return replace(
        config,
        name=settings.output,
        dialect="z-lab",
        draft_block_size=settings.draft_block_size,
        layer_causal=(is_causal,) * config.num_layers,
        sliding_windows=(settings.sliding_window or None,) * config.num_layers,
        draft_vocab_size=settings.draft_vocab_size or config.draft_vocab_size,
    )


def _features(
    settings: TrainSettings, target: Any, config: DFlashConfig, vocabulary: Tensor | None, examples: Sequence[Example]
) -> FeatureReader:
    reader = TargetFeatures(target, config.target_layer_ids, settings.soft_labels, vocabulary)
    if not settings.features:
        return OnlineFeatures(reader)
    source = FeatureSource(
        target=settings.target,
        target_layer_ids=config.target_layer_ids,
        feature_size=len(config.target_layer_ids) * config.target_hidden_size,
        top_k=settings.soft_labels,
        vocabulary_hash="" if vocabulary is None else hashlib.sha256(vocabulary.numpy().tobytes()).hexdigest(),
    )
    batch_size = 1 if reader.device.type == "cpu" else settings.batch_size
    extract(Path(settings.features), source, reader, examples, batch_size=batch_size)
    return FeatureCache(Path(settings.features), source)


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
    pretrained: tuple[DFlashConfig, dict[str, Tensor]] | None,
) -> Drafter:
    if pretrained is None:
        return new_drafter(settings, config, target, tables.head, rms)
    drafter = Drafter(config, Variant(), has_lm_head=settings.train_lm_head)
    tensors = dict(pretrained[1])
    if settings.train_lm_head:
        tensors.setdefault("lm_head.weight", tables.head.float().cpu())
    load_tensors(drafter, tensors)
    return drafter
