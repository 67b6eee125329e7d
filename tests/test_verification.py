"""Every verified row is processed as vLLM's plain sampler processes it, were it alone and its drafts its history."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import apply_sampling_constraints
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_dflash import cpu_backend, verification

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the plain sampler's CPU form is the oracle")

VOCABULARY = 50
#: Of float32 logits of a few units; what differs is the order of sums and quotients.
TOLERANCE = 1e-5


@dataclasses.dataclass
class Request:
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafts: list[int]


def processors(params: list[SamplingParams], outputs: list[list[int]]) -> Any:
    kept = verification.logits_processors(_Config, torch.device("cpu"), False)
    added: Any = [(i, p, [], outputs[i]) for i, p in enumerate(params)]
    for processor in kept.all:
        processor.update_state(BatchUpdate(batch_size=len(params), removed=[], moved=[], added=added))
    return kept


class _Config:
    class scheduler_config:
        max_num_seqs = 16

    reasoning_config = None


def sampling_metadata(requests: list[Request], is_verified: bool) -> SamplingMetadata:
    """As the V1 runner's input batch makes it (v1/worker/gpu_input_batch.py, _make_sampling_metadata)."""
    params = [request.params for request in requests]
    longest = max(len(request.prompt) for request in requests)
    prompts = [request.prompt + [VOCABULARY] * (longest - len(request.prompt)) for request in requests]
    allowed = torch.zeros(len(requests), VOCABULARY, dtype=torch.bool)
    for row, p in zip(allowed, params):
        if p.allowed_token_ids:
            row.fill_(True)
            row[p.allowed_token_ids] = False
    temperature = torch.tensor([p.temperature for p in params])
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=bool((temperature > 0).all()),
        top_p=torch.tensor([p.top_p for p in params]),
        top_k=torch.tensor([p.top_k if p.top_k > 0 else VOCABULARY for p in params], dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.tensor(prompts),
        frequency_penalties=torch.tensor([p.frequency_penalty for p in params]),
        presence_penalties=torch.tensor([p.presence_penalty for p in params]),
        repetition_penalties=torch.tensor([p.repetition_penalty for p in params]),
        output_token_ids=[request.output for request in requests],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={i: p.bad_words_token_ids for i, p in enumerate(params) if p.bad_words_token_ids},
        logitsprocs=processors(params, [request.output for request in requests]),
        spec_token_ids=[request.drafts for request in requests] if is_verified else None,
    )


def verified_logits(requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
    """What ours makes of rows behind drafts: [sum of drafts, vocabulary]."""
    cpu_backend.correct()
    metadata = SpecDecodeMetadata.make_dummy([request.drafts for request in requests], torch.device("cpu"))
    settings = sampling_metadata(requests, is_verified=True)
    verifier = verification.Verifier(Sampler(), None, torch.device("cpu"), observe=None)
    logits = verifier.apply_logits_processors(logits.clone(), settings, metadata)
    return apply_sampling_constraints(logits, metadata.cu_num_draft_tokens, settings)


def plain_logits(request: Request, position: int, logits: torch.Tensor) -> torch.Tensor:
    """What the plain sampler makes of a row [vocabulary] when the drafts before it are already output."""
    alone = dataclasses.replace(request, output=request.output + request.drafts[:position], drafts=[])
    settings = sampling_metadata([alone], is_verified=False)
    row = Sampler().apply_logits_processors(logits[None].clone(), settings, predict_bonus_token=False)
    row = Sampler.apply_temperature(row, settings.temperature, settings.all_random)
    for processor in settings.logitsprocs.argmax_invariant:
        row = processor.apply(row)
    return apply_top_k_top_p(row, settings.top_k, settings.top_p)[0]


def random_request(generator: random.Random, **parameters: Any) -> Request:
    def tokens(most: int, least: int = 0) -> list[int]:
        return [generator.randrange(VOCABULARY) for _ in range(generator.randint(least, most))]

    params = SamplingParams(**{"temperature": generator.choice([0.0, 0.5, 1.0, 1.7])} | parameters)
    params.update_from_generation_config({}, eos_token_id=7)
    if parameters.get("bad_words"):
        params._bad_words_token_ids = [[3], [4, 5], [11, 12, 13]]
    return Request(params, tokens(6, 1), tokens(8), tokens(6))


PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logit_bias": {"logit_bias": {3: 5.0, 8: -4.0, 20: 100.0}},
    "min_p": {"min_p": 0.2},
    "min_p of 1": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 9, "top_p": 0.8},
    "min_p, top_p and bias": {"min_p": 0.05, "top_p": 0.9, "logit_bias": {1: 2.0}},
    "repetition penalty and bias": {"repetition_penalty": 1.6, "logit_bias": {i: 1.5 for i in range(0, 50, 3)}},
    "presence and frequency": {"presence_penalty": 1.2, "frequency_penalty": 0.7},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [9, 10]},
    "allowed tokens": {"allowed_token_ids": [1, 2, 3, 9, 30], "logit_bias": {2: 3.0}},
    "bad words": {"bad_words": ["a", "b c", "d e f"]},
}


@pytest.mark.case("F10", "F14")
@pytest.mark.parametrize("name", PARAMETERS)
def test_rows_behind_drafts_are_processed_as_plain_rows(name):
    generator = random.Random(name)
    torch.manual_seed(0)
    for _ in range(20):
        # Others beside it, with parameters of their own, so that no row takes a neighbour's.
        kinds = [name, generator.choice(list(PARAMETERS)), name, "nothing", generator.choice(list(PARAMETERS))]
        requests = [random_request(generator, **PARAMETERS[kind]) for kind in kinds]
        logits = torch.randn(sum(len(request.drafts) for request in requests), VOCABULARY) * 2
        if not len(logits):
            continue
        ours = verified_logits(requests, logits)
        row = 0
        for request in requests:
            for position in range(len(request.drafts)):
                torch.testing.assert_close(
                    ours[row], plain_logits(request, position, logits[row]), rtol=TOLERANCE, atol=TOLERANCE
                )
                row += 1


def test_min_p_masks_what_is_less_probable_than_its_share_of_the_likeliest():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    # exp(-1 / T) < min_p masks the second: for T = 1, 0.37 < 0.5; for T = 2, 0.61.
    verification.mask_improbable(
        logits, torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1, 2, 1])
    )
    assert (logits > float("-inf")).sum(-1).tolist() == [1, 2, 2, 4]


def test_biases_go_to_every_row_of_their_request_and_no_other():
    logits = torch.zeros(5, 4)
    verification.add_biases(logits, {0: {1: 2.0}, 2: {0: 1.0, 3: -1.0}}, [2, 1, 0])
    assert logits.tolist() == [[0, 2, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0] * 4, [0] * 4]
    verification.add_biases(logits, {2: {0: 1.0, 3: -1.0}}, [1, 2, 2])
    assert logits[3:].tolist() == [[1, 0, 0, -1], [1, 0, 0, -1]]
