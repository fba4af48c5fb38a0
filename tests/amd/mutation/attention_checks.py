"""Checks of the masks of attention over pages, of its schedules and of its merges."""

from dataclasses import replace
from typing import Any

import torch

from rocm_attn.kernels.attention.arguments import NewRows
from rocm_attn.kernels.attention.cuts import DecodeCut, ExtendCut, Sequences
from rocm_attn.kernels.attention.decode import launch_storing_decode
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.attention.extend_schedule import launch_extend_schedule
from rocm_attn.kernels.attention.merge_states import launch_merge_states
from rocm_attn.kernels.attention.pads import launch_clear_pads
from rocm_attn.kernels.attention.plain_decode import launch_plain_decode
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.refs import merge_states as merge_twins
from rocm_attn.kernels.refs.pads import clear_pads
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from tests.amd import schedule_twins
from tests.amd.kernels import segment_cases
from tests.amd.kernels.attention_cases import ALL_SHARED, Case, assert_served, queries_of, run_decode, run_extend
from tests.amd.mutation.arguments import assert_same, placed
from tests.amd.mutation.latent_checks import rows_of_several_tokens
from tests.amd.mutation.memory import GARBAGE, PAGE_SIZE, Memory, gapped, garbage, ints
from tests.amd.mutation.placed_attention import CPU, attention

# Heads that leave lanes of every tile empty, dims that are no powers of two, gaps between all rows.
HEADS, DIMS = (6, 2), (24, 40)


DECODE_TILES = DecodeTiles(key_block=16, num_warps=1, num_stages=1, programs_per_cu=1)


EXTEND_TILES = ExtendTiles(query_rows=16, key_block=16, num_warps=1, num_stages=1)


SEGMENT_TILES = SegmentTiles(
    segment_len=32,
    key_block=16,
    decode_rows=16,
    decode_warps=1,
    decode_stages=1,
    programs_per_cu=1,
    extend=EXTEND_TILES,
)


# Every option of scores; the window hides keys in the middle of a tile.
SCORES: dict[str, Any] = {"window_left": 20, "soft_cap": 1.5, "sinks": True, "slopes": True}


def decode(memory: Memory, like: DecodeTiles = DECODE_TILES) -> None:
    """Checks split and whole rows, an empty sequence; every program passes a part to another. Codes come in pairs."""
    codes = {"kv": Encoding.E4M3FN, "scales": Scales.LAYER, "dtype": torch.float16}
    for kv_len, num_programs, head_blocks, scores in (
        ([33, 0, 1, 16, 70], 4, 1, {}),
        ([90], 7, 2, {}),
        ([33, 3, 16], 2, 1, {"first_page": [2, 9, 1]}),
        ([90, 80], 3, 1, SCORES),
        ([20, 20, 400], 5, 1, {**SCORES, "window_left": 300}),  # the last row is shared by two programs
        ([33, 16], 2, 1, codes),
        ([330, 20], 30, 1, SCORES),
    ):
        case = Case(kv_len, [1] * len(kv_len), HEADS, DIMS, PAGE_SIZE, spread=True, **scores)
        tiles = replace(like, head_blocks=head_blocks, paired=scores is codes)
        tiles = replace(tiles, dim_block=0) if tiles.paired else tiles
        tensors = attention(memory, case)
        run_decode(tensors, num_programs=num_programs, tiles=tiles, put=memory.put)
        assert_served(tensors)


def plain_decode(memory: Memory) -> None:
    """Checks odd dims, a window, and an empty sequence."""
    for window_left in (UNLIMITED_WINDOW, 20):
        case = Case([33, 0, 1, 16, 70], [1] * 5, HEADS, DIMS, PAGE_SIZE, spread=True, window_left=window_left)
        tensors = attention(memory, case)
        launch_plain_decode(tensors.args(), scores=tensors.scores)
        assert_served(tensors)


def storing_decode(memory: Memory) -> None:
    """Checks new tokens of two heads of odd dims, one head with query heads in two blocks, and three heads per row."""
    for heads, dims, tiles in (
        (HEADS, DIMS, replace(DECODE_TILES, head_blocks=2)),
        ((6, 3), (24, 24), replace(DECODE_TILES, heads_per_row=3)),
    ):
        case = Case([33, 3, 16], [1, 1, 1], heads, dims, PAGE_SIZE, spread=True)
        tensors = attention(memory, case)
        page_no = (tensors.kv_len.long() - 1) // PAGE_SIZE
        page, offset = tensors.table[tensors.row_of_seq.long(), page_no].long(), (tensors.kv_len - 1) % PAGE_SIZE
        k, v = (memory.put(gapped(3, heads[1], dim)) for dim in dims)
        for side, pages in ((k, tensors.k_pages), (v, tensors.v_pages)):
            side.copy_(pages[page, offset])
            pages[page, offset] = 7.0
        counts = memory.put(ints([3, 3, 1, 0]))
        new = NewRows(k, v, memory.put((page * PAGE_SIZE + offset).int()), counts, null_page=True)
        cut = DecodeCut.of(tiles, num_kv_heads=heads[1], programs=4, window_left=case.window_left)
        words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=dims[1], tiles=tiles)
        args = tensors.decode_args(cut, words, memory.put)
        launch_storing_decode(args, new, scores=tensors.scores, cut=cut, tiles=tiles)
        assert_served(tensors)
        assert counts[3] == 0, "what lies beside a row was looked at"


def merges(memory: Memory) -> None:
    """Checks merges of rows of one token and of several tokens."""
    decode(memory)
    rows_of_several_tokens(memory)


def decode_of_two_heads(memory: Memory) -> None:
    """Checks two heads per row of codes with a scale per token, whose last pages are not full."""
    case = Case([33, 16], [1, 1], (4, 2), (32, 32), PAGE_SIZE, kv=Encoding.E4M3FN, scales=Scales.TOKEN)
    tensors = attention(memory, case)
    run_decode(tensors, num_programs=3, tiles=replace(DECODE_TILES, heads_per_row=2), put=memory.put)
    assert_served(tensors)


def extend(memory: Memory) -> None:
    """Checks a prefix, a prompt, a tail; dims that fill tiles or do not; whole and shared rows; two KV heads as one."""
    joined = replace(EXTEND_TILES, heads_per_row=2)
    for heads, dims, prefix, programs, scores in (
        (HEADS, DIMS, 19, 0, {}),
        (HEADS, (16, 16), 18, 0, {}),
        (HEADS, DIMS, 19, 7, {}),
        (HEADS, (16, 16), 43, 5, SCORES),
        ((20, 1), DIMS, 43, 0, SCORES),  # more than a tile has rows
        ((20, 1), DIMS, 43, 9, SCORES),
        (HEADS, DIMS, 19, 0, {"window_right": UNLIMITED_WINDOW}),
        (HEADS, DIMS, 29, 5, {"masked": True}),
        (HEADS, (16, 16), 11, 0, {"masked": True}),
        (HEADS, (16, 16), 29, 0, {"masked": True, "window_left": 9, "slopes": True}),
        (HEADS, (24, 20), 19, 5, {}),
    ):
        tiles = joined if dims == (24, 20) else EXTEND_TILES
        case = Case([prefix + 2, 18, 0], [2, 18, 0], heads, dims, PAGE_SIZE, tail=3, spread=True, **scores)
        tensors = attention(memory, case)
        run_extend(tensors, tiles=tiles, sharing=ALL_SHARED._replace(programs=programs), put=memory.put)
        assert_served(tensors)


def segments(memory: Memory) -> None:
    """Checks deterministic extend, then decode: cuts and diagonals within tiles, windows, empty sequences."""
    for dims, case in (
        (DIMS, {"kv_len": [70, 18, 0], "q_len": [2, 18, 0], "tail": 3}),
        ((16, 16), {"kv_len": [67, 40], "q_len": [3, 5], **SCORES}),
        (DIMS, {"kv_len": [40, 33], "q_len": [2, 1], "window_right": UNLIMITED_WINDOW, "tail": 3}),
        (DIMS, {"kv_len": [97, 0, 32, 20], "q_len": [1] * 4}),
        (DIMS, {"kv_len": [97], "q_len": [1]}),  # every slot of the workspace is used
        (DIMS, {"kv_len": [97, 33], "q_len": [1] * 2, **SCORES}),
    ):
        for heads in (HEADS, (19, 1)):  # of which a tile holds 16, and two blocks are 10 and 9
            tensors = attention(memory, Case(heads=heads, dims=dims, page_size=PAGE_SIZE, spread=True, **case))
            if max(tensors.case.q_len) > 1:
                segment_cases.run_extend(tensors, tiles=SEGMENT_TILES, put=memory.put)
            else:
                segment_cases.run_decode(tensors, num_programs=3, tiles=SEGMENT_TILES, put=memory.put)
            assert_served(tensors)


def segments_left_in_memory(memory: Memory) -> None:
    """Checks deterministic extend that keeps the parts left of a segment in its workspace, and rows that see no key."""
    for case in ({"kv_len": [70, 18, 0], "q_len": [2, 18, 0], "tail": 3}, {"kv_len": [67], "q_len": [3], **SCORES}):
        tensors = attention(memory, Case(heads=HEADS, dims=DIMS, page_size=PAGE_SIZE, spread=True, **case))
        segment_cases.run_extend(tensors, tiles=replace(SEGMENT_TILES, left_in_memory=True), put=memory.put)
        assert_served(tensors)


def decode_schedule(memory: Memory) -> None:
    """Checks the words against those of the host twin, and a decode that walks them."""
    kv_len, q_len = [33, 0, 1, 50, 70], [1, 1, 1, 2, 1]
    cut = DecodeCut.of(DECODE_TILES, num_kv_heads=2, programs=4, window_left=-1)
    schedule = memory.put(garbage(cut.words(5)))
    launch_decode_schedule(placed(memory, queries_of(kv_len, q_len, sum(q_len), CPU)), schedule, cut)
    assert schedule.tolist() == schedule_twins.decode_schedule(kv_len, q_len, cut)
    decode(memory)


def extend_schedule(memory: Memory) -> None:
    """Checks the words of the host twin. Every program has a share, except in a step with no sequence (null kv_len)."""
    some, num_tokens = ([20, 40, 3], [2, 17, 3]), 25
    none: tuple[list[int], list[int]] = [], []
    steps = (some, 0, True, -1), (some, 7, True, -1), (some, 7, True, 9), (some, 5, False, -1), (none, 0, True, -1)
    for (kv_len, q_len), programs, causal, window_left in steps:
        sharing = ALL_SHARED._replace(programs=programs, rows=2, causal=causal, window_left=window_left)
        cut = replace(ExtendCut.of(EXTEND_TILES, gqa_ratio=3, causal=causal), sharing=sharing)
        schedule = memory.put(garbage(cut.words(num_tokens, len(kv_len))))
        launch_extend_schedule(placed(memory, queries_of(kv_len, q_len, num_tokens, CPU)), schedule, cut)
        twin = schedule_twins.extend_schedule(kv_len, q_len, cut, num_tokens)
        assert schedule_twins.as_in_the_twin(schedule.tolist(), cut) == twin
    cut = replace(ExtendCut(5), sequences=Sequences.WITHOUT_CELLS)
    for kv_len, q_len, first_cell in ((*some, [20, 30, 3]), (*none, list[int]())):
        schedule = memory.put(garbage(cut.words(num_tokens, len(kv_len))))
        queries = placed(memory, queries_of(kv_len, q_len, num_tokens, CPU))
        launch_extend_schedule(queries, schedule, cut, memory.put(ints(first_cell)))
        twin = schedule_twins.extend_schedule(kv_len, q_len, cut, num_tokens, {1})
        assert schedule_twins.as_in_the_twin(schedule.tolist(), cut) == twin


def merge_sides(memory: Memory) -> None:
    """Checks rows of an odd dim; each side is empty and NaN somewhere, and in one place both are."""
    sides = []
    for empty in (0, 1):
        out, lse = gapped(3, 3, 20), torch.randn(3, 3)
        for token, head in ((empty, 1), (1, 0)):
            out[token, head], lse[token, head] = float("nan"), float("-inf")
        sides += [out, lse]
    merged = torch.full((3, 3, 20), GARBAGE * 1.0), torch.full((3, 3), GARBAGE * 1.0)
    assert_same(memory, launch_merge_states, merge_twins.merge_states, *sides, *merged, near=1e-5)


def pads(memory: Memory) -> None:
    """Checks three heads of an odd dim; two tokens are real and three are not."""
    outputs = [gapped(5, 3, 24), torch.randn(3, 5).t()]
    for row_of_token in (None, ints([1, 0, 3, 3, 0][: len(outputs[0])])):
        assert_same(memory, launch_clear_pads, clear_pads, ints([4, 2, 1, 0]), *outputs, row_of_token)
