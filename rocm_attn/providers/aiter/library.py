"""The one file that imports AITER: its functions, and whether the installed ones take the arguments that are passed.

Every function is called by keyword, because parameters have changed position between releases. `from aiter import` runs
at each call; it costs less than a microsecond, and a replayed graph does not run it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


def unified_attention() -> Function:
    """Triton: decode, extend and mixed steps through a dense block table."""
    try:
        from aiter.ops.triton.attention.unified_attention import unified_attention as function
    except ImportError:  # releases before 2026
        from aiter.ops.triton.unified_attention import unified_attention as function
    return _as_function(function)


def paged_attention_ragged() -> Function:
    """HIP: decode steps through a CSR page list."""
    from aiter import paged_attention_ragged as function

    return _as_function(function)


def mha_batch_prefill_func() -> Function:
    """Composable Kernel: extend and mixed steps through a CSR page list."""
    from aiter import mha_batch_prefill_func as function

    return _as_function(function)


def flash_attn_varlen_func() -> Function:
    """Assembly or Composable Kernel: extend steps without a prefix, over packed K and V."""
    from aiter import flash_attn_varlen_func as function

    return _as_function(function)


def pa_decode_gluon() -> Function:
    """Gluon: decode steps over vectorised pools, through a dense block table."""
    from aiter.ops.triton.gluon.pa_decode_gluon import pa_decode_gluon as function

    return _as_function(function)


def pa_fwd_asm() -> Function:
    """Assembly: decode steps over vectorised pools, through a dense block table."""
    from aiter import pa_fwd_asm as function

    return _as_function(function)


def pa_persistent_fwd() -> Function:
    """Assembly: decode steps over vectorised pages of 1024 tokens in eight bits, through a CSR page list."""
    from aiter import pa_persistent_fwd as function

    return _as_function(function)


def get_pa_metadata_v1() -> Function:
    """HIP: the schedule of pa_persistent_fwd."""
    from aiter import get_pa_metadata_v1 as function

    return _as_function(function)


def mla_decode_fwd() -> Function:
    """Assembly: decode steps over a latent pool."""
    from aiter.mla import mla_decode_fwd as function

    return _as_function(function)


def get_mla_metadata_v1() -> Function:
    """HIP: the schedule of mla_decode_fwd."""
    from aiter import get_mla_metadata_v1 as function

    return _as_function(function)


def mla_prefill_fwd() -> Function:
    """Assembly: extend and mixed steps over a latent pool."""
    from aiter.mla import mla_prefill_fwd as function

    return _as_function(function)


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function of AITER, and the keywords that the provider passes to it."""

    load: Callable[[], Function]
    keywords: frozenset[str]

    def complaint(self) -> str:
        """Why the installed function cannot be called as the provider calls it; empty if it can."""
        try:
            function = self.load()
        except ImportError as error:
            return f"AITER is not installed correctly ({error}); install the distribution amd-aiter"
        parameters = inspect.signature(function).parameters
        unknown = sorted(self.keywords - set(parameters))
        required = {name for name, value in parameters.items() if value.default is inspect.Parameter.empty}
        missing = sorted(required - self.keywords)
        if not unknown and not missing:
            return ""
        found = [f"takes no {name}" for name in unknown] + [f"requires {name}" for name in missing]
        return (
            f"the installed AITER's {function.__name__} {' and '.join(found)}; this version of rocm_attn was "
            "written for AITER v0.1.10 to v0.1.20"
        )


def _keywords(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNIFIED_KEYWORDS = _keywords(
    "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table "
    "softcap q_descale k_descale v_descale alibi_slopes sinks"
)
_UNIFIED = EntryPoint(unified_attention, _UNIFIED_KEYWORDS)
_UNIFIED_VECTORISED = EntryPoint(unified_attention, _UNIFIED_KEYWORDS | {"shuffled_kv_cache"})
_RAGGED = EntryPoint(
    paged_attention_ragged,
    _keywords(
        "out workspace_buffer query key_cache value_cache scale kv_indptr kv_page_indices kv_last_page_lens block_size "
        "max_num_partitions alibi_slopes kv_cache_dtype kv_cache_layout logits_soft_cap k_scale v_scale fp8_out_scale "
        "partition_size mtp"
    ),
)
_BATCH_PREFILL_KEYWORDS = _keywords(
    "q k v cu_seqlens_q kv_indptr kv_page_indices max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "logits_soft_cap causal window_size alibi_slopes return_lse out kv_last_page_lens sink_ptr"
)
_BATCH_PREFILL = EntryPoint(mha_batch_prefill_func, _BATCH_PREFILL_KEYWORDS)
_BATCH_PREFILL_EIGHT_BITS = EntryPoint(
    mha_batch_prefill_func, _BATCH_PREFILL_KEYWORDS | _keywords("q_descale k_descale v_descale")
)
_VARLEN = EntryPoint(
    flash_attn_varlen_func,
    _keywords(
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale logits_soft_cap causal "
        "window_size alibi_slopes return_lse out sink_ptr"
    ),
)
_GLUON = EntryPoint(
    pa_decode_gluon,
    _keywords(
        "output query key_cache value_cache context_lengths block_tables softmax_scale query_length "
        "max_context_partition_num context_partition_size compute_type query_scale key_scale value_scale exp_sums "
        "max_logits temporary_output alibi_slopes sinks sliding_window ps"
    ),
)
_ASSEMBLED = EntryPoint(
    pa_fwd_asm,
    _keywords(
        "Q K V block_tables context_lens block_tables_stride0 max_qlen K_QScale V_QScale out_ qo_indptr high_precision "
        "kernelName"
    ),
)
_PERSISTENT = EntryPoint(
    pa_persistent_fwd,
    _keywords(
        "Q K V output max_qlen qo_indptr kv_indptr kv_indices context_lens work_indptr work_info reduce_indptr "
        "reduce_final_map reduce_partial_map K_QScale V_QScale softmax_scale mask"
    ),
)
_PERSISTENT_SCHEDULE = EntryPoint(
    get_pa_metadata_v1,
    _keywords(
        "seqlens_qo_indptr pages_kv_indptr context_lens num_heads_per_head_k num_heads_k is_causal work_metadata_ptrs "
        "work_indptr work_info reduce_indptr reduce_final_map reduce_partial_map kv_granularity block_size "
        "max_seqlen_qo uni_seqlen_qo fast_mode max_split_per_batch"
    ),
)
_LATENT = _keywords("q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q sm_scale logit_cap")
_LATENT_SPLITS = EntryPoint(mla_decode_fwd, _LATENT | _keywords("num_kv_splits num_kv_splits_indptr"))
_LATENT_SHARES_KEYWORDS = _LATENT | _keywords(
    "num_kv_splits work_meta_data work_indptr work_info_set reduce_indptr reduce_final_map reduce_partial_map"
)
_LATENT_SHARES = EntryPoint(mla_decode_fwd, _LATENT_SHARES_KEYWORDS)
_LATENT_EIGHT_BITS = EntryPoint(mla_decode_fwd, _LATENT_SHARES_KEYWORDS | _keywords("q_scale kv_scale"))
_LATENT_SCHEDULE = EntryPoint(
    get_mla_metadata_v1,
    _keywords(
        "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k is_causal "
        "work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map page_size "
        "kv_granularity max_seqlen_qo uni_seqlen_qo fast_mode max_split_per_batch dtype_q dtype_kv"
    ),
)

# Name of the table's choice -> the functions that its kernel calls.
ENTRY_POINTS: Mapping[str, tuple[EntryPoint, ...]] = {
    "aiter.unified_attention": (_UNIFIED,),
    "aiter.paged_attention_ragged": (_RAGGED,),
    "aiter.mha_batch_prefill_func": (_BATCH_PREFILL,),
    "aiter.unified_attention[vectorised]": (_UNIFIED_VECTORISED,),
    "aiter.mha_batch_prefill_func[vectorised]": (_BATCH_PREFILL,),
    "aiter.pa_decode_gluon": (_GLUON,),
    "aiter.pa_fwd_asm": (_ASSEMBLED,),
    "aiter.pa_persistent_fwd": (_PERSISTENT, _PERSISTENT_SCHEDULE),
    "aiter.mha_batch_prefill_func[fp8]": (_BATCH_PREFILL_EIGHT_BITS,),
    "aiter.mha_batch_prefill_func[vectorised, fp8]": (_BATCH_PREFILL_EIGHT_BITS,),
    "aiter.flash_attn_varlen_func": (_VARLEN,),
    "aiter.mla_decode_fwd": (_LATENT_SPLITS,),
    "aiter.mla_decode_fwd+get_mla_metadata_v1": (_LATENT_SPLITS, _LATENT_SHARES, _LATENT_SCHEDULE),
    "aiter.mla_decode_fwd+get_mla_metadata_v1[fp8]": (_LATENT_EIGHT_BITS, _LATENT_SCHEDULE),
    "aiter.mla_prefill_fwd": (EntryPoint(mla_prefill_fwd, _LATENT),),
}


def unavailable() -> Mapping[str, str]:
    """Row name -> why the installed AITER cannot serve it; rows that it can serve are left out."""
    complaints = {name: [entry.complaint() for entry in entries] for name, entries in ENTRY_POINTS.items()}
    return {name: "; ".join(filter(None, each)) for name, each in complaints.items() if any(each)}


def _as_function(function: Any) -> Function:
    assert callable(function)
    return function  # type: ignore[no-any-return]
