"""The probe: the target's greedy answers to a few prompts, and the outputs of all its layers on them, made once.

Everything the doctor tries afterwards runs the small drafter only: for greedy text the target's choice after any prefix
is the text's next token (training/acceptance.py), and whichever layers a drafter reads are already there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_dflash.doctor.prompts import Question, Rendering, render
from vllm_dflash.training.blocks import PackedRow, pack
from vllm_dflash.training.target_features import TargetFeatures

#: Likeliest tokens of the target that a drafter's distribution is compared with.
_TOP_K = 16


@dataclass(frozen=True)
class Probe:
    """Answers and what the target computed while it read them; T tokens in all."""

    row: PackedRow  # documents one after another; its features are those of all layers, [T, layers * hidden]
    num_layers: int
    ids: list[tuple[str, str]]  # (id, source) of each document
    answers: list[list[int]]
    embedding: Tensor  # [vocabulary, hidden], the target's
    head: Tensor  # [vocabulary, hidden], the target's

    def features(self, layer_ids: Sequence[int]) -> Tensor:
        """Outputs of some layers beside each other, [T, len(layer_ids) * hidden]."""
        layers = self.row.features.unflatten(1, (self.num_layers, -1))
        return layers[:, list(layer_ids)].flatten(1)


class ProbeSource:
    """Makes probes of one target and its questions, each rendering once.

    Args:
        target: a Hugging Face causal language model, on its device.
        asked: the questions.
        max_tokens: of each answer.
    """

    def __init__(self, target: Any, tokenizer: Any, asked: Sequence[Question], max_tokens: int) -> None:
        self.target, self.tokenizer, self.asked, self.max_tokens = target.eval(), tokenizer, asked, max_tokens
        self._made: dict[Rendering, Probe] = {}

    def get(self, rendering: Rendering) -> Probe:
        """The probe with questions rendered in this way; answers of fewer than two tokens are left out.

        Raises:
            ValueError: the questions cannot be rendered so, or the target answers none of them.
        """
        if rendering not in self._made:
            self._made[rendering] = self._make(rendering)
        return self._made[rendering]

    def _make(self, rendering: Rendering) -> Probe:
        prompts = render(self.asked, rendering, self.tokenizer)
        answers = greedy_answers(self.target, prompts, self.max_tokens, self.tokenizer.eos_token_id)
        asked = [(q, p, a) for q, p, a in zip(self.asked, prompts, answers) if len(a) > 1]
        if len(asked) < 2:
            raise ValueError(
                f"the target answers fewer than two of {len(prompts)} prompts with more than one token ("
                f"{rendering.label}); give other prompts with --prompts, or another --chat-template."
            )
        num_layers = self.target.config.get_text_config().num_hidden_layers
        extractor = TargetFeatures(self.target, range(num_layers), _TOP_K, dtype=self.target.dtype)
        seen = extractor.extract([prompt + answer for _, prompt, answer in asked])
        documents = [
            (torch.tensor(prompt + answer), torch.tensor([False] * len(prompt) + [True] * len(answer)), features)
            for (_, prompt, answer), features in zip(asked, seen)
        ]
        return Probe(
            pack(documents).to(extractor.device),
            num_layers,
            [(question.id, "probe") for question, _, _ in asked],
            [answer for _, _, answer in asked],
            self.target.get_input_embeddings().weight.detach(),
            self.target.get_output_embeddings().weight.detach(),
        )


@torch.inference_mode()
def greedy_answers(target: Any, prompts: Sequence[Sequence[int]], max_tokens: int, end: int | None) -> list[list[int]]:
    """The target's greedy answers, one batch padded on the left; an end token closes an answer and is part of it."""
    from transformers import GenerationConfig

    ends = target.generation_config.eos_token_id
    ends = sorted({end, *(ends if isinstance(ends, list) else [ends])} - {None})
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), ends[0] if ends else 0)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    # A config of its own: the target's may have a repetition penalty, which serving at temperature 0 has not.
    config = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0
    )
    kept, target.generation_config = target.generation_config, GenerationConfig(pad_token_id=config.pad_token_id)
    try:
        output = target.generate(ids.to(target.device), attention_mask=mask.to(target.device), generation_config=config)
    finally:
        target.generation_config = kept
    answers = []
    for row in output[:, longest:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        answers.append(row if stop is None else row[: stop + 1])
    return answers
