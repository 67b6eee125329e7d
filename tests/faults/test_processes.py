"""A server with drafts outlives its clients and bad requests, ends when a part of it dies, and comes back the same."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from engines import Engine
from serving import MAX_LEN, Server, wait_until
from tiny_bytes import VOCAB, write_byte_target
from tiny_models import write_tiny_drafter

PROMPTS = [[10 + i, 20, 30 + i] for i in range(4)]
#: Seconds in which a server with a dead part must have ended; vLLM's own time limits are shorter.
END_SECONDS = 60


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, Any]:
    """A target with a tokenizer of bytes, and a drafter for it."""
    folder = tmp_path_factory.mktemp("processes")
    return write_byte_target(folder / "target"), write_tiny_drafter(folder / "drafter", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def server(pair, tmp_path_factory) -> Iterator[Server]:
    target, drafter = pair
    server = Server(target, drafter, tmp_path_factory.mktemp("server") / "log")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def expected(engine, pair) -> list[list[int]]:
    """Plain vLLM's answers to `PROMPTS`."""
    return engine(pair[0], max_model_len=MAX_LEN).token_ids(PROMPTS, max_tokens=16, ignore_eos=False)


def answers(server: Server) -> list[list[int]]:
    return [server.token_ids(prompt) for prompt in PROMPTS]


def is_idle(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(server.metric(name) for name in names)


@pytest.mark.feature("clients that disconnect", "50 streams cut off; cache empty, texts equal plain's afterwards")
def test_abort_storm(server, expected):
    def leave_early(number: int) -> int:
        """Bytes that arrived before this client closed its connection."""
        body = {
            "model": "tiny",
            "prompt": [5 + number, 6],
            "temperature": number % 2,
            "max_tokens": 500,
            "stream": True,
        }
        body |= {"ignore_eos": True, "n": 1 + number % 2 * 2}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            seen = 0
            for line in stream.iter_lines():
                seen += len(line)
                if seen > 200 * (number % 5):
                    break
        return seen

    with ThreadPoolExecutor(10) as threads:
        storm = threads.map(leave_early, range(50))
        assert answers(server) == expected, "beside the storm"
        assert min(storm) > 0
    wait_until(lambda: is_idle(server), 30, "no request is left and the cache is empty")
    assert answers(server) == expected
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 100


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "xargs value": {"vllm_xargs": {"dflash_max_draft": -1}},
    "xargs type": {"vllm_xargs": {"dflash_max_draft": "many"}},
    "xargs name": {"vllm_xargs": {"dflash_max_drafts": 3}},
    "xargs switch": {"vllm_xargs": {"dflash": 7}},
    "xargs no mapping": {"vllm_xargs": [1]},
    "JSON schema": {"response_format": SCHEMA},
    "regular expression": {"structured_outputs": {"regex": "(("}},
    "grammar": {"structured_outputs": {"grammar": "root ::= undefined_rule"}},
    "two grammars": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "long prompt": {"prompt": [7] * (MAX_LEN + 1)},
    "long answer": {"max_tokens": 10**6},
    "no prompt": {"prompt": []},
    "unknown token": {"prompt": [VOCAB + 10]},
    "negative temperature": {"temperature": -1},
    "top_p": {"top_p": 2.0},
    "min_p": {"min_p": 2.0},
    "no sequences": {"n": 0},
    "logit bias": {"logit_bias": {str(VOCAB + 5): 1.0}},
    "logprobs": {"logprobs": 10**6},
    "min above max": {"min_tokens": 20, "max_tokens": 10},
    "no number": {"max_tokens": "x"},
    "another model": {"model": "other"},
}


def test_storm_of_bad_requests(server, expected):
    """Each gets a refusal of its own; nobody else notices."""
    with ThreadPoolExecutor(8) as threads:
        names = list(BAD_REQUESTS) * 5
        responses = threads.map(
            lambda name: (name, server.complete(**{"prompt": PROMPTS[0]} | BAD_REQUESTS[name])), names
        )
        assert answers(server) == expected, "beside the storm"
        statuses = {name: response.status_code for name, response in responses}
    assert {name: status for name, status in statuses.items() if not 400 <= status < 500} == {}
    assert httpx.post(f"{server.url}/v1/completions", content=b'{"model": "tiny", ', timeout=30).status_code == 400
    refusal = server.complete(PROMPTS[0], vllm_xargs={"dflash_max_draft": -1}).text
    assert "dflash_max_draft' is -1; give a whole number" in refusal
    assert answers(server) == expected
    wait_until(lambda: is_idle(server), 30, "no request is left")


def killed(server: Server, title: str) -> None:
    """Kill a part while a client waits: the client hears of it, and nothing is left of the server soon after."""
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.complete, PROMPTS[0], max_tokens=500, n=8, temperature=1.0, ignore_eos=True)
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0 or waiting.done(), 30, "the request runs")
        assert not waiting.done(), "it should still run when its engine dies"
        server.kill(title)
        with contextlib.suppress(httpx.TransportError):  # the connection may break instead
            assert waiting.result(END_SECONDS).status_code >= 500
    server.wait_until_gone(END_SECONDS)
    assert server.alive() == []
    # vLLM's server ends in order, with code 0, so that only its log says why.
    assert server.process.poll() is not None
    assert "EngineDeadError" in server.log.read_text()


@pytest.mark.feature(
    "crash of the engine", "SIGKILL: clients get an error, no process stays, same text after a restart"
)
def test_killed_engine_core_ends_the_server(server):
    killed(server, "EngineCore")


@pytest.mark.slow
def test_killed_worker_ends_the_server_and_it_comes_back_the_same(pair, expected, tmp_path):
    target, drafter = pair
    first = Server(target, drafter, tmp_path / "first")
    try:
        killed(first, "Worker")
    finally:
        first.stop()
    second = Server(target, drafter, tmp_path / "second")
    try:
        assert answers(second) == expected
    finally:
        second.stop()


@pytest.mark.feature("restart in one process", "engines with and without drafts, one after the other; texts equal")
def test_engines_come_and_go_in_one_process(pair, expected):
    target, drafter = pair
    for speculates in (True, False, True):
        started = Engine(target, drafter if speculates else None, max_model_len=MAX_LEN)
        results = started.generate(PROMPTS, max_tokens=16, ignore_eos=False)
        assert [result.token_ids for result in results] == expected
        assert any(draft.tokens for result in results for draft in result.drafts) == speculates
        is_ours = type(getattr(started.runner, "drafter", None)).__module__ == "vllm_dflash.proposer"
        assert is_ours == speculates
        del started
        gc.collect()
