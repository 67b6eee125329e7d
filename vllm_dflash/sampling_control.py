"""Between the proposer and draft_sampling.py: whose parameters drafts follow, and what the target said of them.

draft_sampling.py knows neither vLLM nor its runner. Drafts are proposed here behind the drafter's block pass; in the
next step the runner asks for what they were drawn from, and once they are verified the verifier shows the target's
distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_dflash.draft_sampling import CANDIDATES, DraftSampling, Sampling
from vllm_dflash.options import DFlashOptions
from vllm_dflash.requests import draft_sampling
from vllm_dflash.verification import Verifier

if TYPE_CHECKING:
    from vllm_dflash.proposer import DraftProposer


class SamplingControl:
    """Tokens of every draft, taken or drawn.

    Args:
        proposer: constructed; its runner need not be complete.
        draws: drafts of sampled requests are drawn, as vLLM's `draft_sample_method` says.
    """

    def __init__(self, proposer: DraftProposer, draws: bool) -> None:
        self._proposer, self._runner = proposer, proposer.runner
        # The others see only their part of the vocabulary.
        self._has_whole_logits = not (proposer.use_local_argmax_reduction or proposer.use_heterogeneous_vocab)
        vllm_config = proposer.vllm_config
        options = DFlashOptions.from_additional_config(vllm_config.additional_config)
        # What is measured would come a step too late under asynchronous scheduling.
        is_free = options.draft_sampling == "auto" and not vllm_config.scheduler_config.async_scheduling
        self.sampling = DraftSampling(draws and self._has_whole_logits, chooses=is_free and self._has_whole_logits)

    def install_verifier(self) -> None:
        """Have the runner, by now complete, verify with our sampler from here on."""
        runner = self._runner
        self.verifier = Verifier(runner.sampler, runner.speculative_config, runner.device, self.learn)
        runner.rejection_sampler = self.verifier

    def propose(
        self,
        hidden: torch.Tensor,  # [D * P, hidden], the rows that predict, request by request
        request_ids: Sequence[str],  # D
        context_lens: np.ndarray,  # [D] position of each anchor
        has_exact_lens: bool,
        needs_confidences: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft tokens [D * P] int64 and the drafter's maximum probabilities [D * P], ones where not needed."""
        self.sampling.keep_only(self._runner.requests)
        settings = self._settings(request_ids)
        draws, keeps_all = self.sampling.begin_step(settings)
        if not has_exact_lens:  # a seed's numbers are drawn by position
            draws &= [setting.seed is None for setting in settings]
        if draws.any() or keeps_all:
            candidates = self._proposer.model.candidates(hidden, CANDIDATES)
            tokens = self.sampling.propose(candidates, request_ids, settings, context_lens, draws, keeps_all)
            return tokens, candidates.confidences
        self.sampling.drop(request_ids)
        if needs_confidences and self._has_whole_logits:
            return self._proposer.model.confident_tokens(hidden)
        tokens = self._proposer._greedy_sample(hidden)
        return tokens, torch.ones(len(tokens))

    def verified_probs(self, metadata: SpecDecodeMetadata) -> torch.Tensor | None:
        """What the drafts that are verified now were drawn from [rows, vocabulary]; None where all were taken."""
        batch = self._runner.input_batch
        return self.sampling.verified_probs(
            batch.req_ids, metadata.num_draft_tokens, metadata.draft_token_ids, batch.vocab_size
        )

    def learn(
        self,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        sampled: torch.Tensor,
    ) -> None:
        """Hold drafts that were just verified against the target's distributions; see `verification.Observer`."""
        request_ids = self._runner.input_batch.req_ids
        if sampling_metadata.all_greedy or not self.sampling.wants(request_ids):
            return
        num_accepted = ((sampled >= 0).sum(1) - 1).tolist()
        probs = self.verifier.target_probs(metadata, logits, sampling_metadata)
        settings = self._settings(request_ids)
        self.sampling.learn(request_ids, settings, metadata.num_draft_tokens, num_accepted, probs)

    def _settings(self, request_ids: Sequence[str]) -> list[Sampling]:
        requests = self._runner.requests
        return [draft_sampling(requests[request].sampling_params) for request in request_ids]
