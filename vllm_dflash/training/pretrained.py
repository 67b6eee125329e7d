"""Read a drafter, of either dialect or a training checkpoint, to train it on or to write it in another format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_dflash.checkpoint import check_checkpoint
from vllm_dflash.config import DFlashConfig, is_dflash_config

#: Settings that some drafters have and DFlashConfig does not hold, with the only value that it means.
_ASSUMED: dict[str, Any] = {
    "attention_value_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "hidden_act": "silu",
    "is_neox_style": True,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "partial_rotary_factor": 1.0,
    "use_aux_hidden_state": True,
}

#: Files fetched from the Hub.
_FILES = ["config.json", "*.safetensors", "mask_embedding.pt", "run.json"]


def import_drafter(name: str | Path) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """A drafter's config and tensors, float32 under the checkpoint's names; d2t is int64, t2d left out.

    Args:
        name: local folder or Hub repository of z-lab's or speculators' dialect; a training checkpoint is the former.

    Raises:
        FileNotFoundError: there is no such drafter.
        ValueError: it is quantised, damaged, or not a plain DFlash drafter.
    """
    folder = drafter_folder(name)
    raw = read_json(folder / "config.json")
    config = DFlashConfig.from_dict(raw, str(name))
    if not is_dflash_config(raw):
        raise ValueError(
            f"drafter '{name}' has architectures {raw.get('architectures')}, a variant of DFlash with tensors of its "
            f"own; only plain DFlash drafters (architectures ['DFlashDraftModel']) can be trained and exported."
        )
    if config.is_quantised:
        raise ValueError(
            f"drafter '{name}' is quantised, and its weights cannot be restored; give the checkpoint that it was "
            f"quantised from."
        )
    _refuse_other_arithmetic(raw, folder, str(name))
    check_checkpoint(folder, config)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return config, {
        key: _widened(key, tensor, str(name))
        for key, tensor in tensors.items()
        if key != "t2d" and not key.endswith("inv_freq")
    }


def drafter_folder(name: str | Path) -> Path:
    """The local folder of a drafter, fetched from the Hub where `name` is no folder.

    Raises:
        FileNotFoundError: neither a folder nor a repository that can be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=_FILES))
    except (OSError, ValueError) as error:  # Hub errors are either
        raise FileNotFoundError(
            f"drafter '{name}' is neither a folder here nor a Hugging Face repository that can be reached "
            f"({type(error).__name__}); give one of them."
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Content of a JSON file that holds a mapping.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON mapping.
    """
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"'{file}' does not exist; give the folder of a drafter or a checkpoint.") from error
    except ValueError as error:
        raise ValueError(f"'{file}' is not JSON ({error}); copy or download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"'{file}' holds a {type(content).__name__}, not a mapping; copy or download it again.")
    return content


def _refuse_other_arithmetic(raw: Mapping[str, Any], folder: Path, name: str) -> None:
    """Refuse what DFlashConfig cannot hold, because training and export would drop it without a word."""
    for section in _sections(raw):
        for key, assumed in _ASSUMED.items():
            if section.get(key) not in (None, assumed):
                raise ValueError(_lost(name, f"sets {key} {section[key]!r} in its config.json"))
    for rope in _sections(raw, "rope_parameters", "rope_scaling"):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
            raise ValueError(_lost(name, f"scales its positions or does so by layer ({dict(rope)})"))
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(_lost(name, "has an embedding of its own for the mask token (mask_embedding.pt)"))


def _sections(section: Mapping[str, Any], *only: str) -> Iterator[Mapping[str, Any]]:
    """This mapping and all below it; with `only`, just those under these keys."""
    if not only:
        yield section
    for key, value in section.items():
        if isinstance(value, Mapping):
            if key in only:
                yield value
            yield from _sections(value, *only)


def _lost(name: str, what: str) -> str:
    return (
        f"drafter '{name}' {what}, which training and export do not know and would lose; serve the checkpoint as it "
        f"is, or train a new drafter."
    )


def _widened(key: str, tensor: Tensor, name: str) -> Tensor:
    if key == "d2t":
        return tensor.long()
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"drafter '{name}' has '{key}' as {tensor.dtype}, a quantised type, and its values cannot be restored; "
            f"give the checkpoint that it was quantised from."
        )
    return tensor.float()
