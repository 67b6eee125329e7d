"""Seconds of a step on machines that are not here, for bench/simulate.py: rooflines, and a stand-in for this CPU.

A roofline takes the longer of reading a part's weights and K/V once and of its arithmetic, part by part (attention
projections, MLP, attention, LM head), at the given shares of the data sheet's numbers, and adds a fixed overhead per
pass. Mixture-of-experts layers read the experts that N tokens are expected to hit. No tile quantisation, no
communication.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from vllm_dflash.draft_length import CostModel, StepSize, TimedStep
from vllm_dflash.draft_length.terms import HEADS, INDEX, NAMES, QUERIES, ROW_KNOTS, TOKEN_KNOTS, TOKENS

HEAD_DIM, BYTES = 128, 2  # bf16
DRAFT_LAYERS, DRAFT_FEATURES = 5, 5


class StepCosts(Protocol):
    """True times of steps; counts may be arrays of one shape."""

    name: str

    def target(self, num_tokens, num_requests, context_tokens, attended_tokens): ...
    def draft(self, num_drafting, num_positions, draft_block_size, context_tokens): ...
    def context(self, rows): ...
    def fits(self, num_requests: int, context_tokens: float) -> bool: ...


@dataclass(frozen=True)
class Machine:
    """An accelerator, by its data sheet and by what kernels reach of it."""

    name: str
    bytes_per_second: float
    flops: float  # dense bf16
    memory: float  # bytes
    bandwidth_share: float = 0.8
    flops_share: float = 0.7
    target_overhead: float = 1.0e-3  # scheduling, sampling, launches of a step
    draft_overhead: float = 0.3e-3

    def seconds(self, num_bytes, num_flops):
        """Of one part of a pass."""
        return np.maximum(
            num_bytes / (self.bytes_per_second * self.bandwidth_share), num_flops / (self.flops * self.flops_share)
        )


@dataclass(frozen=True)
class Architecture:
    """Sizes of a target."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 151_936
    experts: int = 0
    experts_per_token: int = 0
    draft_intermediate: int = 0  # of the dense drafter; 0 = as the target's

    @property
    def attention_weights(self) -> int:
        """Parameters of the projections of one layer."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * HEAD_DIM

    @property
    def kv_bytes(self) -> int:
        """Of one token in one layer."""
        return 2 * self.kv_heads * HEAD_DIM * BYTES


MACHINES = (Machine("H200", 4.8e12, 989e12, 141e9), Machine("B200", 8.0e12, 2250e12, 180e9))
ARCHITECTURES = (
    Architecture("Qwen3-4B", 36, 2560, 32, 8, 9728),
    Architecture("Qwen3-8B", 36, 4096, 32, 8, 12288),
    Architecture("Qwen3-32B", 64, 5120, 64, 8, 25600),
    Architecture("Qwen3-30B-A3B", 48, 2048, 32, 4, 768, experts=128, experts_per_token=8, draft_intermediate=6144),
)


@dataclass(frozen=True)
class Roofline:
    """A target with its drafter on a machine."""

    machine: Machine
    model: Architecture

    @property
    def name(self) -> str:
        return f"{self.machine.name} {self.model.name}"

    def target(self, num_tokens, num_requests, context_tokens, attended_tokens):
        """Seconds of a target pass; attended_tokens: over rows, the context that each attends to."""
        model = self.model
        layer = self._dense(num_tokens, model.attention_weights) + self._mlp(num_tokens)
        layer = layer + self._attention(context_tokens, attended_tokens)
        return self.machine.target_overhead + model.layers * layer + self._head(num_tokens)

    def draft(self, num_drafting, num_positions, draft_block_size, context_tokens):
        """Seconds of a draft pass; 0 where no request drafts."""
        model, rows = self.model, num_drafting * draft_block_size
        mlp = 3 * model.hidden * (model.draft_intermediate or model.intermediate)
        layer = self._dense(rows, model.attention_weights + mlp)
        layer = layer + self._attention(context_tokens, context_tokens * draft_block_size)
        seconds = self.machine.draft_overhead + DRAFT_LAYERS * layer + self._head(num_drafting * num_positions)
        return np.where(np.asarray(num_drafting) > 0, seconds, 0.0)

    def context(self, rows):
        """Seconds of fusing features and writing K/V for all draft layers."""
        model = self.model
        weights = DRAFT_FEATURES * model.hidden**2 + DRAFT_LAYERS * 2 * model.hidden * model.kv_heads * HEAD_DIM
        return self._dense(rows, weights)

    def fits(self, num_requests: int, context_tokens: float) -> bool:
        """Whether weights and K/V fit into 0.9 of the memory."""
        model = self.model
        mlp = 3 * model.hidden * model.intermediate * max(model.experts, 1)
        draft_mlp = 3 * model.hidden * (model.draft_intermediate or model.intermediate)
        weights = model.layers * (model.attention_weights + mlp) + 2 * model.vocabulary * model.hidden
        weights += DRAFT_LAYERS * (model.attention_weights + draft_mlp) + DRAFT_FEATURES * model.hidden**2
        cache = num_requests * context_tokens * model.kv_bytes * (model.layers + DRAFT_LAYERS)
        return weights * BYTES + cache < 0.9 * self.machine.memory

    def _dense(self, rows, weights):
        return self.machine.seconds(weights * BYTES, 2 * rows * weights)

    def _mlp(self, rows):
        model = self.model
        weights = 3 * model.hidden * model.intermediate
        if not model.experts:
            return self._dense(rows, weights)
        hit = model.experts * (1 - (1 - model.experts_per_token / model.experts) ** rows)
        return self.machine.seconds(hit * weights * BYTES, 2 * rows * model.experts_per_token * weights)

    def _attention(self, context_tokens, attended_tokens):
        return self.machine.seconds(
            context_tokens * self.model.kv_bytes, 4 * attended_tokens * self.model.heads * HEAD_DIM
        )

    def _head(self, rows):
        return self._dense(rows, self.model.vocabulary * self.model.hidden)


@dataclass(frozen=True)
class MeasuredCosts:
    """A cost model that was fitted to a profile, taken as the truth."""

    name: str
    model: CostModel

    def target(self, num_tokens, num_requests, context_tokens, attended_tokens):
        price = self.model.price
        seconds = price("step") + price("request") * num_requests + self.model.token_seconds(num_tokens)
        speculation = price("speculation") * (np.asarray(num_tokens) > num_requests)
        return seconds + speculation + price("context") * context_tokens + price("attended") * attended_tokens

    def draft(self, num_drafting, num_positions, draft_block_size, context_tokens):
        return self.model.draft_pass_seconds(np.asarray(num_drafting), num_positions, draft_block_size, context_tokens)

    def context(self, rows):
        return self.model.price("stored") + self.model.price("stored_row") * rows

    def fits(self, num_requests: int, context_tokens: float) -> bool:
        return num_requests * context_tokens <= 300_000  # some GiB of float32 K/V


def cpu_stand_in() -> MeasuredCosts:
    """SmolLM2-135M in float32 on 2 cores, from medians in bench/results/serving.csv and README's profile of a cycle.

    Cycles there, in units of a plain step of one request taken as 30 ms: 8 requests 56; K = 3: 45 for one request (of
    them 15 % draft step, 7 % its head, 5 % its block pass) and 120 for 8; K = 7: 54 and 185. Context prices are
    guesses.
    """
    prices = np.full(len(NAMES), 1e-9)
    milliseconds = {"step": 29.0, "request": 0.9, "speculation": 0.5, "context": 2e-4, "attended": 1e-4}
    milliseconds |= {"draft": 1.5, "draft_context": 1e-4, "stored": 0.3, "stored_row": 0.1}
    for name, value in milliseconds.items():
        prices[INDEX[name]] = 1e-3 * value
    prices[TOKENS] = 1e-3 * np.where(TOKEN_KNOTS < 8, 2.3, 1.7)
    prices[QUERIES] = 1e-3 * np.where(ROW_KNOTS < 8, 0.35, 0.25)
    prices[HEADS] = 1e-3 * np.where(ROW_KNOTS < 8, 0.8, 0.5)
    return MeasuredCosts("CPU stand-in", CostModel(prices))


def measured_costs(path: Path) -> MeasuredCosts:
    """Costs from a file: a cost model as CostModel.to_json writes it, or a JSON list of timed steps.

    Raises:
        ValueError: the file holds neither.
    """
    text = path.read_text()
    if text.lstrip().startswith("["):
        steps = [TimedStep.from_json(step) for step in json.loads(text)]
        return MeasuredCosts(path.stem, CostModel.from_profile(steps))
    return MeasuredCosts(path.stem, CostModel.from_json(text))


def profile(
    costs: StepCosts, num_positions: int, block_size: Callable[[int], int], noise: float, seed: int = 0
) -> list[TimedStep]:
    """The timed steps that a start-up profile would measure: a coarse grid of sizes, each time a few percent off."""
    tried = [length for length in (0, 1, 3, 7, 15) if length <= num_positions]
    rng = np.random.default_rng(seed)
    steps = []
    for num_requests in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        for length in tried:
            for context in (128, 4096):
                size = step_size(num_requests, np.full(num_requests, length), np.full(num_requests, context))
                steps.append(timed(costs, size, rng.normal(0, noise, 3)))
                if length:
                    drafting = step_size(
                        num_requests, np.full(num_requests, length), np.full(num_requests, context),
                        np.arange(num_requests), length, block_size(length),
                    )  # fmt: skip
                    steps.append(timed(costs, drafting, rng.normal(0, noise, 3)))
    return steps


def step_size(
    num_requests: int,
    lengths: np.ndarray,  # [R]
    context_lens: np.ndarray,  # [R]
    drafting: np.ndarray | None = None,  # [D]
    num_positions: int = 0,
    draft_block_size: int = 0,
) -> StepSize:
    """Counts of a step."""
    num_drafting = 0 if drafting is None else len(drafting)
    return StepSize(
        num_requests=num_requests,
        num_tokens=num_requests + int(lengths.sum()),
        num_verified=int(lengths.sum()),
        context_tokens=int(context_lens.sum()),
        attended_tokens=int((context_lens * (1 + lengths)).sum()),
        num_drafting=num_drafting,
        query_rows=num_drafting * draft_block_size,
        head_rows=num_drafting * num_positions,
        draft_context_tokens=int(context_lens[drafting].sum()) if num_drafting else 0,
        context_rows=num_requests + int(lengths.sum()),
    )


def timed(costs: StepCosts, size: StepSize, log_error: np.ndarray) -> TimedStep:
    """A step with its true times times exp(log_error [3]): target, draft, context."""
    num_positions, block_size = (rows // max(size.num_drafting, 1) for rows in (size.head_rows, size.query_rows))
    target = costs.target(size.num_tokens, size.num_requests, size.context_tokens, size.attended_tokens)
    draft = costs.draft(size.num_drafting, num_positions, block_size, size.draft_context_tokens)
    context = costs.context(size.context_rows) if size.context_rows else 0.0
    parts = np.array([float(target), float(draft), float(context)]) * np.exp(log_error)
    return TimedStep(size, float(parts.sum()), float(parts[1]), float(parts[2]))
