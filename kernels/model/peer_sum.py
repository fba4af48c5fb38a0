"""Sums a tensor over the ranks of one host: each rank reads the others' values from their memory, in one launch.

A program sums a block of elements, apart from all other programs:

1. It copies the block to its region of this rank's memory, which all ranks can read, and then writes the number of this
   sum into its flag of each rank.
2. It waits until all ranks have written theirs.
3. It adds up the block of every rank in float32, in the order of ranks, and rounds once. So all ranks get the same bits,
   and an element's sum depends on no other element.

A program's sums go to two regions in turn. A rank begins the sum after the next one only when all ranks have begun the
next one, and so have read this one.

A program is one warp: the release of a flag then follows all of its stores. With several, Triton's barrier on AMD would
not wait for the stores of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# A program waits for those of other ranks, so all programs of a sum have to run at the same time.
PROGRAMS = 512
REGION_BYTES = 1 << 12
MEMORY_BYTES = 2 * PROGRAMS * REGION_BYTES
MOST_RANKS = 8
# Bytes that a thread loads at once: x begins at a multiple of them, and its size is one.
UNIT_BYTES = 16
_LEAST_BLOCK = 512


@triton.jit(do_not_specialize=["units"])
def _peer_sum_kernel(
    x,
    memory,
    flags,
    distances,
    counts,
    units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    REGION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    lane = tl.arange(0, BLOCK)
    is_there = program * BLOCK + lane < units * UNIT
    x += program * BLOCK + lane
    own = tl.load(x, mask=is_there, other=0.0)
    place = ((count & 1) * PROGRAMS + program) * REGION + lane
    # Before the barrier: after it, AMD's compiler lets each rank's values wait for the distance of the next.
    offsets = ()
    for other in tl.static_range(RANKS):
        offsets += (tl.load(distances + other) * UNIT,)  # type: ignore[assignment]
    tl.store(memory + place, own, mask=is_there)
    tl.debug_barrier()
    rank = tl.arange(0, LANES)
    is_rank = rank < RANKS
    theirs = flags + tl.load(distances + rank, mask=is_rank, other=0) * 4 + (program * RANKS + RANK)
    tl.atomic_xchg(theirs, tl.zeros([LANES], tl.int32) + count, mask=is_rank, sem="release", scope="sys")
    mine = flags + program * RANKS + rank
    # A difference, because the number goes on from the largest one to the smallest.
    late = tl.full([], -1, tl.int32)
    while late < 0:
        seen = tl.atomic_add(mine, tl.zeros([LANES], tl.int32), mask=is_rank, sem="acquire", scope="sys")
        late = tl.min(tl.where(is_rank, seen - count, 0), 0)
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        if other == RANK:
            total += own.to(tl.float32)
        else:
            total += tl.load(memory + offsets[other] + place, mask=is_there, other=0.0).to(tl.float32)
    tl.store(x, total.to(x.dtype.element_ty), mask=is_there)
    tl.store(counts + program, count)


_variant = repeated_launches(_peer_sum_kernel)


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """The memory that a rank's sums go through. It begins with zeros, and lies at the same offset of each rank's part.

    values:    uint8 [MEMORY_BYTES], read by all ranks
    flags:     int32 [PROGRAMS, ranks], written by all ranks
    distances: int64 [ranks]: from this rank's values to each rank's, and likewise of flags, in units of UNIT_BYTES
    counts:    int32 [PROGRAMS], the rank's own: sums that each program has begun
    rank:      this rank
    """

    values: Tensor
    flags: Tensor
    distances: Tensor
    counts: Tensor
    rank: int


@only_launches
def launch_peer_sum(x: Tensor, memory: PeerMemory) -> None:
    """Sums x over all ranks, in place. All of them launch the same sums, in the same order.

    x: float32, float16 or bfloat16, contiguous, of up to PROGRAMS * REGION_BYTES bytes, in whole units of UNIT_BYTES
    """
    unit = UNIT_BYTES // x.element_size()
    region, num = REGION_BYTES // x.element_size(), x.numel()
    assert num % unit == 0 and num <= PROGRAMS * region
    assert x.is_contiguous() and x.data_ptr() % UNIT_BYTES == 0
    if not num:
        return
    block = max(_LEAST_BLOCK, next_power_of_2(triton.cdiv(num, PROGRAMS)))
    ranks = len(memory.distances)
    _variant(x.dtype, block, memory.rank, ranks)(
        x.device,
        (triton.cdiv(num, block), 1, 1),
        x,
        memory.values.view(x.dtype),
        memory.flags,
        memory.distances,
        memory.counts,
        num // unit,
        unit,
        block,
        region,
        PROGRAMS,
        memory.rank,
        ranks,
        next_power_of_2(ranks),
        num_warps=1,
    )
