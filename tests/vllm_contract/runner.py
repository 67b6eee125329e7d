"""What we use of vLLM inside the engine: the V1 runner, proposers, their attention metadata."""

from __future__ import annotations

from vllm_contract.row import Row

_PROPOSE = (
    "num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids "
    "token_indices_to_sample common_attn_metadata sampling_metadata mm_embed_inputs num_rejected_tokens_gpu "
    "slot_mappings"
)
_PROPOSE_CALL = f"self.drafter.propose({', '.join(f'{name}=_' for name in _PROPOSE.split())})"

RUNNER: dict[str, tuple[Row, ...]] = {
    "vllm.distributed.eplb.eplb_state": (
        Row("EplbState.prepare_forward", "proposer.py", call="model_config num_unpadded_tokens"),
    ),
    "vllm.distributed.parallel_state": (
        Row("get_tp_group", "length_setup.py", call=""),
        Row("GroupCoordinator.broadcast_object", "length_setup.py", call="obj * src"),
        Row("GroupCoordinator.__init__", "length_setup.py", sets="rank_in_group"),
    ),
    "vllm.forward_context": (
        Row("set_forward_context", "length_setup.py", call="attn_metadata vllm_config * num_tokens"),
        Row(
            "set_forward_context",
            "proposer.py",
            call="attn_metadata vllm_config * num_tokens num_tokens_across_dp cudagraph_runtime_mode slot_mapping",
        ),
    ),
    "vllm.v1.attention.backend": (
        Row(
            "CommonAttentionMetadata",
            "proposer.py",
            call=(
                "* query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs "
                "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal"
            ),
        ),
    ),
    "vllm.v1.attention.backends.utils": (Row("PAD_SLOT_ID", "triton_kernels/draft_inputs.py", value=-1),),
    "vllm.v1.kv_cache_interface": (Row("KVCacheGroupSpec", "kv_groups.py", fields="layer_names kv_cache_spec"),),
    "vllm.v1.outputs": (
        Row("SamplerOutput", "verification.py", fields="sampled_token_ids logprobs_tensors"),
        Row("LogprobsTensors", "verification.py"),
        Row("ModelRunnerOutput", "step_lengths.py", fields="req_id_to_index sampled_token_ids"),
    ),
    "vllm.v1.sample.logits_processor": (
        Row("LogitsProcessors", "verification.py"),
        Row(
            "build_logitsprocs",
            "runners.py",
            signature="vllm_config device is_pin_memory is_pooling_model custom_logitsprocs",
            contains="ctor(vllm_config, device, is_pin_memory)",
        ),
    ),
    "vllm.v1.sample.logits_processor.state": (
        Row("LogitsProcessors.__init__", "verification.py", sets="argmax_invariant non_argmax_invariant"),
    ),
    "vllm.v1.sample.logits_processor.builtin": (
        Row("MinTokensLogitsProcessor", "verification.py"),
        Row(
            "MinTokensLogitsProcessor.__init__",
            "verification.py",
            sets="device logits_slice min_toks restore_logits_slice",
        ),
        Row("LogitBiasLogitsProcessor", "verification.py"),
        Row("LogitBiasLogitsProcessor.__init__", "verification.py", sets="biases"),
        Row("MinPLogitsProcessor", "verification.py"),
        Row("MinPLogitsProcessor.__init__", "verification.py", sets="min_p_count min_p_cpu_tensor"),
    ),
    "vllm.v1.sample.metadata": (
        Row(
            "SamplingMetadata",
            "verification.py, sampling_control.py, proposer.py",
            fields="temperature all_greedy logitsprocs logprob_token_ids",
        ),
    ),
    "vllm.v1.sample.sampler": (
        Row("Sampler", "verification.py"),
        Row("Sampler.compute_logprobs", "verification.py", call="logits"),
        Row("Sampler.forward", "verification.py", call="logits sampling_metadata predict_bonus_token"),
        Row("Sampler.gather_specific_token_logprobs", "verification.py", call="logprobs logprob_token_ids sampled"),
    ),
    "vllm.v1.sample.ops.topk_topp_sampler": (
        Row("apply_top_k_only", "cpu_backend.py", signature="logits k"),
        Row("apply_top_k_top_p", "cpu_backend.py", call="logits k p"),
        Row("apply_top_k_top_p_pytorch", "cpu_backend.py", contains="apply_top_k_only(_, _)"),
        Row("apply_top_k_top_p_pytorch", "cpu_sampling.py", call="logits k p * allow_cpu_sync"),
        Row("TopKTopPSampler.forward_cpu", "cpu_backend.py", contains="apply_top_k_top_p(logits, k, p)"),
    ),
    "vllm.v1.spec_decode.metadata": (
        Row(
            "SpecDecodeMetadata",
            "verification.py, sampling_control.py, cpu_backend.py, proposer.py",
            fields=(
                "draft_token_ids num_draft_tokens cu_num_draft_tokens cu_num_sampled_tokens target_logits_indices "
                "bonus_logits_indices logits_indices"
            ),
            contains="self.max_spec_len = max(self.num_draft_tokens)",
        ),
    ),
    "vllm.v1.sample.rejection_sampler": (
        Row("expand_batch_to_tokens", "cpu_backend.py", signature="x cu_num_tokens num_tokens replace_from replace_to"),
        # Looked up as a global of the module, so rebinding the name there is enough.
        Row(
            "apply_sampling_constraints",
            "cpu_backend.py",
            contains=(
                "expand_batch_to_tokens(_, _, _, replace_from=_, replace_to=_); expand_batch_to_tokens(_, _, _); "
                "apply_top_k_top_p(_, _, _)"
            ),
        ),
        Row("apply_sampling_constraints", "verification.py", call="logits cu_num_draft_tokens sampling_metadata"),
        Row(
            "RejectionSampler.__init__",
            "verification.py",
            call="sampler spec_config device",
            sets="is_logits_logprobs_mode",
        ),
        Row(
            "RejectionSampler.forward",
            "verification.py",
            signature="metadata draft_probs logits sampling_metadata",
            contains="self.apply_logits_processors(target_logits, sampling_metadata, metadata)",
        ),
        Row(
            "RejectionSampler.apply_logits_processors",
            "verification.py",
            signature="logits sampling_metadata metadata",
        ),
    ),
    "vllm.v1.sample.thinking_budget_state": (
        Row(
            "ThinkingBudgetStateHolder.__init__",
            "thinking_budgets.py",
            call="reasoning_config max_num_seqs num_spec_tokens device * is_pin_memory",
            sets="_state think_end_token_ids",
        ),
        Row(
            "ThinkingBudgetStateHolder.update_state",
            "thinking_budgets.py",
            signature="output_token_ids spec_token_ids repeat_indices",
        ),
        Row(
            "ThinkingBudgetStateHolder.apply_to_logits",
            "thinking_budgets.py",
            signature="logits predict_bonus_token spec_token_ids",
        ),
        Row("ThinkingBudgetStateHolder._update_think_state", "thinking_budgets.py", signature="state"),
    ),
    "vllm.v1.spec_decode.dflash": (
        Row(
            "DFlashProposer",
            "runners.py, proposer.py",
            bases="SpecDecodeBaseProposer",
            members="dflash_config",
            lacks="__new__ load_model propose",
        ),
        Row(
            "DFlashProposer.__init__",
            "runners.py, proposer.py",
            signature="vllm_config device runner",
            sets="arange dflash_causal positions",
        ),
        Row(
            "DFlashProposer.build_per_group_and_layer_attn_metadata",
            "proposer.py",
            call="cad",
            returns="tuple[list[object], dict[str, object]]",
        ),
        Row(
            "DFlashProposer.dummy_run",
            "drafter.py, proposer.py",
            call="* num_tokens",
            contains="self.model.precompute_and_store_context_kv(context_states, context_positions)",
        ),
    ),
    "vllm.v1.spec_decode.llm_base_proposer": (
        Row("SpecDecodeBaseProposer", "runners.py", lacks="__new__"),
        Row(
            "SpecDecodeBaseProposer.__init__",
            "proposer.py",
            sets=(
                "_enable_probabilistic_draft_probs arange block_size device draft_model_config "
                "dtype eplb_state hidden_size input_ids "
                "num_speculative_tokens parallel_drafting_token_id positions use_heterogeneous_vocab "
                "use_local_argmax_reduction vllm_config"
            ),
        ),
        Row("SpecDecodeBaseProposer.load_model", "proposer.py", signature="target_model", sets="model"),
        Row("SpecDecodeBaseProposer.initialize_attn_backend", "proposer.py", sets="block_size"),
        Row("SpecDecodeBaseProposer.propose", "proposer.py", signature=_PROPOSE),
        Row(
            "SpecDecodeBaseProposer._determine_batch_execution_and_padding",
            "proposer.py",
            call="num_tokens",
            returns="tuple[CUDAGraphMode, int, torch.Tensor | None]",
        ),
        Row(
            "SpecDecodeBaseProposer._get_slot_mapping",
            "proposer.py",
            call="num_tokens slot_mapping",
            returns="dict[str, torch.Tensor]",
        ),
        Row(
            "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
            "proposer.py",
            signature="sampled_token_ids requests gpu_input_batch discard_request_mask",
            returns="tuple[torch.Tensor, torch.Tensor]",
        ),
        Row(
            "SpecDecodeBaseProposer.prepare_inputs_padded",
            "proposer.py",
            signature="common_attn_metadata spec_decode_metadata valid_sampled_tokens_count",
            returns="tuple[CommonAttentionMetadata, torch.Tensor, torch.Tensor]",
        ),
        Row("SpecDecodeBaseProposer._greedy_sample", "proposer.py", signature="hidden_states"),
    ),
    "vllm.v1.spec_decode.utils": (Row("PADDING_SLOT_ID", "triton_kernels/draft_inputs.py", value=-1),),
    "vllm.v1.utils": (Row("CpuGpuBuffer.__init__", "proposer.py", sets="np"),),
    "vllm.v1.worker.cpu_model_runner": (
        Row(
            "CPUModelRunner",
            "runners.py, cpu_backend.py",
            lacks="_input_fits_in_drafter execute_model sample_tokens",
            bases="GPUModelRunner",
        ),
    ),
    "vllm.v1.worker.cpu_worker": (
        Row("CPUWorker.compile_or_warm_up_model", "runners.py", signature=""),
        Row("CPUWorker", "runners.py", bases="Worker", lacks="load_model"),
        Row(
            "CPUWorker.init_device",
            "runners.py, proposer.py",
            contains="self.use_v2_model_runner; CPUModelRunner(self.vllm_config, torch.device('cpu'))",
        ),
    ),
    "vllm.v1.worker.gpu_worker": (
        Row("Worker.compile_or_warm_up_model", "runners.py", signature=""),
        Row("Worker.load_model", "runners.py"),
    ),
    "vllm.v1.worker.gpu_input_batch": (
        Row("InputBatch", "proposer.py", members="req_ids"),
        Row("InputBatch.__init__", "proposer.py", sets="thinking_budget_state_holder"),
    ),
    "vllm.v1.worker.gpu_model_runner": (
        Row("DFlashProposer", "runners.py"),
        Row(
            "GPUModelRunner.__init__",
            "runners.py, proposer.py",
            sets="effective_drafter_max_model_len max_num_reqs max_num_tokens requests use_async_scheduling",
            contains=(
                "self.drafter = DFlashProposer(self.vllm_config, self.device, self); "
                "self.discard_request_mask = self._make_buffer(self.max_num_reqs, dtype=torch.bool); "
                "self.input_batch = InputBatch(...)"
            ),
        ),
        Row("GPUModelRunner._input_fits_in_drafter", "runners.py", signature="common_attn_metadata"),
        Row("GPUModelRunner.sample_tokens", "runners.py", contains="self._input_fits_in_drafter(_)"),
        Row(
            "GPUModelRunner._calc_spec_decode_metadata",
            "cpu_backend.py",
            signature="num_draft_tokens cu_num_scheduled_tokens",
            returns="SpecDecodeMetadata",
        ),
        Row(
            "GPUModelRunner._bookkeeping_sync",
            "cpu_backend.py",
            contains="self.input_batch.generators.get(_); gen.set_offset(_)",
        ),
        Row(
            "GPUModelRunner.execute_model",
            "plugin.py",
            signature="scheduler_output intermediate_tensors",
            contains="self._update_states(scheduler_output)",
        ),
        Row(
            "GPUModelRunner.propose_draft_token_ids",
            "proposer.py",
            contains=_PROPOSE_CALL,
        ),
        Row(
            "GPUModelRunner._get_spec_decode_draft_probs",
            "runners.py, proposer.py",
            signature="spec_decode_metadata",
            returns="torch.Tensor | None",
        ),
        Row(
            "GPUModelRunner._sample",
            "runners.py, proposer.py",
            contains=(
                "self._get_spec_decode_draft_probs(spec_decode_metadata); self.rejection_sampler(_, draft_probs, _, _)"
            ),
        ),
        # Drafts may be one list per request where the scheduler waits for them.
        Row(
            "GPUModelRunner._get_draft_token_ids_cpu",
            "proposer.py",
            contains="isinstance(self._draft_token_ids, list); self.input_batch.req_ids",
        ),
    ),
}
