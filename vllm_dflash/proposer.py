"""The proposer of vLLM's V1 model runner: one draft step, told top to bottom in `propose`.

A subclass of vLLM's DFlashProposer; loading, buffers, attention metadata and CUDA-graph dispatch are inherited.
Which rows a step has is drawn in triton_kernels/draft_inputs.py.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_dflash import LOGGER, cpu_backend
from vllm_dflash.context_backlog import ContextBacklog, ContextRows
from vllm_dflash.draft_length import DraftPlan
from vllm_dflash.drafter import Drafter
from vllm_dflash.length_control import LengthControl, StepBatch
from vllm_dflash.length_setup import fixed_lengths, make_control
from vllm_dflash.memory_report import drafter_memory
from vllm_dflash.requests import draft_limit
from vllm_dflash.sampling_control import SamplingControl
from vllm_dflash.thinking_budgets import ThinkingBudgets
from vllm_dflash.triton_kernels.draft_inputs import PAD_SLOT_ID, DraftRows, context_only, draft_inputs

logger = init_logger(LOGGER)


class DraftProposer(DFlashProposer):
    """Drafts for the requests that can use it; writes context K/V for all of them."""

    model: Drafter

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.mask_token_id = self.parallel_drafting_token_id
        self.lengths: LengthControl = fixed_lengths(self.num_speculative_tokens)
        self.backlog = ContextBacklog(page_size=1)  # every row completes a page, so none waits
        self.sampling = SamplingControl(self, draws=self._enable_probabilistic_draft_probs)
        if device.type == "cpu":
            cpu_backend.correct()

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Load the drafter; the runner, by now complete, verifies with our sampler from here on."""
        super().load_model(target_model)
        for owner, name in ((self.model.model, "embed_tokens"), (self.model, "lm_head")):
            layer = getattr(owner, name)
            if isinstance(layer, BaseLayerWithLoRA):  # it would look rows up in the target's batch
                setattr(owner, name, layer.base_layer)
        self.sampling.install_verifier()

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """vLLM's: the anchors [R] int32 and how many tokens each request got [R]; at once where each got one.

        While nothing is drafted on a CPU, what is done for each request in each step is most of what it costs.
        """
        num_reqs = gpu_input_batch.num_reqs
        each_got_one = sampled_token_ids.shape[1] == 1 and not self.runner.discard_request_mask.np[:num_reqs].any()
        if each_got_one and sampled_token_ids.is_cpu:
            anchors = sampled_token_ids[:, 0].to(torch.int32)
            return anchors, torch.ones_like(anchors)
        return super().prepare_next_token_ids_padded(sampled_token_ids, requests, gpu_input_batch, discard_request_mask)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]:
        """vLLM's: metadata, each request's last row [R] and its rejected rows [R]; none where nothing was drafted."""
        if valid_sampled_tokens_count.is_cpu and not any(spec_decode_metadata.num_draft_tokens):
            last_rows = common_attn_metadata.query_start_loc[1:] - 1
            return common_attn_metadata, last_rows, torch.zeros_like(last_rows)
        return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count)

    def prepare(self) -> None:
        """Decide how draft lengths are decided; vLLM has loaded and warmed up everything by now."""
        logger.info("%s", drafter_memory(self).line())
        self.lengths = make_control(self)
        self.backlog = ContextBacklog(self.block_size)
        batch = self.runner.input_batch
        if batch.thinking_budget_state_holder is not None:
            batch.thinking_budget_state_holder = ThinkingBudgets(self.vllm_config, self.device)

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor | list[list[int]]:
        """Write context K/V of the target's rows and draft a block for each request that can use one.

        Args (T rows of the target pass, R requests; the others are vLLM's and not needed here):
            num_speculative_tokens: K of this step; 0 only writes context K/V.
            target_positions: [T] int64, or [3, T] under M-RoPE, whose text row is the first.
            target_hidden_states: [T, F * hidden], the features side by side.
            next_token_ids: [R] int32, the anchors.
            num_rejected_tokens_gpu: [R] int32, rejected rows at the end of each request's rows.

        Returns:
            [R, K] draft tokens; where some requests do not draft and the scheduler waits for the result, one list
            per request, empty for those.
        """
        started = time.perf_counter()
        positions = target_positions[0] if target_positions.dim() == 2 else target_positions
        batch = self.step_batch(common_attn_metadata, num_rejected_tokens_gpu, num_speculative_tokens)
        plan = self.lengths.plan(batch)
        rows = self.rows(plan, batch, next_token_ids, positions, common_attn_metadata, num_rejected_tokens_gpu)
        context_rows = self.store_context(target_hidden_states, rows, batch, is_drafting=len(plan.drafting) > 0)
        stored = time.perf_counter()
        hidden = self.run_queries(rows, plan.drafting, common_attn_metadata, num_rejected_tokens_gpu)
        tokens, confidences = self.sample(hidden, rows, plan, batch)
        decision = self.lengths.choose(plan, confidences)
        self.lengths.finish(
            batch,
            plan,
            decision,
            query_rows=len(rows.query_ids),
            context_rows=context_rows,
            context_seconds=stored - started,
            draft_seconds=time.perf_counter() - stored,
            alive=self.runner.requests,
        )
        return self.by_request(tokens, decision.lengths, plan.drafting, len(next_token_ids), num_speculative_tokens)

    def rows(
        self,
        plan: DraftPlan,
        batch: StepBatch,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        metadata: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,
    ) -> DraftRows:
        """Context and query rows of the step."""
        is_whole = len(plan.drafting) == 0 and batch.has_exact_lens and not batch.num_rejected.any()
        if is_whole and batch.context_lens.max() <= self.max_draft_position:
            return context_only(positions, metadata.slot_mapping[: len(positions)])
        return draft_inputs(
            anchors,
            positions,
            metadata.query_start_loc,
            num_rejected,
            metadata.block_table_tensor,
            torch.from_numpy(plan.drafting).to(self.device, non_blocking=True),
            kv_block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            num_query_per_req=1 + self.num_masks(plan),
            max_position=self.max_draft_position,
        )

    def num_masks(self, plan: DraftPlan) -> int:
        """Masks of a block. A causal drafter predicts the same with fewer behind; a bidirectional one sees them, also
        where the step's K is below the engine's.
        """
        return plan.num_positions if self.dflash_causal else self.num_speculative_tokens

    @property
    def max_draft_position(self) -> int:
        """Positions at or beyond it have no cache slot, or no RoPE entry in the drafter."""
        return min(self.runner.effective_drafter_max_model_len, self.draft_model_config.max_model_len)

    def step_batch(
        self,
        metadata: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,
        num_speculative_tokens: int,
    ) -> StepBatch:
        """What this step's target pass consisted of, and who can draft: a sampled anchor and room for a whole block.

        vLLM stops drafting for the whole batch when one request is near the end (`_input_fits_in_drafter`). Here
        it is each request's own affair. Lengths come from the host, so that a GPU is not waited for; there they
        may count rejected rows, and a request stops drafting up to K tokens early.
        """
        num_reqs = metadata.num_reqs
        lengths = metadata.seq_lens_cpu_upper_bound.numpy()[:num_reqs].astype(np.int64)
        rejected = np.zeros(num_reqs, dtype=np.int64)
        has_exact_lens = num_rejected is None or num_rejected.is_cpu or self.lengths.learns
        if num_rejected is not None and has_exact_lens:
            rejected[:] = num_rejected.cpu().numpy()[:num_reqs]
            lengths -= rejected
        request_ids = tuple(self.runner.input_batch.req_ids[:num_reqs])
        caps = np.full(num_reqs, num_speculative_tokens, dtype=np.int64)
        is_seeded = np.zeros(num_reqs, dtype=bool)
        for row, request_id in enumerate(request_ids):
            parameters = self.runner.requests[request_id].sampling_params
            if parameters is None:
                continue
            limit = draft_limit(parameters.extra_args) if parameters.extra_args else None
            if limit is not None and limit < num_speculative_tokens:
                caps[row] = limit
            if parameters.seed is not None and parameters.temperature > 0:
                is_seeded[row] = True
        caps[lengths + 1 + self.num_speculative_tokens > self.max_draft_position] = 0
        caps[self.runner.discard_request_mask.np[:num_reqs]] = 0  # a prompt goes on
        return StepBatch(
            request_ids=request_ids,
            num_rows=np.diff(metadata.query_start_loc_cpu.numpy()[: num_reqs + 1]).astype(np.int64),
            num_rejected=rejected,
            context_lens=lengths,
            has_exact_lens=has_exact_lens,
            caps=caps,
            is_seeded=is_seeded,
        )

    def store_context(
        self, target_hidden_states: torch.Tensor, rows: DraftRows, batch: StepBatch, is_drafting: bool
    ) -> int:
        """Fuse features and write their K/V, or leave both to a later step; returns how many rows were written."""
        due = self.backlog.rows_due(
            ContextRows(target_hidden_states, rows.context_positions, rows.context_slots), batch, is_drafting
        )
        if due is None:
            return 0
        features, positions, slots = due
        if slots.is_cpu:  # there rows without a slot are not even computed
            kept = torch.from_numpy(np.flatnonzero(slots.numpy() != PAD_SLOT_ID))
            if len(kept) < len(slots):
                features, positions, slots = features[kept], positions[kept], slots[kept]
        if len(slots):  # none where all requests are beyond the drafter's last position
            self.model.store_context(features, positions, slots)
        return len(slots)

    def run_queries(
        self,
        rows: DraftRows,
        drafting: np.ndarray,
        metadata: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Hidden states [D * Q, hidden] of the query rows; None where no request drafts."""
        num_queries = len(rows.query_ids)
        if num_queries == 0:
            if self.vllm_config.parallel_config.data_parallel_size > 1:
                self.dummy_run(num_tokens=1)  # the other ranks' collectives wait for this one
            return None
        _, layer_metadata = self.build_per_group_and_layer_attn_metadata(
            self.query_metadata(rows, drafting, metadata, num_rejected)
        )
        graph_mode, num_padded, num_tokens_across_dp = self._determine_batch_execution_and_padding(num_queries)
        # Graphs are captured on these buffers.
        self.input_ids[:num_queries] = rows.query_ids
        self.positions[:num_queries] = rows.query_positions
        if self.eplb_state is not None:
            self.eplb_state.prepare_forward(self.draft_model_config, num_queries)
        with set_forward_context(
            layer_metadata,
            self.vllm_config,
            num_tokens=num_padded,
            num_tokens_across_dp=num_tokens_across_dp,
            cudagraph_runtime_mode=graph_mode,
            slot_mapping=self._get_slot_mapping(num_padded, rows.query_slots),
        ):
            return self.model(
                input_ids=self.input_ids[:num_padded],
                positions=self.positions[:num_padded],
                inputs_embeds=None,
            )

    def query_metadata(
        self,
        rows: DraftRows,
        drafting: np.ndarray,
        metadata: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,
    ) -> CommonAttentionMetadata:
        """Attention metadata of the query rows: each sees its request's accepted context and its own block."""
        num_drafting = len(drafting)
        num_query_per_req = len(rows.query_ids) // num_drafting
        seq_lens, block_table = metadata.seq_lens, metadata.block_table_tensor
        if num_rejected is not None:
            seq_lens = seq_lens - num_rejected
        upper_bound = metadata.seq_lens_cpu_upper_bound
        if num_drafting < metadata.num_reqs:
            chosen = torch.from_numpy(drafting)
            upper_bound = upper_bound[chosen]
            chosen = chosen.to(self.device, non_blocking=True)
            seq_lens, block_table = seq_lens[chosen], block_table[chosen]
        starts = torch.arange(num_drafting + 1, dtype=torch.int32) * num_query_per_req
        return CommonAttentionMetadata(
            query_start_loc=self.arange[: num_drafting + 1] * num_query_per_req,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens + num_query_per_req,
            seq_lens_cpu_upper_bound=upper_bound + num_query_per_req,
            num_reqs=num_drafting,
            num_actual_tokens=len(rows.query_ids),
            max_query_len=num_query_per_req,
            max_seq_len=metadata.max_seq_len + num_query_per_req,
            block_table_tensor=block_table,
            slot_mapping=rows.query_slots,
            causal=self.dflash_causal,
        )

    def sample(
        self,
        hidden: torch.Tensor | None,  # [D * Q, hidden] of the query rows
        rows: DraftRows,
        plan: DraftPlan,
        batch: StepBatch,
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Draft tokens [D, P] of the first P masks, and the maximum probability of each [D, P] where lengths need it.

        Distributions of tokens that are drawn wait in `self.sampling` to be verified.
        """
        num_drafting, num_positions = len(plan.drafting), plan.num_positions
        if hidden is None:
            return torch.empty(0, 0, dtype=torch.int64, device=self.device), np.empty((0, 0))
        num_masks = len(rows.sample_indices) // num_drafting
        wanted = rows.sample_indices.view(num_drafting, num_masks)[:, :num_positions].reshape(-1)
        tokens, confidences = self.sampling.propose(
            hidden[wanted],
            [batch.request_ids[i] for i in plan.drafting],
            batch.context_lens[plan.drafting],
            batch.has_exact_lens,
            needs_confidences=self.lengths.learns,
        )
        shape = (num_drafting, num_positions)
        return tokens.view(shape), confidences.float().cpu().numpy().reshape(shape)

    def by_request(
        self,
        tokens: torch.Tensor,
        lengths: np.ndarray,
        drafting: np.ndarray,
        num_reqs: int,
        num_speculative_tokens: int,
    ) -> torch.Tensor | list[list[int]]:
        """Draft tokens [D, P], cut to `lengths` [D], as the runner wants them; see `propose`."""
        if len(drafting) == num_reqs and (lengths == num_speculative_tokens).all():
            return tokens
        if self.runner.use_async_scheduling:
            # The scheduler has already set K placeholders for everyone; zeros are verified and rejected.
            padded = tokens.new_zeros(num_reqs, num_speculative_tokens)
            padded[torch.from_numpy(drafting).to(tokens.device), : tokens.shape[1]] = tokens
            return padded
        drafts: list[list[int]] = [[] for _ in range(num_reqs)]
        for request, block, length in zip(drafting, tokens.tolist(), lengths):
            drafts[request] = block[:length]
        return drafts
