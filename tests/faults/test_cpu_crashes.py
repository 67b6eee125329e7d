"""Requests of which vLLM's CPU backend dies, for all users of the server; here they are answered."""

from __future__ import annotations

import pytest
import torch
from oracle_drafts import ask

PROMPTS = [[(7 * i + j) % 120 + 4 for i in range(100)] for j in range(4)]


@pytest.fixture(scope="module")
def served(engine, tiny_target, tiny_drafter):
    return engine(tiny_target, drafter=tiny_drafter, num_drafted=4, max_num_batched_tokens=32, max_model_len=256)


@pytest.mark.feature("seed with chunked prefill", "same seed, same text, whatever the chunks")
def test_seed_of_a_prompt_in_chunks(served):
    """The rows at the ends of chunks are sampled too, and must leave the seed's numbers alone."""
    seeded = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    together = [output.outputs[0].token_ids for output in ask(served, PROMPTS, seeded)]
    alone = [ask(served, [prompt], seeded)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert together == alone
    others = ask(served, PROMPTS, seeded | {"seed": 6})
    assert [output.outputs[0].token_ids for output in others] != alone


def test_seed_is_not_used_up_by_dropped_tokens(served, monkeypatch):
    """The first token is drawn with the seed's first numbers, as if the prompt had been computed at once."""
    drawn: list[list[torch.Tensor]] = []
    batch = served.runner.input_batch
    sample = served.runner._sample

    def sample_and_record(*arguments):
        drawn.append([generator.get_state() for generator in batch.generators.values()])
        return sample(*arguments)

    monkeypatch.setattr(served.runner, "_sample", sample_and_record)
    ask(served, [[9, *PROMPTS[0]]], {"temperature": 1.0, "seed": 11, "max_tokens": 1})
    assert [len(states) for states in drawn] == [0, 0, 0, 1]  # 101 tokens in chunks of 32
    assert torch.equal(drawn[-1][0], torch.Generator().manual_seed(11).get_state())


@pytest.mark.feature("seed with prefix caching", "same seed, same text, beside running requests and alone")
def test_seed_of_a_request_that_the_scheduler_would_pad(engine, tiny_target, tiny_drafter, monkeypatch):
    """One token is left of a cached prompt; beside running requests vLLM would pad it with drafts to verify."""
    served = engine(
        tiny_target, drafter=tiny_drafter, num_drafted=4, max_num_batched_tokens=64, max_model_len=256, block_size=32
    )
    prompt = PROMPTS[0][:33]
    seeded = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    alone = ask(served, [prompt], seeded)[0]
    assert alone.num_cached_tokens == 0
    padded: list[list[int]] = []
    scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def schedule_and_record(*arguments):
        output = schedule(*arguments)
        padded.extend(tokens for tokens in output.scheduled_spec_decode_tokens.values() if -1 in tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", schedule_and_record)
    # Eight fill the batch; when the shortest ends, the prompt joins those that still run.
    running = [{"max_tokens": 6 + 4 * j, "ignore_eos": True} for j in range(8)]
    beside = ask(served, [[j + 9, 5, 6] for j in range(8)] + [prompt], [*running, seeded])[-1]
    assert padded == []
    assert beside.num_cached_tokens == 32
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


def test_top_k_in_steps_without_drafts(served):
    """vLLM's top-k for CPUs wants a largest value, and the first step of a request has no verified row."""
    [output] = ask(served, [PROMPTS[0][:5]], {"temperature": 1.0, "top_k": 1, "max_tokens": 12})
    [greedy] = ask(served, [PROMPTS[0][:5]], {"max_tokens": 12})
    assert output.outputs[0].token_ids == greedy.outputs[0].token_ids
