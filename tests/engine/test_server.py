"""A real `vllm serve` on a loopback port, asked by the OpenAI client, as in examples/serve.sh."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY
from openai import BadRequestError, OpenAI

QUESTION = [{"role": "user", "content": "Tom has 5 boxes with 12 pencils each. How many pencils has he?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("forecast", "record")
]
START_SECONDS = 240


@dataclass
class Server:
    url: str
    log: Path
    client: OpenAI

    def counter(self, name: str) -> float:
        """Sum of a Prometheus counter over its labels."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    url = f"http://127.0.0.1:{(port := free_port())}"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # as users run it: front end, engine core and worker are processes
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [str(REPOSITORY / "examples" / "serve.sh"), "--port", str(port), "--dtype", "float32"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # How many drafts there are would else depend on how busy the machine is.
    command += ["--additional-config", '{"dflash": {"draft_length": "fixed"}}']
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    try:
        wait_until_healthy(url, process, log)
        yield Server(url, log, OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start within {START_SECONDS} s:\n{log.read_text()[-3000:]}")


@pytest.mark.case("F33")
def test_worker_announces_what_is_live(server):
    [line] = [line for line in server.log.read_text().splitlines() if "vllm-dflash" in line and "is live" in line]
    assert "Drafter drafts in the V1 runner (our proposer), kernels: oneDNN and torch on the CPU" in line
    assert "trained block 8, K = 3" in line


def test_chat_is_drafted_and_counted(server):
    before = server.counter("vllm:spec_decode_num_drafts_total")
    accepted = server.counter("vllm:spec_decode_num_accepted_tokens_total")
    reply = server.client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=40, temperature=0)
    assert reply.usage.completion_tokens == 40
    cycles = server.counter("vllm:spec_decode_num_drafts_total") - before
    assert 10 <= cycles < 39
    assert server.counter("vllm:spec_decode_num_accepted_tokens_total") > accepted


def test_streaming_gives_the_same_text(server):
    whole = server.client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=32, temperature=0)
    chunks = server.client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=32, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_completions_with_two_choices_differ_under_temperature(server):
    reply = server.client.completions.create(
        model="smollm2", prompt="Once upon a time", n=2, max_tokens=24, temperature=1.0, seed=7
    )
    assert len(reply.choices) == 2
    assert reply.choices[0].text != reply.choices[1].text


def test_stop_string_ends_the_text_before_it(server):
    full = (
        server.client.completions.create(
            model="smollm2", prompt="The days of the week are Monday,", max_tokens=24, temperature=0
        )
        .choices[0]
        .text
    )
    stop = full.strip().split()[3]
    cut = server.client.completions.create(
        model="smollm2", prompt="The days of the week are Monday,", max_tokens=24, temperature=0, stop=[stop]
    ).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == full[: full.index(stop)]


def test_logprobs_are_those_of_the_chosen_tokens(server):
    reply = server.client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 16
    for token in content:
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs), abs=1e-4)


def test_a_request_can_go_without_drafts(server):
    def ask(**xargs):
        before = server.counter("vllm:spec_decode_num_draft_tokens_total")
        reply = server.client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=16, temperature=0, extra_body={"vllm_xargs": xargs}
        )
        return reply.choices[0].message.content, server.counter("vllm:spec_decode_num_draft_tokens_total") - before

    text, drafted = ask(dflash=True)
    assert drafted > 10
    assert ask(dflash=False) == (text, 0)
    short_text, few = ask(dflash_max_draft=1)
    assert (short_text, 0 < few < drafted) == (text, True)
    with pytest.raises(BadRequestError, match="dflash_max_draft' is -1; give a whole number"):
        ask(dflash_max_draft=-1)


@pytest.mark.case("F10")
def test_min_p_and_logit_bias_are_served_with_drafts(server):
    """Most clients that send min_p cannot leave it out; vLLM answers 400 with speculation on."""
    before = server.counter("vllm:spec_decode_num_draft_tokens_total")
    favourite = 28  # a token that the model would hardly ever choose
    biased = server.client.completions.create(
        model="smollm2",
        prompt="Once upon a time",
        max_tokens=12,
        temperature=1.0,
        logit_bias={str(favourite): 100},
        extra_body={"min_p": 0.05, "return_token_ids": True},
    )
    assert biased.choices[0].token_ids == [favourite] * 12
    assert server.counter("vllm:spec_decode_num_draft_tokens_total") > before


def test_a_refused_request_leaves_the_server_up(server):
    with pytest.raises(BadRequestError):
        server.client.completions.create(model="smollm2", prompt="x", max_tokens=10**6)
    assert server.client.completions.create(model="smollm2", prompt="x", max_tokens=2).choices[0].text


@pytest.mark.feature("tool calls over HTTP", "required and named, whole and streamed; calls are those without drafts")
@pytest.mark.case("F11")
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "forecast"}}], ids=["required", "named"]
)
def test_tool_calls_are_those_without_drafts(server, choice):
    def ask(stream: bool, drafts: bool) -> list[tuple[str, str]]:
        """Names and arguments of the calls."""
        reply = server.client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Will it rain in Rome in the next two days?"}],
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=80,
            temperature=0,
            stream=stream,
            extra_body={"vllm_xargs": {"dflash": drafts}},
        )
        if not stream:
            return [(call.function.name, call.function.arguments) for call in reply.choices[0].message.tool_calls]
        calls: dict[int, list[str]] = {}
        for chunk in reply:
            for part in chunk.choices[0].delta.tool_calls or []:
                name, arguments = calls.setdefault(part.index, ["", ""])
                calls[part.index] = [name + (part.function.name or ""), arguments + (part.function.arguments or "")]
        return [(name, arguments) for name, arguments in calls.values()]

    drafts = "vllm:spec_decode_num_drafts_total"
    before = server.counter(drafts)
    [(name, arguments)] = expected = ask(stream=False, drafts=False)
    assert server.counter(drafts) == before
    called = json.loads(arguments)
    assert name in ("forecast", "record")
    assert called
    assert ask(stream=False, drafts=True) == expected
    assert server.counter(drafts) > before + 2
    for with_drafts in (False, True):
        [(streamed_name, streamed)] = ask(stream=True, drafts=with_drafts)
        assert (streamed_name, json.loads(streamed)) == (name, called)
