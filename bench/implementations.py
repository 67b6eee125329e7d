"""One kernel on one shape, in every implementation that is compared, with its correctness check.

What the names stand for:

    ours      the Triton kernel through its public function (interpreted: through its launcher, on the CPU)
    twin      the torch twin that the tests compare it with
    compiled  torch.compile of the twin
    baseline  what vLLM launches today; for the loss, plain cross-entropy on logits
    torch_*   the same steps by torch, for machines without vLLM

`bench_kernels.py` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Outputs = Mapping[str, torch.Tensor]


class Tolerance(NamedTuple):
    """Largest error / largest value, and RMS error / RMS value, of the reference.

    RMS errors are those that the tests allow. Their largest error is relative to the RMS, which does not suit these
    shapes: of ten million values some are six RMS large, and so is a step of bfloat16 there.
    """

    largest: float
    rms: float


#: Sums in float32, rounded once to bfloat16, where neighbours are up to 2^-7 of their value apart. Sums in another
#: order rarely fall on the other side of the border between two of them.
ROUNDED = Tolerance(2**-7, 2**-9)
#: As ROUNDED; and the kernel rounds the weights of a softmax as well, which the twin does not.
ROUNDED_TWICE = Tolerance(2**-6, 2**-8)
#: Sums in float32 of up to 4,096 products in another order, not rounded.
SUMMED = Tolerance(1e-4, 2e-5)
#: Sums in float32 of squares of ROUNDED values, of which a few differ.
SQUARES = Tolerance(2e-3, 1e-3)


@dataclass
class Implementations:
    """What runs for one case."""

    #: name -> a call without arguments that returns outputs by name.
    runs: dict[str, Callable[[], Outputs]]
    #: Differences between outputs of ours and of the twin, as sentences; empty = equal.
    differences: Callable[[Outputs, Outputs], list[str]]
    #: name -> why it is not there.
    missing: dict[str, str] = field(default_factory=dict)
    #: Whether ours has to run in a CUDA graph (everything in the draft step does).
    is_capturable: bool = True

    def compile_twin(self, backend: str) -> None:
        """Add "compiled", or say why not; compiles at its first run."""
        if "compiled" not in self.missing:
            self.runs["compiled"] = torch.compile(self.runs["twin"], backend=backend, dynamic=False)


def compared(actual: Outputs, expected: Outputs, tolerances: Mapping[str, Tolerance | None]) -> list[str]:
    """Differences of each named output; a tolerance of None asks for equality."""
    found = []
    for name, tolerance in tolerances.items():
        left, right = actual[name].cpu(), expected[name].cpu()
        if left.shape != right.shape:
            found.append(f"{name} is {tuple(left.shape)}, not {tuple(right.shape)}")
        elif tolerance is None:
            wrong = int((left != right).sum())
            found += [f"{name} differs in {wrong} of {left.numel()} places"] * (wrong > 0)
        elif left.numel():
            found += _beyond(name, left.float(), right.float(), tolerance)
    return found


def _beyond(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> list[str]:
    error = actual - expected
    largest = float(error.abs().max() / expected.abs().max())
    rms = float(error.norm() / expected.norm())
    if largest <= tolerance.largest and rms <= tolerance.rms:  # false for NaN
        return []
    return [
        f"{name}: largest error {largest:.2e} (allowed {tolerance.largest:.2e}), RMS {rms:.2e} ({tolerance.rms:.2e})"
    ]


def vllm_ops() -> Any:
    """vLLM's custom ops.

    Raises:
        ImportError: vLLM is not installed, or without ops for this machine.
    """
    from vllm import _custom_ops

    return _custom_ops
