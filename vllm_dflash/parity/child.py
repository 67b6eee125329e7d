"""Start an engine in a child process, show its progress, and say plainly why one died.

One engine after the other: two of them would not fit a GPU's memory, and an engine's process frees it for certain.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from vllm_dflash.atomic import write_atomically

_TAIL_LINES = 15
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10  # between SIGTERM and SIGKILL

#: The child imports the package that we are, also where that is not the installed one but stands in this folder.
_SEARCH_PATH = [] if Path(__file__).parents[2] == Path.cwd() else ["-P"]

#: What vLLM's own messages mean here: part of the log -> sentence.
_KNOWN = {
    "are not yet supported with speculative decoding": (
        "vLLM refuses min_p and logit_bias with speculation, and this version of the plugin does not apply them "
        "either; leave --min-p and --logit-bias out."
    ),
}


class EngineDied(RuntimeError):
    """A child ended without all its answers."""


def answer(label: str, output: Path, engine: dict[str, Any], sampling: dict[str, Any], requests: list[Any]) -> Any:
    """Content of `output` once a child has answered all requests; see answers.py. Starts none where all are there.

    Args:
        label: what the engine is, for the progress bar and messages.
        output: file of the answers; the job and the log stand beside it.

    Raises:
        EngineDied: with the reason where it is known, and the end of the log.
    """
    known = read_answers(output)
    wanted = {request["id"] for request in requests}
    if wanted <= known.get("answers", {}).keys() and "facts" in known:
        return known
    job = {
        "engine": engine,
        "sampling": sampling,
        "max_num_waiting": 2 * engine["max_num_seqs"],
        "parent": os.getpid(),
        "requests": requests,
        "output": str(output),
    }
    job_file, log_file = output.with_suffix(".job"), output.with_suffix(".log")
    write_atomically(job_file, lambda temporary: temporary.write_text(json.dumps(job)))
    with log_file.open("w") as log:
        child = subprocess.Popen(
            [sys.executable, *_SEARCH_PATH, "-m", "vllm_dflash.parity.answers", str(job_file)],
            env=_environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # workers of the engine end with it, and Ctrl-C reaches us first
        )
        try:
            _watch(child, label, output, wanted)
        finally:
            _end(child)
    found = read_answers(output)
    if child.returncode != 0 or not wanted <= found.get("answers", {}).keys():
        raise EngineDied(death_notice(label, child.returncode, log_file))
    return found


def read_answers(output: Path) -> dict[str, Any]:
    """What a child has written so far; empty where nothing."""
    return json.loads(output.read_text()) if output.exists() else {}


def death_notice(label: str, return_code: int, log_file: Path) -> str:
    """Why a child died, as one sentence, and the tail of its log."""
    lines = [line.rstrip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    text = "\n".join(lines)
    reason = next((sentence for part, sentence in _KNOWN.items() if part in text), None)
    if reason is not None:
        return reason
    how = f"signal {signal.Signals(-return_code).name}" if return_code < 0 else f"exit code {return_code}"
    tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"the engine {label} ended with {how}; the end of its log, {log_file}:\n{tail}"


def _environment() -> dict[str, str]:
    """The user's, completed; what is set there stays."""
    import torch

    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # vLLM would leave one core idle, half of a small machine
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not torch.cuda.is_available():
        # Three processes would take three times as long to start; on CPUs nothing else is different.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return defaults | os.environ


def _watch(child: subprocess.Popen[bytes], label: str, output: Path, wanted: set[str]) -> None:
    from tqdm import tqdm

    with tqdm(total=len(wanted), desc=label, unit="answer", mininterval=1.0) as bar:
        seen = 0
        while child.poll() is None:
            time.sleep(_POLL_SECONDS)
            modified = output.stat().st_mtime_ns if output.exists() else 0
            if modified != seen:
                seen = modified
                bar.update(len(wanted & read_answers(output).get("answers", {}).keys()) - bar.n)
        bar.update(len(wanted & read_answers(output).get("answers", {}).keys()) - bar.n)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group, also where the child itself is gone already."""
    for which, patience in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, which)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience)
