"""The parameters of AITER's functions in two releases, as recorded from ROCm/aiter; "name=default" has a default."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Release:
    """One release: the module of unified_attention, which has moved, and the parameters of each function."""

    version: str
    parameters: Mapping[str, str]

    def is_before(self, *numbers: int) -> bool:
        """True if it was made before the release of these three numbers."""
        return tuple(int(part) for part in self.version.split(".")[:3]) < numbers

    def signature(self, name: str) -> inspect.Signature:
        """Returns the function's signature."""
        return inspect.Signature([_parameter(text) for text in self.parameters[name].split()])


def _parameter(text: str) -> inspect.Parameter:
    name, _, default = text.partition("=")
    value = _DEFAULTS[default] if default else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)


_DEFAULTS: Mapping[str, object] = {
    "None": None,
    "per_Token": "per_Token",
    "False": False,
    "True": True,
    "bfloat16": torch.bfloat16,
    "0": 0,
    "1": 1,
    "16": 16,
    "256": 256,
    "-1": -1,
    "0.0": 0.0,
    "(-1,-1)": (-1, -1),
    "(-1,-1,0)": (-1, -1, 0),
}

_RAGGED = (
    "out workspace_buffer query key_cache value_cache scale kv_indptr kv_page_indices kv_last_page_lens block_size "
    "max_num_partitions alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale v_scale "
    "fp8_out_scale=None partition_size=256 mtp=1"
)
_UNIFIED_0_1_15 = (
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap "
    "q_descale k_descale v_descale alibi_slopes=None output_scale=None qq_bias=None sinks=None"
)
_UNIFIED = (
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap "
    "q_descale k_descale v_descale q_scales=None alibi_slopes=None output_scale=None qq_bias=None sinks=None "
    "shuffled_kv_cache=False skip_reduce=False"
)
_BATCH_PREFILL = (
    "q k v cu_seqlens_q kv_indptr kv_page_indices max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None "
    "logits_soft_cap=0.0 causal=False window_size=(-1,-1) alibi_slopes=None deterministic=False return_lse=False "
    "return_attn_probs=False out=None kv_last_page_lens=None block_table=None seqlen_k=None q_descale=None "
    "k_descale=None v_descale=None kv_block_descale=None sink_ptr=None sink_size=0"
)
_VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_q=0 dropout_p=0.0 softmax_scale=None "
    "logits_soft_cap=0.0 causal=False window_size=(-1,-1,0) bias=None alibi_slopes=None deterministic=False "
    "return_lse=False return_attn_probs=False how_v3_bf16_cvt=1 block_table=None out=None cu_seqlens_q_padded=None "
    "cu_seqlens_k_padded=None sink_ptr=None"
)
_MLA_0_1_15 = (
    "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size=1 nhead_kv=1 "
    "sm_scale=None logit_cap=0.0 num_kv_splits=None num_kv_splits_indptr=None work_meta_data=None work_indptr=None "
    "work_info_set=None reduce_indptr=None reduce_final_map=None reduce_partial_map=None q_scale=None kv_scale=None "
    "intra_batch_mode=False return_logits=False return_lse=False"
)
_MLA_PREFILL = (
    "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q sm_scale=None logit_cap=0.0 "
    "num_kv_splits=None"
)
_MLA = _MLA_0_1_15 + " g_kv_indptr=None cp_world_size=1 cp_rank=0 causal=True"

_SCHEDULE_0_1_15 = (
    "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k is_causal "
    "work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map page_size=1 "
    "kv_granularity=16 max_seqlen_qo=-1 uni_seqlen_qo=-1 fast_mode=True topk=-1 max_split_per_batch=-1 "
    "intra_batch_mode=False dtype_q=None dtype_kv=None"
)
_SCHEDULE = _SCHEDULE_0_1_15.replace(
    " dtype_q=None",
    " is_cp_round_robin=False mla_version=0 dtype_q_nope=None dtype_q_rope=None dtype_kv_nope=None dtype_kv_rope=None "
    "dtype_q=None",
)

_GLUON = (
    "output query key_cache value_cache context_lengths block_tables softmax_scale query_length "
    "max_context_partition_num context_partition_size=256 compute_type=bfloat16 query_scale=None key_scale=None "
    "value_scale=None exp_sums=None max_logits=None temporary_output=None alibi_slopes=None sinks=None "
    "sliding_window=0 ps=True"
)
_SELECTED = (
    "q kv out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale topk_indices block_table kv_lora_rank"
)

V0_1_15 = Release(
    "0.1.15",
    {
        "paged_attention_ragged": _RAGGED,
        "unified_attention": _UNIFIED_0_1_15,
        "mha_batch_prefill_func": _BATCH_PREFILL,
        "flash_attn_varlen_func": _VARLEN,
        "pa_decode_gluon": _GLUON,
        "mla_decode_fwd": _MLA_0_1_15,
        "get_mla_metadata_v1": _SCHEDULE_0_1_15,
        "mla_prefill_fwd": _MLA_PREFILL,
        "unified_attention_sparse_mla": _SELECTED,
    },
)
E4048607 = Release(
    "0.1.21.dev46+ge4048607a",
    {**V0_1_15.parameters, "unified_attention": _UNIFIED, "mla_decode_fwd": _MLA, "get_mla_metadata_v1": _SCHEDULE},
)
RELEASES = (V0_1_15, E4048607)
