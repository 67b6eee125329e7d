"""Sampled text follows the target's distribution, row by row, and repeats under a seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from oracle_drafts import LENGTHS, ask, random_prompts
from scipy import stats
from transformers import AutoModelForCausalLM
from vllm.exceptions import VLLMValidationError

pytest_plugins = ["engine_pairs"]

PROMPTS = random_prompts(8)
PROMPT = [40, 77, 12, 130]
NUM_SAMPLES = 300  # of each kind
#: Parameters, and how many tokens of each text are looked at: few enough texts of them to be seen often.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "temperature": ({"temperature": 0.7}, 2),
    "top_k": ({"temperature": 2.0, "top_k": 3}, 3),
    "top_p": ({"temperature": 1.0, "top_p": 0.5}, 2),
    "all three": ({"temperature": 1.5, "top_k": 5, "top_p": 0.7}, 3),
}


class Distribution:
    """What the target says after `PROMPT`, from Hugging Face's model and textbook definitions."""

    def __init__(self, target, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        self.model = target
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    @torch.inference_mode()
    def after(self, texts: list[tuple[int, ...]]) -> np.ndarray:
        """Probabilities [texts, vocabulary] of the next token."""
        logits = self.model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1].double().numpy()
        return np.stack([self._kept(row / self.temperature) for row in logits])

    def _kept(self, logits: np.ndarray) -> np.ndarray:
        order = np.argsort(-logits)
        order = order[: self.top_k or None]
        probabilities = np.exp(logits[order] - logits[order[0]])
        probabilities /= probabilities.sum()
        # The smallest set that reaches top_p.
        kept = np.cumsum(probabilities) - probabilities < self.top_p
        out = np.zeros_like(logits)
        out[order[kept]] = probabilities[kept] / probabilities[kept].sum()
        return out

    def texts(self, num_tokens: int, least: float) -> dict[tuple[int, ...], float]:
        """Texts of so many tokens that are at least so probable."""
        known: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(num_tokens):
            rows = self.after(list(known))
            known = {
                (*text, int(token)): probability * float(row[token])
                for (text, probability), row in zip(known.items(), rows)
                for token in np.flatnonzero(probability * row >= least)
            }
        return known


@pytest.mark.feature("temperature", "distribution of three tokens against the exact one, chi-square")
@pytest.mark.feature("top_k", "distribution of three tokens against the exact one; top_k 1 equals greedy")
@pytest.mark.feature("top_p", "distribution of three tokens against the exact one, chi-square")
@pytest.mark.case("F14")
def test_text_has_the_targets_distribution(pair, byte_target):
    """All kinds in one batch, so that each row must get its own request's parameters."""
    target = AutoModelForCausalLM.from_pretrained(byte_target, dtype=torch.float32).eval()
    expected = {kind: Distribution(target, **s).texts(n, least=6 / NUM_SAMPLES) for kind, (s, n) in KINDS.items()}
    pair.set_right(1.0)
    for texts in expected.values():
        for text in sorted(texts, key=lambda text: -texts[text])[:8]:
            pair.oracle.learn(PROMPT, [*text, *text])
    kinds = list(KINDS) * NUM_SAMPLES
    sampling = [KINDS[kind][0] | {"max_tokens": 4, "ignore_eos": True, "detokenize": False} for kind in kinds]
    outputs = ask(pair.dflash, [PROMPT] * len(kinds), sampling)
    assert min(pair.oracle.patterns[7, accepted] for accepted in (0, 1)) > 100
    for kind, texts in expected.items():
        length = KINDS[kind][1]
        seen = Counter(tuple(output.outputs[0].token_ids[:length]) for of, output in zip(kinds, outputs) if of == kind)
        counts = np.array([seen[text] for text in texts] + [NUM_SAMPLES - sum(seen[text] for text in texts)])
        shares = np.array([*texts.values(), 1 - sum(texts.values())])
        assert len(texts) > 5, kind
        if shares[-1] < 1e-9:
            assert counts[-1] == 0
            counts, shares = counts[:-1], shares[:-1]
        assert stats.chisquare(counts, NUM_SAMPLES * shares / shares.sum()).pvalue > 1e-3, kind


def test_the_most_probable_token_alone_is_greedy(pair):
    greedy = pair.plain_answers(PROMPTS, {"ignore_eos": True})
    pair.learn(greedy)
    sampled = ask(pair.dflash, PROMPTS, {"temperature": 1.0, "top_k": 1, "ignore_eos": True})
    assert [o.outputs[0].token_ids for o in sampled] == [o.outputs[0].token_ids for o in greedy]
    tiny = ask(pair.dflash, PROMPTS, {"temperature": 1.0, "top_p": 1e-6, "ignore_eos": True})
    assert [o.outputs[0].token_ids for o in tiny] == [o.outputs[0].token_ids for o in greedy]


def token_ids(outputs) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


SEEDED: dict[str, Any] = {"temperature": 0.5, "seed": 11, "ignore_eos": True}


@pytest.mark.feature("seed", "one text alone, in batches of other composition, and again")
@pytest.mark.case("F50")
@pytest.mark.parametrize("prompt", [PROMPTS[1], PROMPTS[3]], ids=["short", "longer"])
def test_a_seed_gives_one_text_in_any_company(pair, prompt):
    pair.learn(pair.plain_answers([prompt], {"ignore_eos": True}))
    [alone] = token_ids(ask(pair.dflash, [prompt], SEEDED))
    company = [{"ignore_eos": True}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3, "top_p": 0.5}, SEEDED]
    together = token_ids(ask(pair.dflash, [*PROMPTS[4:7], prompt], company))
    assert together[-1] == alone
    assert token_ids(ask(pair.dflash, [prompt, *PROMPTS[:2]], [SEEDED, {}, {}]))[0] == alone
    assert token_ids(ask(pair.dflash, [prompt], SEEDED | {"seed": 12}))[0] != alone
    assert sum(accepted > 0 for _, accepted in pair.oracle.patterns.elements()) > 3


@pytest.mark.case("F50")
def test_a_seed_gives_a_one_token_prompt_one_text_in_any_company(pair):
    """The scheduler pads it with drafts, but only in company."""
    from vllm import SamplingParams

    sampling = SEEDED | {"temperature": 2.0, "max_tokens": 12}
    [[alone]] = token_ids(ask(pair.dflash, [[9]], sampling))
    llm_engine = pair.dflash.llm.llm_engine
    finished: dict[str, Any] = {}
    llm_engine.add_request("long", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=30))
    llm_engine.step()
    llm_engine.add_request("short", {"prompt_token_ids": [9]}, SamplingParams(**sampling))
    while llm_engine.has_unfinished_requests():
        finished |= {output.request_id: output.outputs[0] for output in llm_engine.step() if output.finished}
    assert list(finished["short"].token_ids) == alone


@pytest.mark.case("F50")
def test_requests_without_a_seed_differ(pair):
    first, second = token_ids(ask(pair.dflash, [PROMPTS[1]] * 2, {"temperature": 2.0, "ignore_eos": True}))
    assert first != second


@pytest.mark.feature("n", "choices of one seed differ and repeat; with top_k 1 all are the greedy text")
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_several_choices(pair, lengths):
    greedy = pair.plain_answers(PROMPTS[:4], {"ignore_eos": True})
    pair.learn(greedy)
    same = token_ids(ask(pair.dflash, PROMPTS[:4], {"n": 3, "temperature": 1.0, "top_k": 1, "ignore_eos": True}))
    assert same == [[list(output.outputs[0].token_ids)] * 3 for output in greedy]
    pair.schedule(lengths)
    first = token_ids(ask(pair.dflash, PROMPTS[:4], SEEDED | {"n": 3}))
    assert all(len({tuple(text) for text in texts}) == 3 for texts in first)
    pair.schedule(lengths)
    assert token_ids(ask(pair.dflash, PROMPTS[:4], SEEDED | {"n": 3})) == first


def test_several_greedy_choices_are_refused_as_without_speculation(pair):
    messages = []
    for served in (pair.plain, pair.dflash):
        with pytest.raises(VLLMValidationError, match="n must be 1 when using greedy sampling") as caught:
            ask(served, PROMPTS[:1], {"n": 2})
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
