"""What the target's rows go through before drafts are accepted or rejected, beyond what vLLM applies there itself.

`logit_bias` and `min_p`: vLLM's rejection sampler knows neither for rows behind drafts, and refuses requests that have
them. The row behind the last draft goes through the plain sampler, which knows both; the others get them here, in its
order (v1/sample/sampler.py): the bias before penalties, which scale it, and min_p after the temperature.

Two defects of vLLM 0.32 and 0.33 are corrected on the way: the row behind the last draft is held to `min_tokens` by the
length before the drafts, and `logprob_token_ids` of a request gives nothing, or ends the engine beside another
request's `logprobs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler, apply_sampling_constraints
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def logits_processors(vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> LogitsProcessors:
    """The processors that vLLM has without speculation; with it, it builds only the first."""
    kinds = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    return LogitsProcessors(kind(vllm_config, device, is_pin_memory) for kind in kinds)


#: Gets what was verified: metadata, the target's logits [rows + requests, vocabulary], sampling metadata, and the
#: sampled tokens [requests, K + 1], -1 behind each request's last.
Observer = Callable[[SpecDecodeMetadata, torch.Tensor, SamplingMetadata, torch.Tensor], None]


class Verifier(RejectionSampler):
    """vLLM's rejection sampler, with every sampling parameter on every verified row."""

    def __init__(
        self, sampler: Sampler, spec_config: Any, device: torch.device, observe: Observer | None = None
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self._observe = observe

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Accept or reject; see vLLM's method for shapes. A step without any drafts is the plain sampler's."""
        if metadata.max_spec_len == 0:
            return self.sampler(logits, sampling_metadata, predict_bonus_token=True)
        wanted = sampling_metadata.logprob_token_ids
        # vLLM's would put the few values of these tokens where it expects whole rows of the vocabulary.
        without = dataclasses.replace(sampling_metadata, logprob_token_ids=None) if wanted else sampling_metadata
        with minimums_behind_blocks(sampling_metadata.logitsprocs.non_argmax_invariant, metadata.num_draft_tokens):
            output = super().forward(metadata, draft_probs, logits, without)
        if wanted:
            given = self.logprobs_of_given_tokens(metadata, logits, wanted, output.sampled_token_ids)
            output = dataclasses.replace(output, logprobs_tensors=given)
        if self._observe is not None:
            self._observe(metadata, logits, sampling_metadata, output.sampled_token_ids)
        return output

    def logprobs_of_given_tokens(
        self,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,  # [rows + requests, vocabulary], as the target gave them
        token_ids: dict[int, list[int]],  # by index of the request
        sampled: torch.Tensor,  # [requests, K + 1], -1 behind each request's last
    ) -> LogprobsTensors | None:
        """Log-probabilities of the tokens that requests name, [requests * (K + 1), ...], as the plain sampler's."""
        width = sampled.shape[1]
        starts = metadata.cu_num_sampled_tokens - metadata.cu_num_sampled_tokens.diff(
            prepend=metadata.cu_num_sampled_tokens.new_zeros(1)
        )
        rows = starts[:, None] + torch.arange(width, device=starts.device)
        # Rows behind a request's last are dropped with their -1 tokens.
        rows = rows.flatten().clamp_(max=len(logits) - 1)
        values = logits[rows].float()
        if not self.is_logits_logprobs_mode:
            values = self.sampler.compute_logprobs(values)
        by_row = {request * width + i: ids for request, ids in token_ids.items() for i in range(width)}
        return self.sampler.gather_specific_token_logprobs(values, by_row, sampled.flatten().clamp(min=0).long())

    def target_probs(
        self, metadata: SpecDecodeMetadata, logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> torch.Tensor:
        """The target's distribution [rows, vocabulary] at each verified row, as drafts are held against it."""
        rows = logits[metadata.target_logits_indices].float()
        rows = self.apply_logits_processors(rows, sampling_metadata, metadata)
        return apply_sampling_constraints(rows, metadata.cu_num_draft_tokens, sampling_metadata).softmax(-1)

    def apply_logits_processors(
        self,
        logits: torch.Tensor,  # [rows, vocabulary] float32: N_r rows behind drafts of each request r
        sampling_metadata: SamplingMetadata,
        metadata: SpecDecodeMetadata,
    ) -> torch.Tensor:
        """Also called by vLLM's `forward`, in place of the method of its own class. May change `logits`."""
        processors = sampling_metadata.logitsprocs
        for processor in processors.non_argmax_invariant:
            if isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
                add_biases(logits, processor.biases, metadata.num_draft_tokens)
        logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
        for processor in processors.argmax_invariant:
            if isinstance(processor, MinPLogitsProcessor) and processor.min_p_count:
                temperatures = sampling_metadata.temperature
                if temperatures is not None:  # otherwise all are greedy
                    counts = torch.tensor(metadata.num_draft_tokens)
                    mask_improbable(logits, processor.min_p_cpu_tensor[: len(counts)], temperatures, counts)
        return logits


@contextlib.contextmanager
def minimums_behind_blocks(processors: Sequence[Any], num_drafts: Sequence[int]) -> Iterator[None]:
    """While the row behind each block is sampled, hold `min_tokens` against the length there, drafts included.

    vLLM holds it against the length before the block, and so forbids a text to end there that already may. The token
    of this row counts only where all drafts are accepted.
    """
    changed = []
    for processor in processors:
        if isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
            bound = {
                request: (stops, is_structured)
                for request, (least, tokens, stops, is_structured) in processor.min_toks.items()
                if len(tokens) + num_drafts[request] < least
            }
            if len(bound) < len(processor.min_toks):
                changed.append((processor, processor.logits_slice, processor.restore_logits_slice))
                structured = {request: bound[request] for request in bound if bound[request][1]}
                processor.logits_slice = _places(bound, processor.device)
                processor.restore_logits_slice = _places(structured, processor.device)
    try:
        yield
    finally:
        for processor, places, restored in changed:
            processor.logits_slice, processor.restore_logits_slice = places, restored


def _places(stops: dict[int, tuple[set[int], bool]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, tokens), each [n] int32, of the stop tokens of requests."""
    pairs = [(request, token) for request, (tokens, _) in stops.items() for token in tokens]
    rows, tokens = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2).to(device, non_blocking=True).unbind(1)
    return rows, tokens


def add_biases(logits: torch.Tensor, biases: dict[int, dict[int, float]], num_rows: Sequence[int]) -> None:
    """Add each request's biases to each of its rows, in place.

    Args:
        logits: [rows, vocabulary] float32, request by request.
        biases: by index of the request, then by token.
        num_rows: rows of each request; 0 = none.
    """
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    first = 0
    for request, count in enumerate(num_rows):
        bias = biases.get(request, {})
        for row in range(first, first + count):
            rows += [row] * len(bias)
            tokens += bias.keys()
            values += bias.values()
        first += count
    if rows:
        index = torch.tensor([rows, tokens]).to(logits.device, non_blocking=True)
        addends = torch.tensor(values, dtype=logits.dtype).to(logits.device, non_blocking=True)
        logits[index[0], index[1]] += addends  # a request has each token once, so no place is named twice


def mask_improbable(
    logits: torch.Tensor, min_p: torch.Tensor, temperatures: torch.Tensor, num_rows: torch.Tensor
) -> None:
    """Set logits of tokens less probable than min_p times the most probable one to -inf, in place.

    p_i < min_p * p_max means (l_i - l_max) / T < log(min_p), so neither softmax nor division by T is needed.

    Args:
        logits: [rows, vocabulary] float32, request by request, before the temperature.
        min_p: [requests] float32 on the CPU; 0 = off, as is a temperature of 0 (greedy).
        temperatures: [requests] float32, on the device of `logits`.
        num_rows: [requests] integers on the CPU: rows of each.
    """
    total = int(num_rows.sum())
    margins = min_p.log().to(logits.device, non_blocking=True) * temperatures  # log(0) = -inf: nothing is masked
    margins = torch.where(temperatures > 0, margins, float("-inf"))
    margins = margins.repeat_interleave(num_rows.to(logits.device, non_blocking=True), output_size=total)
    thresholds = logits.amax(-1) + margins
    logits.masked_fill_(logits < thresholds[:, None], float("-inf"))
