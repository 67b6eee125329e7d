"""What happens to the user's speculative config before and after vLLM reads it.

Before: the drafter's config.json is read, the pair is checked, K is completed or clamped. After: what vLLM
misreads in the drafter's config is set right. All of it runs in the front end, before any weight is loaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_dflash import LOGGER
from vllm_dflash.checkpoint import check_checkpoint
from vllm_dflash.config import DFlashConfig, TargetShape, is_dflash_config


def read_drafter(
    speculative: dict[str, Any] | None, spec_method: str | None, spec_model: str | None
) -> DFlashConfig | None:
    """The drafter named by a user's speculative settings, or None if they are not about plain DFlash.

    Args:
        speculative: the `speculative_config` mapping as given, keys with "-" or "_".
        spec_method, spec_model: vLLM's shorthand flags `--spec-method` and `--spec-model`.

    Raises:
        ValueError: the method is dflash, but the drafter cannot be read.
    """
    given = given_settings(speculative)
    method, model = given.get("method", spec_method), given.get("model", spec_model)
    if model is None or method not in (None, "dflash"):
        return None
    try:
        raw = _read_config_json(model, given.get("revision"))
    except (OSError, RecursionError, ValueError) as error:
        if method is None:
            return None
        raise ValueError(
            f"drafter '{model}' has no readable config.json ({error}); give 'model' in the speculative config as a "
            f"folder or a Hugging Face repository with a DFlash drafter."
        ) from None
    if not is_dflash_config(raw):
        if method is None or _is_vllms_variant(raw):
            return None
        DFlashConfig.from_dict(raw, model)  # raises where the file is no DFlash drafter's at all
        raise ValueError(
            f"drafter '{model}' has architectures {raw.get('architectures')}, which vLLM does not serve with method "
            f'dflash; if it is a plain DFlash drafter, set ["DFlashDraftModel"] in its config.json.'
        )
    config = DFlashConfig.from_dict(raw, model)
    if Path(model).is_dir():
        check_checkpoint(Path(model), config)
    return config


def given_settings(speculative: dict[str, Any] | None) -> dict[str, Any]:
    """The user's `speculative_config` with keys as vLLM names them; "-" may stand for "_"."""
    return {key.replace("-", "_"): value for key, value in (speculative or {}).items()}


def target_shape(target_model_config: Any) -> TargetShape:
    """What drafters must know of a target, from vLLM's ModelConfig."""
    return TargetShape(
        name=target_model_config.model,
        num_layers=target_model_config.get_total_num_hidden_layers(),
        hidden_size=target_model_config.get_hidden_size(),
        vocab_size=target_model_config.get_vocab_size(),
    )


def correct_draft_config(speculative_config: Any, config: DFlashConfig) -> None:
    """Set right what vLLM misreads, in place.

    * Causality: vLLM 0.32 and 0.33 serve speculators drafters with full-attention layers causal, although they
      were trained bidirectional (transformers_utils/configs/speculators/algos.py, `update_dflash`; fixed by the
      open pull request 56692). vLLM's per-layer rule without an override is what speculators trains.
    * Sliding window: transformers' Qwen3Config drops `sliding_window` where `use_sliding_window` is not set, which
      says nothing about drafters; their layer types do.
    * Embedding scale: vLLM reads `input_embedding_scale` for DFlash2 only (qwen3_dflash2.py), in `dflash_config`; our
      drafter looks for it there too.
    * Prefix cache: vLLM 0.32 drops the last cached block of a hit as EAGLE needs; DFlash's context K/V depend on
      the target's features alone, so the block is valid (0.33 no longer drops it).
    """
    hf_config = speculative_config.draft_model_config.hf_config
    causal = set(config.layer_causal)
    if len(causal) == 1:
        hf_config.dflash_config["causal"] = causal.pop()
    else:
        hf_config.dflash_config.pop("causal", None)
    for window in set(config.sliding_windows) - {None}:
        hf_config.dflash_config["swa_window_size"] = window
    hf_config.dflash_config["input_embedding_scale"] = config.input_embedding_scale
    if speculative_config.use_eagle_block_drop():
        from vllm.logger import init_logger

        speculative_config.disable_eagle_block_drop = True
        init_logger(LOGGER).info(
            "DFlash reads only features of computed tokens, so prefix-cache hits keep their last block; vLLM's warning "
            "about EAGLE block dropping does not apply."
        )


def _is_vllms_variant(raw: dict[str, Any]) -> bool:
    """Is this a DFlash variant with a class of its own in vLLM (DFlash2, LiLiCorr, Laguna, Muse Glimmer)?"""
    if "speculators_model_type" in raw:  # from which vLLM derives the class; plain DFlash is ours
        return True
    from vllm.model_executor.models import ModelRegistry

    # vLLM puts DFlash before the name of an architecture that lacks it (transformers_utils/configs/eagle.py).
    names = [name if "DFlash" in name else f"DFlash{name}" for name in raw.get("architectures") or []]
    served = set(ModelRegistry.get_supported_archs())
    return "LiLiCorrDraftModel" in (raw.get("architectures") or []) or bool(served.intersection(names))


def _read_config_json(model: str, revision: str | None) -> dict[str, Any]:
    """Content of config.json of a folder or a Hugging Face repository.

    Raises:
        OSError, RecursionError, ValueError: it cannot be read, or holds no mapping.
    """
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    if os.path.isdir(model):
        raw = json.loads((Path(model) / "config.json").read_bytes())
    else:
        raw = get_hf_file_to_dict("config.json", model, revision or "main")
        if raw is None:
            raise ValueError("neither a folder nor a repository that can be reached")
    if not isinstance(raw, dict):
        raise ValueError(f"it holds a {type(raw).__name__}, not a mapping")
    return raw
