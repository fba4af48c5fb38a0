"""Takes the slots that an engine gives for a step's new tokens, if its table gives the same ones.

    slot[t] = given[t], or slot_map[given[t]] in another space
    slot_of_token[t] stays unchanged if it is slot[t]; otherwise the token is dropped

Fill has written the table's slots to slot_of_token. A given slot that is negative, or in the page that belongs to no
sequence, means that the engine does not want the token written: it is dropped, which is no fault. Any other slot that
differs would put a token's K and V where its sequence never reads them, and where another's may lie: it is dropped too,
and sets SLOT_NOT_IN_TABLE in the step's error word. Tokens past the step's last one are dropped; so are those past the
given slots, which sets TOO_FEW_GIVEN.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_TOKENS = 256
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_NOT_IN_TABLE = tl.constexpr(error_word.SLOT_NOT_IN_TABLE)
_TOO_FEW = tl.constexpr(error_word.TOO_FEW_GIVEN)


@at_any_alignment
@triton.jit(do_not_specialize=["num_given", "num_tokens_padded", "given_stride", "map_stride", "map_len"])
def _take_slots_kernel(
    given,
    slot_map,
    counts,
    slot_of_token,
    num_given,
    num_tokens_padded,
    given_stride,
    map_stride,
    map_len,
    HAS_MAP: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    DROPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens_padded
    num_tokens = tl.load(counts + 1)
    is_given = (token < num_given) & (token < num_tokens)
    slot = tl.load(given + token.to(tl.int64) * given_stride, mask=is_given, other=-1).to(tl.int64)
    if HAS_MAP:
        in_map = (slot >= 0) & (slot < map_len)
        # A slot past the map is no slot of the other space, unlike -1, which means not to write.
        beyond = slot >= map_len
        slot = tl.load(slot_map + slot * map_stride, mask=in_map, other=-1).to(tl.int64)
        slot = tl.where(beyond, 1 << 62, slot)
    wanted = tl.load(slot_of_token + token, mask=is_given, other=0)
    is_same = is_given & (slot == wanted)
    strays = is_given & (slot >= FIRST_SLOT) & (slot != wanted)
    tl.store(slot_of_token + token, tl.where(is_same, wanted, DROPPED), mask=inside)
    tl.atomic_or(counts + _ERROR_WORD + tl.zeros([BLOCK], tl.int32), _NOT_IN_TABLE, mask=strays, sem="relaxed")
    if (tl.program_id(0) == 0) & (num_given < num_tokens):
        tl.atomic_or(counts + _ERROR_WORD, _TOO_FEW, sem="relaxed")


_variant = repeated_launches(_take_slots_kernel)


def launch_take_slots(given: Tensor, slot_map: Tensor | None, to: StepTensors, *, page_size: int) -> None:
    """Drops the tokens whose given slot is not the table's.

    given:         int32 or int64 [n], any stride, read only; the engine's slot of each token
    slot_map:      int32 or int64 [slots], slot -> slot of this space; None: the same
    to:            counts[1] is num_tokens, counts[3] receives error bits. slot_of_token is as fill has written it; in
                   it a dropped token receives 0, or -1 if page 0 is a real page
    """
    num_tokens_padded, null_page = to.slot_of_token.shape[0], to.terms.null_page
    fixed = slot_map is not None, page_size if null_page else 0, 0 if null_page else -1, _TOKENS
    slot_map = given if slot_map is None else slot_map
    _variant(given.dtype, slot_map.dtype, *fixed)(
        to.counts.device,
        (max(1, -(-num_tokens_padded // _TOKENS)), 1, 1),
        given,
        slot_map,
        to.counts,
        to.slot_of_token,
        given.shape[0],
        num_tokens_padded,
        given.stride(0),
        slot_map.stride(0),
        slot_map.shape[0],
        *fixed,
        num_warps=4,
    )
