"""The cut of the work of attention over latent pages, as the values of attention/cuts.py.

A latent pool has one KV head, so all query heads of a token share a row of decode's schedule. This module does not
import Triton, so that a provider can choose and describe a kernel where there is none.
"""

from rocm_attn.kernels.attention.cuts import WHOLE_ROWS, DecodeCut, ExtendCut, NewTokenRange, RowCut
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles


def latent_decode_cut(
    tiles: LatentTiles, *, num_heads: int, compute_units: int, window_left: int, fewest: int = 1, most: int = 1
) -> DecodeCut:
    """The cut of sequences with fewest to most new tokens.

    Its programs are groups of as many programs as a token has blocks of query heads.
    """
    groups = max(1, compute_units * tiles.programs_per_cu // tiles.head_blocks(num_heads))
    # A sequence's first new token may see keys that its last one no longer does.
    window = window_left if window_left == UNLIMITED_WINDOW else window_left + most - 1
    of_row = min(tiles.tokens_per_block(num_heads), most)
    tokens = NewTokenRange(fewest, most, of_row)
    is_even = tiles.even and most == 1
    return DecodeCut(1, tiles.key_block, tiles.row_cost, groups, window, tokens, is_even=is_even)


def latent_row_cut(cut: DecodeCut, num_heads: int) -> RowCut:
    """The cut as kernels are compiled for it."""
    return RowCut(
        ROWS=cut.rows,
        GQA_RATIO=num_heads,
        HEADS_PER_ROW=1,
        HEAD_BLOCKS=1,
        BLOCK_HEADS=num_heads,
        Q_ROWS=cut.tokens.OF_ROW * num_heads,
        KEY_BLOCK=cut.key_block,
        ROW_COST=cut.row_cost,
        WINDOWED=cut.window_left != UNLIMITED_WINDOW,
        # The schedule decides which sequences take part: kernels of launches that differ in that alone are the same.
        TOKENS=cut.tokens._replace(FEWEST=1),
    )


def latent_partials_words(cut: DecodeCut, *, num_heads: int, v_head_dim: int) -> int:
    """float32 words of decode's workspace, for rows that several programs share: two parts per group of programs."""
    return 2 * cut.programs * cut.tokens.OF_ROW * num_heads * (v_head_dim + 2)


def latent_extend_cut(tiles: LatentTiles, *, num_heads: int, causal: bool, min_q_len: int = 1) -> ExtendCut:
    """The cut of sequences with min_q_len new tokens or more."""
    return ExtendCut(tiles.tokens_per_block(num_heads), min_q_len, WHOLE_ROWS._replace(causal=causal))
