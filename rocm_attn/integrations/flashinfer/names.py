"""FlashInfer's names that are not served: for each one the reason, and what to use.

The served names are those of __init__.pyi. Both lists follow FlashInfer's own __init__.py.
"""

from __future__ import annotations

import sys

from rocm_attn.errors import Unsupported

_NVIDIA = "it runs NVIDIA's own kernels"

# Names -> the reason, and the name to use.
REFUSED = {
    "cudnn_batch_decode_with_kv_cache prepare_balanced_batch_decode_with_kv_cache sm110_gqa_decode "
    "prepare_sm110_gqa_decode launch_sm110_gqa_decode_prepared xqa get_dcp_spec_counter_bytes "
    "get_dcp_spec_workspace_size_bytes CakeFmhaRequestOrderedDecodePlan cake_batch_decode_with_kv_cache "
    "cake_fmha_manifest plan_cake_fmha_request_ordered_paged_decode": f"{_NVIDIA}; use "
    "BatchDecodeWithPagedKVCacheWrapper",
    "trtllm_fmha_v2_prefill cake_batch_context_with_kv_cache": f"{_NVIDIA}; use BatchPrefillWithPagedKVCacheWrapper",
    "xqa_mla": f"{_NVIDIA}; use BatchMLAPagedAttentionWrapper",
    "trtllm_sage_attention_quantize nvfp4_attention_sm120 nvfp4_attention_sm120_fwd nvfp4_attention_sm120_quantize_qkv "
    "concat_mla_kv_quant_fp8": "no kernel here reads queries in eight or four bits; use the wrappers of prefill in 16 "
    "bits",
    "nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_kv_cache_with_slot_mapping "
    "nvfp4_quantize_append_paged_mla_kv_cache": "no kernel here reads NVFP4 pages; use append_paged_kv_cache or "
    "append_paged_mla_kv_cache",
    "compute_paged_mqa_logits_schedule fp4_paged_mqa_logits fp8_paged_mqa_logits min_block_table_width padded_seq_len "
    "precompile_paged_mqa_logits top_k_page_table_transform top_k_ragged_transform msa_ops FP8MQATopKWrapper "
    "qsa_forward qsa_indexed_forward": "a sparse layer scores "
    "and selects keys in one step here; use rocm_attn's sparse attention",
    "TopKTieBreak top_k top_k_varlen topk": "there is no top-k of rows here; use torch.topk",
    "chunk_gated_delta_product chunk_gated_delta_rule chunk_gated_delta_rule2 fused_kda_decode gdn_fused_decode_step "
    "gdn_fused_decode_step_supported packed_fused_kda_decode packed_kda_decode recurrent_kda KDAPrefillPlanCache "
    "RecurrentKDAPrefillWorkspace RecurrentKDAPrefillWrapper kda_prefill_supports_fp32_checkpoints mamba "
    "prepare_bf16_kda_prefill prepare_tf32_kda_prefill cake_gated_delta_product_mtp chunk_gated_delta_rule_paged "
    "gated_delta_rule_decode_paged gdn_paged_decode_slots gdn_paged_prefill_slots": "recurrent layers keep their "
    "states in slots of a pool here; use the recurrent layers of a rocm_attn runtime",
    "CakeCausalConv1dDetFunction CakeCausalConv1dFunction cake_causal_conv1d cake_causal_conv1d_det "
    "cake_causal_conv1d_det_train_backward cake_causal_conv1d_det_train_backward_workspace_bytes "
    "cake_causal_conv1d_det_train_forward cake_causal_conv1d_det_train_forward_workspace_bytes "
    "cake_causal_conv1d_train_backward cake_causal_conv1d_train_backward_workspace_bytes "
    "cake_causal_conv1d_train_forward cake_causal_conv1d_train_forward_workspace_bytes cake_causal_conv1d_train "
    "cake_causal_conv1d_train_backend": "kernels here have no gradients; train with torch's convolutions",
    "cake_top_k_top_p_sampling_from_probs": f"{_NVIDIA}; use top_k_top_p_sampling_from_probs",
    "CakeRMSNormFunction cake_rmsnorm cake_rmsnorm_train_backward cake_rmsnorm_train_backward_workspace_bytes "
    "cake_rmsnorm_train_forward fused_add_rmsnorm fused_add_rmsnorm_fp8_block_quant fused_add_rmsnorm_quant "
    "fused_dit_gate_residual_layernorm_gamma_beta fused_dit_gate_residual_layernorm_scale_shift "
    "fused_dit_residual_layernorm_scale_shift fused_qk_rmsnorm_rope fused_rmsnorm_silu gated_residual_next_rmsnorm "
    "gated_residual_rmsnorm gelu_and_mul gelu_tanh_and_mul gemma_fused_add_rmsnorm gemma_rmsnorm layernorm "
    "layernorm_quant mhc rmsnorm rmsnorm_quant rmsnorm_sigmoid_gate silu_and_mul supports_gated_residual_next_rmsnorm "
    "supports_gated_residual_rmsnorm supports_rmsnorm_sigmoid_gate CakeMHCDetTrainFinishFunction "
    "CakeMHCDetTrainHeadFunction CakeMHCDetTrainPrepareFunction CakeMHCTrainFinishFunction CakeMHCTrainHeadFunction "
    "CakeMHCTrainPrepareFunction CakeRMSNormDetFunction CakeRMSNormSiLUGateDetFunction CakeRMSNormSiLUGateFunction "
    "cake_mhc_det_train_backward_finish cake_mhc_det_train_backward_prepare "
    "cake_mhc_det_train_backward_workspace_bytes cake_mhc_det_train_finish cake_mhc_det_train_forward_finish "
    "cake_mhc_det_train_forward_prepare cake_mhc_det_train_forward_stats cake_mhc_det_train_forward_workspace_bytes "
    "cake_mhc_det_train_head cake_mhc_det_train_head_backward cake_mhc_det_train_head_forward "
    "cake_mhc_det_train_prepare cake_mhc_train_backward_finish cake_mhc_train_backward_prepare "
    "cake_mhc_train_backward_workspace_bytes cake_mhc_train_finish cake_mhc_train_forward_finish "
    "cake_mhc_train_forward_prepare cake_mhc_train_forward_stats cake_mhc_train_forward_workspace_bytes "
    "cake_mhc_train_head cake_mhc_train_head_backward cake_mhc_train_head_forward cake_mhc_train_prepare "
    "cake_rmsnorm_det cake_rmsnorm_det_train_backward cake_rmsnorm_det_train_backward_workspace_bytes "
    "cake_rmsnorm_det_train_forward cake_rmsnorm_silu_gate cake_rmsnorm_silu_gate_det "
    "cake_rmsnorm_silu_gate_det_train_backward cake_rmsnorm_silu_gate_det_train_backward_workspace_bytes "
    "cake_rmsnorm_silu_gate_det_train_forward cake_rmsnorm_silu_gate_train cake_rmsnorm_silu_gate_train_backend "
    "cake_rmsnorm_silu_gate_train_backward cake_rmsnorm_silu_gate_train_backward_workspace_bytes "
    "cake_rmsnorm_silu_gate_train_forward cake_rmsnorm_train cake_rmsnorm_train_backend": "there are "
    "no norms or activations here; use torch's, or those of your engine",
    "MiniMaxH3Mxfp8PreAttention MiniMaxH3Nvfp4PreAttention MiniMaxH3QkvQuantizePack NVFP44Over6Config "
    "NVFP44Over6ErrMode SfLayout add_rmsnorm_fp4quant block_scale_interleave e2m1_and_ufp8sf_scale_to_float "
    "fp4_quantize get_fp4_quantization_module make_nvfp4_global_scale mxfp4_dequantize mxfp4_dequantize_host "
    "mxfp4_quantize mxfp8_dequantize_host mxfp8_grouped_quantize mxfp8_quantize nvfp4_batched_quantize "
    "nvfp4_block_scale_interleave nvfp4_kv_dequantize nvfp4_kv_dequantize_paged nvfp4_kv_quantize nvfp4_quantize "
    "nvfp4_quantize_paged_kv_cache resolve_nvfp4_4over6 rmsnorm_fp4quant scaled_fp4_grouped_quantize shuffle_matrix_a "
    "shuffle_matrix_sf_a silu_and_mul_mxfp8_quantize silu_and_mul_mxfp8_quantize_backward silu_and_mul_nvfp4_quantize "
    "silu_and_mul_scaled_nvfp4_experts_quantize silu_and_mul_mxfp8_experts_quantize": "no kernel here has FP4 or MX "
    "formats; keep tensors in 16 bits, or K and V in FP8",
    "SegmentGEMMWrapper bmm_bf16 bmm_fp8 bmm_mxfp8 grouped_mm_bf16 grouped_mm_fp4 grouped_mm_fp8 grouped_mm_mxfp8 "
    "mm_bf16 mm_bf16_fp4 mm_fp4 mm_fp8 mm_mxfp8 mm_nvfp4_svdquant nvfp4_quantize_smooth prepare_bf16_fp4_weights "
    "prepare_low_latency_gemm_weights svdquant_linear tgv_gemm_sm100 PreparedNvFp4LoraAdapter StaleAdapterError "
    "mm_fp8_lora mm_nvfp4_lora prepare_nvfp4_lora_adapter": "there are no matrix products here; use "
    "torch's, or those of AITER",
    "ActivationType B12xMoEWrapper CuteDslBf16MoEWrapper CuteDslMoEWrapper CuteDslMxfp8Mxfp4MoEWrapper "
    "RoutingMethodType b12x_fused_moe cudnn_frost_grouped_gemm1_swiglu "
    "cudnn_frost_grouped_gemm1_swiglu_workspace_size cute_dsl_fused_moe cute_dsl_fused_moe_bf16 "
    "cute_dsl_fused_moe_mxfp8_mxfp4 cute_dsl_fused_moe_nvfp4 cutlass_fused_moe is_gated_activation prims_ts_bf16_moe "
    "prims_ts_bf16_moe_partitioned prims_ts_bf16_routed_moe prims_ts_fp4_block_scale_moe "
    "prims_ts_fp4_block_scale_moe_partitioned prims_ts_fp4_block_scale_routed_moe prims_ts_fp8_block_scale_moe "
    "prims_ts_fp8_block_scale_moe_partitioned prims_ts_fp8_block_scale_routed_moe prims_ts_fp8_per_tensor_scale_moe "
    "prims_ts_fp8_per_tensor_scale_moe_partitioned reorder_rows_for_gated_act_gemm trtllm_bf16_moe "
    "trtllm_bf16_routed_moe trtllm_fp4_block_scale_moe trtllm_fp4_block_scale_routed_moe trtllm_fp8_block_scale_moe "
    "trtllm_fp8_block_scale_routed_moe trtllm_fp8_per_tensor_scale_moe trtllm_fp8_per_tensor_scale_routed_moe "
    "deinterleave_gated_rows megamoe": "there are no experts here; use your engine's, or those of AITER",
    "MeasurementPolicy autotune autotune_v2 autotune_v2_reload ReplayCoverage": "it times NVIDIA's kernels; tiles here "
    "come from a table, which rocm-attn tune extends",
    "fi_trace jit next_positive_power_of_2 trace_apply": "it is a tool of FlashInfer's own kernels, which do not run "
    "here; leave it out",
}

# Attributes of FlashInfer's wrappers that are not public and that engines read -> why they are not served.
REFUSED_ATTRIBUTES = {
    "_backend _requested_backend": "kernels are chosen here; leave the choice out",
    "_cached_module _plan_info _planned_backend": "there is no CUDA module; call plan() or fast_decode_plan() in "
    "place of it",
    "_float_workspace_buffer _pin_memory_int_workspace_buffer _kv_lens_buffer _workspace_size": "no workspace is used; "
    "leave it out",
}


class NotServed(Unsupported, AttributeError):
    """A name that is not served was read. It is an AttributeError, so getattr() with a default and hasattr() work."""


class NotImportable(Unsupported, ImportError):
    """A name that is not served was imported."""


def reason_in(table: dict[str, str], name: str) -> str | None:
    """Returns the reason of a table's name, or None if the table does not have it."""
    return next((reason for names, reason in table.items() if name in names.split()), None)


def refuse_name(name: str) -> None:
    """Raises NotServed, or NotImportable in an import statement, if FlashInfer has the name and it is not served."""
    reason = reason_in(REFUSED, name)
    if reason is None:
        return
    sentence = f"flashinfer.{name} is not served: {reason}"
    # `from flashinfer import name` asks by hasattr() in importlib, and replaces an AttributeError by a sentence without
    # the reason. Frame 1 is __getattr__, and frame 2 its caller.
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        raise NotImportable(sentence)
    raise NotServed(sentence)
