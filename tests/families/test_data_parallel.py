"""Two data-parallel ranks answer as one does.

Those of a dense target are engines of their own behind one server. With experts, every rank takes part in every pass of
every other: one that is idle, or that drafts nothing, has to make a pass of its drafter all the same, or all of them
wait for ever. vLLM's CPU backend lacks the exchange of rows that experts need; there the tests supply it.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Any

import pytest
from rank_server import RankServer
from test_ranks import PROMPTS, answer, start
from tiny_bytes import VOCAB, write_byte_target
from tiny_models import write_tiny_drafter

from vllm_dflash.draft_length import read_trace

pytest_plugins = ["family_engines"]

#: Ends at the context's end, where nothing fits behind it that could be drafted.
LONG = [list(range(3, 103)) * 2 + list(range(3, 39))]
MAX_LEN = 256
#: Seconds after which a rank stops waiting for others and fails. They start at different times on a busy machine.
PATIENCE = 150


def free_port() -> str:
    """Below those that the system hands out, or another test is given it before the ranks listen, seconds later."""
    first = 20_000 + 10 * (os.getpid() % 1_000)
    for port in range(first, first + 2_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:  # nobody listens
                return str(port)
    raise OSError(f"no port from {first} on is free")


def two_ranks(tmp_path, job: dict[str, Any], rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What two ranks in lock step answer in each of their rounds."""
    variables = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": free_port()}
    processes = [
        start(tmp_path, job | {"rounds": own}, VLLM_DP_RANK=str(rank), **variables) for rank, own in enumerate(rounds)
    ]
    try:
        return [answer(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.case("F24")
@pytest.mark.feature(
    "data parallel 2, experts",
    "ranks in lock step, also idle or without drafts; text of one rank; the test adds vLLM's missing exchange on CPUs",
)
def test_ranks_with_experts_draft_in_lock_step(engine, family_target, family_drafter, expert_group, tmp_path):
    target = family_target("qwen3_moe")
    plain = engine(target, max_model_len=MAX_LEN)
    expected, expected_long = (plain.token_ids(prompts, max_tokens=24) for prompts in (PROMPTS, LONG))
    assert len(expected_long[0]) == MAX_LEN - len(LONG[0]) < 24
    settings = {"distributed_executor_backend": "uni", "cpu_distributed_timeout_seconds": PATIENCE}
    job = {"target": str(target), "drafter": str(family_drafter), "max_tokens": 24, "settings": settings}
    everything: dict[str, Any] = {"prompts": PROMPTS}
    nothing: dict[str, Any] = {"prompts": []}
    without_drafts = everything | {"extra_args": {"dflash": False}}
    first, second = two_ranks(
        tmp_path,
        job | {"exchange": True},
        [[everything, everything, {"prompts": LONG}], [nothing, everything | {"max_tokens": 12}, without_drafts]],
    )
    assert [step["texts"] for step in first["rounds"]] == [expected, expected, expected_long]
    assert [step["texts"] for step in second["rounds"]] == [[], [text[:12] for text in expected], expected]
    before, beside, behind = (step["drafted"] for step in first["rounds"])
    assert 0 < before < beside < behind
    before, beside, behind = (step["drafted"] for step in second["rounds"])
    assert 0 == before < beside == behind
    assert {seen["workers"][0]["decides"] for seen in (first, second)} == {"ScheduledLengths"}


@pytest.mark.feature(
    "data parallel 2, experts, on CPUs", "vLLM's own message: NotImplementedError, with and without speculation"
)
def test_vllm_exchanges_no_rows_between_cpus():
    """When this fails, vLLM has learnt it, and what `ranks.py` supplies can go."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    communicator = CpuCommunicator.__new__(CpuCommunicator)  # its group is not asked
    for exchange in (communicator.all_gatherv, communicator.reduce_scatterv):
        with pytest.raises(NotImplementedError):
            exchange([])


@pytest.mark.feature("data parallel 2, offline", "vLLM's own message, for dense targets")
def test_vllm_has_no_offline_ranks_of_dense_targets(monkeypatch):
    from vllm import envs
    from vllm.config import ParallelConfig

    monkeypatch.setitem(vars(envs), "VLLM_DP_SIZE", 2)  # variables of the environment may be cached by now
    with pytest.raises(ValueError, match="Offline data parallel mode is not supported/useful for dense models"):
        ParallelConfig(is_moe_model=False)
    ParallelConfig(is_moe_model=True)


@pytest.mark.slow  # six processes that import vLLM
@pytest.mark.case("F24")
@pytest.mark.feature("data parallel 2", "a server of a dense target: text of one rank; one idle, then drafts in both")
def test_two_ranks_behind_one_server_answer_as_one(engine, tmp_path):
    target = write_byte_target(tmp_path / "target")
    drafter = write_tiny_drafter(tmp_path / "drafter", vocab_size=VOCAB)
    prompts = [[10 + i, 20, 30 + i] for i in range(8)]
    expected = engine(target, max_model_len=MAX_LEN).token_ids(prompts, max_tokens=24)
    trace = tmp_path / "trace.jsonl"
    server = RankServer(target, drafter, tmp_path, options={"draft_length": "fixed", "trace": str(trace)})
    try:
        assert server.drafted() == [0, 0]
        assert [server.token_ids(prompt, rank=0) for prompt in prompts[:3]] == expected[:3]
        first, second = server.drafted()
        assert first > second == 0, "the other rank is idle"
        assert server.together(prompts, ranks=[0, 1] * 4) == expected
        both = server.drafted()
        assert both[0] > first
        assert both[1] > 0
        assert server.together(prompts) == expected, "where the server likes"
    finally:
        server.stop()
    live = [line for line in server.log.read_text().splitlines() if re.search("vllm-dflash .* is live", line)]
    assert len(live) == 2
    assert len(read_trace(trace).steps) >= 64, "of the first rank alone"
    assert read_trace(f"{trace}.1").num_speculative_tokens == 7
