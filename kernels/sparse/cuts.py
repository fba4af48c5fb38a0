"""The cut of sparse attention's work, and its scratch: both depend on shapes alone, so a graph serves all lengths.

This module does not import Triton, so that a provider can choose and describe a kernel where there is none.
"""

from typing import NamedTuple

from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.kernels.tuning.latent_tiles import SelectedTiles
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# float32 words of scratch, 128 MiB, that one launch of the indexer fills at most; a single token may take more.
_MOST_WORDS = 32 << 20


# Rounds of programs that a device takes one after another, at most: more of them start more often.
_MOST_ROUNDS = 4


def index_splits(blocks: int, key_blocks: int, programs: int) -> int:
    """Programs that share the keys of a block of tokens: their last round leaves the device as little idle as possible.

    blocks, key_blocks: of tokens, and the most of keys that one of them meets
    programs:           that the device holds at a time

    A last round that is nearly empty costs as much as a full one. H200, 64 tokens of 64k keys, 1,056 programs at a
    time: 147 us with 33 splits, 148 with 16, 179 with 17, 159 with 24.
    """
    blocks = max(blocks, 1)

    def keys_in_a_round(splits: int) -> float:
        return splits / -(-blocks * splits // programs)

    splits = max((max(rounds * programs // blocks, 1) for rounds in range(1, _MOST_ROUNDS + 1)), key=keys_in_a_round)
    return max(min(splits, key_blocks), 1)


class TopKCut(NamedTuple):
    """The cut of the search for the best candidates of a token and set, its line (top_k.py).

    stride:      words of a line of scores
    parts:       parts of a line that are filtered side by side; 0: the line is short, and nothing is filtered
    part_units:  units of a part
    groups:      maxima of a line that give a bound
    block_units: units that the last search holds at a time
    """

    stride: int
    parts: int
    part_units: int
    groups: int
    block_units: int

    @property
    def slots(self) -> int:
        """Units of all parts of a line."""
        return self.parts * self.part_units

    @property
    def line_words(self) -> int:
        """Words of scratch of a line: scores; for each part the candidates and their number; maxima and their bound."""
        return self.stride + (self.parts * (2 * self.part_units + 1) + self.groups + 1 if self.parts else 0)


def top_k_cut(max_units: int, indexing: Indexing, *, longest_part: int = 8192) -> TopKCut:
    """The cut of lines of up to max_units candidates.

    longest_part: units that a searching program holds, a power of two; a filtering one has a quarter of them
    """
    # Lines begin at 16 bytes.
    stride = max(-(-max_units // 4) * 4, 4)
    if max_units <= longest_part:
        return TopKCut(stride, 0, 0, 0, max(next_power_of_2(max_units), 16))
    # Two maxima for each unit that is chosen: with random scores about 1.4 * top units then reach the bound. With four,
    # whose bound is nearer, all of top-k takes 76 us instead of 56 (64 lines of 64k, top 2048; H200).
    groups = min(max(next_power_of_2(2 * indexing.top), 256), longest_part)
    block_units = min(max(next_power_of_2(2 * indexing.top), 256), longest_part)
    part_units = longest_part // 4
    return TopKCut(stride, -(-max_units // part_units), part_units, groups, block_units)


def select_chunk(num_tokens: int, max_kv_len: int, indexing: Indexing) -> int:
    """Tokens whose scores are in scratch at the same time."""
    words = top_k_cut(indexing.max_units(max_kv_len), indexing).line_words * indexing.sets
    return max(min(num_tokens, _MOST_WORDS // words), 1)


def select_words(num_tokens: int, max_kv_len: int, indexing: Indexing) -> int:
    """float32 words of scratch of launch_select, for num_tokens padded tokens."""
    cut = top_k_cut(indexing.max_units(max_kv_len), indexing)
    return select_chunk(num_tokens, max_kv_len, indexing) * indexing.sets * cut.line_words


class SelectedCut(NamedTuple):
    """The cut of attention over a selection: a program for each part of a token's row.

    rows:      rows of a token: KV heads, times the blocks that the query heads of one are cut into
    row_heads: query heads of a row; the last block of a KV head may have fewer
    parts:     parts of a selection; they are merged if there are several
    part_keys: places of a part, whole key blocks
    """

    rows: int
    row_heads: int
    parts: int
    part_keys: int

    def words(self, num_tokens: int, v_head_dim: int) -> int:
        """float32 words of scratch for num_tokens padded tokens: an accumulator, a maximum and a sum of each part."""
        return num_tokens * self.rows * self.parts * self.row_heads * (v_head_dim + 2) if self.parts > 1 else 0


def selected_cut(
    num_tokens: int, selection_keys: int, *, heads: tuple[int, int], tiles: SelectedTiles, programs: int
) -> SelectedCut:
    """The cut of num_tokens padded tokens.

    selection_keys: width * unit_tokens
    heads:          KV heads, and query heads that share one
    programs:       that the device is to have; tokens are cut in no more parts than give this many
    """
    num_kv_heads, ratio = heads
    head_blocks = -(-ratio // tiles.query_rows)
    rows = num_kv_heads * head_blocks
    blocks = -(-selection_keys // tiles.key_block)
    parts = max(min(programs // max(num_tokens * rows, 1), blocks), 1)
    part_blocks = -(-blocks // parts)
    return SelectedCut(rows, -(-ratio // head_blocks), -(-blocks // part_blocks), part_blocks * tiles.key_block)


def selected_words(
    num_tokens: int,
    selection_keys: int,
    *,
    heads: tuple[int, int],
    tiles: SelectedTiles,
    programs: int,
    v_head_dim: int,
) -> int:
    """float32 words of scratch for num_tokens padded tokens or fewer; arguments: selected_cut's.

    A few tokens have more parts, and may need more words than many. Graphs of all sizes share memory that is made for
    the largest one.
    """
    one = selected_cut(1, selection_keys, heads=heads, tiles=tiles, programs=programs)
    of_part = one.words(1, v_head_dim) // (one.rows * one.parts)
    return min(programs, num_tokens * one.rows * one.parts) * of_part


def segment_cut(selection_keys: int, *, heads: tuple[int, int], tiles: SegmentTiles) -> SelectedCut:
    """The cut of deterministic attention, for any number of tokens: a part is a segment. Arguments: selected_cut's."""
    num_kv_heads, ratio = heads
    head_blocks = -(-ratio // tiles.decode_rows)
    parts = max(-(-selection_keys // tiles.segment_len), 1)
    return SelectedCut(num_kv_heads * head_blocks, -(-ratio // head_blocks), parts, tiles.segment_len)
