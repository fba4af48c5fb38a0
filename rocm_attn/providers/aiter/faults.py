"""Faults of AITER's kernels in some releases: of AITER, or of the ROCm that compiles them.

Each says how it is known. A fault ends with the first release that AITER's own sources, tests or code objects show to
be right. If no such release is known, it has no end here. A build between two releases has a fault that ended with the
later one, unless its files hold the mark of the fix (machine/aiter_marks.py).
"""

from dataclasses import replace

import torch

from rocm_attn.machine.aiter_marks import FLOAT16_IN_SPLITS, LARGE_KEYS_BY_OTHERS, OPUS_BY_TORCH, SMALL_TILES_AT_512
from rocm_attn.machine.aiter_switches import EXPERIMENTAL, NO_OPUS
from rocm_attn.machine.releases import Release, ReleaseRange
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem
from rocm_attn.providers.contract import Fault, side_bytes

_MI300, _MI355 = "gfx942", "gfx950"
_BOTH = (_MI300, _MI355)


def _before(release: str) -> ReleaseRange:
    return ReleaseRange(before=Release.of(release))


def _between(since: str, before: str) -> ReleaseRange:
    return ReleaseRange(Release.of(since), Release.of(before))


# Its tile in decode is a page, or 64 keys of a larger page. It takes 64 KiB at head_dim 512 in 2-byte elements. Tiles
# of eight bits fit: tests/amd/aiter_source runs them.
WIDE_DECODE = Fault(
    "head_dim 512 on pages of 64 tokens or more needs more than gfx942's 64 KiB of LDS, unless they hold eight bits",
    lambda problem, pool: problem.head_dim == 512 and problem.page_size >= 64 and _is_like_q(problem),
    (_MI300,),
    aiter=_before("0.1.19.post1"),
    mark=SMALL_TILES_AT_512,
)

# In extend and mixed steps its tiles are 64 keys on pages of any size.
WIDE_EXTEND = Fault(
    "head_dim 512 needs more than gfx942's 64 KiB of LDS",
    lambda problem, pool: problem.head_dim == 512,
    (_MI300,),
    aiter=_before("0.1.19.post1"),
    mark=SMALL_TILES_AT_512,
)

# An assertion on the way to the kernel that splits sequences; layers with a window are not split. It looks at the dtype
# of the pages alone (v0.1.16:aiter/ops/triton/attention/unified_attention.py:130).
FLOAT16_SPLITS = Fault(
    "pages of float16 are refused if sequences are split",
    lambda problem, pool: (
        problem.dtype == torch.float16 and _is_like_q(problem) and problem.window_left == UNLIMITED_WINDOW
    ),
    _BOTH,
    aiter=_between("0.1.16", "0.1.17"),
    mark=FLOAT16_IN_SPLITS,
)

# v0.1.20:op_tests/test_batch_prefill.py:620 tests pages of one token at head_dim 128 alone, in every release.
WIDE_ROWS_ALONE = Fault(
    "pages of one token are tested at head_dim 128 alone",
    lambda problem, pool: problem.page_size == 1 and problem.head_dim != 128,
    _BOTH,
)

# AITER's tests leave it out: off by 0.05 to 1.78 in bfloat16 with two new tokens or more, and right on gfx942.
SPILLED_SCALARS = Fault(
    "causal attention without a soft cap is miscompiled for gfx950",
    lambda problem, pool: problem.causal and not problem.logits_soft_cap,
    (_MI355,),
    rocm=_between("7.2", "7.3"),
)

# It adds the bias before it caps the sum.
CAPPED_SLOPES = Fault(
    "it caps logits with their ALiBi slopes added, and the slopes must be added after the soft cap",
    lambda problem, pool: problem.has_alibi_slopes and problem.logits_soft_cap > 0,
    _BOTH,
)

# It keeps positions for the bias in 16 bits.
FAR_SLOPES = Fault(
    "its ALiBi slopes are limited to sequences of up to 65536 tokens",
    lambda problem, pool: problem.has_alibi_slopes and pool.max_kv_len > 1 << 16,
    _BOTH,
)

# float8_e4m3fnuz is its dtypes.fp8 there, and the format in which the matrix units compute.
READS_FNUZ = Fault(
    "it reads eight bits as float8_e4m3fnuz on gfx942, which halves float8_e4m3fn values",
    lambda problem, pool: problem.kv_encoding is KVEncoding.E4M3FN,
    (_MI300,),
)
READS_FN = Fault(
    "it reads eight bits as float8_e4m3fn on gfx950, which doubles float8_e4m3fnuz values",
    lambda problem, pool: problem.kv_encoding is KVEncoding.E4M3FNUZ,
    (_MI355,),
)
EIGHT_BITS = (READS_FNUZ, READS_FN)

# Depending on the release, groups of 16 heads were counted as more sequences, counted as more tokens, or not formed. In
# v0.1.18 schedule and kernels agree for one new token: both take 32, 64 and 128 heads unchanged, and others in groups
# of 16 (csrc/kernels/mla/metadata/v1_2_device.cuh:859, aiter/mla.py:483 to 558), and csrc/py_itfs_cu/asm_mla.cu:850 has
# a kernel for each (hsa/gfx950/mla/mla_asm.csv); v0.1.19 and v0.1.20 have the same.
GROUPS_OF_HEADS = Fault(
    "releases differ in how they group more than 16 heads on gfx950",
    lambda problem, pool: problem.num_q_heads > 16,
    (_MI355,),
    aiter=_before("0.1.18"),
)

# Its kernels multiply a page's number by its bytes and keep 32 bits.
LATENT_OF_4_GIB = Fault(
    "the latents of a layer take more than 4 GiB, the limit of its offsets",
    lambda problem, pool: side_bytes(problem, pool) > 2**32 - 1,
    (_MI300,),
)
# ceccccd0bc (aiter#4341) keeps 64 bits, in the kernel of 16 heads alone: hsa/gfx950/mla/
# mla_a8w8_qh16_qseqlen1_gqaratio16_ps.co has a v_mul_hi_u32 for each v_mul_lo_u32 from v0.1.19.post1 on, and
# op_tests/test_mla_ltx.py reads rows past 4 GiB.
LATENT_OF_4_GIB_BEFORE = replace(
    LATENT_OF_4_GIB,
    hits=lambda problem, pool: LATENT_OF_4_GIB.hits(problem, pool) and _padded_heads(problem) not in (32, 64, 128),
    archs=(_MI355,),
    aiter=_before("0.1.19.post1"),
)
LATENT_OF_4_GIB_BY_MANY = replace(
    LATENT_OF_4_GIB,
    what=f"{LATENT_OF_4_GIB.what} for 32, 64 or 128 heads",
    hits=lambda problem, pool: LATENT_OF_4_GIB.hits(problem, pool) and _padded_heads(problem) in (32, 64, 128),
    archs=(_MI355,),
)

# aiter/mla.py:863 and 911 in v0.1.20 call hk_mla_decode_fwd without q_scale and kv_scale, for 128 heads on both archs
# and for 64 on gfx950.
SCALES_LEFT_OUT = Fault(
    f"{EXPERIMENTAL} selects a kernel that ignores the scales of 128 heads; unset it",
    lambda problem, pool: _padded_heads(problem) == 128,
    _BOTH,
    only_with=EXPERIMENTAL,
)
SCALES_LEFT_OUT_OF_64 = replace(
    SCALES_LEFT_OUT,
    what=SCALES_LEFT_OUT.what.replace("128", "64"),
    hits=lambda problem, pool: _padded_heads(problem) == 64,
    archs=(_MI355,),
)

# aiter/mla.py:869 in v0.1.20 calls hk_mla_decode_fwd without them for 64 rows of heads and tokens, and every served
# release does. The schedule is then for twice the compute units, more than this call has room for.
SCALES_LEFT_OUT_OF_FEW = replace(
    SCALES_LEFT_OUT,
    what=SCALES_LEFT_OUT.what.replace("128 heads", "four tokens of 16 heads"),
    hits=lambda problem, pool: True,
    archs=(_MI355,),
)

# Its kernels for four tokens multiply a page's number by its bytes and keep 32 bits, on both archs.
LATENT_OF_4_GIB_BY_FEW = replace(LATENT_OF_4_GIB, archs=_BOTH)

# aiter#4770 and vllm#52312: its module was declared with one kind of tensor and built with another (aiter/ops/mha.py:
# 355 in v0.1.20). aiter/ops/mha.py:2895 selects it.
OPUS_TYPES = Fault(
    f"head_dim/v_head_dim 192/128 in bfloat16 without a log-sum-exp may end in a TypeError; {NO_OPUS}=1 avoids it",
    lambda problem, pool: (
        _is_assembled_192(problem)
        and not (problem.wants_lse or problem.has_sinks or problem.logits_soft_cap)
        and problem.window_left == UNLIMITED_WINDOW
    ),
    (_MI355,),
    aiter=_between("0.1.18", "0.1.21"),
    mark=OPUS_BY_TORCH,
    not_with=NO_OPUS,
)

# Since a43694f180 (aiter#4473) aiter/ops/mha.py:2858 sends such keys to a kernel without the limit.
KEYS_OF_4_GIB = Fault(
    "keys of one sequence reach 4 GiB at head_dim/v_head_dim 192/128, the limit of its assembly's offsets",
    lambda problem, pool: (
        _is_assembled_192(problem)
        and pool.max_kv_len * problem.num_kv_heads * problem.head_dim * problem.dtype.itemsize >= 2**32
    ),
    _BOTH,
    aiter=_before("0.1.20"),
    mark=LARGE_KEYS_BY_OTHERS,
)


def _is_like_q(problem: Problem) -> bool:
    return problem.kv_encoding is KVEncoding.LIKE_Q


def _padded_heads(problem: Problem) -> int:
    """The heads that mla_decode_fwd is given, a multiple of 16."""
    return -(-problem.num_q_heads // 16) * 16


def _is_assembled_192(problem: Problem) -> bool:
    return (problem.head_dim, problem.v_head_dim) == (192, 128) and problem.dtype == torch.bfloat16


COMPOSABLE = (FAR_SLOPES,)
VARLEN = (*COMPOSABLE, OPUS_TYPES, KEYS_OF_4_GIB)
BATCH_PREFILL = (WIDE_ROWS_ALONE, SPILLED_SCALARS, *COMPOSABLE)
UNIFIED_DECODE = (WIDE_DECODE, FLOAT16_SPLITS, *EIGHT_BITS)
UNIFIED_EXTEND = (WIDE_EXTEND, *EIGHT_BITS)
RAGGED = (CAPPED_SLOPES,)
GLUON = EIGHT_BITS
LATENT_EIGHT_BITS = (
    GROUPS_OF_HEADS,
    LATENT_OF_4_GIB,
    LATENT_OF_4_GIB_BEFORE,
    LATENT_OF_4_GIB_BY_MANY,
    SCALES_LEFT_OUT,
    SCALES_LEFT_OUT_OF_64,
    *EIGHT_BITS,
)
LATENT_EIGHT_BITS_OF_FEW = (LATENT_OF_4_GIB_BY_FEW, SCALES_LEFT_OUT_OF_FEW, *EIGHT_BITS)
