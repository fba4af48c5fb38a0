"""Faults of AITER's kernels in some releases: of AITER, or of the ROCm that compiles them.

Each says how it is known. A fault ends with the first release that AITER's own sources, tests or code objects show to
be right. If no such release is known, it has no end here.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rocm_attn.machine.releases import Release, ReleaseRange
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding
from rocm_attn.providers.contract import Fault, side_bytes

_MI300, _MI355 = "gfx942", "gfx950"
_BOTH = (_MI300, _MI355)


def _before(release: str) -> ReleaseRange:
    return ReleaseRange(before=Release.of(release))


def _between(since: str, before: str) -> ReleaseRange:
    return ReleaseRange(Release.of(since), Release.of(before))


# Its tile in decode is a page, or 64 keys of a larger page, which takes 64 KiB at head_dim 512.
WIDE_DECODE = Fault(
    "head_dim 512 on pages of 64 tokens or more needs more than gfx942's 64 KiB of LDS",
    lambda problem, pool: problem.head_dim == 512 and problem.page_size >= 64,
    (_MI300,),
    aiter=_before("0.1.19.post1"),
)

# In extend and mixed steps its tiles are 64 keys on pages of any size.
WIDE_EXTEND = Fault(
    "head_dim 512 needs more than gfx942's 64 KiB of LDS",
    lambda problem, pool: problem.head_dim == 512,
    (_MI300,),
    aiter=_before("0.1.19.post1"),
)

# Two stages of a tile of 128 keys, if a sequence is not split.
LARGE_PAGE_DECODE = Fault(
    "head_dim 256 on pages of 128 tokens needs more than gfx942's 64 KiB of LDS",
    lambda problem, pool: problem.head_dim == 256 and problem.page_size == 128,
    (_MI300,),
    aiter=_before("0.1.12"),
)

# An assertion on the way to the kernel that splits sequences; layers with a window are not split.
FLOAT16_SPLITS = Fault(
    "float16 is refused if sequences are split",
    lambda problem, pool: problem.dtype == torch.float16 and problem.window_left == UNLIMITED_WINDOW,
    _BOTH,
    aiter=_between("0.1.16", "0.1.17"),
)

# Pages of more than 256 tokens were cut into parts of 256 keys, of which eight at most were read; the rest was dropped.
LARGE_PAGES_LOSE_KEYS = Fault(
    "on pages of 1024 tokens it ignores keys after the first 2048",
    lambda problem, pool: problem.page_size == 1024,
    _BOTH,
    aiter=_before("0.1.14"),
)

# Byte offsets of 31 bits: its code objects declare 0x80000000 as the size of K and of V in v0.1.16.
POOL_OF_2_GIB = Fault(
    "K or V of a layer takes more than 2 GiB, the limit of its offsets",
    lambda problem, pool: side_bytes(problem, pool) > 2**31 - 1,
    _BOTH,
    aiter=_before("0.1.17"),
)

# Composable Kernel's bound on a byte offset. Past it v0.1.13 loads by addresses (csrc/cpp_itfs/
# mha_fwd_batch_prefill.cu:51), and its tests run sides of 4.5 GiB on pages of 1, 16 and 1024 in both layouts, in
# bfloat16 and eight bits (op_tests/test_batch_prefill.py:1709): neither bytes nor elements are counted in 32 bits.
# v0.1.12 tests linear pages of 1024 alone, without causality.
PROMPTS_OF_2_GIB = replace(POOL_OF_2_GIB, aiter=_before("0.1.13"))

# Its instances are those that AITER's tests of each release run.
NO_PAGES_OF_16 = Fault(
    "it has no kernel for pages of 16 tokens",
    lambda problem, pool: problem.page_size == 16,
    _BOTH,
    aiter=_before("0.1.10.post1"),
)
NO_HEAD_DIM_256 = Fault(
    "it has no kernel for head_dim 256",
    lambda problem, pool: problem.head_dim == 256,
    _BOTH,
    aiter=_before("0.1.12"),
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

# Since that release it finds scales of a page by their stride; before, by the number of KV heads.
NO_FACTOR_STRIDES = Fault(
    "its scales are stored per page",
    lambda problem, pool: True,
    _BOTH,
    aiter=_before("0.1.13"),
)

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

COMPOSABLE = (FAR_SLOPES,)
BATCH_PREFILL = (PROMPTS_OF_2_GIB, NO_PAGES_OF_16, NO_HEAD_DIM_256, SPILLED_SCALARS, *COMPOSABLE)
UNIFIED_DECODE = (WIDE_DECODE, LARGE_PAGE_DECODE, FLOAT16_SPLITS, *EIGHT_BITS)
UNIFIED_EXTEND = (WIDE_EXTEND, *EIGHT_BITS)
RAGGED = (CAPPED_SLOPES,)
GLUON = (LARGE_PAGES_LOSE_KEYS, *EIGHT_BITS)
ASSEMBLED = (POOL_OF_2_GIB,)
PERSISTENT = (NO_FACTOR_STRIDES, *EIGHT_BITS)
LATENT_EIGHT_BITS = (GROUPS_OF_HEADS, *EIGHT_BITS)
