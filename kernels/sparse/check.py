"""Checks that a selection keeps to its sequences: ascending units, each once, within the keys that its token sees.

Attention does not need it. An entry outside of a sequence's KV gives no key, and an entry that is listed twice counts
twice. Both are mistakes of the selection's author, and a debug run reports them.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import BAD_COUNT, NOT_ASCENDING, OUTSIDE, SelectedKeys, SparseTokens
from rocm_attn.kernels.sparse.places import visible_tokens

_BAD_COUNT, _OUTSIDE, _NOT_ASCENDING = tl.constexpr(BAD_COUNT), tl.constexpr(OUTSIDE), tl.constexpr(NOT_ASCENDING)
_BLOCK = 1024


@triton.jit
def _check_selection_kernel(
    units,
    counts,
    position_of_token,
    num_tokens,
    faults,
    SETS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    visible = visible_tokens(position_of_token, num_tokens, tl.program_id(0) // SETS, True)
    num_units = tl.cdiv(visible, UNIT_TOKENS)
    count = tl.where(visible > 0, tl.load(counts + line), 0)
    is_bad = ((count < 0) | (count > tl.minimum(num_units, WIDTH))).to(tl.int32)
    fault = is_bad * _BAD_COUNT
    for first in range(0, tl.minimum(count, WIDTH), BLOCK):
        slot = first + tl.arange(0, BLOCK)
        is_listed = slot < tl.minimum(count, WIDTH)
        unit = tl.load(units + line * WIDTH + slot, mask=is_listed, other=0)
        before = tl.load(units + line * WIDTH + tl.maximum(slot - 1, 0), mask=is_listed, other=0)
        is_outside = is_listed & ((unit < 0) | (unit >= num_units))
        # The first one of a line has none before it.
        is_low = is_listed & (slot > 0) & (unit <= before)
        fault |= tl.max(is_outside.to(tl.int32), 0) * _OUTSIDE
        fault |= tl.max(is_low.to(tl.int32), 0) * _NOT_ASCENDING
    if fault != 0:
        tl.atomic_or(faults, fault, sem="relaxed")


def launch_check_selection(selection: SelectedKeys, tokens: SparseTokens, faults: Tensor) -> None:
    """Sets bits of a fault word for each error in a selection. Pads, which see no key, may select anything.

    faults: int32 [1]; bits are added:
            BAD_COUNT      a count is negative, or larger than the units that the token sees or the selection's width
            OUTSIDE        an entry is no unit that its token sees
            NOT_ASCENDING  an entry is not larger than the one before it
    """
    num_tokens, sets, width = selection.units.shape
    selection.check(num_tokens)
    tokens.check()
    assert len(tokens.position_of_token) == num_tokens
    launch(
        _check_selection_kernel,
        (num_tokens * sets,),
        selection.units,
        selection.counts,
        tokens.position_of_token,
        tokens.num_tokens,
        faults,
        SETS=sets,
        WIDTH=width,
        UNIT_TOKENS=selection.unit_tokens,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
        num_warps=4,
    )
