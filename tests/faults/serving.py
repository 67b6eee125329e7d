"""A real `vllm serve` of a tiny target with drafts on, as its own processes, which tests may kill."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

START_SECONDS = 400
MAX_LEN = 512


class Server:
    """One server on a free loopback port; `log` is what it wrote."""

    def __init__(self, target: Path, drafter: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(target), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", str(MAX_LEN), "--max-num-seqs", "8", "--block-size", "32"]
        command += ["--speculative-config", json.dumps({"method": "dflash", "model": str(drafter)})]
        command += ["--additional-config", json.dumps({"dflash": {"draft_length": "fixed"}})]
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # front end, engine core and worker are processes
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        environment.pop("TRITON_INTERPRET", None)
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
        self._wait_until_healthy()
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)

    def complete(self, prompt: list[int], **parameters: Any) -> httpx.Response:
        """Answer of /v1/completions; greedy unless `parameters` say otherwise."""
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, "return_token_ids": True}
        return httpx.post(f"{self.url}/v1/completions", json=body | parameters, timeout=60)

    def token_ids(self, prompt: list[int], **parameters: Any) -> list[int]:
        return self.complete(prompt, **parameters).raise_for_status().json()["choices"][0]["token_ids"]

    def metric(self, name: str) -> float:
        """Sum of a Prometheus metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))

    def kill(self, title: str) -> None:
        """SIGKILL for the first process whose title has this word."""
        [victim, *_] = [process for process in self.descendants if title in " ".join(process.cmdline())]
        os.kill(victim.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end; kill whatever is left after half a minute."""
        if self.process.poll() is None:
            self.process.terminate()
        self.wait_until_gone(30)
        for process in self.alive():
            process.kill()
        self.process.wait(30)

    def wait_until_gone(self, seconds: float) -> None:
        """Until none of its processes runs, or the time is over."""
        psutil.wait_procs(self.alive(), timeout=seconds)

    def alive(self) -> list[psutil.Process]:
        """Its processes that still run, the server's own among them."""
        own = [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        processes = [process for process in self.descendants if process.is_running()]
        return own + [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]

    def _wait_until_healthy(self) -> None:
        def is_healthy() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
            try:
                return httpx.get(f"{self.url}/health", timeout=5).is_success
            except httpx.TransportError:
                return False

        wait_until(is_healthy, START_SECONDS, "the server is up")


def wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until something is so; fails the test where it takes longer."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds} s it was not so that {what}")
        time.sleep(0.2)
