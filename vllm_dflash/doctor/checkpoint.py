"""Checks of a drafter's files: format, dtypes, NaN, constants, initialisations, quantisation damage.

A matrix that no training has touched is told by three signs at once (`looks_initialised`): the largest singular value
of a random m x n matrix with entries of deviation s is s (sqrt(m) + sqrt(n)) (Marchenko-Pastur), its entries have the
kurtosis of the distribution they were drawn from, and its rows have nearly the same norm. Trained matrices of the
shipped drafter exceed the first by 1.2 to 3.5 times, except values' projections, whose kurtosis and rows tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vllm_dflash.checkpoint import check_checkpoint
from vllm_dflash.config import DFlashConfig
from vllm_dflash.doctor.finding import Finding, error, warning

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
#: Values that a row of a quantised matrix has at most: 8 is three bits, of which little is left; 32 five.
_DAMAGED_LEVELS, _FEW_LEVELS = 8, 32
#: Kurtosis of what matrices are initialised with: normal, uniform.
_KURTOSES = (3.0, 1.8)


def load_checkpoint(folder: Path, config: DFlashConfig) -> tuple[dict[str, Tensor], list[Finding]]:
    """Tensors of a drafter in float32 (d2t: int64), and what is wrong with them; no pickle is opened.

    With an error among the findings the tensors may be incomplete, or none.
    """
    findings = list(_pickles(folder))
    if any(f.level == "error" for f in findings):
        return {}, findings
    try:
        check_checkpoint(folder, config)
        stored: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            stored |= load_file(file)
    except (ValueError, SafetensorError) as problem:
        return {}, [*findings, _refusal(str(problem))]
    kept = {name: t for name, t in stored.items() if name != "t2d" and not name.endswith("inv_freq")}
    findings += _dtypes(kept, config.name)
    tensors = {name: t.long() if name == "d2t" else t.float() for name, t in kept.items()}
    return tensors, findings + [f for check in _CHECKS for f in check(tensors, config.name)]


def looks_initialised(matrix: Tensor) -> bool:
    """Is a matrix [m, n] float32 what an initialisation draws: no direction, no row and no entry stands out?"""
    num_rows, num_columns = matrix.shape
    if min(num_rows, num_columns) < 16:
        return False
    centred = matrix - matrix.mean()
    deviation = centred.std()
    if float(deviation) == 0:
        return False
    kurtosis = float((centred / deviation).pow(4).mean())
    # The kurtosis of mn normal entries has a standard error of sqrt(24 / mn).
    tolerance = max(0.05, 5 * (24 / matrix.numel()) ** 0.5)
    if not any(abs(kurtosis - of_drawn) < tolerance for of_drawn in _KURTOSES):
        return False
    norms = centred.norm(dim=1)
    if float(norms.std() / norms.mean()) > 1.4 * (1 / (2 * num_columns)) ** 0.5:
        return False
    return _largest_singular_value(centred) < 1.05 * float(deviation) * (num_rows**0.5 + num_columns**0.5)


def largest_level_count(matrix: Tensor, rows: int = 8) -> int:
    """Most distinct values among some of its rows."""
    step = max(1, len(matrix) // rows)
    return max(len(row.unique()) for row in matrix[::step])


def magnitude_outliers(tensors: Mapping[str, Tensor], factor: float = 8.0) -> dict[str, float]:
    """Matrices whose RMS is out of line with the same module's in other layers: name -> RMS of those.

    With one layer only, or where all are alike, there is nothing to compare.
    """
    found: dict[str, float] = {}
    for name, matrix in tensors.items():
        if matrix.dim() != 2 or not name.startswith("layers."):
            continue
        module = name.split(".", 2)[2]
        others = [t for other, t in tensors.items() if other != name and other.endswith(f".{module}")]
        if not others:
            continue
        typical = torch.stack([_rms(t) for t in others]).median().item()
        ratio = float(_rms(matrix)) / max(typical, 1e-12)
        # Of two layers each is the other's outlier, so the one that is out of line with the rest of its own is meant.
        all_rms = torch.stack([_rms(t) for n, t in tensors.items() if t.dim() == 2 and n.startswith("layers.")])
        usual = float(all_rms.median())
        if max(ratio, 1 / max(ratio, 1e-12)) > factor and max(_rms(matrix) / usual, usual / _rms(matrix)) > factor / 2:
            found[name] = typical
    return found


def _pickles(folder: Path) -> Iterator[Finding]:
    found = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if "mask_embedding.pt" in found:
        yield error(
            "checkpoint",
            f"drafter '{folder}' has an embedding of its own for the mask token in mask_embedding.pt, a pickle, which "
            f"is not opened here",
            "measure it by serving (vllm-dflash eval --engine vllm)",
        )
    elif found and not list(folder.glob("*.safetensors")):
        yield error(
            "checkpoint",
            f"drafter '{folder}' has its weights in {', '.join(found)} and no *.safetensors; pickles are not opened, "
            f"because loading them can run code",
            "save it in the safetensors format",
        )
    elif found:
        yield warning(
            "checkpoint",
            f"drafter '{folder}' also holds {', '.join(found)}, which nothing here opens",
            "remove what is not needed",
        )


def _refusal(message: str) -> Finding:
    """What serving's own check says, under the name of what it found."""
    said, _, repair = message.rstrip(".").rpartition(". ")
    name = "not-finite" if "NaN" in message else "checkpoint"
    return error(name, said or message, repair or "re-export or download the checkpoint")


def _dtypes(tensors: Mapping[str, Tensor], name: str) -> Iterator[Finding]:
    kinds = {str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if n != "d2t"}
    if len(kinds) > 1:
        yield warning("dtype", f"drafter '{name}' mixes {', '.join(sorted(kinds))}", "export it in one dtype")


def _constant(tensors: Mapping[str, Tensor], name: str) -> Iterator[Finding]:
    flat = [n for n, t in tensors.items() if t.numel() > 1 and bool((t == t.flatten()[0]).all())]
    matrices = sorted(n for n in flat if tensors[n].dim() == 2 or not bool(tensors[n].any()))
    matrices = [n for n in matrices if n != "d2t" and not n.endswith("bias")]
    if matrices:
        yield error(
            "unfilled-tensor",
            f"drafter '{name}' has the same value everywhere in {', '.join(matrices)}: no training wrote that",
            "re-export the checkpoint; its trainer or converter left these tensors unfilled",
        )


def _initialised(tensors: Mapping[str, Tensor], name: str) -> Iterator[Finding]:
    matrices = {n: t for n, t in tensors.items() if t.dim() == 2 and n.startswith(("fc", "layers"))}
    drawn = sorted(n for n, t in matrices.items() if looks_initialised(t))
    if len(drawn) > len(matrices) // 2:
        yield error(
            "untrained",
            f"{len(drawn)} of the {len(matrices)} matrices of drafter '{name}' have the statistics of an "
            f"initialisation: it was never trained",
            "give the trained checkpoint; this one drafts at random",
        )
    elif drawn:
        yield error(
            "unfilled-tensor",
            f"{', '.join(drawn)} of drafter '{name}' {'has' if len(drawn) == 1 else 'have'} the statistics of an "
            f"initialisation, unlike its other matrices: it was left at random values",
            "re-export the checkpoint; a converter that does not know the tensor's name loses it without a word",
        )


def _levels(tensors: Mapping[str, Tensor], name: str) -> Iterator[Finding]:
    matrices = {n: t for n, t in tensors.items() if t.dim() == 2 and n.startswith(("fc", "layers", "lm_head"))}
    counts = {n: largest_level_count(t) for n, t in matrices.items() if t.shape[1] >= 64}
    constant = {n for n in counts if counts[n] <= 1}
    few = sorted(n for n, count in counts.items() if count <= _FEW_LEVELS and n not in constant)
    if not few:
        return
    most = max(counts[n] for n in few)
    message = (
        f"{len(few)} matrices of drafter '{name}' have at most {most} different values per row ('{few[0]}' is one): "
        f"they went through a quantisation to {max(1, (most - 1).bit_length())} bits"
    )
    repair = "export the drafter in bf16, or quantise it to 8 bits"
    yield (error if most <= _DAMAGED_LEVELS else warning)("quantisation", message, repair)


_CHECKS = (_constant, _initialised, _levels)


def _rms(tensor: Tensor) -> Tensor:
    return tensor.pow(2).mean().sqrt()


def _largest_singular_value(matrix: Tensor, iterations: int = 12) -> float:
    """From below, by power iteration: exact where one direction stands out."""
    vector = torch.ones(matrix.shape[1]) / matrix.shape[1] ** 0.5
    for _ in range(iterations):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / vector.norm().clamp(min=1e-30)
    return float((matrix @ vector).norm())
