"""What we use of vLLM to decide a draft length per step: its scheduler, its V2 runner."""

from __future__ import annotations

from vllm_contract.row import Row

SCHEDULING: dict[str, tuple[Row, ...]] = {
    "vllm.v1.core.sched.async_scheduler": (
        # Placeholders follow the step's length, and a request's own may be cut before the next step.
        Row("AsyncScheduler", "plugin.py", bases="Scheduler", lacks="schedule update_from_output"),
        Row(
            "AsyncScheduler._update_after_schedule",
            "step_lengths.py",
            contains=(
                "scheduler_output.num_spec_tokens_to_schedule; request.spec_token_ids = self._spec_token_placeholders"
            ),
        ),
    ),
    "vllm.v1.core.sched.output": (
        Row(
            "SchedulerOutput",
            "step_lengths.py",
            fields=(
                "finished_req_ids num_invalid_spec_tokens num_scheduled_tokens num_spec_tokens_to_schedule "
                "scheduled_spec_decode_tokens total_num_scheduled_tokens"
            ),
        ),
    ),
    "vllm.v1.core.sched.scheduler": (
        Row(
            "Scheduler.__init__",
            "plugin.py, step_lengths.py",
            sets="dynamic_sd_lookup num_spec_tokens requests running scheduler_config vllm_config",
        ),
        # Asked once for every step that is not empty, and of nothing but the number of its requests; without it, and
        # only then, one-token prompts are padded.
        Row(
            "Scheduler.schedule",
            "plugin.py, step_lengths.py",
            contains=(
                "self.dynamic_sd_lookup is None; "
                "num_spec_tokens_to_schedule = self.dynamic_sd_lookup[len(num_scheduled_tokens)]; "
                "request.spec_token_ids; "
                "self.running.append(request)"
            ),
        ),
        Row(
            "Scheduler.update_from_output",
            "plugin.py, step_lengths.py",
            signature="scheduler_output model_runner_output",
            contains=(
                "scheduler_output.scheduled_spec_decode_tokens.get(req_id); "
                "model_runner_output.req_id_to_index[req_id]; "
                "num_accepted = max(len(generated_token_ids) - _, 0)"
            ),
        ),
        # The warning that our own message declares void.
        Row(
            "Scheduler.__init__",
            "speculative_config.py",
            contains=(
                "'EAGLE trailing prefix-cache block dropping is disabled. This is experimental and "
                "may affect speculative-token acceptance rates.'"
            ),
        ),
    ),
    "vllm.v1.request": (
        Row(
            "Request.__init__",
            "step_lengths.py",
            sets="num_computed_tokens request_id sampling_params spec_token_ids",
        ),
    ),
    "vllm.v1.worker.gpu.cudagraph_utils": (
        # Graphs for every length of the table, up to the number of requests.
        Row(
            "CudaGraphManager._init_candidates",
            "step_lengths.py",
            contains=(
                "speculative_config.uses_dynamic_speculative_decoding(); "
                "build_dynamic_sd_schedule_lookup(speculative_config.num_speculative_tokens_per_batch_size, "
                "vllm_max_batch_size=self.max_num_reqs, vllm_num_speculative_tokens=_)"
            ),
        ),
    ),
    "vllm.v1.worker.gpu.model_runner": (
        Row("init_speculator", "runners.py"),
        Row(
            "GPUModelRunner.__init__",
            "runners.py",
            contains="self.speculator = init_speculator(self.vllm_config, self.device, self.req_states)",
        ),
        Row(
            "GPUModelRunner.sample_tokens",
            "speculator.py",
            contains=(
                "num_spec_tokens = self.execute_model_state.num_spec_tokens_to_schedule; self.speculator.propose(...)"
            ),
        ),
    ),
    "vllm.v1.worker.gpu.spec_decode": (
        Row("init_speculator", "runners.py", signature="vllm_config device req_states"),
    ),
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (
        Row("DFlashSpeculator.__init__", "speculator.py", signature="vllm_config device"),
        # A profiling run draws no graph, so that context K/V are written by themselves before the block pass.
        Row(
            "DFlashSpeculator.propose",
            "speculator.py",
            contains=(
                "dispatch_cg_and_sync_dp(...); is_profile; "
                "self._precompute_context_kv(0, num_target_tokens, dummy_run); "
                "self._build_uniform_attn_metadata(...); self._prepare_eplb_forward(num_query_tokens); "
                "self._generate_draft(...)"
            ),
        ),
        # The V2 runner's speculator drives our drafter.
        Row(
            "DFlashSpeculator._precompute_context_kv",
            "drafter.py",
            contains="self.model.precompute_and_store_context_kv(_, _, _)",
        ),
    ),
}
