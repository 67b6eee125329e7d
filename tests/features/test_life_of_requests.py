"""Requests that stream, leave early, come late or are refused: their answers and their neighbours' are plain vLLM's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from oracle_drafts import LENGTHS, K, answers, ask, random_prompts

pytest_plugins = ["engine_pairs"]

PROMPTS = random_prompts(8)
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 40}


def add(served, name: str, prompt: list[int], **sampling) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(**({"temperature": 0.0} | ENDLESS | sampling))
    served.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)


def run(served, until: int | None = None) -> dict[str, list]:
    """Steps the engine, at most `until` times; every output of each request."""
    llm_engine = served.llm.llm_engine
    outputs: dict[str, list] = {}
    while llm_engine.has_unfinished_requests() and until != 0:
        for output in llm_engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        until = None if until is None else until - 1
    return outputs


@pytest.mark.feature("streaming", "deltas of text and tokens join to plain's answer, with stop strings as well")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("with_stop", [False, True])
def test_deltas_join_to_the_whole(pair, lengths, with_stop):
    from vllm.sampling_params import RequestOutputKind

    pair.schedule(lengths)
    whole = pair.plain_answers(PROMPTS, ENDLESS)
    pair.learn(whole)
    stops = [[output.outputs[0].text[9:][:3]] if with_stop else [] for output in whole]
    if with_stop:
        whole = pair.plain_answers(PROMPTS, [ENDLESS | {"stop": stop} for stop in stops])
    for i, (prompt, stop) in enumerate(zip(PROMPTS, stops)):
        add(pair.dflash, str(i), prompt, stop=stop, output_kind=RequestOutputKind.DELTA)
    streamed = run(pair.dflash)
    for i, expected in enumerate(whole):
        deltas = [output.outputs[0] for output in streamed[str(i)]]
        assert "".join(delta.text for delta in deltas) == expected.outputs[0].text
        assert [t for delta in deltas for t in delta.token_ids] == list(expected.outputs[0].token_ids)
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == expected.outputs[0].finish_reason
    assert max(len(output.outputs[0].token_ids) for outputs in streamed.values() for output in outputs) > 1


@pytest.mark.feature("abort", "between blocks of drafts; the others and later requests get plain's text")
def test_aborted_requests_leave_no_trace(pair):
    whole = pair.plain_answers(PROMPTS, ENDLESS)
    pair.learn(whole)
    for i, prompt in enumerate(PROMPTS):
        add(pair.dflash, str(i), prompt)
    run(pair.dflash, until=3)
    scheduler = pair.dflash.llm.llm_engine.engine_core.engine_core.scheduler
    assert all(len(request.spec_token_ids) == K for request in scheduler.running)
    pair.dflash.llm.llm_engine.abort_request(["0", "3", "4", "7"])
    for i in (0, 7):  # again, in the place of those
        add(pair.dflash, f"again {i}", PROMPTS[i])
    finished = {name: outputs[-1] for name, outputs in run(pair.dflash).items()}
    assert sorted(finished) == ["1", "2", "5", "6", "again 0", "again 7"]
    for name, output in finished.items():
        assert answers(output) == answers(whole[int(name[-1])])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_requests_of_all_kinds_come_and_go(pair, lengths):
    """Arrivals, lengths, parameters and aborts at random; one-token prompts, which the scheduler pads, among them."""
    pair.schedule(lengths)
    generator = random.Random(5)
    kinds: list[dict[str, Any]] = [{}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.5}, {"logprobs": 2}]
    kinds += [{"allowed_token_ids": list(range(60, 90))}, {"min_tokens": 5, "ignore_eos": False}]
    prompts = random_prompts(40, lengths=(1, 6, 30, 2), seed=9)
    sampling = [{"max_tokens": generator.randrange(1, 40)} for _ in range(40)]
    sampling = [ENDLESS | kinds[i % len(kinds)] | one for i, one in enumerate(sampling)]
    sampling = [one | {"max_tokens": max(one["max_tokens"], one.get("min_tokens", 0))} for one in sampling]
    whole = pair.plain_answers(prompts, sampling)
    pair.learn(whole)
    finished: dict[str, Any] = {}
    aborted: set[str] = set()
    waiting = list(range(40))
    while waiting or pair.dflash.llm.llm_engine.has_unfinished_requests():
        for i in [waiting.pop(0) for _ in range(min(generator.randrange(3), len(waiting)))]:
            add(pair.dflash, str(i), prompts[i], **sampling[i])
            if generator.random() < 0.15:
                aborted.add(str(i))
        finished |= {name: outputs[-1] for name, outputs in run(pair.dflash, until=1).items() if outputs[-1].finished}
        if aborted - finished.keys() and generator.random() < 0.5:
            pair.dflash.llm.llm_engine.abort_request([min(aborted - finished.keys())])
    assert len(finished) > 30
    for name, output in finished.items():
        assert answers(output) == answers(whole[int(name)]), sampling[int(name)]


@pytest.mark.feature("embedding requests", "refused with the message that there is without speculation")
def test_embeddings_are_refused_as_without_speculation(pair):
    messages = []
    for served in (pair.plain, pair.dflash):
        with pytest.raises(ValueError, match="only supported for pooling models") as caught:
            served.llm.embed([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert len(ask(pair.dflash, PROMPTS[:1], ENDLESS)[0].outputs[0].token_ids) == 40


@pytest.mark.case("F43")
def test_counters_say_what_was_drafted_verified_and_accepted(pair):
    pair.schedule([K, 0, 3, 0, K])
    counters = pair.dflash.runner.drafter.lengths.lengths.counters
    [output] = pair.compare(PROMPTS[:1], ENDLESS)
    verified = sum(drafted * count for (drafted, _), count in pair.oracle.patterns.items())
    accepted = sum(accepted * count for (_, accepted), count in pair.oracle.patterns.items())
    assert (counters.verified, counters.accepted) == (verified, accepted)
    assert counters.steps_off == pytest.approx(0.4 * counters.steps, abs=2)
    assert len(output.outputs[0].token_ids) == pytest.approx(counters.request_steps + accepted, abs=K + 1)
    assert counters.seconds > counters.seconds_off > 0


@pytest.mark.case("F26", "F36")
def test_rows_computed_are_those_needed(pair, monkeypatch):
    """Draft rows follow the step's length, and each prompt token's context K/V are computed once."""
    proposer = pair.dflash.runner.drafter
    query_rows, context_rows = [], []
    run_queries, store_context = proposer.run_queries, proposer.model.store_context

    def count_queries(rows, *rest):
        query_rows.append(len(rows.query_ids))
        return run_queries(rows, *rest)

    def count_context(features, positions, slots):
        context_rows.append(len(slots))
        return store_context(features, positions, slots)

    monkeypatch.setattr(proposer, "run_queries", count_queries)
    monkeypatch.setattr(proposer.model, "store_context", count_context)
    pair.schedule([K, 0, 3, 0, K])
    prompt = random_prompts(1, lengths=[50], seed=2)  # which no cache knows
    [output] = pair.compare(prompt, ENDLESS)
    # A bidirectional block stays whole whatever is verified of it; without drafts there is none.
    assert query_rows[:5] == [K + 1, 0, K + 1, 0, K + 1]
    assert context_rows[0] == 50
    # Every token but the last, which is never an input, and those accepted behind the end.
    needed = 50 + len(output.outputs[0].token_ids) - 1
    assert needed <= sum(context_rows) <= needed + K
