"""What we use of vLLM around the engine: config, arguments, plugins, `LLM` and its outputs, metrics."""

from __future__ import annotations

from vllm_contract.row import Row

FRONT_END: dict[str, tuple[Row, ...]] = {
    "vllm": (
        Row("__version__", "plugin.py, length_setup.py"),
        Row("LLM", "demo.py, training/generators.py, training/served.py"),
        Row("SamplingParams", "demo.py, training/generators.py, training/served.py"),
        Row("LLM", "parity/answers.py"),
        Row("SamplingParams", "parity/answers.py, requests.py"),
    ),
    "vllm.config": (Row("VllmConfig", "drafter.py, plugin.py, proposer.py, thinking_budgets.py, verification.py"),),
    "vllm.config.scheduler": (Row("SchedulerConfig", "step_lengths.py", fields="async_scheduling max_num_seqs"),),
    "vllm.config.model": (
        Row("ModelConfig", "drafter.py, proposer.py, speculative_config.py", fields="model max_model_len hf_config"),
        Row("ModelConfig.get_total_num_hidden_layers", "speculative_config.py", call=""),
        Row("ModelConfig.get_hidden_size", "speculative_config.py", call=""),
        Row("ModelConfig.get_vocab_size", "speculative_config.py", call=""),
        Row("ModelConfig", "runners.py", members="architectures"),
        Row("ModelConfig", "refusals.py, step_lengths.py", members="is_hybrid has_inner_state"),
    ),
    "vllm.config.parallel": (
        Row(
            "ParallelConfig",
            "proposer.py, length_setup.py",
            fields="data_parallel_size data_parallel_index tensor_parallel_size",
        ),
    ),
    "vllm.config.speculative": (
        Row(
            "SpeculativeConfig",
            "plugin.py, speculative_config.py",
            fields="method model revision num_speculative_tokens draft_model_config disable_eagle_block_drop",
        ),
        Row(
            "SpeculativeConfig",
            "step_lengths.py",
            fields="enable_adaptive_verification num_speculative_tokens_per_batch_size",
        ),
        Row(
            "SpeculativeConfig.uses_dynamic_speculative_decoding",
            "step_lengths.py",
            call="",
            contains="self.num_speculative_tokens_per_batch_size is not None",
        ),
        Row(
            "SpeculativeConfig.use_eagle_block_drop",
            "speculative_config.py",
            call="",
            returns="bool",
            contains="not self.disable_eagle_block_drop",
        ),
    ),
    "vllm.config.vllm": (
        Row(
            "VllmConfig",
            "drafter.py, plugin.py, proposer.py",
            fields="additional_config parallel_config",
            members="use_v2_model_runner",
        ),
        Row(
            "VllmConfig",
            "parity/answers.py",
            fields="model_config scheduler_config speculative_config",
            members="use_v2_model_runner",
        ),
        Row("VllmConfig", "step_lengths.py", fields="device_config model_config scheduler_config speculative_config"),
        # Called while the config is made, when it is known which runner it is for, and before capture sizes are set.
        Row(
            "VllmConfig._maybe_override_dynamic_sd_cudagraph_mode",
            "plugin.py",
            signature="",
            contains="speculative_config.uses_dynamic_speculative_decoding(); self.use_v2_model_runner",
        ),
        Row(
            "VllmConfig.__post_init__",
            "plugin.py",
            contains="self._maybe_override_dynamic_sd_cudagraph_mode(); self._set_cudagraph_sizes()",
        ),
        # Cache slots for the anchor and K masks.
        Row(
            "VllmConfig.num_lookahead_tokens",
            "proposer.py",
            contains="speculative_config.use_dflash(); self.num_speculative_tokens + 1",
        ),
    ),
    "vllm.exceptions": (Row("VLLMValidationError", "plugin.py"),),
    "vllm.engine.arg_utils": (
        Row(
            "EngineArgs", "plugin.py", fields="speculative_config spec_method spec_model spec_tokens additional_config"
        ),
        Row(
            "EngineArgs",
            "refusals.py",
            fields="pipeline_parallel_size kv_transfer_config kv_offloading_size kv_offloading_backend",
        ),
        # Plugins must be in place before the config is created.
        Row("EngineArgs.__post_init__", "plugin.py", contains="load_general_plugins()"),
        Row(
            "EngineArgs.create_speculative_config",
            "plugin.py",
            signature="target_model_config target_parallel_config",
            contains=(
                "self.spec_method; self.spec_model; self.spec_tokens; SpeculativeConfig(**self.speculative_config)"
            ),
        ),
        Row(
            "EngineArgs.create_engine_config",
            "plugin.py",
            contains="self.create_speculative_config(target_model_config=_, target_parallel_config=_)",
        ),
        # The demo's arguments of LLM, which LLM hands on.
        Row(
            "EngineArgs",
            "demo.py",
            fields="disable_log_stats dtype enforce_eager max_model_len max_num_seqs use_tqdm_on_load",
        ),
        Row(
            "EngineArgs",
            "parity/runs.py",
            fields=(
                "additional_config dtype enforce_eager max_model_len max_num_seqs per_request_spec_decode_metrics seed "
                "skip_tokenizer_init speculative_config use_tqdm_on_load"
            ),
        ),
    ),
    "vllm.entrypoints.llm": (
        Row("LLM.__init__", "parity/answers.py", call="model", sets="llm_engine"),
        Row("LLM.__init__", "demo.py, training/generators.py, training/served.py", call="model"),
        Row("LLM.__init__", "training/generators.py", sets="llm_engine"),
        Row("LLM.chat", "demo.py", call="messages sampling_params * use_tqdm"),
        Row("LLM.generate", "training/served.py", call="prompts sampling_params * use_tqdm"),
        Row("LLM.get_metrics", "demo.py, training/served.py", call=""),
    ),
    "vllm.envs": (
        Row(
            "environment_variables",
            "demo.py",
            contains=(
                "'VLLM_CPU_KVCACHE_SPACE'; 'VLLM_CPU_NUM_OF_RESERVED_CPU'; "
                "'VLLM_ENABLE_V1_MULTIPROCESSING'; 'VLLM_LOGGING_LEVEL'; 'VLLM_NO_USAGE_STATS'"
            ),
        ),
    ),
    "vllm.logprobs": (Row("Logprob", "parity/answers.py", fields="logprob"),),
    "vllm.logger": (
        Row(
            "init_logger",
            "plugin.py, drafter.py, fused.py, length_setup.py, speculative_config.py, step_lengths.py, proposer.py",
            call="name",
        ),
    ),
    "vllm.outputs": (
        Row("RequestOutput.__init__", "demo.py", sets="outputs"),
        Row("RequestOutput.__init__", "training/generators.py", sets="finished request_id"),
        Row("CompletionOutput", "demo.py", fields="text token_ids"),
        Row("CompletionOutput", "training/generators.py, training/served.py", fields="finish_reason text token_ids"),
        Row("CompletionOutput", "training/served.py", fields="spec_decode_metrics"),
        Row(
            "CompletionOutput",
            "parity/answers.py",
            fields="finish_reason logprobs spec_decode_metrics token_ids",
        ),
    ),
    "vllm.plugins": (
        Row("DEFAULT_PLUGINS_GROUP", "pyproject.toml", value="vllm.general_plugins"),
        Row("PLATFORM_PLUGINS_GROUP", "pyproject.toml", value="vllm.platform_plugins"),
        Row(
            "load_general_plugins", "plugin.py", call="", contains="load_plugins_by_group(group=DEFAULT_PLUGINS_GROUP)"
        ),
    ),
    "vllm.sampling_params": (
        Row("SamplingParams", "demo.py", members="max_tokens temperature"),
        Row("SamplingParams", "plugin.py, proposer.py", members="extra_args seed temperature"),
        Row(
            "SamplingParams.verify",
            "plugin.py",
            signature="model_config speculative_config structured_outputs_config tokenizer",
        ),
        Row("SamplingParams._validate_spec_decode", "plugin.py", signature="speculative_config"),
        Row("SamplingParams", "requests.py", members="temperature top_k top_p min_p seed"),
        Row("SamplingParams", "training/generators.py", members="detokenize max_tokens output_kind seed temperature"),
        Row("RequestOutputKind", "training/generators.py", members="FINAL_ONLY"),
        Row("RequestOutputKind", "parity/answers.py", members="FINAL_ONLY"),
        # Log-probabilities of the two tokens of a difference, and of the one that the target prefers.
        Row("SamplingParams", "parity/greedy.py", members="ignore_eos logprob_token_ids logprobs max_tokens"),
        Row(
            "SamplingParams",
            "parity/oracle.py",
            members=("frequency_penalty logit_bias min_p presence_penalty repetition_penalty temperature top_k top_p"),
        ),
    ),
    "vllm.transformers_utils.configs.speculators.algos": (
        Row(
            "update_dflash",
            "speculative_config.py, proposer.py",
            contains="pre_trained_config['dflash_config']['causal']; 'target_layer_ids'; ['DFlashDraftModel']",
        ),
    ),
    "vllm.transformers_utils.repo_utils": (
        Row("get_hf_file_to_dict", "speculative_config.py", call="file_name model revision"),
    ),
    "vllm.v1.engine.llm_engine": (
        Row("LLMEngine.add_request", "training/generators.py, parity/answers.py", call="request_id prompt params"),
        Row("LLMEngine.step", "training/generators.py, parity/answers.py", call=""),
    ),
    "vllm.v1.engine.input_processor": (
        Row("InputProcessor._validate_params", "plugin.py", contains="params.verify(_, _, _, _)"),
    ),
    "vllm.v1.metrics.stats": (
        Row("RequestSpecDecodeMetrics", "training/served.py", fields="num_spec_tokens per_step_accepted"),
        Row("RequestSpecDecodeMetrics", "parity/answers.py", fields="per_step_accepted per_step_drafted"),
    ),
    "vllm.v1.metrics.reader": (
        Row("Metric", "demo.py", fields="name"),
        Row("Counter", "demo.py", fields="value"),
        Row("Vector", "demo.py", fields="values"),
    ),
    "vllm.v1.spec_decode.metrics": (
        Row(
            "SpecDecodingProm.__init__",
            "demo.py",
            contains=(
                "'vllm:spec_decode_num_drafts'; 'vllm:spec_decode_num_accepted_tokens'; "
                "'vllm:spec_decode_num_accepted_tokens_per_pos'"
            ),
        ),
    ),
}
