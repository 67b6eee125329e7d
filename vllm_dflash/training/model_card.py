"""The README.md of an exported drafter, as the Hugging Face Hub reads it.

Every number comes from two kinds of records; what they lack is left out of the card.

    run.json    of the training run: target, license, datasets [Hub names], data [files], data_hash, num_examples,
                num_tokens, command, commit, seed, machine, minutes, versions {package: version},
                metrics {name: number}
    evaluation  of a measurement: tasks [{task, n, tau, interval [low, high], without_loops {n, tau, interval}}],
                confidence (0.95), num_speculative_tokens, decoding, engine, machine, command, commit, versions
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.config import DFlashConfig
from vllm_dflash.training.dialects import Dialect

_TAGS = ("dflash", "speculative-decoding")

_TAU = (
    "tau is the number of tokens gained per cycle of drafting and verification, the target's own token included: 1 "
    "means that no draft was accepted."
)
_LOOPS = "A repeating loop is trivial to draft, so tau is also given without the texts that end in one."


@dataclass(frozen=True)
class ModelCard:
    """What the card tells beside the drafter's shape."""

    name: str  # of the drafter, as users type it: Hub name or folder
    target: str  # Hub name or folder; empty where it is not known
    license: str | None = None  # identifier of the Hub; None: the run record's
    run: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, Any]] = ()

    def render(self, config: DFlashConfig, dialect: Dialect) -> str:
        """The text of README.md."""
        sections = [
            self._front_matter(),
            f"# {Path(self.name).name}",
            self._summary(config),
            *self._usage(config, dialect),
            *self._acceptance(),
            *self._data(),
            *self._training(),
        ]
        return "\n\n".join(sections) + "\n"

    def _front_matter(self) -> str:
        values: dict[str, Any] = {
            "license": self.license or self.run.get("license"),
            "base_model": self.target if _is_hub_name(self.target) else None,
            "library_name": "vllm",
            "pipeline_tag": "text-generation",
            "tags": _TAGS,
            "datasets": self.run.get("datasets"),
        }
        lines = ["---"]
        for key, value in values.items():
            if isinstance(value, str):
                lines.append(f"{key}: {json.dumps(value)}")  # a JSON string is a YAML string
            elif value:
                lines += [f"{key}:", *(f"- {json.dumps(item)}" for item in value)]
        return "\n".join([*lines, "---"])

    def _summary(self, config: DFlashConfig) -> str:
        target = f"`{self.target}`" if self.target else "its target"
        block, vocabulary = "", ""
        if config.draft_vocab_size != config.vocab_size:
            vocabulary = f" It drafts {config.draft_vocab_size} of the {config.vocab_size} tokens."
        if config.draft_block_size is not None:
            block = f", in blocks of {config.draft_block_size}: up to {config.max_speculative_tokens} tokens per cycle"
        return (
            f"A DFlash drafter for speculative decoding with {target}. It has {_count(config.num_layers, 'layer')} and "
            f"reads the outputs of target layers {', '.join(map(str, config.target_layer_ids))} (0 is the first)"
            f"{block}.{vocabulary} The target verifies every drafted token, so the text is its own."
        )

    def _usage(self, config: DFlashConfig, dialect: Dialect) -> list[str]:
        speculative: dict[str, Any] = {"method": "dflash", "model": self.name}
        if config.max_speculative_tokens is not None:
            speculative["num_speculative_tokens"] = config.max_speculative_tokens
        serve = f"vllm serve {self.target or 'TARGET'} --speculative-config '{json.dumps(speculative)}'"
        sections = ["## Usage", _code(serve)]
        if config.input_embedding_scale != 1:
            sections.append(
                f"Token embeddings are multiplied by {config.input_embedding_scale:g} (`input_embedding_scale`), which "
                "vLLM 0.32 and 0.33 overlook for plain DFlash: install the plugin vllm-dflash, or few drafts fit."
            )
        if config.max_speculative_tokens is None:
            sections.append("Add `num_speculative_tokens`: the checkpoint does not record its block size.")
        if dialect == "speculators":
            sections += ["The config names the target, so this is enough:", _code(f"vllm serve {self.name}")]
        return sections

    def _acceptance(self) -> list[str]:
        sections = ["## Acceptance length", _TAU] if self.evaluations else []
        for evaluation in self.evaluations:
            table, has_loops = _tau_table(evaluation)
            sections += [_LOOPS] if has_loops and _LOOPS not in sections else []
            sections += [table, *_circumstances(evaluation)]
        return sections

    def _data(self) -> list[str]:
        rows = [
            (label, _plain(self.run[key]))
            for label, key in (
                ("data sets", "datasets"),
                ("files", "data"),
                ("examples", "num_examples"),
                ("supervised tokens", "num_tokens"),
                ("hash", "data_hash"),
            )
            if self.run.get(key) not in (None, [], ())
        ]
        return ["## Data", _table(("", ""), rows)] if rows else []

    def _training(self) -> list[str]:
        sections = [_code(self.run["command"])] if self.run.get("command") else []
        rows = [
            (label, _plain(self.run[key]))
            for label, key in (("machine", "machine"), ("minutes", "minutes"), ("seed", "seed"), ("commit", "commit"))
            if self.run.get(key) is not None
        ]
        rows += [(name, str(version)) for name, version in (self.run.get("versions") or {}).items()]
        sections += [_table(("", ""), rows)] if rows else []
        metrics = [(name, _plain(value)) for name, value in (self.run.get("metrics") or {}).items()]
        sections += [_table(("metric", "value"), metrics)] if metrics else []
        return ["## Training", *sections] if sections else []


def check_evaluation(evaluation: Mapping[str, Any], name: str) -> None:
    """Refuse a measurement without tasks, or with a task that lacks its name or tau.

    Raises:
        ValueError: names the file and what is missing.
    """
    tasks = evaluation.get("tasks")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, Mapping) for task in tasks):
        raise ValueError(f"'{name}' is no evaluation: its 'tasks' are {tasks!r}; give a file of `vllm-dflash eval`.")
    for task in tasks:
        missing = [key for key in ("task", "n", "tau") if task.get(key) is None]
        if missing:
            raise ValueError(
                f"'{name}' has a task {task.get('task')!r} without {', '.join(missing)}; give a file of "
                f"`vllm-dflash eval`."
            )


def _tau_table(evaluation: Mapping[str, Any]) -> tuple[str, bool]:
    """The table of an evaluation, and whether it distinguishes texts with loops."""
    tasks = evaluation["tasks"]
    has_loops = any(task.get("without_loops") for task in tasks)
    confidence = evaluation.get("confidence")
    interval = "interval" if confidence is None else f"{confidence:.0%} interval"
    header = ["task", "n", "tau", interval]
    if has_loops:
        header += ["n without loops", "tau without loops", interval]
    rows = []
    for task in tasks:
        cells = [str(task["task"]), *_tau_cells(task)]
        rows.append([*cells, *_tau_cells(task.get("without_loops") or {})] if has_loops else cells)
    return _table(header, rows), has_loops


def _tau_cells(result: Mapping[str, Any]) -> list[str]:
    n, tau, interval = result.get("n"), result.get("tau"), result.get("interval")
    return [
        "" if n is None else str(n),
        "" if tau is None else f"{tau:.2f}",
        "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
    ]


def _circumstances(evaluation: Mapping[str, Any]) -> list[str]:
    """Where and how tau was measured: one line, and the command."""
    parts = [
        f"{label}{_plain(evaluation[key])}"
        for label, key in (
            ("", "engine"),
            ("K = ", "num_speculative_tokens"),
            ("", "decoding"),
            ("", "machine"),
            ("commit ", "commit"),
        )
        if evaluation.get(key) is not None
    ]
    parts += [f"{package} {version}" for package, version in (evaluation.get("versions") or {}).items()]
    measured = [f"Measured: {'; '.join(parts)}."] if parts else []
    return measured + ([_code(evaluation["command"])] if evaluation.get("command") else [])


def _is_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _code(text: str) -> str:
    return f"```bash\n{text}\n```"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
