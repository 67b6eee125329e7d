"""A real `vllm serve` with two data-parallel ranks, as its own processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

#: Six processes import vLLM, on two cores or less.
START_SECONDS = 500
ANSWER_SECONDS = 60


class RankServer:
    """Two ranks with drafts behind one port; `log` is what all processes wrote."""

    def __init__(self, target: Path, drafter: Path, folder: Path, options: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        command = [str(Path(sys.executable).parent / "vllm"), "serve", str(target), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "256", "--max-num-seqs", "8", "--num-gpu-blocks-override", "32"]
        command += ["--data-parallel-size", "2", "--api-server-count", "1"]
        command += ["--speculative-config", json.dumps({"method": "dflash", "model": str(drafter)})]
        command += ["--additional-config", json.dumps({"dflash": options})]
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would give each rank a NUMA node of its own
            "OMP_NUM_THREADS": "1",
            "DFLASH_CACHE": str(folder),
        }
        environment.pop("TRITON_INTERPRET", None)
        with self.log.open("w") as stream:
            self._process = subprocess.Popen(
                command, stdout=stream, stderr=stream, env=environment, start_new_session=True
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def token_ids(self, prompt: list[int], rank: int | None = None) -> list[int]:
        """Greedy answer of 24 tokens, from this rank or from the one that the server chooses."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 24,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=ANSWER_SECONDS)
        return reply.raise_for_status().json()["choices"][0]["token_ids"]

    def together(self, prompts: list[list[int]], ranks: Sequence[int | None] = ()) -> list[list[int]]:
        """Answers in order to requests that are all sent at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self.token_ids, prompts, ranks or [None] * len(prompts)))

    def drafted(self) -> list[float]:
        """Tokens that each rank has drafted so far."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_SECONDS).text
        counts = re.findall(r'^vllm:spec_decode_num_draft_tokens_total\{engine="(\d)".*\} (\S+)$', text, re.MULTILINE)
        return [float(count) for _, count in sorted(counts)]

    def stop(self) -> None:
        """Ask it to end, and kill whatever is left after half a minute."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                pytest.fail(f"the server ended with {self._process.returncode}:\n{self.log.read_text()[-3000:]}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            time.sleep(0.5)
        pytest.fail(f"the server did not start within {START_SECONDS} s:\n{self.log.read_text()[-3000:]}")
