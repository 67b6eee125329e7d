"""What we use of vLLM to build and run the drafter: layers, models and their registry, K/V writes."""

from __future__ import annotations

from vllm_contract.row import Row

_CONTEXT_KV = "context_states context_positions context_slot_mapping"
_KV_UPDATE = "layer key value kv_cache slot_mapping"


def _attention_backend(name: str, method: str, layout: str) -> tuple[Row, ...]:
    """A backend whose caches our kernels read and write; `method` shows their `layout`."""
    return (
        Row(
            f"{name}Impl.forward",
            "fused.py",
            signature="layer query key value kv_cache attn_metadata output output_scale output_block_scale",
        ),
        # The layout of a cache.
        Row(f"{name}Impl.{method}", "fused.py", contains=layout),
        Row(
            f"{name}Impl.__init__",
            "fused.py",
            sets="alibi_slopes kv_sharing_target_layer_name logits_soft_cap scale",
        ),
        Row(f"{name}Metadata", "fused.py", fields="block_table max_query_len num_actual_tokens seq_lens"),
    )


MODEL: dict[str, tuple[Row, ...]] = {
    "vllm._custom_ops": (
        Row("rms_norm", "context_kv.py", call="out input weight epsilon"),
        Row("rotary_embedding", "context_kv.py", call="positions query key head_size cos_sin_cache is_neox"),
    ),
    "vllm.lora.layers.base": (Row("BaseLayerWithLoRA", "proposer.py"),),
    "vllm.lora.layers.vocab_parallel_embedding": (
        Row("VocabParallelEmbeddingWithLoRA.__init__", "proposer.py", sets="base_layer"),
    ),
    "vllm.model_executor.models.interfaces": (Row("supports_eagle3", "refusals.py", call="model"),),
    "vllm.model_executor.layers.attention.attention": (
        Row("Attention.__init__", "context_kv.py, fused.py", sets="impl kv_cache"),
        Row(
            "unified_attention_with_output",
            "fused.py",
            contains=(
                "self.impl.forward(self, query, key, value, kv_cache, attn_metadata, output=output, "
                "output_scale=output_scale, output_block_scale=output_block_scale)"
            ),
        ),
    ),
    "vllm.model_executor.layers.layernorm": (Row("RMSNorm.__init__", "context_kv.py", sets="variance_epsilon weight"),),
    "vllm.model_executor.layers.linear": (
        Row("LinearBase", "memory_report.py"),
        Row("UnquantizedLinearMethod", "context_kv.py"),
        Row("LinearBase.__init__", "context_kv.py", sets="quant_method"),
        Row("QKVParallelLinear", "context_kv.py", bases="ColumnParallelLinear"),
        Row("ColumnParallelLinear", "context_kv.py", bases="LinearBase"),
        Row("ColumnParallelLinear.__init__", "context_kv.py", sets="bias"),
        Row("ColumnParallelLinear.forward", "context_kv.py", call="input_", contains="(output, output_bias)"),
    ),
    "vllm.model_executor.layers.logits_processor": (
        Row("LogitsProcessor.forward", "drafter.py", call="lm_head hidden_states"),
        Row("LogitsProcessor.__init__", "fused.py", sets="logits_as_input org_vocab_size scale soft_cap"),
    ),
    "vllm.model_executor.layers.rotary_embedding.base": (
        Row("RotaryEmbeddingBase.__init__", "context_kv.py", sets="cos_sin_cache head_size is_neox_style"),
    ),
    "vllm.model_executor.layers.utils": (
        Row(
            "dispatch_cpu_unquantized_gemm",
            "context_kv.py",
            call="layer * remove_weight",
            contains="layer.weight.ndim; layer.cpu_linear",
        ),
    ),
    "vllm.model_executor.model_loader.utils": (
        Row("initialize_model", "drafter.py", contains="model_class(vllm_config=vllm_config, prefix=prefix)"),
        Row("get_model_cls", "runners.py", call="model_config"),
    ),
    "vllm.model_executor.models": (Row("ModelRegistry", "plugin.py, speculative_config.py"),),
    "vllm.platforms": (Row("current_platform", "fused.py, plugin.py"),),
    "vllm.platforms.interface": (
        Row("Platform.is_cpu", "plugin.py", call=""),
        Row("Platform.is_cuda", "fused.py", call=""),
        Row("Platform.is_rocm", "fused.py", call=""),
        Row("Platform.fp8_dtype", "fused.py"),
    ),
    "vllm.model_executor.models.qwen3_dflash": (
        Row("_SLIDING_ATTENTION", "config.py", value="sliding_attention"),
        Row(
            "_dflash_layer_causal",
            "config.py, speculative_config.py",
            contains="getattr(config, 'is_causal', None); getattr(config, 'dflash_config', None); _.get('causal')",
        ),
        Row(
            "_resolve_layer_attention",
            "config.py",
            contains=(
                "dflash_config.get('use_swa', False); dflash_config.get('swa_window_size', _); _SLIDING_ATTENTION"
            ),
        ),
        Row(
            "DFlashQwen3DecoderLayer.__init__",
            "config.py, drafter.py",
            sets="self_attn",
            contains=(
                "set_default_rope_theta(config, default_theta=1000000); "
                "dflash_config.get('attention_sink_bias', getattr(config, 'add_swa_attention_sink_bias', False))"
            ),
        ),
        Row(
            "DFlashQwen3Model.__init__",
            "drafter.py",
            call="* vllm_config start_layer_id prefix",
            sets="config embed_tokens hidden_norm layers mask_embedding",
        ),
        # Ours scales what this returns, so vLLM must not (tests/families/test_embedding_scale.py).
        Row("DFlashQwen3Model.embed_input_ids", "drafter.py", signature="input_ids"),
        Row("DFlashQwen3Model.forward", "drafter.py", contains="self.embed_input_ids(input_ids)"),
        Row("DFlashQwen3Model._build_fused_kv_buffers", "drafter.py", signature=""),
        Row("DFlashQwen3Model.precompute_and_store_context_kv", "drafter.py", signature=_CONTEXT_KV),
        Row("DFlashQwen3ForCausalLM", "drafter.py", members="model_cls", lacks="__new__"),
        Row(
            "DFlashQwen3ForCausalLM.__init__",
            "drafter.py",
            signature="vllm_config prefix",
            sets="draft_id_to_target_id draft_model_config lm_head logits_processor",
            contains="self.model = self.model_cls(vllm_config=_, prefix=_, start_layer_id=_)",
        ),
        Row(
            "DFlashQwen3ForCausalLM.load_weights",
            "drafter.py",
            signature="weights",
            contains="self.model._build_fused_kv_buffers(); name.replace('d2t', 'draft_id_to_target_id')",
        ),
        # Greedy drafting repeats these two steps: logits of the head, and d2t as offsets.
        Row(
            "DFlashQwen3ForCausalLM.compute_logits",
            "drafter.py",
            signature="hidden_states",
            contains="self.logits_processor(self.lm_head, hidden_states); base + self.draft_id_to_target_id",
        ),
        Row(
            "DFlashQwen3Attention.__init__",
            "context_kv.py",
            sets="head_dim num_kv_heads q_size v_scale",
            contains=(
                "self.attn = Attention(...); self.qkv_proj = QKVParallelLinear(...); self.rotary_emb = get_rope(...); "
                "self.k_norm = RMSNorm(self.head_dim, eps=rms_norm_eps)"
            ),
        ),
        # The order of the query, key and value rows of `qkv_proj`.
        Row(
            "DFlashQwen3Attention.forward",
            "context_kv.py",
            contains="qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)",
        ),
        Row("DFlashQwen3ForCausalLM.forward", "proposer.py", call="* input_ids positions inputs_embeds"),
        Row("DFlashQwen3ForCausalLM.combine_hidden_states", "proposer.py", call="hidden_states"),
        Row("DFlashQwen3ForCausalLM.precompute_and_store_context_kv", "proposer.py", call=_CONTEXT_KV),
    ),
    # Where vLLM looks for the scale, and that a mask embedding is scaled too.
    "vllm.model_executor.models.qwen3_dflash2": (
        Row(
            "DFlash2Qwen3Model.__init__",
            "drafter.py, speculative_config.py",
            contains="draft_config = self.config.dflash_config; draft_config.get('input_embedding_scale', 1.0)",
        ),
        Row(
            "DFlash2Qwen3Model.embed_input_ids",
            "drafter.py",
            contains="super().embed_input_ids(input_ids) * self.input_embedding_scale",
        ),
    ),
    "vllm.model_executor.models.registry": (
        Row("_ModelRegistry.register_model", "plugin.py", call="model_arch model_cls"),
        Row("_ModelRegistry.get_supported_archs", "speculative_config.py", call=""),
        Row(
            "_SPECULATIVE_DECODING_MODELS",
            "plugin.py",
            contains="'DFlashDraftModel'; ('qwen3_dflash', 'DFlashQwen3ForCausalLM')",
        ),
    ),
    "vllm.v1.attention.backends.cpu_attn": (
        Row("CPUAttentionBackendImpl.do_kv_cache_update", "context_kv.py", call=_KV_UPDATE),
    ),
    "vllm.v1.attention.backends.flash_attn": (
        Row("FlashAttentionImpl.do_kv_cache_update", "context_kv.py", call=_KV_UPDATE),
        *_attention_backend("FlashAttention", "do_kv_cache_update", "kv_cache.transpose(1, 2).split(_, dim=-1)"),
    ),
    "vllm.v1.attention.backends.triton_attn": (
        Row("TritonAttentionImpl.do_kv_cache_update", "context_kv.py", call=_KV_UPDATE),
        *_attention_backend("TritonAttention", "forward", "kv_cache.transpose(1, 2); kv_cache.split(_, dim=-1)"),
    ),
}
