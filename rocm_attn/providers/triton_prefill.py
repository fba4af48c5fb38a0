"""Prefill steps without cached tokens on sm_90: one program per row of the plain kernel, without splits.

Splitting a row over programs costs a merge and a larger launch, which pays off only for more keys than short prompts
have.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rocm_attn.kernels.tuning.tiles import ExtendTileChoice, ExtendTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem, Scales
from rocm_attn.providers.by_tokens import ANY_TOKENS, KernelByTokens, ServedSteps, SizedKernel
from rocm_attn.providers.contract import BoundKernel, Limits

# Rows of a block in the tiles of few rows.
_FEW_ROWS = 64
# More blocks than any step has.
_ANY_BLOCKS = ANY_TOKENS


class _Prompts(NamedTuple):
    """Prompts for which whole rows take less time.

    most:          mean new tokens of a step, at most
    dim_block:     of tiles of few rows whose table row takes all columns at once; 0: these do too
    blocks_per_cu: blocks of few rows for each compute unit, up to which the tiles are those
    most_beyond:   mean new tokens, at most, of steps with more blocks, whose tiles are those of long sequences
    """

    most: int
    dim_block: int = 0
    blocks_per_cu: int = _ANY_BLOCKS
    most_beyond: int = 0


# Settings up to each head dim. Microseconds of an H200 in blocks of 64 rows, of 128, and of extend steps: 32 x 8 heads
# of 32, 1 x 512: 8.6, 9.1, 16.6; 16 x 64: 8.6, 5.5, 9.3; 4 x 512: 20.2, 18.9, 22.7; 16 x 1024: 195, 183, 197; 1 x 2048:
# 44, 47, 51. 64 x 16 of them, 4 x 64: 4.9, 4.2, 7.6. 64 x 8 of 64, 1 x 128: 4.3, 5.5, 9.4; 64 x 128: 88, 96, 134; 4 x
# 512: 39, 41, 51; but 32 x 32, 1 x 1024: 27, 26, 22. 32 x 8 of 96, 1 x 128: 4.7, 6.5, 12.3; 2 x 256: 10.3, 10.6, 16.2;
# 16 x 64: 12.2, 10.6, 13.3; 4 x 512: 36, 30, 42; but 1 x 1024: 32, 32, 29. In blocks of 128 columns the first takes
# 5.9, and 12 x 4 of 72, 8 x 91: 7.7 in place of 6.3. 32 x 8 of 128, 1 x 128: 5.1, 7.2, 11.8; 1 x 512: 15.4, 22.4, 16.8;
# 64 x 128: 98, 81, 111; 4 x 512: 40, 37, 42; 1 x 2048: 90, 86, 72. 64 x 8 of 192, 1 x 512: 27.7, 28.0, 34.5; 64 x 128:
# 225, 264, 293. 16 x 8 of 256, whose blocks have 32 rows, and in extend steps, 1 x 30: 4.8 and 9.9; 1 x 200: 14.3 and
# 17.5; but 1 x 400: 24.6 and 18.5; 8 x 100: 18.9 and 17.5; 4 x 1, 8 x 100: 9.6 and 15.7; 1 x 400: 19 and 25.
_PROMPTS = {
    32: _Prompts(2048, blocks_per_cu=1, most_beyond=2048),
    64: _Prompts(512),
    96: _Prompts(512, dim_block=32, blocks_per_cu=3, most_beyond=512),
    128: _Prompts(512, blocks_per_cu=4, most_beyond=512),
    192: _Prompts(512),
    256: _Prompts(512, blocks_per_cu=1),
}
# Mean new tokens of a step with windows, at most: the loop over keys at a window's edge takes whole rows longer. With
# windows of 512, here and in extend steps, 64 x 8 heads of 64, 1 x 128: 5.5 and 10.0; 8 x 384: 58 and 61; 1 x 512: 21
# and 18; 4 x 512: 45 and 47; 32 x 8 of 96: 5.7 and 10.9; 45 and 54; 18 and 16; 33 and 41; 32 x 16 of 128: 6.4 and 11.2;
# 49 and 49; 19 and 17; 39 and 37.
_MOST_WITH_WINDOW = 384
# Blocks of few rows for each compute unit, up to which loads of more keys are in flight in windows: more blocks run at
# once with fewer loads. 64 x 8 heads of 64, windows of 128, 1 x 300: 8.6 with three in flight, 10.1 with two; 8 x 200:
# 25 and 23; 64 x 64: 44 and 38.
_FEW_BLOCKS_IN_WINDOW = 4
# Shorter windows were not measured. Of 128, 64 x 64: 38 and 42, 30 and 30, 39 and 39.
_LEAST_WINDOW = 128


def limits_of_prompts(those: Limits) -> Limits:
    """The limits of a kernel's steps of new prompts alone, from the kernel's limits.

    Attention that is not causal, slopes and soft caps were not measured. With more query heads per KV head, many rows
    of a block of 64 would have no token.
    """
    head_dim = those.head_dim[0], max(_PROMPTS)
    return replace(
        those,
        archs=("sm_90",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dim=head_dim,
        v_head_dim=head_dim,
        dims_alike=True,
        max_gqa_ratio=32,
        least_window=max(_LEAST_WINDOW, those.least_window),
        soft_cap=False,
        alibi=False,
        non_causal=False,
        encodings=(KVEncoding.LIKE_Q,),
        scales=(Scales.NONE,),
    )


def bind_prompts(
    problem: Problem,
    target: Target,
    rows: Sequence[ExtendTileChoice],
    whole: Callable[[ExtendTiles], BoundKernel],
    extend: BoundKernel,
) -> KernelByTokens:
    """Whole rows of the plain kernel for few new tokens, else the extend kernel; within limits_of_prompts().

    rows:   of the table of paged extend
    whole:  binds a kernel of whole rows
    extend: serves any step
    """
    prompts = next(prompts for max_head_dim, prompts in _PROMPTS.items() if problem.head_dim <= max_head_dim)
    *fewer, last = (row for row in rows if row.max_rows <= _FEW_ROWS)
    tiles = replace(last.tiles, dim_block=last.tiles.dim_block or prompts.dim_block)
    few, windowed = whole(tiles), problem.window_left != UNLIMITED_WINDOW
    any_prompt = _MOST_WITH_WINDOW if windowed else ANY_TOKENS
    most, most_beyond = min(prompts.most, any_prompt), min(prompts.most_beyond, any_prompt)

    def up_to(blocks_per_cu: int) -> ServedSteps:
        tokens = tiles.tokens_of(blocks_per_cu * target.compute_units, problem.num_q_heads)
        return ServedSteps(most, max_tokens=min(tokens, ANY_TOKENS))

    short = [
        *(SizedKernel(ServedSteps(row.max_rows // problem.gqa_ratio), whole(row.tiles)) for row in fewer),
        # If no sequence has more rows, larger blocks would be half empty.
        SizedKernel(ServedSteps(last.max_rows // problem.gqa_ratio), few),
    ]
    if windowed and prompts.blocks_per_cu > _FEW_BLOCKS_IN_WINDOW:
        short.append(SizedKernel(up_to(_FEW_BLOCKS_IN_WINDOW), few))
        few = whole(replace(tiles, num_stages=tiles.diagonal_stages))
    short.append(SizedKernel(up_to(prompts.blocks_per_cu), few))
    if most_beyond:
        short.append(SizedKernel(ServedSteps(most_beyond), whole(rows[-1].tiles)))
    return KernelByTokens.before(short, extend)
