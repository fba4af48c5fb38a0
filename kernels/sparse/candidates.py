"""The choice among candidates: units outside of the blocks that an earlier choice left get no score.

    scores[t, s, u] = NaN, unless block u // block_keys is among the blocks of t and s

A unit without a score is never chosen (top_k.py). Blocks are in ascending order, so each is found by halving. A token
that has all its blocks is left as it is.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import Indexing, SelectedKeys, SparseTokens
from rocm_attn.kernels.sparse.places import visible_tokens

# Units of a program, each of whose threads writes a few.
_UNITS, _WARPS = 1024, 4


@triton.jit(do_not_specialize=["first_token"])
def _leave_out_kernel(
    scores,
    blocks,
    counts,
    position_of_token,
    num_tokens,
    first_token,
    scores_line,
    SETS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    num_units = visible_tokens(position_of_token, num_tokens, first_token + tl.program_id(0) // SETS, True)
    first = tl.program_id(1) * BLOCKS
    of_line = first_token.to(tl.int64) * SETS + line
    count = tl.load(counts + of_line)
    if (first * BLOCK_KEYS < num_units) & (count < tl.cdiv(num_units, BLOCK_KEYS)):
        # block, low, high: [BLOCKS]; entries before low are less than the block, and those from high on are not
        block = first + tl.arange(0, BLOCKS)
        low = tl.zeros([BLOCKS], tl.int32)
        high = low + count
        blocks += of_line * WIDTH
        for _ in tl.static_range(TURNS):
            middle = (low + high) // 2
            is_less = (low < high) & (tl.load(blocks + tl.minimum(middle, WIDTH - 1)) < block)
            low = tl.where(is_less, middle + 1, low)
            high = tl.where(is_less, high, middle)
        is_left_out = (low == count) | (tl.load(blocks + tl.minimum(low, WIDTH - 1)) != block)
        unit = block[:, None] * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)[None, :]
        mask = is_left_out[:, None] & (unit < num_units)
        tl.store(scores + line * scores_line + unit, float("nan"), mask=mask)


def launch_leave_out(
    scores: Tensor,
    tokens: SparseTokens,
    among: SelectedKeys,
    *,
    indexing: Indexing,
    first_token: int = 0,
) -> None:
    """Takes their scores from the units of some tokens that are in none of the blocks which are left to them.

    scores: float32 [n, sets, stride], of tokens [first_token, first_token + n); contiguous
    among:  the blocks of all tokens of the step, of indexing.block_keys units each
    """
    num_tokens, sets, stride = scores.shape
    among.check(len(tokens.row_of_token))
    assert scores.is_contiguous()
    assert (among.sets, among.width, among.unit_tokens) == (sets, indexing.candidate_blocks, indexing.block_keys)
    assert first_token + num_tokens <= len(tokens.row_of_token)
    blocks = max(_UNITS // indexing.block_keys, 1)
    launch(
        _leave_out_kernel,
        (num_tokens * sets, triton.cdiv(stride, blocks * indexing.block_keys)),
        scores,
        among.units,
        among.counts,
        tokens.position_of_token,
        tokens.num_tokens,
        first_token,
        stride,
        SETS=sets,
        WIDTH=among.width,
        TURNS=among.width.bit_length(),
        BLOCK_KEYS=indexing.block_keys,
        BLOCKS=blocks,
        num_warps=_WARPS,
    )
