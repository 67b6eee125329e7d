"""Engines that answer prompts with the target: vLLM, or Hugging Face transformers where vLLM is not installed.

Both have the same four names: `window` prompts are worth having in hand at once, `submit` hands one over, `step` works
for a while and returns what was finished, `max_length` is the context. A sampled answer depends on the prompt and its
own seed alone, not on what else is in the batch, so a run that goes on after a kill gives the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from vllm_dflash.training.target_features import load_target


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are made."""

    max_tokens: int  # of an answer
    max_length: int  # of prompt and answer; the target's own limit also holds
    temperature: float  # 0: greedy
    batch_size: int


@dataclass(frozen=True)
class Answer:
    """What the target wrote, with the end-of-turn token where it came to one."""

    token_ids: list[int]
    finish: Literal["stop", "length"]


class Generator(Protocol):
    """See the module's first lines."""

    window: int
    max_length: int

    def submit(self, key: str, prompt_ids: Sequence[int], seed: int) -> None:
        """Hand over a prompt of fewer than `max_length` tokens, under a name not in use."""

    def step(self) -> list[tuple[str, Answer]]:
        """Work; returns the answers finished meanwhile, perhaps none, by the names of their prompts."""


class VllmGenerator:
    """Answers by vLLM in this process, without speculation."""

    def __init__(self, target: str, settings: GenerationSettings) -> None:
        from transformers import AutoConfig
        from vllm import LLM

        self.settings, self.window = settings, 2 * settings.batch_size
        self.max_length = _context(AutoConfig.from_pretrained(target), settings)
        self._engine = LLM(
            target,
            dtype="bfloat16" if torch.cuda.is_available() else "float32",  # as load_target
            enforce_eager=not torch.cuda.is_available(),  # compiling for a CPU takes minutes and gains little
            max_model_len=self.max_length,
            max_num_seqs=settings.batch_size,
        ).llm_engine

    def submit(self, key: str, prompt_ids: Sequence[int], seed: int) -> None:
        """As in Generator."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=self.settings.temperature,
            max_tokens=min(self.settings.max_tokens, self.max_length - len(prompt_ids)),
            seed=seed,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(key, {"prompt_token_ids": list(prompt_ids)}, parameters)

    def step(self) -> list[tuple[str, Answer]]:
        """As in Generator."""
        finished = []
        for output in self._engine.step():
            if output.finished:
                completion = output.outputs[0]
                finish: Literal["stop", "length"] = "stop" if completion.finish_reason == "stop" else "length"
                finished.append((output.request_id, Answer(list(completion.token_ids), finish)))
        return finished


class TransformersGenerator:
    """Answers by `generate` of transformers, in left-padded batches of prompts of similar length."""

    def __init__(self, target: str, tokenizer: Any, settings: GenerationSettings) -> None:
        from transformers import GenerationConfig

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.settings, self.window = settings, 8 * settings.batch_size
        self._model = load_target(target, device).eval()
        self.max_length = _context(self._model.config, settings)
        ends = self._model.generation_config.eos_token_id
        self._ends = sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})
        if not self._ends:
            raise ValueError(f"target '{target}' has no end-of-turn token, so its answers would never end; set one.")
        # The target's own settings, such as a repetition penalty, would change what it writes; vLLM ignores them too.
        self._model.generation_config = GenerationConfig(eos_token_id=self._ends, pad_token_id=self._ends[0])
        self._waiting: list[tuple[str, list[int], int]] = []

    def submit(self, key: str, prompt_ids: Sequence[int], seed: int) -> None:
        """As in Generator."""
        self._waiting.append((key, list(prompt_ids), seed))

    def step(self) -> list[tuple[str, Answer]]:
        """As in Generator."""
        self._waiting.sort(key=lambda waiting: len(waiting[1]))
        batch = self._waiting[: self.settings.batch_size]
        self._waiting = self._waiting[self.settings.batch_size :]
        if not batch:
            return []
        limits = [min(self.settings.max_tokens, self.max_length - len(ids)) for _, ids, _ in batch]
        written = self._generate([ids for _, ids, _ in batch], [seed for _, _, seed in batch], max(limits))
        return [(key, self._answer(row, limit)) for (key, _, _), row, limit in zip(batch, written, limits)]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], seeds: list[int], max_tokens: int) -> list[list[int]]:
        longest = max(len(ids) for ids in prompts)
        ids = torch.full((len(prompts), longest), self._ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        device = self._model.device
        noise = [] if self.settings.temperature == 0 else [_GumbelNoise(seeds, self.settings.temperature, device)]
        output = self._model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_tokens,
            do_sample=False,
            logits_processor=noise,
        )
        return list(output[:, longest:].tolist())

    def _answer(self, token_ids: list[int], limit: int) -> Answer:
        token_ids = token_ids[:limit]
        end = next((i for i, token in enumerate(token_ids) if token in self._ends), None)
        return Answer(token_ids, "length") if end is None else Answer(token_ids[: end + 1], "stop")


class _GumbelNoise:
    """Makes greedy decoding sample: argmax(logits / T + g), with Gumbel noise g, is distributed as softmax(logits / T).

    Unlike `do_sample`, it takes one stream of random numbers per row.
    """

    def __init__(self, seeds: list[int], temperature: float, device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # both [rows, ...]
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators):
            row.exponential_(generator=generator)
        return scores.float() / self._temperature - noise.log()


def _context(config: Any, settings: GenerationSettings) -> int:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(settings.max_length, own or settings.max_length)
