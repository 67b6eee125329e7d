"""Every setting of a training run, its default and where that comes from; flags and YAML keys are these names."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

#: gamma of the loss decay by block size, as the paper gives it; other sizes: half the block.
PAPER_LOSS_DECAY = {16: 7.0, 10: 5.0, 8: 4.0}

#: Shape of a new drafter where the settings leave it open; a pretrained drafter keeps its own.
NEW_DRAFTER: dict[str, Any] = {
    "num_layers": 5,
    "num_features": 5,
    "draft_block_size": 16,
    "in_block_attention": "bidirectional",
    "sliding_window": 0,
}

#: What decides which drafter is learnt; a run that is resumed cannot change it.
_LEARNT = (
    *("target", "num_layers", "draft_block_size", "num_features", "target_layer_ids", "mask_token_id"),
    *("draft_vocab_size", "in_block_attention", "sliding_window", "train_lm_head"),
    "input_embedding_scale",
    *("injection", "target_features", "drafting", "anchors", "optimizer"),
    *("loss_weight", "loss_decay", "dpace_alpha", "truncate_blocks", "soft_labels", "soft_share", "loss_negatives"),
)

#: Least values of counts; the least one stands for something of its own in many of them.
_LEAST = {
    "eval_examples": 0,
    "max_length": 2,
    "max_examples": 0,
    "num_layers": 0,
    "num_features": 0,
    "draft_block_size": 0,
    "draft_vocab_size": 0,
    "sliding_window": -1,
    "input_embedding_scale": 0,
    "max_anchors": 1,
    "loss_decay": 0,
    "soft_labels": 0,
    "loss_negatives": 0,
    "weight_decay": 0,
    "max_steps": 0,
    "max_minutes": 0,
    "batch_size": 1,
    "accumulation_steps": 1,
    "eval_steps": 1,
    "checkpoint_steps": 1,
    "keep_checkpoints": 1,
    "log_steps": 1,
}


def _setting(default: Any, help_text: str, *aliases: str) -> Any:
    """A field with its help text and the names other trainers give the same flag."""
    return field(default=default, metadata={"help": help_text, "aliases": aliases})


@dataclass(frozen=True)
class TrainSettings:
    """Settings of `vllm-dflash train`. Defaults are the paper's unless the help says otherwise."""

    # What is trained, on what, where it goes
    target: str = _setting("", "folder or Hub name of the target", "--verifier-name-or-path", "--target-model-path")
    data: tuple[str, ...] = _setting((), "files, folders or Hub data sets with the target's own answers", "--data-path")
    output: str = _setting("", "folder for checkpoints, metrics and the final drafter", "--save-path")
    eval_data: tuple[str, ...] = _setting((), "data to measure tau on; default: --eval-examples held out of --data")
    eval_examples: int = _setting(64, "examples to measure tau on")
    features: str = _setting("", "folder of cached features, extracted once; empty: the target runs in every step")
    max_length: int = _setting(3072, "tokens of an example, the rest is cut off", "--seq-length")
    max_examples: int = _setting(0, "use only so many examples; 0: all")
    from_pretrained: str = _setting("", "drafter to start from (z-lab or speculators format)")

    # The drafter; what is left open is the paper's, or that of --from-pretrained
    num_layers: int = _setting(0, "layers of the drafter; 0: 5")
    draft_block_size: int = _setting(0, "anchor and masks; 0: 16, or the pretrained drafter's", "--block-size")
    num_features: int = _setting(0, "target layers read, spread by the paper's rule; 0: 5")
    target_layer_ids: tuple[int, ...] = _setting((), "target layers read, 0 is the first; default: the paper's rule")
    mask_token_id: int = _setting(-1, "mask token; -1: the tokenizer's, else an unused token")
    draft_vocab_size: int = _setting(0, "tokens the drafter can draft, those the data has most; 0: all")
    in_block_attention: Literal["auto", "bidirectional", "causal"] = _setting(
        "auto",
        "causal: a slot does not depend on how many follow, so one drafter serves every K exactly; auto: "
        "bidirectional, or the pretrained drafter's",
    )
    sliding_window: int = _setting(
        -1, "attention window of all draft layers, tokens; 0: full attention; -1: full, or the pretrained drafter's"
    )
    input_embedding_scale: float = _setting(
        0.0,
        "factor on the embeddings of block tokens; 0: the target's own (not 1 for Gemma and Granite), or the "
        "pretrained drafter's; vLLM without this plugin knows 1 only",
    )
    train_lm_head: bool = _setting(False, "give the drafter an LM head of its own, started from the target's")
    initialisation: Literal["target", "random"] = _setting("target", "of layers and final norm (not in the paper)")
    fc_initialisation: Literal["last-feature", "scaled", "random"] = _setting(
        "last-feature", "of the fusion: pass the deepest feature on, or random with each feature scaled by 1/RMS"
    )

    # Ablations; only the defaults can be served
    injection: Literal["kv", "input"] = _setting("kv", "features as keys and values of every layer, or as input only")
    target_features: bool = _setting(True, "read the target's hidden states at all")
    drafting: Literal["block", "autoregressive"] = _setting("block", "fill a block at once, or token by token")
    anchors: Literal["random", "uniform"] = _setting("random", "where blocks begin")

    # Loss
    max_anchors: int = _setting(512, "blocks per example and epoch; all positions where there are fewer")
    loss_weight: Literal["decay", "dpace", "uniform"] = _setting(
        "decay", "weight of the slots", "--per-position-loss-weight"
    )
    loss_decay: float = _setting(0.0, "gamma of the decay; 0: the paper's for this block size", "--dflash-decay-gamma")
    dpace_alpha: float = _setting(0.5, "smoothing of D-PACE (value of arXiv 2605.18810)")
    truncate_blocks: bool = _setting(
        False,
        "causal only: instead of weighting late slots down, leave them out as often (same expected loss, less work)",
    )
    soft_labels: int = _setting(
        0, "the target's likeliest tokens per position to learn from besides the text's; 0: none"
    )
    soft_share: float = _setting(0.5, "share of the soft labels in the loss where --soft-labels is set")
    loss_negatives: int = _setting(
        0, "score against the tokens in the batch and so many random others instead of the whole vocabulary; 0: whole"
    )

    # Optimisation
    optimizer: Literal["adamw", "muon"] = _setting("adamw", "muon: for matrices, with AdamW for the rest")
    lr: float = _setting(6e-4, "peak learning rate", "--learning-rate")
    weight_decay: float = _setting(0.01, "decoupled weight decay of matrices")
    beta2: float = _setting(0.95, "AdamW's second moment (training-stability value common for transformers)")
    warmup_ratio: float = _setting(0.04, "share of steps with rising learning rate", "--scheduler-warmup-ratio")
    max_grad_norm: float = _setting(1.0, "gradient clipping")
    epochs: float = _setting(6.0, "passes over the data", "--num-epochs")
    max_steps: int = _setting(0, "stop after so many optimiser steps; 0: by --epochs")
    max_minutes: float = _setting(0.0, "plan the schedule for so many minutes of steps; 0: by --epochs or --max-steps")
    batch_size: int = _setting(8, "examples packed into one row and run at once, per process")
    accumulation_steps: int = _setting(1, "rows per optimiser step", "--gradient-accumulation-steps")
    precision: Literal["auto", "fp32", "bf16"] = _setting("auto", "autocast; auto: bf16 on CUDA, fp32 on a CPU")
    attention_backend: Literal["auto", "sdpa", "flex", "xformers"] = _setting("auto", "implementation of attention")
    seed: int = _setting(0, "of initialisation, order and anchors")

    # Book-keeping
    eval_steps: int = _setting(200, "measure tau every so many steps")
    checkpoint_steps: int = _setting(200, "write a checkpoint every so many steps", "--checkpoint-freq")
    keep_checkpoints: int = _setting(2, "latest checkpoints kept besides the best")
    resume: bool = _setting(True, "go on from the last checkpoint in --output")
    log_steps: int = _setting(10, "write metrics every so many steps")
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = _setting((), "besides metrics.jsonl", "--logger")
    run_name: str = _setting("", "name of the run for --report-to")

    def __post_init__(self) -> None:
        """Check what can be checked without loading anything."""
        self._require(self.target != "", "target", "name the target model with --target")
        self._require(self.output != "", "output", "name a folder with --output")
        for name, least in _LEAST.items():
            self._require(getattr(self, name) >= least, name, f"it must be at least {least}")
        for name in ("lr", "epochs", "max_grad_norm"):
            self._require(getattr(self, name) > 0, name, "it must be above 0")
        self._require(self.draft_block_size != 1, "draft_block_size", "a block is an anchor and at least one mask")
        self._require(0 <= self.soft_share <= 1, "soft_share", "it is a share, 0 to 1")
        self._require(0 <= self.dpace_alpha <= 1, "dpace_alpha", "it is a share, 0 to 1")
        self._require(0 <= self.warmup_ratio <= 1, "warmup_ratio", "it is a share, 0 to 1")
        self._require(
            not self.truncate_blocks or self.in_block_attention != "bidirectional",
            "truncate_blocks",
            "it needs --in-block-attention causal: in a bidirectional block every slot depends on how many there are",
        )

    def _require(self, holds: bool, name: str, repair: str) -> None:
        if not holds:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)!r}: {repair}.")

    def shaped(self, **shape: Any) -> TrainSettings:
        """These settings with what they leave open about the drafter's shape taken from `shape`.

        Args:
            shape: values by the names of `NEW_DRAFTER`.
        """
        blank = {name: TrainSettings.__dataclass_fields__[name].default for name in shape}
        return replace(self, **{name: value for name, value in shape.items() if getattr(self, name) == blank[name]})

    @property
    def effective_loss_decay(self) -> float:
        """gamma."""
        return self.loss_decay or PAPER_LOSS_DECAY.get(self.draft_block_size, self.draft_block_size / 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, with the aliases other trainers use, and --config for a YAML file of them."""
    parser.add_argument("--config", metavar="YAML", help="file of settings by the names of these flags; flags win")
    hints = get_type_hints(TrainSettings)
    for setting in fields(TrainSettings):
        names = [f"--{setting.name.replace('_', '-')}", *setting.metadata["aliases"]]
        shown = "" if setting.default in ("", (), None) else f" (default {setting.default})"
        options: dict[str, Any] = {"dest": setting.name, "default": None, "help": setting.metadata["help"] + shown}
        parser.add_argument(*names, **options, **_argument_type(hints[setting.name]))


def from_arguments(options: argparse.Namespace) -> TrainSettings:
    """Settings of a command line: flags over YAML over defaults.

    Raises:
        ValueError: a YAML key is unknown or a value does not fit.
    """
    values = read_yaml(Path(options.config)) if options.config else {}
    flags = {f.name: getattr(options, f.name) for f in fields(TrainSettings)}
    values |= {name: tuple(v) if isinstance(v, list) else v for name, v in flags.items() if v is not None}
    return TrainSettings(**values)


def read_yaml(path: Path) -> dict[str, Any]:
    """Settings in a YAML file, checked by name and type.

    Raises:
        ValueError: names the key and what it should be.
    """
    import yaml

    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' is not YAML ({error}); write one 'name: value' per line.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"'{path}' holds a {type(raw).__name__}; write one 'name: value' per line.")
    hints = get_type_hints(TrainSettings)
    values = {}
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise ValueError(f"'{path}' has no setting {key!r}; known settings: {', '.join(hints)}.")
        values[name] = _checked(path, name, value, hints[name])
    return values


def differences(settings: TrainSettings, earlier: str) -> dict[str, tuple[Any, Any]]:
    """Settings that decide what is learnt and are not those of an earlier run: name -> (earlier, now).

    Args:
        earlier: that run's settings as YAML. How long and how fast it learns, where and what it writes may change.
    """
    import yaml

    now, before = yaml.safe_load(to_yaml(settings)), yaml.safe_load(earlier)
    return {n: (before[n], now[n]) for n in _LEARNT if n in before and before[n] != now[n]}


def to_yaml(settings: TrainSettings) -> str:
    """All settings as YAML, to be read back by --config."""
    import yaml

    values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()}
    return str(yaml.safe_dump(values, sort_keys=False))


def _checked(path: Path, name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_checked(path, name, item, get_args(hint)[0]) for item in items)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"'{path}' sets {name} to {value!r}; it can be {', '.join(map(repr, get_args(hint)))}.")
        return value
    if hint is float and not isinstance(value, bool):
        with contextlib.suppress(ValueError, TypeError):
            return float(value)  # YAML takes 6e-4 for a string, because it has no point
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"'{path}' sets {name} to {value!r}; it must be of type {hint.__name__}.")
    return value


def _argument_type(hint: Any) -> dict[str, Any]:
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is tuple:
        return {"nargs": "+"} | _argument_type(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    return {"type": hint}
