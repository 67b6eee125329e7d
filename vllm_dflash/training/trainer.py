"""The training run: prepare everything, then step, measure, save until done.

All randomness is a function of the seed and the step's number (order of examples, anchors, block lengths, negatives),
so a checkpoint needs no random state, and a run that goes on from one equals one that was never stopped, to the bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.acceptance import Acceptance
from vllm_dflash.training.attention import Backend, default_backend
from vllm_dflash.training.checkpoint import Checkpoint, TrainState, link, load_last, save_checkpoint
from vllm_dflash.training.data import Example
from vllm_dflash.training.drafting import measure
from vllm_dflash.training.examples import ExampleOrder, FeatureReader, packed_row
from vllm_dflash.training.metrics import MetricsLog
from vllm_dflash.training.model import Drafter
from vllm_dflash.training.optimizer import learning_rate_factor, make_optimizers, set_learning_rate
from vllm_dflash.training.settings import TrainSettings, to_yaml
from vllm_dflash.training.step import StepResult, TargetTables, row_loss
from vllm_dflash.training.vocabulary import to_d2t


@dataclass
class Run:
    """What a training run works with; made by setup.py."""

    settings: TrainSettings
    config: DFlashConfig
    drafter: Drafter
    tables: TargetTables
    features: FeatureReader
    examples: Sequence[Example]
    held_out: Sequence[Example]
    record: dict[str, Any]


@dataclass
class _Tally:
    """Sums since the last line of metrics."""

    loss: float = 0.0
    correct: Tensor | float = 0.0
    labelled: Tensor | float = 0.0
    rows: int = 0
    anchors: int = 0
    tokens: int = 0
    grad_norm: float = 0.0

    def add(self, result: StepResult, num_slots: int, tokens: int) -> None:
        missing = num_slots - len(result.correct)  # slots of a truncated block
        pad = (0, missing)
        self.loss += float(result.loss.detach())
        self.correct = self.correct + torch.nn.functional.pad(result.correct.cpu(), pad)
        self.labelled = self.labelled + torch.nn.functional.pad(result.labelled.cpu(), pad)
        self.rows, self.anchors, self.tokens = self.rows + 1, self.anchors + result.num_anchors, self.tokens + tokens


class Trainer:
    """One run on this process; with torchrun or accelerate, one of several."""

    def __init__(self, run: Run) -> None:
        from accelerate import Accelerator

        self.run, self.settings = run, run.settings
        settings = run.settings
        self.accelerator = Accelerator(mixed_precision=_precision(settings))
        self.device = self.accelerator.device
        self.folder = Path(settings.output)
        tables = run.tables
        self.tables = TargetTables(*(t.to(self.device) for t in (tables.embedding, tables.head, tables.column)))
        self.backend: Backend = (
            default_backend(self.device) if settings.attention_backend == "auto" else settings.attention_backend
        )
        optimizers = make_optimizers(
            run.drafter.parameters(), settings.optimizer, settings.lr, settings.beta2, settings.weight_decay
        )
        self.state, self._saved_step = TrainState(), -1
        self._resume(run.drafter, optimizers)
        self.drafter, *self.optimizers = self.accelerator.prepare(run.drafter, *optimizers)
        self.order = ExampleOrder(run.examples, settings.seed)
        self.total_steps = _total_steps(settings, len(run.examples), self.accelerator.num_processes)

    def train(self) -> TrainState:
        """Run to the end of the schedule; returns where it ended."""
        settings = self.settings
        self.folder.mkdir(parents=True, exist_ok=True)
        log = MetricsLog(self.folder, settings, self.state.step) if self.accelerator.is_main_process else None
        tally, started, minutes_before = _Tally(), time.monotonic(), self.state.minutes
        with tqdm(
            total=self.total_steps or None, initial=self.state.step, unit="step", disable=log is None
        ) as progress:
            while (done := self._progress()) < 1:
                set_learning_rate(self.optimizers, learning_rate_factor(done, settings.warmup_ratio))
                self._step(tally)
                minutes = minutes_before + (time.monotonic() - started) / 60
                self.state = replace(self.state, step=self.state.step + 1, minutes=minutes)
                progress.update()
                is_end = self._progress() >= 1
                if self.state.step % settings.log_steps == 0 or is_end:
                    tally = self._log(log, progress, tally)
                if self.state.step % settings.eval_steps == 0 or is_end:
                    started += self._timed(self._measure, log, progress)
                if self.state.step % settings.checkpoint_steps == 0 or is_end:
                    started += self._timed(self._save)
        if log is not None:
            log.close()
        return self.state

    def evaluate(self) -> Acceptance:
        """tau on the held-out examples, by the walk."""
        drafter = self.accelerator.unwrap_model(self.drafter)
        return measure(drafter, self.tables, self.run.held_out, self.run.features, self.backend, self.device)

    def _progress(self) -> float:
        """Share of the schedule that is behind, 0 to 1."""
        if self.settings.max_minutes:
            return self.state.minutes / self.settings.max_minutes
        return self.state.step / self.total_steps

    def _step(self, tally: _Tally) -> None:
        settings, accelerator = self.settings, self.accelerator
        rows_per_step = settings.accumulation_steps * accelerator.num_processes
        for index in range(settings.accumulation_steps):
            # Every process takes its own rows; together they are the step's, whatever the number of processes.
            number = self.state.step * rows_per_step + index * accelerator.num_processes + accelerator.process_index
            first = number * settings.batch_size
            row = packed_row([self.order[first + i] for i in range(settings.batch_size)], self.run.features)
            is_last = index == settings.accumulation_steps - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.drafter):
                with accelerator.autocast():
                    result = row_loss(
                        self.drafter, row.to(self.device), self.tables, settings, self.backend,
                        _row_seed(settings.seed, number),
                    )  # fmt: skip
                accelerator.backward(result.loss / settings.accumulation_steps)
            tally.add(result, settings.draft_block_size - 1, len(row.input_ids))
        norm = accelerator.clip_grad_norm_(self.drafter.parameters(), settings.max_grad_norm)
        tally.grad_norm = float(norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _log(self, log: MetricsLog | None, progress: Any, tally: _Tally) -> _Tally:
        accuracy = torch.as_tensor(tally.correct) / torch.as_tensor(tally.labelled).clamp_min(1)
        values = {
            "train/loss": round(tally.loss / tally.rows, 4),
            "train/position_acc": [round(float(a), 4) for a in accuracy],
            "train/grad_norm": round(tally.grad_norm, 4),
            "train/lr": self.optimizers[0].param_groups[0]["lr"],
            "train/tokens": tally.tokens,
            "train/anchors": tally.anchors,
            "train/minutes": round(self.state.minutes, 3),
        }
        if log is not None:
            log.write(self.state.step, values)
            rate = progress.format_dict["rate"] or 0
            shown = {"loss": values["train/loss"], "tau": f"{self.state.best_tau:.3f}"}
            shown["tok/s"] = f"{rate * tally.tokens / max(tally.rows, 1) * self.settings.accumulation_steps:.0f}"
            if self.settings.max_minutes:
                shown["left"] = f"{self.settings.max_minutes - self.state.minutes:.0f} min"
            progress.set_postfix(shown)
        return _Tally()

    def _measure(self, log: MetricsLog | None, progress: Any) -> None:
        if not self.run.held_out:
            return
        acceptance = self.evaluate()
        values = {"eval/tau": round(acceptance.tau, 4), "eval/position": [round(p, 4) for p in acceptance.by_position]}
        self.run.record["metrics"] = {"eval_tau": values["eval/tau"]}
        if log is not None:
            log.write(self.state.step, values)
            progress.write(
                f"step {self.state.step}: tau {acceptance.tau:.3f} on {len(self.run.held_out)} held-out examples"
            )
        if acceptance.tau > self.state.best_tau:
            self.state = replace(self.state, best_tau=acceptance.tau)
            self._save(is_best=True)

    def _save(self, is_best: bool = False) -> None:
        tensors = self.accelerator.get_state_dict(self.drafter)
        optimizers = [dict(o.state_dict()) for o in self.optimizers]
        if not self.accelerator.is_main_process or self._saved_step == self.state.step:
            return
        record = self.run.record | {"minutes": round(self.state.minutes, 1), "step": self.state.step}
        checkpoint = Checkpoint(
            config=self.run.config,
            tensors=servable_tensors(tensors, self.tables, self.run.config),
            optimizers=optimizers,
            state=self.state,
            settings_yaml=to_yaml(self.settings),
            record=record,
        )
        path = save_checkpoint(self.folder, checkpoint, self.settings.keep_checkpoints)
        self._saved_step = self.state.step
        if is_best:
            link(self.folder, "best", path.name)

    def _resume(self, drafter: Drafter, optimizers: list[torch.optim.Optimizer]) -> None:
        found = load_last(self.folder) if self.settings.resume and self.folder.is_dir() else None
        if found is None:
            return
        tensors, states, self.state = found
        load_tensors(drafter, tensors)
        for optimizer, state in zip(optimizers, states):
            optimizer.load_state_dict(state)
        print(f"going on from step {self.state.step} in '{self.folder}'")

    def _timed(self, do: Any, *arguments: Any) -> float:
        """Seconds that `do` took: measuring and saving do not count as training time."""
        started = time.monotonic()
        do(*arguments)
        return time.monotonic() - started


def servable_tensors(tensors: dict[str, Tensor], tables: TargetTables, config: DFlashConfig) -> dict[str, Tensor]:
    """The drafter's tensors, with head and d2t where its vocabulary is reduced, on the CPU."""
    whole = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    if config.draft_vocab_size < config.vocab_size:
        whole.setdefault("lm_head.weight", tables.head.float().cpu().contiguous())
        whole["d2t"] = to_d2t(tables.target_ids.cpu())
    return whole


def load_tensors(drafter: Drafter, tensors: dict[str, Tensor]) -> None:
    """Load a checkpoint's tensors; a frozen head and d2t are not the drafter's own.

    Raises:
        ValueError: a tensor is missing, or one has no place in the drafter.
    """
    left = {name: t for name, t in tensors.items() if name != "d2t"}
    if drafter.lm_head is None:
        left.pop("lm_head.weight", None)
    missing = sorted(drafter.state_dict().keys() - left.keys())
    superfluous = sorted(left.keys() - drafter.state_dict().keys())
    if missing or superfluous:
        raise ValueError(
            f"checkpoint '{drafter.config.name}' does not fit the drafter to be trained: missing {missing}, without a "
            f"place {superfluous}; use the settings that it was trained with."
        )
    drafter.load_state_dict(left)


def _row_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=7).digest(), "big")


def _total_steps(settings: TrainSettings, num_examples: int, num_processes: int) -> int:
    """Steps of the schedule; 0 where it is planned in minutes."""
    if settings.max_minutes and num_processes > 1:
        raise ValueError("--max-minutes plans by one process's clock; with several use --epochs or --max-steps.")
    if settings.max_minutes:
        return 0
    per_step = settings.batch_size * settings.accumulation_steps * num_processes
    return settings.max_steps or max(1, round(settings.epochs * num_examples / per_step))


def _precision(settings: TrainSettings) -> str:
    if settings.precision == "auto":
        return "bf16" if torch.cuda.is_available() else "no"
    return "no" if settings.precision == "fp32" else "bf16"
