"""Drafters that are damaged, wrong or hostile are refused in one message, before anything is loaded, and run nothing.

Each is given to vLLM as a user would give it, up to the point where loading would begin.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import drafter_config, drafter_tensors, write_tiny_drafter

from vllm_dflash.plugin import register
from vllm_dflash.speculative_config import read_drafter
from vllm_dflash.weight_files import read_headers

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good drafter, to be damaged."""
    return write_tiny_drafter(tmp_path / "drafter")


@pytest.fixture
def give(tiny_target: Path) -> Callable[[Path], Any]:
    """Gives a drafter to vLLM; returns the configuration of the engine that would now be started."""
    from vllm.engine.arg_utils import EngineArgs

    def configure(folder: Path) -> Any:
        register()
        arguments = EngineArgs(
            str(tiny_target),
            dtype="float32",
            max_model_len=128,
            speculative_config={"method": "dflash", "model": str(folder)},
        )
        return arguments.create_engine_config()

    return configure


@pytest.fixture
def refused(give: Callable[[Path], Any]) -> Callable[..., None]:
    """Asserts that a drafter is refused in one line that has these parts in this order."""

    def check(folder: Path, *parts: str) -> None:
        with pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts)) as caught:
            give(folder)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 900

    return check


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors by name, "__" for "."; None removes."""
    tensors: dict[str, torch.Tensor | None] = dict(load_file(folder / WEIGHTS))
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def write_index(folder: Path, **shards: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def test_the_undamaged_drafter_is_accepted(give, folder):
    assert give(folder).speculative_config.num_speculative_tokens == 7


# ---- files with weights


def test_truncated_file(refused, folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-1000])
    refused(folder, WEIGHTS, "damaged or truncated", f"{len(content)} bytes are announced", "download it again")


LIES = {
    "shape larger than its data": lambda entry: entry | {"shape": [64, 128000]},
    "unknown type": lambda entry: entry | {"dtype": "F31"},
    "another type": lambda entry: entry | {"dtype": "BF16"},
    "overlapping data": lambda entry: (
        entry | {"data_offsets": [entry["data_offsets"][0] - 8, entry["data_offsets"][1]]}
    ),
    "negative size": lambda entry: entry | {"shape": [-64, -128]},
    "huge size": lambda entry: entry | {"shape": [2**62, 2**62]},
    "data before the file": lambda entry: entry | {"data_offsets": [-8, entry["data_offsets"][1]]},
    "nothing": lambda entry: {},
}


@pytest.mark.parametrize("lie", LIES)
def test_header_that_lies(refused, folder, lie):
    content = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["fc.weight"] = LIES[lie](header["fc.weight"])
    changed = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    refused(folder, WEIGHTS, "damaged or truncated", "download it again")


def test_header_that_is_nested_without_end(refused, folder):
    header = b'{"x":' + b"[" * 100_000
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, WEIGHTS, "damaged or truncated")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_wrong_type(refused, folder, dtype):
    rewrite(folder, fc__weight=torch.zeros(64, 128).to(dtype))
    refused(folder, str(folder), "config.json", "'fc.weight' has type", "F32, BF16", "Re-export")


def test_map_of_tokens_with_fractions(refused, tmp_path):
    reduced = {"d2t": torch.zeros(50), "lm_head.weight": torch.ones(50, 64)}
    refused(write_tiny_drafter(tmp_path / "d", reduced, draft_vocab_size=50), "'d2t' has type F32", "I64", "Re-export")


def test_wrong_shape(refused, folder):
    rewrite(folder, fc__weight=torch.zeros(64, 192))
    refused(folder, str(folder), "'fc.weight' has shape [64, 192]", "config.json asks for [64, 128]", "Re-export")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_no_numbers(refused, folder, value, dtype):
    broken = torch.ones(64, 128)
    broken[3, 5] = value
    rewrite(folder, fc__weight=broken.to(dtype))
    refused(folder, str(folder), "NaN or infinite in fc.weight", "earlier checkpoint")


def test_large_values_are_numbers(give, folder):
    rewrite(folder, fc__weight=torch.full((64, 128), 6e4).half())
    give(folder)


# ---- what could run code


def test_pickle_is_refused_unopened(refused, folder, tmp_path):
    trace = tmp_path / "trace"
    content = pickle.dumps({"fc.weight": Bomb(trace)})
    pickle.loads(content)
    assert trace.exists(), "it goes off when opened"
    trace.unlink()
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    refused(folder, str(folder), "no *.safetensors file, only pytorch_model.bin", "safetensors format", "run code")
    (folder / WEIGHTS).write_bytes(content)  # under the right name it is no safetensors file
    refused(folder, WEIGHTS, "damaged or truncated")
    assert not trace.exists()


@pytest.mark.feature("hostile drafters", "code in the drafter's folder is never run; greedy text equals plain's")
def test_code_beside_the_weights_is_not_run(engine, tiny_target, folder, tmp_path):
    """As published drafters have it: auto_map in config.json, code, other people's pickles."""
    trace = tmp_path / "trace"
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nclass Evil: pass\n")
    (folder / "__init__.py").write_text("from . import evil\n")
    auto_map = {name: "evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")}
    (folder / "config.json").write_text(json.dumps(drafter_config(auto_map=auto_map)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(trace)))
    prompts = [[3, 5, 7], [11, 2, 90]]
    results = engine(tiny_target, drafter=folder, max_model_len=64, max_num_seqs=2).generate(prompts, max_tokens=8)
    assert any(draft.tokens for result in results for draft in result.drafts)
    plain = engine(tiny_target, max_model_len=64, max_num_seqs=2).token_ids(prompts, max_tokens=8)
    assert [result.token_ids for result in results] == plain
    assert not trace.exists()


# ---- indices and links


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "..\\x.safetensors"])
def test_index_that_leads_out_of_the_folder(refused, folder, name):
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    write_index(folder, fc=name)
    refused(folder, INDEX, f"names '{name}'", "own folder", "re-export")


def test_index_that_names_missing_files(refused, folder):
    write_index(folder, **{"fc.weight": WEIGHTS, "norm.weight": "model-00002-of-00002.safetensors"})
    refused(folder, str(folder), "lacks model-00002-of-00002.safetensors", INDEX, "download it again")


def test_file_that_the_index_leaves_out(refused, folder):
    """vLLM does not load it, so what is in it alone is missing."""
    tensors = load_file(folder / WEIGHTS)
    save_file({"norm.weight": tensors.pop("norm.weight")}, folder / "left-out.safetensors")
    save_file(tensors, folder / WEIGHTS)
    write_index(folder, **dict.fromkeys(tensors, WEIGHTS))
    refused(folder, str(folder), "'norm.weight' is missing")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": [1]}', "[" * 100_000])
def test_index_that_is_none(refused, folder, content):
    (folder / INDEX).write_text(content)
    refused(folder, INDEX, "is damaged", "download it again")


def test_second_set_of_weights(refused, folder):
    """vLLM would take the second and say nothing."""
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    refused(folder, str(folder), "would read consolidated.safetensors alone", "keep one set")


def test_snapshot_of_the_hugging_face_cache(give, folder, tmp_path):
    """There every file is a link to a blob outside of its folder."""
    repository = tmp_path / "models--someone--drafter"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / f"{number:064x}")
    give(snapshot)
    assert len(read_headers(snapshot)) == len(drafter_tensors(drafter_config()))


def test_link_to_nothing(refused, folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../../blobs/0")
    refused(folder, WEIGHTS, "leads to no file", "download it again")


def test_link_to_what_never_ends(refused, folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")
    refused(folder, WEIGHTS, "leads to no file")


# ---- folders and config.json


def test_empty_folder(refused, tmp_path):
    refused(tmp_path, f"'{tmp_path}' has no readable config.json", "No such file", "give 'model'")


def test_folder_with_nothing_but_a_config(refused, folder):
    (folder / WEIGHTS).unlink()
    refused(folder, str(folder), "no *.safetensors file; save it")


NO_CONFIG = {
    "": "Expecting value",
    "{": "Expecting",
    "[1]": "holds a list",
    '"x"': "holds a str",
    "[" * 100_000: "recursion",
}


@pytest.mark.parametrize("content", NO_CONFIG, ids=["empty", "cut", "list", "text", "nested"])
def test_config_that_is_none(refused, folder, content):
    (folder / "config.json").write_text(content)
    refused(folder, f"'{folder}' has no readable config.json", NO_CONFIG[content], "give 'model'")


NUMBERS: dict[str, tuple[Any, str]] = {
    "num_hidden_layers": (10**12, "no drafter has more than 1000"),
    "hidden_size": (10**12, "no drafter has more than"),
    "intermediate_size": (2**31, "no drafter has more than"),
    "head_dim": (10**30, "no drafter has more than"),
    "max_position_embeddings": (10**10, "no drafter has more than"),
    "vocab_size": (10**9, "they use different tokenizers"),
    "rms_norm_eps": (float("inf"), "positive number"),
    "rope_theta": (float("nan"), "positive number"),
    "num_attention_heads": (-1, "whole number"),
    "num_key_value_heads": (2.0, "whole number"),
    "num_target_layers": (10**9, "trained for a target with 1000000000 layers"),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_that_nothing_can_have(refused, folder, key):
    value, message = NUMBERS[key]
    (folder / "config.json").write_text(json.dumps(drafter_config(layer_types=None) | {key: value}))
    refused(folder, str(folder), message)


def test_block_longer_than_vllm_can_verify_is_cut(give, folder):
    (folder / "config.json").write_text(json.dumps(drafter_config(block_size=10**9)))
    assert give(folder).speculative_config.num_speculative_tokens == 128


@pytest.fixture
def powerless(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Makes whoever runs this test an ordinary user until its end; root may read everything."""
    closed = [(parent, parent.stat().st_mode) for parent in tmp_path.parents if parent.stat().st_mode & 0o055 != 0o055]

    def give_up_power() -> None:
        if os.geteuid() == 0:
            for parent, _ in closed:
                parent.chmod(0o755)
            os.seteuid(NOBODY)

    yield give_up_power
    if os.getuid() == 0:
        os.seteuid(0)
        for parent, mode in closed:
            parent.chmod(mode)


@pytest.mark.parametrize("closed", [".", WEIGHTS, "config.json"])
def test_files_that_may_not_be_read(powerless, folder, tmp_path, closed):
    """The drafter alone is looked at: an ordinary user might not reach the target of these tests either."""
    tmp_path.chmod(0o755)
    (folder / closed).chmod(0)
    powerless()
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder))}.*Permission denied.*give") as caught:
        read_drafter({"method": "dflash", "model": str(folder)}, None, None)
    assert "\n" not in str(caught.value)
