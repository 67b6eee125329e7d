"""The NumPy oracle against vLLM's own sampler, on CPU tensors, for each parameter and all together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_dflash.parity.oracle import Sampling, next_token_probabilities

VOCAB = 60
PROMPT, OUTPUT = [3, 4, 5, 5, 17], [8, 8, 9, 17]

PARAMETERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "top_p nearly nothing": {"top_p": 1e-6},
    "top_k and top_p": {"top_k": 9, "top_p": 0.6, "temperature": 0.8},
    "min_p": {"min_p": 0.2},
    "min_p at a temperature": {"min_p": 0.2, "temperature": 0.5},
    "min_p before top_p": {"min_p": 0.05, "top_p": 0.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "negative": {"frequency_penalty": -0.9, "presence_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.6},
    "repetition below one": {"repetition_penalty": 0.6},
    "logit_bias": {"logit_bias": {3: 4.0, 8: -6.0}},
    "logit_bias before repetition": {"logit_bias": {3: 2.5, 8: -2.5, 17: 3.0}, "repetition_penalty": 1.9},
    "all": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {8: 1.0, 30: 2.0},
    },
}


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels():
    """vLLM's own for the CPU, which its engine would load."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def vllms_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What vLLM's sampler draws from, without speculation."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    class Config:
        class scheduler_config:
            max_num_seqs = 1

    parameters = SamplingParams(**sampling.to_dict())
    processors = [kind(Config, torch.device("cpu"), False) for kind in (LogitBiasLogitsProcessor, MinPLogitsProcessor)]
    for processor in processors:
        processor.update_state(BatchUpdate(1, removed=[], added=[(0, parameters, PROMPT, OUTPUT)], moved=[]))

    def one(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float32)

    is_greedy = sampling.temperature == 0
    top_k = sampling.top_k if 0 < sampling.top_k < VOCAB else VOCAB  # as vLLM's input batch stores it
    metadata = SamplingMetadata(
        temperature=one(sampling.temperature),
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=one(sampling.top_p) if sampling.top_p < 1 else None,
        top_k=torch.tensor([top_k]) if top_k < VOCAB else None,
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.tensor([PROMPT]),
        frequency_penalties=one(sampling.frequency_penalty),
        presence_penalties=one(sampling.presence_penalty),
        repetition_penalties=one(sampling.repetition_penalty),
        output_token_ids=[OUTPUT],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )
    sampler = Sampler(logprobs_mode="processed_logprobs")
    scores = sampler.apply_logits_processors(torch.tensor(logits, dtype=torch.float32)[None], metadata, False)
    drawn, logprobs = sampler.sample(scores, metadata)
    if is_greedy:
        return np.eye(VOCAB)[int(drawn)]
    return logprobs[0].double().exp().numpy()


@pytest.mark.parametrize("name", PARAMETERS)
def test_oracle_is_vllms_sampler(name):
    sampling = Sampling(**PARAMETERS[name])
    generator = np.random.default_rng(5)
    for _ in range(5):
        logits = generator.normal(0, 2.5, VOCAB)
        expected = vllms_probabilities(logits, sampling)
        found = next_token_probabilities(logits, PROMPT, OUTPUT, sampling)
        assert np.array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    "name", [name for name in PARAMETERS if name not in ("nothing", "top_k beyond the vocabulary")]
)
def test_every_parameter_changes_something(name):
    """Otherwise the test above would pass with a parameter that both ignore."""
    logits = np.random.default_rng(5).normal(0, 2.5, VOCAB)
    changed = next_token_probabilities(logits, PROMPT, OUTPUT, Sampling(**PARAMETERS[name]))
    assert np.abs(changed - next_token_probabilities(logits, PROMPT, OUTPUT, Sampling())).max() > 1e-3


def test_generous_and_strict_cuts_differ_at_the_border_only():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    sampling = Sampling(top_p=0.7)  # reached by the second token, but for rounding
    strict, generous = (next_token_probabilities(logits, [], [], sampling, r) for r in (-1e-3, 1e-3))
    assert np.array_equal(strict > 0, [True, True, False, False])
    assert np.array_equal(generous > 0, [True, True, True, False])
    third = np.array([2.0, 1.0, 1.0, 0.0])  # the second and third are equal
    strict, generous = (next_token_probabilities(third, [], [], Sampling(top_k=2), r) for r in (-1e-3, 1e-3))
    assert np.array_equal(strict > 0, [True, False, False, False])
    assert np.array_equal(generous > 0, [True, True, True, False])
    assert next_token_probabilities(np.zeros(4), [], [], Sampling(top_k=1), -1e-3).sum() == 0
