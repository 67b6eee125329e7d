"""A drafter whose tensors do not match its config.json is refused before loading, with the tensors' names.

vLLM loads such a drafter without a word, and its acceptance is near zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_config import naming
from tiny_models import write_tiny_drafter

from vllm_dflash.checkpoint import check_checkpoint, expected_tensors, read_tensor_shapes
from vllm_dflash.config import DFlashConfig

HIDDEN, Q_SIZE, KV_SIZE, NUM_HEADS = 64, 128, 64, 4  # of the tiny drafter
REDUCED = {"d2t": torch.zeros(50, dtype=torch.int64), "lm_head.weight": torch.zeros(50, HIDDEN)}


def check(folder: Path) -> None:
    config = DFlashConfig.from_dict(json.loads((folder / "config.json").read_text()), str(folder))
    check_checkpoint(folder, config)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edit the tensors of a written drafter."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good drafter of three layers, to be damaged."""
    return write_tiny_drafter(tmp_path / "drafter")


# ---- good checkpoints


def test_good_checkpoint_passes(folder):
    check(folder)


def test_shipped_drafter_passes(drafter):
    check(drafter)


def test_shapes_in_the_headers_are_those_of_the_tensors(drafter):
    with safe_open(drafter / "model.safetensors", "pt") as file:
        expected = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert read_tensor_shapes(drafter) == expected


def test_own_embedding_and_head_are_allowed(tmp_path):
    own = {"embed_tokens.weight": torch.zeros(128, HIDDEN), "lm_head.weight": torch.zeros(128, HIDDEN)}
    check(write_tiny_drafter(tmp_path, own))


def test_unused_buffers_are_allowed(tmp_path):
    unused = {"t2d": torch.zeros(128, dtype=torch.bool), "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    check(write_tiny_drafter(tmp_path, unused))


def test_shards_are_read_together(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = {name: tensors.pop(name) for name in sorted(tensors)[:20]}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(tensors, folder / "model-00002-of-00002.safetensors")
    check(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=naming("'fc.weight' is missing", "Re-export")):
        check(folder)


# ---- tensors that do not match


def test_missing_tensor_is_refused(folder):
    change(folder, lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"))
    message = naming(str(folder), "'layers.1.self_attn.k_norm.weight' is missing", "random values", "Re-export")
    with pytest.raises(ValueError, match=message):
        check(folder)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("layers.1.self_attn.k_norm.weight", "layers.1.self_attn.k_nrom.weight"),
        ("layers.2.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"),
        ("hidden_norm.weight", "hiden_norm.weight"),
    ],
)
def test_misspelt_tensor_is_refused_with_the_right_name(folder, right, wrong):
    change(folder, lambda tensors: tensors.update({wrong: tensors.pop(right)}))
    message = naming(f"'{wrong}' is not a tensor", f"did you mean '{right}'?", f"'{right}' is missing")
    with pytest.raises(ValueError, match=message):
        check(folder)


@pytest.mark.case("F33")
def test_superfluous_layer_is_refused(tmp_path):
    """The checkpoint has more layers than its config.json says: vLLM would serve the first of them."""
    write_tiny_drafter(tmp_path)
    change(tmp_path, lambda t: t.update({n.replace(".2.", ".3."): x.clone() for n, x in t.items() if ".2." in n}))
    with pytest.raises(ValueError, match=naming("'layers.3.self_attn.q_proj.weight' is not a tensor of this drafter")):
        check(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "right"),
    [
        ("fc.weight", (64, 192), "[64, 128]"),  # three feature layers, config.json names two
        ("layers.0.self_attn.q_proj.weight", (64, 64), "[128, 64]"),
        ("layers.2.self_attn.k_norm.weight", (64,), "[32]"),
        ("layers.1.mlp.down_proj.weight", (128, 64), "[64, 128]"),
        ("lm_head.weight", (100, 64), "[128, 64]"),
        ("embed_tokens.weight", (100, 64), "[128, 64]"),
    ],
)
def test_wrong_shape_is_refused_with_both_shapes(tmp_path, name, shape, right):
    write_tiny_drafter(tmp_path, {name: torch.zeros(shape)})
    with pytest.raises(ValueError, match=naming(f"'{name}' has shape {list(shape)}", f"asks for {right}", "Re-export")):
        check(tmp_path)


def test_every_problem_is_named_at_once(folder):
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["norm.weight"]
        tensors["fc.wieght"] = tensors.pop("fc.weight")
        tensors["hidden_norm.weight"] = torch.zeros(63)

    change(folder, damage)
    with pytest.raises(ValueError, match=naming("'norm.weight' is missing", "'fc.wieght'", "[63]", "[64]")):
        check(folder)


def test_attention_bias_needs_its_biases(tmp_path):
    sizes = {"q": Q_SIZE, "k": KV_SIZE, "v": KV_SIZE, "o": HIDDEN}
    biases = {
        f"layers.{layer}.self_attn.{projection}_proj.bias": torch.zeros(size)
        for layer in range(3)
        for projection, size in sizes.items()
    }
    check(write_tiny_drafter(tmp_path / "with", biases, attention_bias=True))
    without = write_tiny_drafter(tmp_path / "without", attention_bias=True)
    with pytest.raises(ValueError, match=naming(*(f"'{name}' is missing" for name in biases))):
        check(without)
    unexpected = write_tiny_drafter(tmp_path / "unexpected", biases)
    with pytest.raises(ValueError, match=naming("'layers.0.self_attn.q_proj.bias' is not a tensor of this drafter")):
        check(unexpected)


def test_attention_sinks_need_their_tensors(tmp_path):
    sinks = {f"layers.{layer}.self_attn.attention_sink_bias": torch.zeros(NUM_HEADS) for layer in range(3)}
    check(write_tiny_drafter(tmp_path / "with", sinks, add_swa_attention_sink_bias=True))
    without = write_tiny_drafter(tmp_path / "without", add_swa_attention_sink_bias=True)
    with pytest.raises(ValueError, match=naming(*(f"'{name}' is missing" for name in sinks))):
        check(without)


# ---- a reduced draft vocabulary


def test_reduced_vocabulary_passes_with_its_map_and_head(tmp_path):
    inverse = {"t2d": torch.zeros(128, dtype=torch.bool)}
    check(write_tiny_drafter(tmp_path, REDUCED | inverse, draft_vocab_size=50))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("absent", ["d2t", "lm_head.weight"])
@pytest.mark.case("F9")
def test_reduced_vocabulary_needs_its_map_and_head(tmp_path, absent, quantised):
    """Without them the target's head would be cut, and every draft would be another token than meant."""
    tensors = {name: tensor for name, tensor in REDUCED.items() if name != absent}
    quantization = {"quantization_config": {"quant_method": "gptq"}} if quantised else {}
    write_tiny_drafter(tmp_path, tensors, draft_vocab_size=50, **quantization)
    name = absent.removesuffix(".weight")
    message = naming(f"'{name}' is missing", "draft_vocab_size 50", "vocab_size 128", "Re-export")
    with pytest.raises(ValueError, match=message):
        check(tmp_path)


def test_map_of_another_length_is_refused(tmp_path):
    write_tiny_drafter(tmp_path, REDUCED | {"d2t": torch.zeros(49, dtype=torch.int64)}, draft_vocab_size=50)
    with pytest.raises(ValueError, match=naming("'d2t' has shape [49]", "asks for [50]")):
        check(tmp_path)


# ---- files that cannot be read


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = naming(str(folder), "no *.safetensors file", "save it in the safetensors format")
    with pytest.raises(ValueError, match=message):
        check(folder)


def file_content(header: bytes, num_data_bytes: int) -> bytes:
    """The layout of safetensors: length of the header, header, data."""
    return len(header).to_bytes(8, "little") + header + bytes(num_data_bytes)


HEADER = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'  # 54 bytes, for 8 bytes of data
DAMAGED = {
    "empty": (b"", "a header of 0 bytes is announced, the file has 0"),
    "shorter than a length": (b"\x00\x01", "a header of 256 bytes is announced, the file has 2"),
    "no header": (bytes(8) + b"{}", "a header of 0 bytes is announced, the file has 10"),
    "header longer than file": ((55).to_bytes(8, "little") + HEADER, "a header of 55 bytes is announced"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "the file has 63"),
    "truncated data": (file_content(HEADER, 7), "70 bytes are announced, 69 are there"),
    "data too long": (file_content(HEADER, 9), "70 bytes are announced, 71 are there"),
    "no JSON": (file_content(b"<x>", 0), "Expecting value"),
    "no UTF-8": (file_content(HEADER.replace(b"x", b"\xff"), 8), "decode"),
    "a list": (file_content(b"[]", 0), ""),
    "a word": (file_content(b'"x"', 0), ""),
    "a number for a tensor": (file_content(b'{"x":1}', 0), ""),
    "no offsets": (file_content(b'{"x":{"shape":[2]}}', 0), "data_offsets"),
    "one offset": (file_content(b'{"x":{"shape":[2],"data_offsets":[0]}}', 0), ""),
}


def test_undamaged_file_of_that_layout_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(file_content(HEADER, 8))
    assert read_tensor_shapes(tmp_path) == {"x": (2,)}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_is_refused(folder, case):
    content, reason = DAMAGED[case]
    (folder / "model.safetensors").write_bytes(content)
    message = naming(str(folder / "model.safetensors"), "damaged or truncated", reason, "copy or download it again")
    with pytest.raises(ValueError, match=message):
        check(folder)


@pytest.mark.parametrize("missing_bytes", [1, 1000, 300_000])
def test_interrupted_copy_is_refused(folder, missing_bytes):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-missing_bytes])
    with pytest.raises(ValueError, match=naming(str(file), f"{len(content) - missing_bytes} are there", "again")):
        check(folder)


# ---- quantised checkpoints


@pytest.fixture
def quantised(folder):
    """The drafter with GPTQ's tensor names: int32 weights of packed shape, scales, zero points."""
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(raw))

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_proj." in name]:
            module, out_size = name.removesuffix(".weight"), len(tensors.pop(name))
            tensors[f"{module}.qweight"] = torch.zeros(8, out_size, dtype=torch.int32)
            tensors[f"{module}.qzeros"] = torch.zeros(1, out_size // 8, dtype=torch.int32)
            tensors[f"{module}.scales"] = torch.zeros(1, out_size)

    change(folder, pack)
    return folder


@pytest.mark.case("F18")
def test_quantised_checkpoint_passes_with_tensors_of_other_names(quantised):
    check(quantised)


@pytest.mark.case("F18")
def test_the_same_tensors_are_refused_without_a_quantization_config(quantised):
    raw = json.loads((quantised / "config.json").read_text())
    del raw["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=naming("'layers.0.self_attn.q_proj.weight' is missing", "qweight")):
        check(quantised)


@pytest.mark.parametrize("module", ["fc", "layers.1.self_attn.k_proj", "layers.2.input_layernorm"])
@pytest.mark.case("F18")
def test_quantised_module_without_any_tensor_is_refused(quantised, module):
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{module}.")]:
            del tensors[name]

    change(quantised, drop)
    with pytest.raises(ValueError, match=naming(str(quantised), f"'{module}' has no tensor", "Re-export")):
        check(quantised)


def test_expected_tensors_of_one_layer_are_counted_once():
    """Eleven per layer and three outside; embedding, head and token map may come with them."""
    config = DFlashConfig.from_dict(json.loads(json.dumps(EIGHT_LAYERS)), "eight")
    required, optional = expected_tensors(config)
    assert len(required) == 8 * 11 + 3
    assert required["fc.weight"] == (2560, 5 * 2560)
    assert required["layers.7.self_attn.o_proj.weight"] == (2560, 32 * 128)
    assert optional == {"embed_tokens.weight": (151936, 2560), "lm_head.weight": (151936, 2560), "d2t": (151936,)}


EIGHT_LAYERS = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 8,
    "vocab_size": 151936,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
