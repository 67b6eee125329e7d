"""Times on a GPU: by events, from a cold L2 cache, through a CUDA graph; and what the GPU's memory and launches take.

    timed(graph.replay)    device time alone: what a runner with full CUDA graphs sees
    wall(function)         from the first launch on an idle GPU to the end: what an eager runner sees

The cache is emptied by reading, not by writing: dirty lines would be written back at the measured kernel's expense.
While the GPU reads, the host has time to enqueue what is measured, so launches do not show in `timed`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 cache of an H200 (50 MiB) or B200 (126 MiB)
COPY_BYTES = 1 << 30


class Tick:
    """A moment on the GPU. Subtracting waits for it, not making it; pytest-benchmark takes the class as its timer."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Tick) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class Machine(NamedTuple):
    """What the GPU does in this very run."""

    copy_bandwidth: float  # bytes/s, read and write counted
    launch_seconds: float  # of the smallest kernel, replayed


class ColdCache:
    """Empties the L2 cache when called."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(FLUSH_BYTES // 4, device="cuda")

    def __call__(self) -> None:
        self.buffer.sum()


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the function and the outputs that a replay fills.

    Raises:
        RuntimeError: the function synchronises or allocates by device values, which a graph cannot hold.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, measures tile sizes and sets up libraries outside of the capture
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


def timed(function: Callable[[], Any], flush: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each round on the device."""
    ticks = []
    for _ in range(rounds):
        flush()
        before = Tick()
        function()
        ticks.append((before, Tick()))
    return [after - before for before, after in ticks]


def wall(function: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of each round on the host's clock, from an idle GPU to an idle GPU."""
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


def rounds_for(function: Callable[[], Any], seconds: float, most: int = 100) -> int:
    """Rounds that fit in `seconds`, 10 at least."""
    one = min(wall(function, 2))
    return max(10, min(most, int(seconds / max(one, 1e-6))))


def measure_machine() -> Machine:
    """Bandwidth of a copy of 1 GiB and the time of one launch, medians."""
    source, target = (torch.zeros(COPY_BYTES // 4, device="cuda") for _ in range(2))
    one = torch.zeros(1, device="cuda")
    flush = ColdCache()
    copies = timed(lambda: target.copy_(source), flush, 20)
    graph, _ = captured(lambda: one.add_(1))
    launches = timed(graph.replay, flush, 50)
    return Machine(2 * COPY_BYTES / statistics.median(copies), statistics.median(launches))
