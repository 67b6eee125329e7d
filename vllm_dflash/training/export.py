"""`vllm-dflash export`: a training checkpoint, or a drafter in the other format, to a folder that vLLM serves.

    config.json          z-lab's or speculators' dialect (dialects.py)
    model.safetensors    the checkpoint's tensors under its names; d2t stays int64, all others in one dtype
    README.md            a model card (model_card.py)

The folder is written beside its place and renamed, so that it is never half there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vllm_dflash.checkpoint import check_checkpoint
from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.dialects import Dialect, TargetName, to_speculators, to_z_lab
from vllm_dflash.training.model_card import ModelCard, check_evaluation
from vllm_dflash.training.pretrained import drafter_folder, import_drafter, read_json
from vllm_dflash.training.settings import TrainSettings

__all__ = ["add_arguments", "export_drafter", "import_drafter", "run", "to_speculators", "to_z_lab"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: All that an export writes; a folder with anything else is not overwritten.
_OWN_FILES = {"config.json", "model.safetensors", "README.md"}

#: Settings of a training run that change the method; vLLM serves the defaults only.
_METHOD_SETTINGS = ("injection", "target_features", "drafting")


def export_drafter(
    config: DFlashConfig,
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    dialect: Dialect = "z-lab",
    dtype: torch.dtype = torch.bfloat16,
    target: TargetName | None = None,
    card: ModelCard | None = None,
    overwrite: bool = False,
) -> None:
    """Write a drafter as a folder that vLLM serves.

    Args:
        config: its shape.
        tensors: its tensors under the checkpoint's names; with a reduced vocabulary also `lm_head.weight` and `d2t`.
        folder: where; its parents are created.
        dialect: of config.json.
        dtype: of all tensors but d2t.
        target: the model it drafts for; speculators' dialect requires it.
        card: what README.md tells; None writes none.
        overwrite: replace an earlier export. On failure the earlier one stays.

    Raises:
        ValueError: a tensor is missing, superfluous, misshapen or not finite; the dialect cannot say what the drafter
            is; or the folder exists and may not be replaced.
        RuntimeError: the disk is full or not writable.
    """
    folder = folder.resolve()
    _check_replaceable(folder, overwrite)
    raw = _config_json(config, dialect, dtype, target)
    stored = _stored_tensors(config, tensors, dialect, dtype)
    readme = None if card is None else card.render(config, dialect)
    temporary = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
        temporary.mkdir(parents=True)
        (temporary / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        save_file(stored, temporary / "model.safetensors", metadata={"format": "pt"})
        if readme is not None:
            (temporary / "README.md").write_text(readme)
        check_checkpoint(temporary, config)
        for file in temporary.iterdir():
            _flush(file)
        _move_into_place(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise RuntimeError(f"'{folder}' could not be written ({error}); what was there before is untouched.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config_json(
    config: DFlashConfig, dialect: Dialect, dtype: torch.dtype, target: TargetName | None
) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    if dialect == "z-lab":
        return to_z_lab(config, name)
    return to_speculators(config, target or TargetName(""), name)


def _stored_tensors(
    config: DFlashConfig, tensors: Mapping[str, Tensor], dialect: Dialect, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors as they are saved, on the CPU, each with memory of its own."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        stored[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if not bool(stored[name].isfinite().all()):
            raise ValueError(
                f"'{name}' of drafter '{config.name}' has values that are not finite as {dtype}; export as bfloat16, "
                f"or from an earlier checkpoint if it was trained into NaN."
            )
    is_reduced = config.draft_vocab_size != config.vocab_size
    if "d2t" in tensors and (is_reduced or bool(tensors["d2t"].any())):  # offsets of a full vocabulary are all zero
        stored["d2t"] = tensors["d2t"].detach().to("cpu", torch.int64, copy=True).contiguous()
        targets = _target_ids(config, stored["d2t"])
        if dialect == "speculators":
            stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, targets, True)
    return stored


def _target_ids(config: DFlashConfig, d2t: Tensor) -> Tensor:
    """Target token of each draft token, [draft vocabulary] int64.

    Raises:
        ValueError: the offsets lead outside the vocabulary or to the same token twice, or there should be none.
    """
    targets = d2t + torch.arange(len(d2t))
    is_inside = bool(((targets >= 0) & (targets < config.vocab_size)).all())
    if not is_inside or len(targets.unique()) != len(targets) or config.draft_vocab_size == config.vocab_size:
        raise ValueError(
            f"'d2t' of drafter '{config.name}' must map draft tokens 0 to {config.draft_vocab_size - 1} to different "
            f"ones of {config.vocab_size} target tokens (target token = d + d2t[d]) and is for reduced vocabularies "
            f"only; store offsets, not token ids, and set draft_vocab_size."
        )
    return targets


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is a file; give a folder to export to.")
    if not overwrite:
        raise ValueError(
            f"'{folder}' exists already; give another folder, or --overwrite to replace an earlier export."
        )
    others = sorted(file.name for file in folder.iterdir() if file.name not in _OWN_FILES)
    if others:
        raise ValueError(
            f"'{folder}' holds what an export does not write ({', '.join(others[:5])}) and is not overwritten; give "
            f"another folder."
        )


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Rename, an earlier export out of the way first; it comes back if the second rename fails."""
    if not folder.exists():
        temporary.rename(folder)
        return
    earlier = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(earlier, ignore_errors=True)
    folder.rename(earlier)
    try:
        temporary.rename(folder)
    except BaseException:
        earlier.rename(folder)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `vllm-dflash export`."""
    parser.add_argument("--checkpoint", required=True, help="training checkpoint, or a drafter in either format")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--format", choices=get_args(Dialect), default="z-lab", help="of config.json (default z-lab)")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="bfloat16", help="of the weights (default bfloat16)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--target", help="the model it drafts for; default: what the checkpoint records")
    parser.add_argument("--license", help="for the model card, such as apache-2.0")
    parser.add_argument(
        "--eval-json", nargs="+", default=[], metavar="FILE", help="measurements for the model card and config"
    )


def run(options: argparse.Namespace) -> int:
    """Export as the flags say; returns the exit code."""
    config, tensors = import_drafter(options.checkpoint)
    source = drafter_folder(options.checkpoint)
    record = read_json(source / "run.json") if (source / "run.json").is_file() else {}
    _refuse_ablation(record, options.checkpoint)
    target = _target(options.target, record, read_json(source / "config.json"))
    evaluations = [read_json(Path(file)) for file in options.eval_json]
    for file, evaluation in zip(options.eval_json, evaluations):
        check_evaluation(evaluation, file)
    if evaluations:
        config = replace(config, acceptance_rates=acceptance_rates(evaluations))
    card = ModelCard(options.output, target.name, options.license, record, evaluations)
    export_drafter(
        config,
        tensors,
        Path(options.output),
        dialect=options.format,
        dtype=_DTYPES[options.dtype],
        target=target,
        card=card,
        overwrite=options.overwrite,
    )
    size = (Path(options.output) / "model.safetensors").stat().st_size
    print(f"{options.output}: {options.format} format, {options.dtype}, {size / 1e6:.1f} MB")
    return 0


def acceptance_rates(evaluations: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Share of cycles in which each position was accepted, averaged over all tasks; serving starts from it."""
    by_task = [
        task["by_position"] for evaluation in evaluations for task in evaluation["tasks"] if "by_position" in task
    ]
    return tuple(round(sum(rates) / len(rates), 4) for rates in zip(*by_task))


def _refuse_ablation(record: Mapping[str, Any], name: str) -> None:
    settings = record.get("settings") or {}
    for key in _METHOD_SETTINGS:
        served = getattr(TrainSettings, key)
        if settings.get(key, served) != served:
            raise ValueError(
                f"'{name}' was trained with {key} {settings[key]!r}, an ablation that vLLM does not serve (it serves "
                f"{served!r}); measure it with `vllm-dflash eval`."
            )


def _target(given: str | None, record: Mapping[str, Any], source: Mapping[str, Any]) -> TargetName:
    """The target as the flag, the run record or speculators' config.json names it; its architectures if it is here."""
    verifier = (source.get("speculators_config") or {}).get("verifier") or {}
    name = given or record.get("target") or verifier.get("name_or_path") or ""
    if name and Path(name, "config.json").is_file():
        return TargetName(name, read_json(Path(name, "config.json")).get("architectures") or ())
    return TargetName(name, verifier.get("architectures") or () if name == verifier.get("name_or_path") else ())
