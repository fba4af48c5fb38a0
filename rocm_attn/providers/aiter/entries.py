"""AITER's rows of the capability table: every entry point for attention, and its known limits.

A limit that is not obvious from the function itself is taken from AITER's own tests, so that no user is the first to
exceed them. Within a kind of step the first row that serves is taken. A function that reads linear pools and vectorised
ones has a row for each, because a release may lack one of the two.
"""

from dataclasses import replace
from typing import Any

import torch

from rocm_attn.batch.step_kinds import FEW_TOKENS, StepKind
from rocm_attn.kernels.metadata.step_tensors import Need
from rocm_attn.machine.target import Target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.aiter import faults, oddities
from rocm_attn.providers.aiter.gluon import GluonDecode, GluonVerify
from rocm_attn.providers.aiter.mla import LatentDecode, LatentExtend, LatentVerify
from rocm_attn.providers.aiter.mla_eight_bits import EightBitLatentDecode, EightBitLatentVerify
from rocm_attn.providers.aiter.mla_persistent import bind_scheduled_latent_decode
from rocm_attn.providers.aiter.prefill import BatchPrefill, EightBitBatchPrefill, VarlenPrefill
from rocm_attn.providers.aiter.ragged import bind_ragged
from rocm_attn.providers.aiter.unified import Unified
from rocm_attn.providers.contract import Baked, Bind, BoundKernel, KernelEntry, Limits, PoolSize, ReadAhead

_HALF = (torch.bfloat16, torch.float16)

# Each arch has one of the two: faults.py.
_EIGHT_BITS = (KVEncoding.E4M3FNUZ, KVEncoding.E4M3FN)
_ANY_ENCODING = (KVEncoding.LIKE_Q, *_EIGHT_BITS)
# Their scale is one number.
_LAYER_SCALES = (Scales.NONE, Scales.LAYER)

_LIMITS = Limits(
    archs=("gfx942", "gfx950"),
    dtypes=_HALF,
    head_dim=(1, 256),
    v_head_dim=(1, 256),
    page_size=(1, 1024),
    max_gqa_ratio=16,
)

_RAGGED = replace(
    _LIMITS,
    exact_dims=((64, 64), (128, 128)),
    page_sizes=(1, 16, 32),
    soft_cap=True,
    alibi=True,
    # The only new token of a sequence sees all keys in both cases.
    non_causal=True,
    lse=False,
    # 2**31 elements of 2 bytes: a build that the environment may select computes 32-bit offsets.
    max_side_bytes=2**32 - 1,
)

# Pages of one token would give tiles of one key.
_UNIFIED = replace(
    _LIMITS,
    exact_dims=((64, 64), (128, 128), (256, 256), (512, 512)),
    page_sizes=(16, 32, 64, 128),
    max_gqa_ratio=64,
    window=True,
    soft_cap=True,
    sinks=True,
    alibi=True,
    encodings=_ANY_ENCODING,
    scales=_LAYER_SCALES,
    lse=False,
    page_strides=True,
)

# scores.py has the combinations that it supports.
_COMPOSABLE = replace(
    _LIMITS,
    window=True,
    soft_cap=True,
    sinks=True,
    alibi=True,
    non_causal=True,
    # The causal bias is slope * key, without the query's part, which all keys share: out is right, and the sum is not.
    lse_of_slopes=False,
)

# For linear pages it takes some strides, with tokens further apart than heads, and raises for others.
_BATCH_PREFILL = replace(
    _COMPOSABLE,
    exact_dims=((128, 128), (256, 256)),
    page_sizes=(1, 16, 1024),
    max_gqa_ratio=64,
)

_VARLEN = replace(
    _COMPOSABLE,
    exact_dims=((64, 64), (96, 96), (128, 128), (160, 160), (192, 192), (192, 128), (224, 224), (256, 256)),
    max_gqa_ratio=64,
    # K and V are gathered for it, in q's dtype.
    pools=(PoolKind.SPLIT, PoolKind.VECTORIZED),
    encodings=(*_ANY_ENCODING, KVEncoding.E5M2),
    scales=(*_LAYER_SCALES, Scales.HEAD),
    page_strides=True,
)

# For queries in eight bits, AITER's tests run only plain scores and soft caps, with bfloat16 out and no log-sum-exp.
_BATCH_PREFILL_EIGHT_BITS = replace(
    _BATCH_PREFILL,
    dtypes=(torch.bfloat16,),
    encodings=_EIGHT_BITS,
    scales=(Scales.LAYER,),
    window=False,
    sinks=False,
    alibi=False,
    lse=False,
)

_LATENT = replace(
    _LIMITS,
    exact_dims=((576, 512),),
    # On pages of more than one token its bf16 kernels read the wrong tokens.
    page_sizes=(1,),
    max_gqa_ratio=128,
    dtypes=(torch.bfloat16,),
    pools=(PoolKind.LATENT,),
    lse=False,
    # The offsets of the kernels without a schedule have 32 bits in every release, and they serve some steps of each row
    # in bfloat16. They multiply the low 24 bits of a page id, which reach further.
    max_side_bytes=2**32 - 1,
)

# A latent layer has one KV head. How far its offsets reach depends on the release (faults.py).
_LATENT_EIGHT_BITS = replace(_LATENT, encodings=_EIGHT_BITS, scales=(Scales.LAYER, Scales.HEAD), max_side_bytes=0)

_ANY_LATENT = replace(_LATENT, encodings=_ANY_ENCODING, scales=(*_LAYER_SCALES, Scales.HEAD))

_VECTORISED = (PoolKind.VECTORIZED,)

_GLUON = replace(
    _LIMITS,
    exact_dims=((64, 64), (128, 128), (256, 256)),
    page_sizes=(16, 64, 1024),
    max_gqa_ratio=64,
    window=True,
    sinks=True,
    # The only new token of a sequence sees all keys in both cases.
    non_causal=True,
    encodings=_ANY_ENCODING,
    scales=(*_LAYER_SCALES, Scales.HEAD, Scales.TOKEN),
    lse=False,
    pools=_VECTORISED,
)

# 64 rows of queries on a KV head, of which a sequence has 4. On pages of 1024 tokens, parts of a window are other ones.
_GLUON_VERIFY = replace(_GLUON, page_sizes=(16, 64), max_gqa_ratio=16, non_causal=False)

# A tile is a page; its rows must be a power of two, which all of these are.
_UNIFIED_VECTORISED = replace(
    _UNIFIED, exact_dims=((64, 64), (128, 128), (256, 256)), page_sizes=(16, 64), pools=_VECTORISED, page_strides=False
)

_BATCH_PREFILL_VECTORISED = replace(_BATCH_PREFILL, page_sizes=(16, 1024), pools=_VECTORISED)
_BATCH_PREFILL_VECTORISED_EIGHT_BITS = replace(_BATCH_PREFILL_EIGHT_BITS, page_sizes=(16, 1024), pools=_VECTORISED)

_TABLE = frozenset({Need.BLOCK_TABLE})
_MAX_KV_LEN = frozenset({Baked.MAX_KV_LEN})
_MAX_Q_LEN = frozenset({Baked.MAX_Q_LEN})
_BOTH_LENGTHS = _MAX_KV_LEN | _MAX_Q_LEN

# Composable Kernel reads blocks of 128 entries of a page list, the last one whole.
_LIST_BLOCKS = ReadAhead(list_entries=256)

# Codes of q are multiplied with codes of K.
_ROUNDED = {"rounds_products": True, "rounds_queries": True}
# No kernel of a library that may change is assumed to mask V or to handle padded tokens.
_OF_AITER: dict[str, Any] = {"min_kv_len": 1, "masks_v": False, "clears_pads": False, "is_probed": True}


def _entry(name: str, kind: StepKind, limits: Limits, bind: Bind, **more: Any) -> KernelEntry:
    """A row. more: its other fields"""
    return KernelEntry(f"aiter.{name}", kind, limits, bind, **{**_OF_AITER, **more})


def _listed(name: str, kind: StepKind, limits: Limits, bind: Bind, **more: Any) -> KernelEntry:
    """A row of a kernel that reads a page list."""
    return _entry(name, kind, limits, bind, needs=frozenset({Need.PAGE_LIST}), reads_ahead=_LIST_BLOCKS, **more)


def _never(problem: Problem, target: Target, pool: PoolSize) -> BoundKernel:
    raise AssertionError("a row that is not bound was selected")


def _unbound(name: str, kind: StepKind, limits: Limits, why: str) -> KernelEntry:
    return _entry(name, kind, limits, _never, not_bound=why)


def _batch_prefill(kind: StepKind) -> tuple[KernelEntry, KernelEntry]:
    """The rows for linear pools and for vectorised ones."""
    linear = _listed(
        "mha_batch_prefill_func",
        kind,
        _BATCH_PREFILL,
        BatchPrefill.bind,
        bakes=_BOTH_LENGTHS,
        faults=faults.BATCH_PREFILL,
    )
    return linear, replace(linear, name=f"{linear.name}[vectorised]", limits=_BATCH_PREFILL_VECTORISED)


def _batch_prefill_eight_bits(kind: StepKind) -> tuple[KernelEntry, KernelEntry]:
    """Like `_batch_prefill`, but for queries in eight bits."""
    linear = _listed(
        "mha_batch_prefill_func[fp8]",
        kind,
        _BATCH_PREFILL_EIGHT_BITS,
        EightBitBatchPrefill.bind,
        bakes=_BOTH_LENGTHS,
        faults=(*faults.BATCH_PREFILL, *faults.EIGHT_BITS),
        notes=(oddities.SATURATED_QUERIES,),
        **_ROUNDED,
    )
    vectorised = replace(
        linear, name="aiter.mha_batch_prefill_func[vectorised, fp8]", limits=_BATCH_PREFILL_VECTORISED_EIGHT_BITS
    )
    return linear, vectorised


def _unified(kind: StepKind, bakes: frozenset[Baked]) -> tuple[KernelEntry, KernelEntry]:
    """The rows for linear pools and for vectorised ones."""
    in_decode = kind is StepKind.DECODE
    limits, vectorised = (replace(each, non_causal=in_decode) for each in (_UNIFIED, _UNIFIED_VECTORISED))
    linear = _entry(
        "unified_attention",
        kind,
        limits,
        Unified.bind,
        needs=frozenset({Need.BLOCK_TABLE, Need.KV_LEN_INT64}),
        bakes=bakes,
        reads_ahead=ReadAhead(table_tokens=64),
        faults=faults.UNIFIED_DECODE if in_decode else faults.UNIFIED_EXTEND,
        notes=(oddities.CAP_OVERFLOWS,) if in_decode else (oddities.CAP_OVERFLOWS, oddities.LOW_LOGITS),
    )
    return linear, replace(linear, name=f"{linear.name}[vectorised]", limits=vectorised, reads_ahead=ReadAhead())


def _latent_extends(kind: StepKind) -> tuple[KernelEntry, ...]:
    return (
        _listed(
            "mla_prefill_fwd", kind, _LATENT, LatentExtend.bind, bakes=_MAX_Q_LEN, notes=(oddities.EMPTY_SEQUENCES,)
        ),
        _unbound(
            "mla_prefill_ps_asm_fwd",
            kind,
            replace(_LATENT, archs=("gfx950",)),
            "its schedule is made on the host from lengths there, so that a step would wait for the device; AITER "
            "refuses it on gfx942",
        ),
    )


def _sparse() -> tuple[KernelEntry, ...]:
    return (
        _unbound(
            "mla_decode_fwd[selected]",
            StepKind.DECODE,
            _ANY_LATENT,
            "it reads a selection as a packed page list of each token; aiter.unified_attention_sparse_mla, which is "
            "bound, takes a row of places for each",
        ),
        _unbound(
            "pa_decode_sparse",
            StepKind.DECODE,
            replace(_ANY_LATENT, exact_dims=((512, 512),)),
            "V is all of its row, as in DeepSeek-V4, and a row has a power of two of elements "
            "(attention/pa_decode_sparse.py:142 in v0.1.17), which latents of 576 do not; before v0.1.20 its offsets "
            "have 32 bits",
        ),
        _unbound(
            "deepgemm_fp8_paged_mqa_logits",
            StepKind.DECODE,
            _ANY_LATENT,
            "a page of its index keys is one row of codes followed by their scales, and it writes the scores of "
            "all keys to memory; releases before 0.1.18 lose rows of them past 2 GiB",
        ),
    )


# Latent layers with expanded latents use it too (packed.py).
VARLEN = _entry(
    "flash_attn_varlen_func",
    StepKind.PREFILL,
    _VARLEN,
    VarlenPrefill.bind,
    bakes=_MAX_Q_LEN,
    # Each sequence's K and V are a view of its own length.
    masks_v=True,
    # A graph serves steps with prefixes too.
    graph_safe=False,
    needs_host_lengths=True,
    faults=faults.VARLEN,
)

ENTRIES: tuple[KernelEntry, ...] = (
    _listed("paged_attention_ragged", StepKind.DECODE, _RAGGED, bind_ragged, bakes=_MAX_KV_LEN, faults=faults.RAGGED),
    _unbound(
        "paged_attention_ragged[fp8]",
        StepKind.DECODE,
        replace(_RAGGED, encodings=_EIGHT_BITS, scales=(Scales.LAYER,)),
        "it rounds probabilities of 256 keys to eight bits without a scale, so that those below 1/2048 vanish "
        "(1/1024 on gfx950) and with them up to an eighth (a quarter) of a result",
    ),
    _unbound(
        "paged_attention_v1",
        StepKind.DECODE,
        replace(_RAGGED, exact_dims=((128, 128),), page_sizes=(16,), dtypes=(torch.float16,), window=True),
        # In e4048607 the grid of csrc/cpp_itfs/pa/pa_v1.cuh:76 covers all keys, and pa_kernels.cuh:445 masks products.
        # op_tests/test_pa_v1.py:593 runs windows.
        "it reads all keys of a sequence and then hides those before the window; aiter.unified_attention, which is "
        "bound, leaves them out",
    ),
    # For vectorised pools: parts of a sequence before whole ones, because one long sequence alone fills a device.
    _entry(
        "pa_decode_gluon",
        StepKind.DECODE,
        _GLUON,
        GluonDecode.bind,
        needs=_TABLE,
        faults=faults.GLUON,
        notes=(oddities.REDUCTION, oddities.SMALL_SCALES),
    ),
    *_unified(StepKind.DECODE, _MAX_KV_LEN),
    # Equal shares of all keys before equal splits of each sequence, in steps of few: one long sequence fills a device.
    _listed(
        "mla_decode_fwd+get_mla_metadata_v1",
        StepKind.DECODE,
        replace(_LATENT, max_gqa_ratio=16),
        bind_scheduled_latent_decode,
        notes=(oddities.FEW_SEQUENCES,),
    ),
    _listed("mla_decode_fwd", StepKind.DECODE, _LATENT, LatentDecode.bind, notes=(oddities.MANY_HEADS,)),
    _listed(
        "mla_decode_fwd+get_mla_metadata_v1[fp8]",
        StepKind.DECODE,
        _LATENT_EIGHT_BITS,
        EightBitLatentDecode.bind,
        faults=faults.LATENT_EIGHT_BITS,
        notes=(oddities.SATURATED_QUERIES, oddities.GROUPED_HEADS),
        **_ROUNDED,
    ),
    # For sparse layers (providers/sparse.py), which Triton's kernels and those of selected.py serve instead.
    *_sparse(),
    # Stores, for which launches of StepOps serve instead.
    *(
        _unbound(
            name,
            StepKind.DECODE,
            _ANY_LATENT,
            "it drops the rows of tokens whose slot is -1, and a step's slots name page 0 for them, which must stay "
            "zero; it stores NaN unchanged; and rope_and_store, which serves instead, is one launch too",
        )
        for name in ("concat_and_cache_mla", "fused_qk_rope_concat_and_cache_mla")
    ),
    _entry(
        "pa_decode_gluon[verify]",
        StepKind.VERIFY,
        _GLUON_VERIFY,
        GluonVerify.bind,
        needs=_TABLE,
        faults=faults.GLUON,
        notes=(oddities.REDUCTION, oddities.LAST_ROWS, oddities.PARTS_OF_WINDOWS),
    ),
    # More heads have as many products as an extend step, and no gain from reading the latent rows once.
    _listed(
        "mla_decode_fwd[verify]",
        StepKind.VERIFY,
        replace(_LATENT, max_gqa_ratio=16),
        LatentVerify.bind,
        min_kv_len=FEW_TOKENS,
        notes=(oddities.LAST_ROWS, oddities.FEWER_KEYS, oddities.EIGHT_ROWS),
    ),
    _listed(
        "mla_decode_fwd+get_mla_metadata_v1[fp8, verify]",
        StepKind.VERIFY,
        replace(_LATENT_EIGHT_BITS, max_gqa_ratio=16),
        EightBitLatentVerify.bind,
        min_kv_len=FEW_TOKENS,
        faults=faults.LATENT_EIGHT_BITS_OF_FEW,
        notes=(oddities.SATURATED_QUERIES, oddities.LAST_ROWS, oddities.FEWER_KEYS),
        **_ROUNDED,
    ),
    *_batch_prefill(StepKind.EXTEND),
    *_unified(StepKind.EXTEND, _BOTH_LENGTHS),
    # After unified_attention, which does not round q.
    *_batch_prefill_eight_bits(StepKind.EXTEND),
    *_latent_extends(StepKind.EXTEND),
    # One kernel for both, because Composable Kernel gives a sequence with one new token a tile of 128.
    *_unified(StepKind.MIXED, _BOTH_LENGTHS),
    *_batch_prefill(StepKind.MIXED),
    *_batch_prefill_eight_bits(StepKind.MIXED),
    *_latent_extends(StepKind.MIXED),
    VARLEN,
)
