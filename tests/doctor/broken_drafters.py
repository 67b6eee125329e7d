"""The shipped drafter, broken in one way at a time: what trainers, converters and users have done to drafters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_dflash.config import DFlashConfig
from vllm_dflash.doctor.probe import Probe
from vllm_dflash.doctor.replay import _anchors, _drafter, _row
from vllm_dflash.doctor.subject import Subject, as_is
from vllm_dflash.training.blocks import make_blocks

DRAFTERS = Path(__file__).resolve().parent.parent.parent / "examples" / "drafters"
SHIPPED = DRAFTERS / "smollm2-135m-instruct-dflash"
BIDIRECTIONAL = DRAFTERS / "smollm2-135m-b8"

Tensors = dict[str, Tensor]
#: Changes a drafter in place; the probe is there for those that have to be fitted to be broken.
Breakage = Callable[[dict[str, Any], Tensors, Probe], None]


@dataclass(frozen=True)
class Case:
    """One way to break a drafter."""

    diagnosis: str  # the name that the doctor has to find
    breakage: Breakage
    repair: str = ""  # part of the repair's words
    drafter: Path = SHIPPED
    template: str | None = None  # of the prompts, in place of the target's
    users: tuple[str, ...] = ()  # troubles of users that this is one of
    is_slow: bool = False


def write_broken(folder: Path, case: Case, probe: Probe) -> Path:
    """The broken drafter of a case."""
    raw = json.loads((case.drafter / "config.json").read_text())
    tensors = load_file(case.drafter / "model.safetensors")
    case.breakage(raw, tensors, probe)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def read_subject(folder: Path) -> Subject:
    """A drafter as the doctor sees it, all of its block drafted."""
    raw = json.loads((folder / "config.json").read_text())
    tensors = {n: t.float() if n != "d2t" else t.long() for n, t in load_file(folder / "model.safetensors").items()}
    config = DFlashConfig.from_dict(raw, str(folder))
    return Subject(folder, raw, config, tensors, (config.draft_block_size or 8) - 1, 100000.0)


def in_config(**changes: Any) -> Breakage:
    """Replace keys of config.json; those of dflash_config where they are there."""

    def change(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
        for key, value in changes.items():
            if key in raw["dflash_config"]:
                raw["dflash_config"][key] = value
            if key in raw or key not in raw["dflash_config"]:
                raw[key] = value

    return change


def in_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Breakage:
    """Replace one tensor by a function of it."""

    def apply(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
        tensors[name] = change(tensors[name].float() if name != "d2t" else tensors[name]).to(tensors[name].dtype)

    return apply


def layers_moved(step: int) -> Breakage:
    """Feature layers counted from another start."""

    def apply(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
        raw["dflash_config"]["target_layer_ids"] = [i + step for i in raw["dflash_config"]["target_layer_ids"]]

    return apply


def interleave_rotary_rows(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
    """Queries and keys as a converter leaves them that keeps the order of GPT-J's RoPE."""
    size = raw["head_dim"]
    order = torch.stack([torch.arange(size // 2), torch.arange(size // 2, size)], 1).flatten()
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = tensor.view(-1, size, tensor.shape[1])[:, order].reshape(tensor.shape)
        elif "q_norm" in name or "k_norm" in name:
            tensors[name] = tensor[order]


def predict_from_anchor(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
    """A head fitted, by ridge regression on the probe, to give in slot k the target's choice behind its own position.

    The layers see masks that they were not trained with, as such a drafter never uses the shipped one's layout.
    """
    raw["dflash_config"]["mask_token_id"] = 0
    shipped = read_subject(SHIPPED)
    setup = as_is(replace(shipped, config=replace(shipped.config, mask_token_id=0)), probe)
    setup = replace(setup, predicts_from_anchor=True)
    row, drafter = _row(probe, setup), _drafter(setup)
    column = torch.full((len(probe.embedding),), -1)
    column[setup.target_ids] = torch.arange(len(setup.target_ids))
    with torch.inference_mode():
        blocks = make_blocks(row, _anchors(row), 4)
        masks = replace(blocks, labels=torch.zeros_like(blocks.labels))
        is_label = blocks.label_mask
        hidden = drafter(row, masks, probe.embedding)[is_label].double()
        rows = blocks.label_rows[is_label]
        assert probe.row.top_ids is not None
        assert probe.row.top_logprobs is not None
        columns, wanted = column[probe.row.top_ids[rows].long()], probe.row.top_logprobs[rows].double() + 14
        logits = torch.zeros(len(hidden), len(setup.target_ids) + 1, dtype=torch.float64)
        logits.scatter_(1, torch.where(columns >= 0, columns, len(setup.target_ids)), wanted.clamp(min=0))
        gram = hidden.T @ hidden
        ridge = 1e-4 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        fitted = torch.linalg.solve(gram + ridge, hidden.T @ logits[:, :-1])
        tensors["lm_head.weight"] = fitted.T.to(torch.bfloat16)


def head_of_first_tokens(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
    """The target's head in place of its own: its first rows, where the map says other tokens."""
    tensors["lm_head.weight"] = probe.head[: raw["draft_vocab_size"]].to(torch.bfloat16).clone()


def quantise(bits: int) -> Breakage:
    """All matrices but the head through `bits` bits and back, by row."""

    def apply(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and name != "lm_head.weight":
                scale = tensor.float().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                tensors[name] = ((tensor.float() / scale).round() * scale).to(tensor.dtype)

    return apply


def without_scales(tensor: Tensor) -> Tensor:
    """int8 values, without the scale of each row."""
    return (tensor / (tensor.abs().amax(1, keepdim=True) / 127)).round()


def drawn(tensor: Tensor) -> Tensor:
    """What nn.Linear is initialised with."""
    bound = tensor.shape[1] ** -0.5
    return torch.empty_like(tensor).uniform_(-bound, bound, generator=torch.Generator().manual_seed(3))


def untrained(raw: dict[str, Any], tensors: Tensors, probe: Probe) -> None:
    """All matrices as initialised, the head the target's."""
    generator = torch.Generator().manual_seed(4)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name != "lm_head.weight":
            tensors[name] = (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
        elif tensor.dim() == 1 and name != "d2t":
            tensors[name] = torch.ones_like(tensor)


def other_basis(tensor: Tensor) -> Tensor:
    """fc for a target of the same shape whose hidden units are others."""
    order = torch.randperm(tensor.shape[1], generator=torch.Generator().manual_seed(5))
    return tensor[:, order]


#: Of another family: behind it the target ends its turn at once.
OTHER_TEMPLATE = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"

CASES: dict[str, Case] = {
    "target layers one too low": Case("target-layers", layers_moved(-1), "[1, 8, 14, 20, 27]", users=("F7",)),
    "features in reverse order": Case(
        "feature-order",
        in_tensor("fc.weight", lambda t: t.unflatten(1, (5, -1)).flip(1).flatten(1)),
        "fc.weight",
        users=("F7",),
        is_slow=True,
    ),
    "predicts from its anchor": Case("anchor", predict_from_anchor, "retrain it", users=("F8",)),
    "rope base a hundred times too small": Case(
        "rope", in_config(rope_theta=1000.0), '"rope_theta": 100000.0', users=("F31",)
    ),
    "head of other tokens": Case("head", head_of_first_tokens, "lm_head.weight", users=("F9",), is_slow=True),
    "map of zeros": Case("d2t", in_tensor("d2t", torch.zeros_like), "d2t", users=("F9",)),
    "another mask token": Case("mask-token", in_config(mask_token_id=0), '"mask_token_id": 16', users=("F30",)),
    # Embeddings of this target are small beside what the layers add: a factor below 24 costs nothing.
    "embeddings times 64": Case(
        "embedding-scale", in_config(input_embedding_scale=64.0), '"input_embedding_scale": 1.0', users=("F32",)
    ),
    "fc at random": Case("unfilled-tensor", in_tensor("fc.weight", drawn), "re-export", users=("F18",)),
    "one projection of zeros": Case(
        "unfilled-tensor", in_tensor("layers.1.self_attn.v_proj.weight", torch.zeros_like), "re-export", users=("F18",)
    ),
    "scales dropped": Case(
        "quantisation", in_tensor("layers.0.mlp.down_proj.weight", without_scales), "scales", users=("F18",)
    ),
    "three bits": Case("quantisation", quantise(3), "bf16", users=("F18",)),
    "untrained": Case("untrained", untrained, "trained checkpoint"),
    "of another target": Case("untrained-or-other-target", in_tensor("fc.weight", other_basis), "train"),
    "interleaved queries and keys": Case(
        "rope", interleave_rotary_rows, '"is_neox_style": false', users=("F31",), is_slow=True
    ),
    "map of ids": Case(
        "d2t", in_tensor("d2t", lambda t: t + torch.arange(len(t))), "d2t[i]", users=("F9",), is_slow=True
    ),
    "map shifted by one": Case("d2t", in_tensor("d2t", lambda t: t + 1), "d2t[i]", users=("F9",), is_slow=True),
    "a longer block than trained": Case(
        "block-length", in_config(block_size=16), "block_size", BIDIRECTIONAL, users=("F27",), is_slow=True
    ),
    "another chat template": Case(
        "chat-template",
        lambda *_: None,
        "chat template of the target",
        template=OTHER_TEMPLATE,
        users=("F44b",),
    ),
}

#: What costs no more than a few percent shows on more answers only: neighbouring layers of a deep target are nearly
#: alike, and the first slots of a small drafter hardly look at the masks behind them.
SUBTLE: dict[str, Case] = {
    "target layers one too high": Case("target-layers", layers_moved(1), "[1, 8, 14, 20, 27]", users=("F7",)),
    "bidirectional in place of causal": Case(
        "causality", in_config(is_causal=False, causal=False), '"is_causal": true', users=("F29",)
    ),
}
