"""The least time each kernel can take: bytes that must move, flops, and what a GPU's data sheet makes of them.

    python bench/floors.py [FOLDER]        # writes floors.md there, with ratios from kernels.csv; bench/results

    floor = max(bytes / memory bandwidth, flops / peak, one launch)

Bytes count every input once and every output once, as if caches were perfect and intermediate values free. A kernel
that is faster than its floor therefore read from the L2 cache what it was supposed to read from memory. This file is
the one definition of bytes and flops: bench_kernels.py divides by the same numbers. It imports no torch.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
NUM_ROWS = (1, 16, 128, 1024, 8192)
CONTEXTS = (512, 4096, 32768, 131072)
BATCHES = (1, 32)
KV_BLOCK_SIZE = 16  # tokens of a cache page, vLLM's default on CUDA

#: Seconds that the smallest kernel takes when a CUDA graph replays it. Assumed; bench_kernels.py measures it.
LAUNCH_SECONDS = 2e-6

BFLOAT16, FLOAT32, INT32, INT64 = 2, 4, 4, 8  # bytes


@dataclass(frozen=True)
class Gpu:
    """A GPU as its vendor's data sheet has it, without structured sparsity."""

    name: str  # as it occurs in torch.cuda.get_device_name
    bandwidth: float  # bytes/s
    bfloat16_peak: float  # flop/s, dense
    fp8_peak: float  # flop/s, dense
    source: str


GPUS = (
    Gpu(
        "H200",
        4.8e12,
        989e12,
        1979e12,
        "NVIDIA H200 data sheet, SXM: 4.8 TB/s; 1,979 / 3,958 TFLOPS bf16 / fp8 with sparsity, half of it dense",
    ),
    Gpu(
        "B200",
        8.0e12,
        2250e12,
        4500e12,
        "NVIDIA Blackwell architecture brief, HGX B200 at 1,000 W: 8 TB/s; 2.25 / 4.5 PFLOPS bf16 / fp8 dense",
    ),
)


@dataclass(frozen=True)
class Model:
    """Dimensions of a target and of a drafter for it; what a kernel sees of both."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    num_layers: int = 5  # of the drafter, as in the paper
    num_features: int = 5  # target layers that are fused
    num_query_per_req: int = 16  # draft_block_size

    @property
    def kv_rows(self) -> int:
        """Rows of the projection to K and V of all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


#: In the order in which the bench runs them while its time lasts.
MODELS = (
    Model("Qwen3-8B", 4096, 32, 8, 128, 151936),
    Model("Qwen3-4B", 2560, 32, 8, 128, 151936),
    Model("Qwen3-Coder-30B-A3B", 2048, 32, 4, 128, 151936, num_layers=8),  # the paper's drafter for it has 8
    Model("SmolLM2-135M", 576, 9, 3, 64, 49152),
)


class Work(NamedTuple):
    """What one call of a kernel has to do at least."""

    num_bytes: int
    flops: int
    is_fp8: bool = False  # products may run at the fp8 peak


@dataclass(frozen=True)
class Case:
    """A kernel on a shape."""

    kernel: str
    model: Model
    rows: int  # context rows (fusion, context_kv, inputs) or predicted rows (head, loss); requests for attention
    context: int = 0  # rows in the cache of each request; attention only

    @property
    def size(self) -> str:
        return f"batch={self.rows} context={self.context}" if self.context else f"M={self.rows}"

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.model.name} {self.size}"

    @property
    def work(self) -> Work:
        return WORK[self.kernel](self)


def feature_fusion_work(case: Case) -> Work:
    """[T, H] of F target layers times W_c [H, F * H]; out come [T, H] and one float32 sum of squares per row."""
    model, fan_in = case.model, case.model.num_features * case.model.hidden
    weight, rows = model.hidden * fan_in, case.rows * (fan_in + model.hidden)
    return Work(BFLOAT16 * (weight + rows) + FLOAT32 * case.rows, 2 * case.rows * weight)


def context_kv_work(case: Case) -> Work:
    """[T, H] times the K/V rows of all layers; K and V go to the cache at a position and a slot per row."""
    model = case.model
    weight = model.kv_rows * model.hidden
    k_norm = model.num_layers * model.head_dim
    # In: features and the row of cos and sin. Out: K and V of all layers.
    per_row = model.hidden + model.head_dim + model.kv_rows
    num_bytes = BFLOAT16 * (weight + k_norm + case.rows * per_row) + (FLOAT32 + 2 * INT64) * case.rows
    return Work(num_bytes, 2 * case.rows * weight)


def block_attention_work(case: Case) -> Work:
    """One layer: the queries of a block over the context in the cache and the block itself."""
    model, queries = case.model, case.model.num_query_per_req
    kv_size, q_size = model.num_kv_heads * model.head_dim, model.num_heads * model.head_dim
    cached = 2 * case.context * kv_size
    block = queries * (2 * q_size + 2 * kv_size)  # q, k, v in; the result out
    pages = math.ceil(case.context / KV_BLOCK_SIZE)
    num_bytes = case.rows * (BFLOAT16 * (cached + block) + INT32 * (pages + 1))
    return Work(num_bytes, case.rows * 4 * queries * q_size * (case.context + queries))


def draft_head_work(case: Case) -> Work:
    """[M, H] times the head; out come a token id, its logit and the log-sum-exp per row, never the logits."""
    weight = case.model.vocabulary * case.model.hidden
    num_bytes = BFLOAT16 * (weight + case.rows * case.model.hidden) + (INT64 + 2 * FLOAT32) * case.rows
    return Work(num_bytes, 2 * case.rows * weight)


def draft_head_fp8_work(case: Case) -> Work:
    """As `draft_head`, weights of one byte and a float32 scale per vocabulary row; the product at the fp8 peak."""
    plain, model = draft_head_work(case), case.model
    num_bytes = plain.num_bytes - model.vocabulary * model.hidden + FLOAT32 * model.vocabulary
    return Work(num_bytes, plain.flops, is_fp8=True)


def draft_loss_work(case: Case) -> Work:
    """Loss and gradient of the hidden states, the head frozen: logits once and their gradient times the head.

    A kernel that computes the logits again in the backward pass instead of keeping them does 1.5 times these flops.
    """
    model = case.model
    weight = model.vocabulary * model.hidden
    per_row = 2 * BFLOAT16 * model.hidden + INT64 + 2 * FLOAT32  # hidden, its gradient; label; weight, loss
    return Work(BFLOAT16 * weight + case.rows * per_row, 4 * case.rows * weight)


def draft_inputs_work(case: Case) -> Work:
    """Positions in, positions and slots out; for every 16 context rows one request with its block of queries."""
    queries = case.model.num_query_per_req
    requests = math.ceil(case.rows / queries)
    per_block = queries * (INT32 + 2 * INT64) + (queries - 1) * INT64  # ids, positions, slots; rows that predict
    return Work(case.rows * 3 * INT64 + requests * (per_block + 6 * INT32), 0)


#: Kernel -> its work. The order is the one of the tables.
WORK = {
    "feature_fusion": feature_fusion_work,
    "context_kv": context_kv_work,
    "block_attention": block_attention_work,
    "draft_head": draft_head_work,
    "draft_head_fp8": draft_head_fp8_work,
    "draft_inputs": draft_inputs_work,
    "draft_loss": draft_loss_work,
}


def cases(kernels: Iterable[str] = WORK, models: Iterable[Model] = MODELS) -> list[Case]:
    """Every kernel on every shape, model by model."""
    found = []
    for model in models:
        for kernel in kernels:
            if kernel == "block_attention":
                found += [Case(kernel, model, batch, context) for batch in BATCHES for context in CONTEXTS]
            else:
                found += [Case(kernel, model, rows) for rows in NUM_ROWS]
    return found


def floor_seconds(work: Work, gpu: Gpu) -> float:
    """The least time."""
    return max(_parts(work, gpu).values())


def bound_by(work: Work, gpu: Gpu) -> str:
    """What the floor consists of: "memory", "compute" or "launch"."""
    parts = _parts(work, gpu)
    return max(parts, key=parts.__getitem__)


def fraction_of_floor(seconds: float, work: Work, gpu: Gpu) -> float:
    """Floor over measured time: 1 is as fast as the data sheet allows."""
    return floor_seconds(work, gpu) / seconds


def gpu_named(device: str) -> Gpu | None:
    """The GPU whose name occurs in a device's; None for one without a data sheet here."""
    return next((gpu for gpu in GPUS if gpu.name in device), None)


def _parts(work: Work, gpu: Gpu) -> dict[str, float]:
    peak = gpu.fp8_peak if work.is_fp8 else gpu.bfloat16_peak
    return {"memory": work.num_bytes / gpu.bandwidth, "compute": work.flops / peak, "launch": LAUNCH_SECONDS}


def measured(file: Path) -> dict[tuple[str, str, str, str], float]:
    """(GPU, kernel, model, size) -> median seconds of ours; of several runs the last one."""
    if not file.exists():
        return {}
    found = {}
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            gpu = gpu_named(row["machine"])
            if gpu is not None and row["implementation"] == "ours" and row["median_us"]:
                found[gpu.name, row["kernel"], row["model"], row["size"]] = float(row["median_us"]) * 1e-6
    return found


def markdown(times: dict[tuple[str, str, str, str], float]) -> str:
    """The page of floors, with the measured ratios that exist."""
    lines = [
        "# Floors of the kernels",
        "",
        "Written by `python bench/floors.py`; do not edit. Floor = max(bytes / bandwidth, flops / peak, launch of "
        f"{LAUNCH_SECONDS * 1e6:g} us).",
        "Bytes are every input and output once, in bfloat16; attention is one layer. The launch is an assumption.",
        "Ratio = measured time / floor (1.0 is the data sheet), from `bench/results/kernels.csv`.",
        "",
        "| GPU | TB/s | bf16 TFLOP/s | fp8 TFLOP/s | source |",
        "|---|---|---|---|---|",
    ]
    for gpu in GPUS:
        lines.append(
            f"| {gpu.name} | {gpu.bandwidth / 1e12:g} | {gpu.bfloat16_peak / 1e12:g} | {gpu.fp8_peak / 1e12:g} "
            f"| {gpu.source} |"
        )
    lines += [
        "",
        "| model | hidden | heads | K/V heads | head size | vocabulary | drafter layers | features | block |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        values = (model.hidden, model.num_heads, model.num_kv_heads, model.head_dim, model.vocabulary)
        values += (model.num_layers, model.num_features, model.num_query_per_req)
        lines.append(f"| {model.name} | {' | '.join(map(str, values))} |")
    return "\n".join(lines + [line for kernel in WORK for line in _table(kernel, times)]) + "\n"


def _table(kernel: str, times: dict[tuple[str, str, str, str], float]) -> list[str]:
    summary = (WORK[kernel].__doc__ or "").splitlines()[0]
    heads = [text for gpu in GPUS for text in (f"{gpu.name} us", "bound by", "ratio")]
    lines = ["", f"## {kernel}", "", summary, "", f"| model | size | MB | GFLOP | {' | '.join(heads)} |"]
    lines.append("|---" * (4 + len(heads)) + "|")
    for case in cases([kernel]):
        work = case.work
        cells = [case.model.name, case.size, f"{work.num_bytes / 1e6:.4g}", f"{work.flops / 1e9:.4g}"]
        for gpu in GPUS:
            seconds = times.get((gpu.name, kernel, case.model.name, case.size))
            ratio = "not measured" if seconds is None else f"{1 / fraction_of_floor(seconds, work, gpu):.2f}"
            cells += [f"{floor_seconds(work, gpu) * 1e6:.1f}", bound_by(work, gpu), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    (folder / "floors.md").write_text(markdown(measured(folder / "kernels.csv")))


if __name__ == "__main__":
    main()
