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
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from tqdm import tqdm

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.acceptance import Acceptance
from vllm_dflash.training.attention import Backend, default_backend
from vllm_dflash.training.checkpoint import Checkpoint, TrainState, load_last, save_checkpoint
from vllm_dflash.training.data import Example
from vllm_dflash.training.drafting import measure
from vllm_dflash.training.examples import ExampleOrder, FeatureReader, packed_row
from vllm_dflash.training.metrics import MetricsLog
from vllm_dflash.training.model import Drafter
from vllm_dflash.training.optimizer import learning_rate_factor, make_optimizers, set_learning_rate
from vllm_dflash.training.settings import TrainSettings, to_yaml
from vllm_dflash.training.step import TargetTables, row_loss
from vllm_dflash.training.tally import Tally
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


class Trainer:
    """One run on this process; with torchrun or accelerate, one of several."""

    def __init__(self, run: Run) -> None:
        from accelerate import Accelerator

        self.run, self.settings = run, run.settings
        settings = run.settings
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=_precision(settings))
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
        saved = load_last(self.folder) if settings.resume else None
        if saved is not None:
            load_tensors(run.drafter, saved[0])
        self.drafter, *self.optimizers = self.accelerator.prepare(run.drafter, *optimizers)
        _prepare_for_fsdp(self.drafter)
        if saved is not None:
            self._go_on(saved[1], saved[2])
        self.order = ExampleOrder(run.examples, settings.seed)
        self.total_steps = _total_steps(settings, len(run.examples), self.accelerator.num_processes)

    def train(self) -> TrainState:
        """Run to the end of the schedule; returns where it ended."""
        settings = self.settings
        self.folder.mkdir(parents=True, exist_ok=True)
        log = MetricsLog(self.folder, settings, self.state.step) if self.accelerator.is_main_process else None
        tally, started, minutes_before = self._new_tally(), time.monotonic(), self.state.minutes
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

    def _step(self, tally: Tally) -> None:
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
            tally.add(result, len(row.input_ids))
        norm = accelerator.clip_grad_norm_(self.drafter.parameters(), settings.max_grad_norm)
        tally.grad_norm = float(norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _log(self, log: MetricsLog | None, progress: Any, tally: Tally) -> Tally:
        tally = tally.over_processes(self.accelerator)
        values = {
            "train/loss": round(tally.loss / tally.rows, 4),
            "train/position_acc": [round(accuracy, 4) for accuracy in tally.accuracy],
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
            rows_per_step = self.settings.accumulation_steps * self.accelerator.num_processes
            shown["tok/s"] = f"{rate * rows_per_step * tally.tokens / tally.rows:.0f}"
            if self.settings.max_minutes:
                shown["left"] = f"{self.settings.max_minutes - self.state.minutes:.0f} min"
            progress.set_postfix(shown)
        return self._new_tally()

    def _new_tally(self) -> Tally:
        return Tally(self.settings.draft_block_size - 1)

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
        if self._saved_step == self.state.step:
            return
        self._saved_step = self.state.step
        # Whole tensors, by name: a run may go on with another number of processes, or without FSDP. All take part.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        tensors, optimizers = get_state_dict(self.drafter, self._inner_optimizers, options=options)
        if not self.accelerator.is_main_process:
            return
        record = self.run.record | {"minutes": round(self.state.minutes, 1), "step": self.state.step}
        checkpoint = Checkpoint(
            config=self.run.config,
            tensors=servable_tensors(cast(dict[str, Tensor], tensors), self.tables, self.run.config),
            optimizers=optimizers,
            state=self.state,
            settings_yaml=to_yaml(self.settings),
            record=record,
        )
        # Where nothing is measured, the latest is the best.
        save_checkpoint(self.folder, checkpoint, self.settings.keep_checkpoints, is_best or not self.run.held_out)

    def _go_on(self, optimizers: dict[str, Any], state: TrainState) -> None:
        whole = StateDictOptions(full_state_dict=True)
        # Learning rate and the like are this run's settings, not those of the run that wrote the checkpoint.
        own = get_optimizer_state_dict(self.drafter, self._inner_optimizers, options=whole)
        optimizers = {**optimizers, "param_groups": own["param_groups"]}
        set_optimizer_state_dict(self.drafter, self._inner_optimizers, optimizers, options=whole)
        self.state = state
        if self.accelerator.is_main_process:
            print(f"going on from step {state.step} in '{self.folder}'")

    @property
    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer.optimizer for optimizer in self.optimizers]

    def _timed(self, do: Any, *arguments: Any) -> float:
        """Seconds that `do` took: measuring and saving do not count as training time."""
        started = time.monotonic()
        do(*arguments)
        return time.monotonic() - started


def _prepare_for_fsdp(drafter: Any) -> None:
    """Tell FSDP2, where layers are sharded one by one, that a layer's context is computed outside its forward."""
    if not isinstance(drafter, FSDPModule):
        return
    sharded: Any = drafter
    if sharded.lm_head is not None:
        raise ValueError("--train-lm-head does not work with FSDP, which would shard the head; use DDP (torchrun).")
    for layer in sharded.layers:
        register_fsdp_forward_method(layer, "context_kv")


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
