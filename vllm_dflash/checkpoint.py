"""Names and shapes of a drafter's tensors, checked against its config before anything is loaded.

Headers of the safetensors files are read first, values only where all else is right. vLLM itself leaves a parameter
that no tensor fills at random values without a word, and acceptance is then near zero with nothing to explain it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from vllm_dflash.config import DFlashConfig
from vllm_dflash.weight_files import StoredTensor, read_headers

#: Tensors that a checkpoint may carry and that are not needed: the inverse of d2t, and RoPE buffers.
_IGNORED = ("t2d", "inv_freq")
#: Types of weights that are not quantised, as safetensors writes them.
_FLOATS = ("F32", "BF16", "F16", "F64")


def check_checkpoint(folder: Path, config: DFlashConfig) -> None:
    """Refuse a checkpoint with a missing, superfluous, misshapen or senseless tensor.

    Args:
        folder: local folder with `*.safetensors`.
        config: what its config.json says.

    Raises:
        ValueError: names the tensors, and the nearest expected name of one that is not known.
    """
    stored = read_headers(folder)
    found = {name: tensor.shape for name, tensor in stored.items()}
    required, optional = expected_tensors(config)
    if config.is_quantised:
        problems = _missing_modules(found, required)
    else:
        problems = [
            f"'{name}' is not a tensor of this drafter{_did_you_mean(name, required | optional)}"
            for name in sorted(found.keys() - required.keys() - optional.keys())
            if not name.endswith(_IGNORED)
        ]
        problems += [f"'{name}' is missing" for name in sorted(required.keys() - found.keys())]
        problems += [
            f"'{name}' has shape {list(found[name])}, but config.json asks for {list(shape)}"
            for name, shape in sorted((required | optional).items())
            if name in found and found[name] != shape
        ]
        problems += _wrong_types(stored, required | optional)
    if config.draft_vocab_size != config.vocab_size:
        known = found.keys() | _modules(found)
        problems += [
            f"'{name}' is missing, although draft_vocab_size {config.draft_vocab_size} differs from vocab_size "
            f"{config.vocab_size}"
            for name in ("d2t", "lm_head")
            if name not in known
        ]
    if problems:
        raise ValueError(
            f"drafter '{config.name}' and its config.json do not fit together; it would draft from random values: "
            + "; ".join(problems)
            + ". Re-export the checkpoint."
        )
    if broken := _not_finite(stored):
        raise ValueError(
            f"drafter '{config.name}' has values that are NaN or infinite in {', '.join(broken)}, from which it cannot "
            f"draft; its training diverged or the files are damaged. Download it again, or use an earlier checkpoint."
        )


def expected_tensors(config: DFlashConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The (required, optional) tensors of a drafter: name -> shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    required: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.attention_bias:
            for projection, size in (("q", q_size), ("k", kv_size), ("v", kv_size), ("o", hidden)):
                shapes[f"self_attn.{projection}_proj.bias"] = (size,)
        if config.has_attention_sinks:
            shapes["self_attn.attention_sink_bias"] = (config.num_heads,)
        required |= {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}
    optional: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "d2t": (config.draft_vocab_size,),
    }
    return required, optional


def read_tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the folder's safetensors files, from their headers.

    Raises:
        ValueError: there is no safetensors file, or one is damaged.
    """
    return {name: tensor.shape for name, tensor in read_headers(folder).items()}


def _wrong_types(stored: dict[str, StoredTensor], known: Iterable[str]) -> list[str]:
    """Tensors that loading would convert into numbers that mean nothing."""
    return [
        f"'{name}' has type {stored[name].dtype}, which is none of {', '.join(_types(name))}"
        for name in sorted(known)
        if name in stored and stored[name].dtype not in _types(name)
    ]


def _types(name: str) -> tuple[str, ...]:
    return ("I64", "I32") if name == "d2t" else _FLOATS


def _not_finite(stored: dict[str, StoredTensor]) -> list[str]:
    """Names of the tensors with NaN or infinities; reads all of them, a gigabyte in about a second."""
    import torch

    broken = []
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, "pt") as opened:
            for name in sorted(name for name, tensor in stored.items() if tensor.file == file):
                # One pass: a sum is finite where all of its terms are.
                if stored[name].dtype in _FLOATS and not opened.get_tensor(name).sum(dtype=torch.float64).isfinite():
                    broken.append(name)
    return broken


def _missing_modules(found: dict[str, tuple[int, ...]], required: dict[str, tuple[int, ...]]) -> list[str]:
    # A quantised module has tensors of other names (scales, zero points) and shapes; that it has some can be checked.
    return [f"'{module}' has no tensor" for module in sorted(_modules(required) - _modules(found))]


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def _did_you_mean(name: str, known: dict[str, tuple[int, ...]]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean '{nearest[0]}'?)" if nearest else ""
