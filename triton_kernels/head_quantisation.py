"""A draft head's weight in float8 with one scale per row, for `draft_head`: half the bytes of bfloat16.

    weight[v] ~ quantised[v] * weight_scale[v],   weight_scale[v] = max_h |weight[v, h]| / (largest float8 value)

Only proposals change by it; the target verifies with its own head.
"""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_ROWS_PER_SLICE = 8192  # bounds the float32 copy


def quantise_head(weight: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A head's weight in float8 with a scale per row, for `draft_head`.

    Args:
        weight: [V, H], finite.
        dtype: float8_e4m3fn (largest value 448) or float8_e4m3fnuz (240), the one that an MI300 (gfx942) computes
            with. None takes fnuz under ROCm on a gfx94x GPU and e4m3fn elsewhere.

    Returns:
        [V, H] of that dtype, rounded to nearest, and weight_scale [V] float32 = the row's largest magnitude over the
        largest value; 1 for rows of zeros.
    """
    if dtype is None:
        has_fnuz = torch.version.hip is not None and weight.is_cuda
        has_fnuz = has_fnuz and torch.cuda.get_device_properties(weight.device).gcnArchName.startswith("gfx94")
        dtype = torch.float8_e4m3fnuz if has_fnuz else torch.float8_e4m3fn
    if dtype not in FP8_DTYPES:
        raise ValueError(f"a head is quantised to one of {FP8_DTYPES}, not to {dtype}")
    largest = torch.finfo(dtype).max
    smallest_scale = torch.finfo(torch.float32).tiny
    quantised = torch.empty_like(weight, dtype=dtype)
    weight_scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _ROWS_PER_SLICE):
        rows = slice(start, start + _ROWS_PER_SLICE)
        values = weight[rows].float()
        magnitude = values.abs().amax(dim=1)
        scale = torch.where(magnitude > 0, (magnitude / largest).clamp(min=smallest_scale), 1.0)
        weight_scale[rows] = scale
        # A quotient may exceed the largest value by its rounding, and e4m3fn would make NaN of it.
        quantised[rows] = (values / scale[:, None]).clamp(-largest, largest).to(dtype)
    return quantised, weight_scale


def check_conversion(dtype: torch.dtype, backend: str, arch: int | str) -> None:
    """Raise NotImplementedError where a GPU (triton's backend and architecture) cannot convert a float8 dtype."""
    if dtype not in FP8_DTYPES or backend != "cuda":
        return
    if isinstance(arch, int) and arch < 89:
        raise NotImplementedError(
            f"{dtype} needs compute capability 8.9, this GPU has {arch / 10}; give draft_head the unquantised weight"
        )
    if dtype == torch.float8_e4m3fnuz:
        raise NotImplementedError(f"{dtype} is for AMD GPUs; quantise_head(weight, torch.float8_e4m3fn) suits this one")
