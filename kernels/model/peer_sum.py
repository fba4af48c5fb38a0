"""Sums a tensor over the ranks of one host: each rank reads the others' values from their memory, in one launch.

A program sums some elements, apart from all other programs:

1. It copies its elements to its region of this rank's memory, which all ranks can read, and then writes the number of
   this sum into its flag of each rank.
2. It waits until all ranks have written theirs.
3. It adds up those of every rank in float32, in the order of ranks, and rounds once. So all ranks get the same
   bits, and an element's sum depends on no other element.

A program's sums go to two regions in turn. A rank begins the sum after the next one only when all ranks have begun the
next one, and so have read this one.

A program is one warp: the release of a flag then follows all of its stores. With several, Triton's barrier on AMD would
not wait for the stores of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# A program waits for those of other ranks, so all programs of a sum have to run at the same time.
PROGRAMS = 512
REGION_BYTES = 1 << 14
_VALUE_BYTES = 2 * PROGRAMS * REGION_BYTES
# Bytes that a thread loads at once: x begins at a multiple of them, and its size is one.
UNIT_BYTES = 16
# Elements that a program adds up at a time: of a small sum, which has as many programs as it can, and of others.
_SMALL_BLOCK, _BLOCK = 512, 1024
# Stands for any number of looks at the flags of ranks that are late.
_ANY = (1 << 31) - 1


@triton.jit(do_not_specialize=["rank", "units", "parts", "looks"])
def _peer_sum_kernel(
    x,
    memory,
    flags,
    addresses,
    counts,
    rank,
    units,
    parts,
    looks,
    UNIT: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    REGION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    ANY: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    lane = tl.arange(0, BLOCK)
    first = program * parts * BLOCK
    place = ((count & 1) * PROGRAMS + program) * REGION
    # Before the barrier: after it, AMD's compiler lets each rank's values wait for the address of the next.
    regions = ()
    for each in tl.static_range(RANKS):
        at = tl.load(addresses + each) * UNIT_BYTES
        regions += (tl.multiple_of(at.to(memory.dtype), UNIT_BYTES) + place,)  # type: ignore[assignment]
    for part in range(parts):
        element = first + part * BLOCK + lane
        own = tl.load(x + element, mask=element < units * UNIT, other=0.0)
        tl.store(memory + place + part * BLOCK + lane, own)  # a region holds whole blocks
    tl.debug_barrier()
    peer = tl.minimum(tl.arange(0, LANES), RANKS - 1)  # the last one more than once, if they are no power of two
    theirs = tl.load(addresses + RANKS + peer).to(flags.dtype) + (program * RANKS + rank)
    tl.atomic_xchg(theirs, tl.zeros([LANES], tl.int32) + count, sem="release", scope="sys")
    mine = flags + program * RANKS + peer
    # A difference, because the number goes on from the largest one to the smallest.
    late = tl.full([], -1, tl.int32)
    left = looks
    while (late < 0) & (left > 0):
        left -= (looks < ANY).to(tl.int32)
        seen = tl.atomic_add(mine, tl.zeros([LANES], tl.int32), sem="acquire", scope="sys")
        late = tl.min(seen - count, 0)
    tl.debug_barrier()
    for part in range(parts):
        total = tl.zeros([BLOCK], tl.float32)
        for each in tl.static_range(RANKS):
            total += tl.load(regions[each] + part * BLOCK + lane).to(tl.float32)
        element = first + part * BLOCK + lane
        tl.store(x + element, total.to(x.dtype.element_ty), mask=element < units * UNIT)
    tl.store(counts + program, count)


_variant = repeated_launches(_peer_sum_kernel)


def memory_bytes(ranks: int) -> int:
    """Bytes of each rank's memory that all ranks read and write. It begins with zeros, at a multiple of UNIT_BYTES."""
    return _VALUE_BYTES + 4 * PROGRAMS * ranks


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """The memory that a rank's sums go through.

    values:    uint8 [2 * PROGRAMS * REGION_BYTES], read by all ranks
    flags:     int32 [PROGRAMS, ranks], written by all ranks
    addresses: int64 [2, ranks]: of each rank's values, in units of UNIT_BYTES, and of its flags, in bytes. The kernel
               makes pointers of them: from a tensor's pointer Triton for AMD reaches memory of its 2 GiB alone
    counts:    int32 [PROGRAMS], the rank's own: sums that each program has begun
    rank:      this rank
    """

    values: Tensor
    flags: Tensor
    addresses: Tensor
    counts: Tensor
    rank: int

    @classmethod
    def of(cls, memory: Tensor, addresses: Sequence[int], rank: int) -> PeerMemory:
        """The memory of one rank. memory: its own, uint8 [memory_bytes(ranks)]; addresses: of every rank's, as it sees
        them
        """
        places = [at // UNIT_BYTES for at in addresses], [at + _VALUE_BYTES for at in addresses]
        return cls(
            values=memory[:_VALUE_BYTES],
            flags=memory[_VALUE_BYTES:].view(torch.int32).view(PROGRAMS, len(addresses)),
            addresses=torch.tensor(places, dtype=torch.int64, device=memory.device),
            counts=torch.zeros(PROGRAMS, dtype=torch.int32, device=memory.device),
            rank=rank,
        )


@only_launches
def launch_peer_sum(x: Tensor, memory: PeerMemory, *, looks: int = _ANY) -> None:
    """Sums x over all ranks, in place. All of them launch the same sums, in the same order.

    x:     float32, float16 or bfloat16, contiguous, up to PROGRAMS * REGION_BYTES bytes, in whole units of UNIT_BYTES
    looks: at the flags, after which a sum that tries the memory goes on without the ranks that are late
    """
    unit = UNIT_BYTES // x.element_size()
    region, num = REGION_BYTES // x.element_size(), x.numel()
    assert num % unit == 0
    assert num <= PROGRAMS * region
    assert x.is_contiguous()
    assert x.data_ptr() % UNIT_BYTES == 0
    if not num:
        return
    block = _SMALL_BLOCK if num <= PROGRAMS * _SMALL_BLOCK else _BLOCK
    parts = triton.cdiv(num, PROGRAMS * block)
    ranks = memory.addresses.shape[1]
    _variant(x.dtype, block, ranks)(
        x.device,
        (triton.cdiv(num, parts * block), 1, 1),
        x,
        memory.values.view(x.dtype),
        memory.flags,
        memory.addresses,
        memory.counts,
        memory.rank,
        num // unit,
        parts,
        looks,
        unit,
        UNIT_BYTES,
        block,
        region,
        PROGRAMS,
        ranks,
        next_power_of_2(ranks),
        _ANY,
        num_warps=1,
    )
