"""The one file that imports AITER: its functions, and whether the installed ones take the arguments that are passed.

Every function is called by keyword, because parameters have changed position between releases. Its module is looked up
at each call; that costs about a microsecond, and a replayed graph does not do it.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rocm_attn.machine import releases
from rocm_attn.machine.aiter_releases import too_old, written_for

Function = Callable[..., Any]

_BAD_INSTALL = "AITER is not installed correctly ({}); install the distribution amd-aiter"


@dataclass(frozen=True, slots=True)
class AiterFunction:
    """A function of AITER. Calling it imports the function and returns it.

    name:   of the function, in every release
    places: modules that have it or had it, in the order in which they are tried
    """

    name: str
    places: tuple[str, ...]

    def __call__(self) -> Function:
        """The installed function. Raises ImportError with a sentence if there is none."""
        for place in self.places:
            if (function := getattr(_imported(place), self.name, None)) is not None:
                assert callable(function)
                return function  # type: ignore[no-any-return]
        if _imported("aiter.ops") is None:
            raise ImportError(_BAD_INSTALL.format(f"the package aiter has no {self.name}, and no folder ops"))
        version, tried = releases.aiter_version() or "of unknown release", " or ".join(self.places)
        where = _where_defined(self.name)
        gone = f"has moved to {where}, which is not called" if where else "is gone"
        raise ImportError(
            f"AITER {version} has no {self.name} in {tried}: it {gone}; this version of rocm_attn was written for "
            f"{written_for()}"
        )


# Triton: decode, extend and mixed steps through a dense block table.
unified_attention = AiterFunction("unified_attention", ("aiter.ops.triton.attention.unified_attention",))
# HIP: decode steps through a CSR page list.
paged_attention_ragged = AiterFunction("paged_attention_ragged", ("aiter",))
# Composable Kernel: extend and mixed steps through a CSR page list.
mha_batch_prefill_func = AiterFunction("mha_batch_prefill_func", ("aiter",))
# Assembly or Composable Kernel: extend steps without a prefix, over packed K and V.
flash_attn_varlen_func = AiterFunction("flash_attn_varlen_func", ("aiter",))
# Gluon: decode steps over vectorised pools, through a dense block table. AITER exports it from the second place too,
# and moves Gluon's kernels out of the first, folder by folder (aiter#5384, aiter#4866).
pa_decode_gluon = AiterFunction("pa_decode_gluon", ("aiter.ops.triton.gluon.pa_decode_gluon", "aiter.ops.attention"))
# Assembly: decode steps over a latent pool.
mla_decode_fwd = AiterFunction("mla_decode_fwd", ("aiter.mla",))
# Triton: attention of a latent pool over selected places, in every kind of step.
unified_attention_sparse_mla = AiterFunction(
    "unified_attention_sparse_mla", ("aiter.ops.triton.attention.unified_attention_sparse_mla",)
)
# HIP: the schedule of mla_decode_fwd.
get_mla_metadata_v1 = AiterFunction("get_mla_metadata_v1", ("aiter",))
# Assembly: extend and mixed steps over a latent pool.
mla_prefill_fwd = AiterFunction("mla_prefill_fwd", ("aiter.mla",))


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function of AITER, and the keywords that the provider passes to it."""

    function: AiterFunction
    keywords: frozenset[str]

    def complaint(self) -> str:
        """Why the installed function cannot be called as the provider calls it; empty if it can."""
        try:
            return self.disagreement(self.function())
        except ImportError as error:
            return str(error)

    def disagreement(self, function: Function) -> str:
        """Why a function cannot be called as the provider calls this one; empty if it can."""
        parameters = inspect.signature(function).parameters
        unknown = sorted(self.keywords - set(parameters))
        required = {name for name, value in parameters.items() if value.default is inspect.Parameter.empty}
        missing = sorted(required - self.keywords)
        if not unknown and not missing:
            return ""
        found = [f"takes no {name}" for name in unknown] + [f"requires {name}" for name in missing]
        return (
            f"the installed AITER's {self.function.name} {' and '.join(found)}; this version of rocm_attn was "
            f"written for {written_for()}"
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
_SELECTED = EntryPoint(
    unified_attention_sparse_mla,
    _keywords(
        "q kv out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale topk_indices block_table kv_lora_rank"
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
    "aiter.pa_decode_gluon[verify]": (_GLUON,),
    "aiter.mha_batch_prefill_func[fp8]": (_BATCH_PREFILL_EIGHT_BITS,),
    "aiter.mha_batch_prefill_func[vectorised, fp8]": (_BATCH_PREFILL_EIGHT_BITS,),
    "aiter.flash_attn_varlen_func": (_VARLEN,),
    "aiter.mla_decode_fwd": (_LATENT_SPLITS,),
    "aiter.mla_decode_fwd[verify]": (_LATENT_SPLITS,),
    "aiter.mla_decode_fwd+get_mla_metadata_v1": (_LATENT_SPLITS, _LATENT_SHARES, _LATENT_SCHEDULE),
    "aiter.mla_decode_fwd+get_mla_metadata_v1[fp8]": (_LATENT_EIGHT_BITS, _LATENT_SCHEDULE),
    "aiter.mla_decode_fwd+get_mla_metadata_v1[fp8, verify]": (_LATENT_EIGHT_BITS, _LATENT_SCHEDULE),
    "aiter.mla_prefill_fwd": (EntryPoint(mla_prefill_fwd, _LATENT),),
    "aiter.unified_attention_sparse_mla": (_SELECTED,),
}


def unavailable() -> Mapping[str, str]:
    """Row name -> why the installed AITER cannot serve it; rows that it can serve are left out."""
    if sentence := too_old(releases.aiter_version()):
        return dict.fromkeys(ENTRY_POINTS, f"{sentence}; install a later release of amd-aiter")
    complaints = {name: [entry.complaint() for entry in entries] for name, entries in ENTRY_POINTS.items()}
    return {name: "; ".join(dict.fromkeys(filter(None, each))) for name, each in complaints.items() if any(each)}


def _imported(place: str) -> object:
    """The module of a place; None if AITER has no such module. Raises ImportError if AITER cannot be imported."""
    try:
        return import_module(place)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        if missing != "aiter" and (place == missing or place.startswith(f"{missing}.")):
            return None
        raise ImportError(_BAD_INSTALL.format(error)) from error


def _where_defined(name: str) -> str:
    """The modules of the installed AITER that define a function, with commas; empty if none does."""
    folders = [Path(folder) for folder in getattr(import_module("aiter"), "__path__", ())]
    files = [(path, path.relative_to(folder.parent)) for folder in folders for path in sorted(folder.rglob("*.py"))]
    defines = re.compile(rf"^def {name}\(", re.MULTILINE)
    found = [file for path, file in files if defines.search(path.read_text(errors="replace"))]
    return ", ".join(".".join(file.with_suffix("").parts) for file in found)
