"""For each kernel file, a small problem that needs all of its masks, in memory that exposes a missing mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import NewRows, Queries
from rocm_attn.kernels.attention.cuts import DecodeCut, ExtendCut
from rocm_attn.kernels.attention.decode import launch_paged_decode, launch_storing_decode
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.attention.extend import launch_paged_extend
from rocm_attn.kernels.attention.extend_schedule import launch_extend_schedule
from rocm_attn.kernels.attention.finish import launch_finish
from rocm_attn.kernels.attention.merge_states import launch_merge_states
from rocm_attn.kernels.attention.pads import launch_clear_pads
from rocm_attn.kernels.attention.plain_decode import launch_plain_decode
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.attention.segment_decode import launch_segment_decode
from rocm_attn.kernels.attention.segment_extend import launch_segment_extend
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.rope_store import launch_rope_store
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm, TokenPlaces
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_attn.kernels.cache.tails import launch_zero_tails
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.metadata.engine_tensors import (
    Q_BOUNDARIES,
    Q_LENGTHS,
    EngineLengths,
    EngineRows,
    GatherSource,
    LengthBounds,
    PublishedLengths,
)
from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.gather_table import launch_gather_table
from rocm_attn.kernels.metadata.pack_mask import launch_pack_mask
from rocm_attn.kernels.metadata.place_mask import launch_place_mask
from rocm_attn.kernels.metadata.publish import launch_publish
from rocm_attn.kernels.metadata.publish_engine import launch_publish_engine
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, FIELDS, Pads
from rocm_attn.kernels.metadata.table_update import launch_table_update
from rocm_attn.kernels.metadata.take_slots import launch_take_slots
from rocm_attn.kernels.refs import cache as cache_twins
from rocm_attn.kernels.refs import engine_metadata, schedules
from rocm_attn.kernels.refs import merge_states as merge_twins
from rocm_attn.kernels.refs import metadata as twins
from rocm_attn.kernels.refs import rope as rope_twins
from rocm_attn.kernels.refs.pads import clear_pads
from rocm_attn.kernels.tuning.expert_tiles import ExpertTiles
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from tests.amd.kernels.attention_cases import ALL_SHARED, Case, Tensors, assert_served, extend_cut, queries_of
from tests.amd.kernels.expert_cases import random_problem
from tests.amd.kernels.launches_of_tensors import (
    fill_step,
    of_pack_mask,
    of_pages,
    of_place_mask,
    of_publish,
)
from tests.amd.mutation.asks_checks import ASKS_CHECKS
from tests.amd.mutation.coded_pages import PAGE_SIZE, coded_pages, of_coded_pages
from tests.amd.mutation.draft_checks import device_inputs, draft_steps, place_trees
from tests.amd.mutation.fresh_tensors import GARBAGE, gapped, garbage, ints
from tests.amd.mutation.latent_checks import latent_segments, latents, rows_of_several_tokens
from tests.amd.mutation.memory import Memory, assert_same
from tests.amd.mutation.moves_check import moves
from tests.amd.mutation.pages_check import check_pages
from tests.amd.mutation.picks_check import pick_rows
from tests.amd.mutation.placed_attention import CPU, attention
from tests.amd.mutation.segment_parts_check import segment_parts
from tests.amd.mutation.sparse_checks import SPARSE_CHECKS
from tests.amd.mutation.speculative_checks import SPECULATIVE_CHECKS
from tests.amd.mutation.take_check import take_inputs
from tests.amd.mutation.watch_check import watch_pages
from tests.amd.vectorised import vectorised_keys, vectorised_values

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
        cut = DecodeCut.of(tiles, num_kv_heads=HEADS[1], programs=num_programs, window_left=case.window_left)
        words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=DIMS[1], tiles=tiles)
        partials = memory.put(torch.full((words,), float("nan")))
        schedule = memory.put(garbage(cut.words(len(kv_len))))
        launch_decode_schedule(tensors.queries, schedule, cut)
        launch_paged_decode(tensors.args(schedule, partials), scores=tensors.scores, cut=cut, tiles=tiles)
        assert_served(tensors)
        memory.assert_surroundings_untouched()


def plain_decode(memory: Memory) -> None:
    """Checks odd dims, a window, and an empty sequence."""
    for window_left in (UNLIMITED_WINDOW, 20):
        case = Case([33, 0, 1, 16, 70], [1] * 5, HEADS, DIMS, PAGE_SIZE, spread=True, window_left=window_left)
        tensors = attention(memory, case)
        launch_plain_decode(tensors.args(), scores=tensors.scores)
        assert_served(tensors)
        memory.assert_surroundings_untouched()


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
        schedule, partials = memory.put(garbage(cut.words(3))), memory.put(torch.full((words,), float("nan")))
        launch_decode_schedule(tensors.queries, schedule, cut)
        launch_storing_decode(tensors.args(schedule, partials), new, scores=tensors.scores, cut=cut, tiles=tiles)
        assert_served(tensors)
        assert counts[3] == 0, "what lies beside a row was looked at"
        memory.assert_surroundings_untouched()


def merges(memory: Memory) -> None:
    """Checks merges of rows of one token and of several tokens."""
    decode(memory)
    rows_of_several_tokens(memory)


def decode_of_two_heads(memory: Memory) -> None:
    """Checks two heads per row of codes with a scale per token, whose last pages are not full."""
    case = Case([33, 16], [1, 1], (4, 2), (32, 32), PAGE_SIZE, kv=Encoding.E4M3FN, scales=Scales.TOKEN)
    tiles = replace(DECODE_TILES, heads_per_row=2)
    tensors = attention(memory, case)
    cut = DecodeCut.of(tiles, num_kv_heads=2, programs=3, window_left=case.window_left)
    words = cut.partials_words(gqa_ratio=tensors.gqa_ratio, v_head_dim=case.dims[1], tiles=tiles)
    partials = memory.put(torch.full((words,), float("nan")))
    schedule = memory.put(garbage(cut.words(len(case.kv_len))))
    launch_decode_schedule(tensors.queries, schedule, cut)
    launch_paged_decode(tensors.args(schedule, partials), scores=tensors.scores, cut=cut, tiles=tiles)
    assert_served(tensors)
    memory.assert_surroundings_untouched()


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
        (HEADS, DIMS, 19, 0, {"causal": False}),
        (HEADS, DIMS, 29, 5, {"masked": True}),
        (HEADS, (16, 16), 11, 0, {"masked": True}),
        (HEADS, (16, 16), 29, 0, {"masked": True, "window_left": 9, "slopes": True}),
        (HEADS, (24, 20), 19, 5, {}),
    ):
        tiles = joined if dims == (24, 20) else EXTEND_TILES
        case = Case([prefix + 2, 18, 0], [2, 18, 0], heads, dims, PAGE_SIZE, tail=3, spread=True, **scores)
        tensors = attention(memory, case)
        cut = extend_cut(tensors, tiles, ALL_SHARED._replace(programs=programs))
        schedule = memory.put(garbage(cut.words(tensors.q.shape[0], tensors.num_seqs)))
        words = cut.partials_words(query_rows=tiles.query_rows, v_head_dim=dims[1])
        args = tensors.args(schedule, memory.put(torch.full((max(1, words),), float("nan"))))
        launch_extend_schedule(tensors.queries, schedule, cut)
        launch_paged_extend(args, scores=tensors.scores, cut=cut, tiles=tiles, mask=tensors.mask)
        assert_served(tensors)
        memory.assert_surroundings_untouched()


def segments(memory: Memory) -> None:
    """Checks deterministic extend, then decode: cuts and diagonals within tiles, windows, empty sequences."""
    for dims, case in (
        (DIMS, {"kv_len": [70, 18, 0], "q_len": [2, 18, 0], "tail": 3}),
        ((16, 16), {"kv_len": [67, 40], "q_len": [3, 5], **SCORES}),
        (DIMS, {"kv_len": [40, 33], "q_len": [2, 1], "causal": False, "tail": 3}),
        (DIMS, {"kv_len": [97, 0, 32, 20], "q_len": [1] * 4}),
        (DIMS, {"kv_len": [97], "q_len": [1]}),  # every slot of the workspace is used
        (DIMS, {"kv_len": [97, 33], "q_len": [1] * 2, **SCORES}),
    ):
        for heads in (HEADS, (19, 1)):  # of which a tile holds 16, and two blocks are 10 and 9
            tensors = attention(memory, Case(heads=heads, dims=dims, page_size=PAGE_SIZE, spread=True, **case))
            if max(tensors.case.q_len) > 1:
                segment_extend(memory, tensors, SEGMENT_TILES)
            else:
                segment_decode(memory, tensors)
            assert_served(tensors)
            memory.assert_surroundings_untouched()


def segments_left_in_memory(memory: Memory) -> None:
    """Checks deterministic extend that keeps the parts left of a segment in its workspace, and rows that see no key."""
    for case in ({"kv_len": [70, 18, 0], "q_len": [2, 18, 0], "tail": 3}, {"kv_len": [67], "q_len": [3], **SCORES}):
        tensors = attention(memory, Case(heads=HEADS, dims=DIMS, page_size=PAGE_SIZE, spread=True, **case))
        segment_extend(memory, tensors, replace(SEGMENT_TILES, left_in_memory=True))
        assert_served(tensors)
        memory.assert_surroundings_untouched()


def segment_extend(memory: Memory, tensors: Tensors, tiles: SegmentTiles) -> None:
    """Runs launch_segment_extend in memory, with the shortest workspace that it allows."""
    case, num_tokens = tensors.case, tensors.q.shape[0]
    cut = ExtendCut.of(tiles.extend, gqa_ratio=tensors.gqa_ratio)
    schedule = memory.put(garbage(cut.words(num_tokens, tensors.num_seqs)))
    launch_extend_schedule(tensors.queries, schedule, cut)
    words = tiles.extend_words(
        cut.max_blocks(num_tokens, tensors.num_seqs),
        programs=0,
        num_kv_heads=case.heads[1],
        gqa_ratio=tensors.gqa_ratio,
        v_head_dim=case.dims[1],
    )
    left = memory.put(torch.full((words,), float("nan"))) if words else torch.empty(0)
    args = tensors.args(schedule, left)
    launch_segment_extend(args, scores=tensors.scores, cut=cut, tiles=tiles)


def segment_decode(memory: Memory, tensors: Tensors) -> None:
    """Runs launch_segment_decode in memory, with the shortest workspace that it allows."""
    case, ratio, tiles = tensors.case, tensors.gqa_ratio, SEGMENT_TILES
    cut = DecodeCut.of(
        tiles.decode(ratio), num_kv_heads=case.heads[1], programs=3, window_left=case.window_left, has_slots=True
    )
    schedule = memory.put(garbage(cut.words(tensors.num_seqs)))
    launch_decode_schedule(tensors.queries, schedule, cut)
    most = tiles.most_segments(max(case.kv_len), case.window_left)
    words = sum(
        cut.segment_words(tensors.num_seqs, most, q_rows=tiles.decode(ratio).q_rows(ratio), v_head_dim=case.dims[1])
    )
    left = memory.put(torch.full((words,), float("nan"))) if words else torch.empty(0)
    args = tensors.args(schedule, left)
    launch_segment_decode(args, scores=tensors.scores, most_segments=most, cut=cut, tiles=tiles)


def decode_schedule(memory: Memory) -> None:
    """Checks the words against those of the host twin, and a decode that walks them."""
    kv_len, q_len = [33, 0, 1, 50, 70], [1, 1, 1, 2, 1]
    cut = DecodeCut.of(DECODE_TILES, num_kv_heads=2, programs=4, window_left=-1)
    schedule = memory.put(garbage(cut.words(5)))
    launch_decode_schedule(placed_queries(memory, kv_len, q_len, sum(q_len)), schedule, cut)
    assert schedule.tolist() == schedules.decode_schedule(kv_len, q_len, cut)
    memory.assert_surroundings_untouched()
    decode(memory)


def extend_schedule(memory: Memory) -> None:
    """Checks the words of the host twin. Every program has a share, except in a step with no sequence (null kv_len)."""
    some, num_tokens = ([20, 40, 3], [2, 17, 3]), 25
    none: tuple[list[int], list[int]] = [], []
    steps = (some, 0, True, -1), (some, 7, True, -1), (some, 7, True, 9), (some, 5, False, -1), (none, 0, True, -1)
    for (kv_len, q_len), programs, causal, window_left in steps:
        sharing = ALL_SHARED._replace(programs=programs, rows=2, causal=causal, window_left=window_left)
        cut = replace(ExtendCut.of(EXTEND_TILES, gqa_ratio=3), sharing=sharing)
        schedule = memory.put(garbage(cut.words(num_tokens, len(kv_len))))
        launch_extend_schedule(placed_queries(memory, kv_len, q_len, num_tokens), schedule, cut)
        assert schedule.tolist() == schedules.extend_schedule(kv_len, q_len, cut, num_tokens)
        memory.assert_surroundings_untouched()


def placed_queries(memory: Memory, kv_len: Sequence[int], q_len: Sequence[int], num_tokens: int) -> Queries:
    """Puts sequences for a schedule into memory."""
    queries = queries_of(kv_len, q_len, num_tokens, CPU)
    return replace(queries, kv_len=memory.put(queries.kv_len), q_indptr=memory.put(queries.q_indptr))


def store(memory: Memory) -> None:
    """Checks three heads of odd dims; the last token is live, one before it is not."""
    k, v = gapped(4, 3, 24), gapped(4, 3, 40)
    pages = [gapped(5, 3, PAGE_SIZE, dim).transpose(1, 2) for dim in (24, 40)]
    for side in pages:
        side[0] = 0.0
    inputs = [k, v, ints([4, 1, 14, 9]), ints([2, 4, 1, 0])]
    assert_same(memory, of_pages(launch_store_kv), of_pages(cache_twins.store_kv), inputs, pages)
    inputs[2] = ints([5, 1, 19, 10])
    assert_same(memory, of_pages(launch_store_kv), of_pages(cache_twins.store_kv), inputs, vectorised_pages(5))
    inputs[2] = ints([4, 1, 14, 9])
    for scales in (Scales.HEAD, Scales.TOKEN):
        store_kv, twin = (of_coded_pages(each, scales) for each in (launch_store_kv, cache_twins.store_kv))
        assert_same(memory, store_kv, twin, inputs, coded_pages(5, scales))


def rope_store(memory: Memory) -> None:
    """Checks five query heads over three, of odd dims. Rotary dims are first or last; norms cover a part or all.

    The last token is live, and at the table's last position. One token before it is not live; one is beyond the table.
    """
    plain = Encoding.FP32, Scales.NONE
    for turned, normed, at_end, (encoding, scales) in (
        (10, 24, False, plain),
        (6, 18, True, plain),
        (0, 24, False, (Encoding.E4M3FN, Scales.HEAD)),
        (24, 0, False, (Encoding.E5M2, Scales.TOKEN)),
    ):
        q, k, v, q_out = gapped(4, 5, 24), gapped(4, 3, 24), gapped(4, 3, 40), gapped(4, 5, 24)
        pages = paged_rows(PageFormat(encoding, PoolKind.SPLIT, PAGE_SIZE, 3, 24, 40, scales))
        tokens = [ints([3, 8, 0, 7]), ints([4, 6, 1, 9]), ints([2, 4, 1, 0])]
        rope = RopeTable(torch.rand(8, turned), RopePairs.NEIGHBOURS, at_end) if turned else None
        norms = [RowNorm(torch.rand(dim), 1e-5, 1.0) for dim in (normed, normed, 40)] if normed else [None] * 3
        wanted = Projected(q, k, v, q_out.clone()), copied(pages, torch.clone), [one.clone() for one in tokens]
        placed = Projected(*map(memory.put, (q, k, v, q_out))), copied(pages, memory.put), [*map(memory.put, tokens)]
        rope_twins.rope_store(wanted[0], TokenPlaces(*wanted[2]), QkvWork(rope, *norms), wanted[1])
        work = QkvWork(placed_rope(memory, rope), *(placed_norm(memory, norm) for norm in norms))
        launch_rope_store(placed[0], TokenPlaces(*placed[2]), work, placed[1])
        (got, got_pages, _), (want, want_pages, _) = placed, wanted
        assert_alike([got.q_out, *got_pages.read(ints(range(5)))], [want.q_out, *want_pages.read(ints(range(5)))])
        memory.assert_surroundings_untouched()


def finish(memory: Memory) -> None:
    """Checks five heads of an odd dim, with two pads and without; one token is at the table's end, one beyond it."""
    of_elements, of_heads = gapped(5, 5, 24), torch.rand(5, 5).t()
    for turned, gate, num_tokens in (
        (10, of_elements, 5),
        (10, of_heads, 5),
        (24, None, 3),
        (0, of_elements, 5),
    ):
        rope = RopeTable(torch.rand(8, turned), RopePairs.NEIGHBOURS, at_end=True) if turned else None
        positions, counts, want = ints([7, 0, 8, 3, 7]), ints([4, num_tokens, 1, 0]), gapped(5, 5, 24)
        got = memory.put(want)
        rope_twins.finish(want, gate, rope, positions, counts)
        gates = None if gate is None else memory.put(gate)
        launch_finish(got, gates, placed_rope(memory, rope), memory.put(positions), memory.put(counts))
        assert_alike([got], [want])
        memory.assert_surroundings_untouched()


def placed_rope(memory: Memory, rope: RopeTable | None) -> RopeTable | None:
    """Puts a table into memory."""
    return None if rope is None else replace(rope, cos_sin=memory.put(rope.cos_sin))


def placed_norm(memory: Memory, norm: RowNorm | None) -> RowNorm | None:
    """Puts a norm's weights into memory."""
    return None if norm is None else replace(norm, weight=memory.put(norm.weight))


def paged_rows(form: PageFormat) -> LayerPages:
    """Five pages of small numbers, of which the first is zero."""
    sides = []
    for dim in (form.head_dim, form.v_head_dim):
        side = torch.rand(5, form.page_size, form.num_kv_heads, dim).to(form.encoding.dtype)
        side.view(torch.uint8)[0] = 0
        sides.append(side)
    scales: list[Tensor | None] = [None, None]
    if form.scales is not Scales.NONE:
        by_page = (5,) if form.scales is Scales.TOKEN else ()
        scales = [torch.rand(*by_page, *form.scale_shape) + 0.5 for _ in sides]
    return LayerPages(sides[0], sides[1], form, *scales)


def copied(pages: LayerPages, copy: Callable[[Tensor], Tensor]) -> LayerPages:
    """Copies the memory of pages by a function that need not support eight-bit dtypes."""
    k, v = (copy(raw).view(pages.format.encoding.dtype) for raw in (pages.raw_k, pages.raw_v))
    return LayerPages(k, v, pages.format, *(s if s is None else copy(s) for s in (pages.k_scale, pages.v_scale)))


def assert_alike(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Checks equality up to the order of a norm's sum, which can change an eight-bit code to the next one."""
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0.26 if got is not found[0] else 1e-5, atol=1e-5, equal_nan=True)


def tails(memory: Memory) -> None:
    """Checks three heads of odd dims; a sequence without new tokens, a full page, and a length beyond its row."""
    pages = [gapped(7, 3, PAGE_SIZE, dim).transpose(1, 2) for dim in (24, 40)]
    for side in pages:
        side[0] = 0.0
    table = ints([0, 0, 1, 2, 3, 4, 5, 6]).view(4, 2)
    inputs = [table, ints([1, 2, 3, 2]), ints([4, 5, 3, 7]), ints([1, 0, 2, 1])]
    assert_same(memory, of_pages(launch_zero_tails), of_pages(cache_twins.zero_tails), inputs, pages)
    coded = coded_pages(7, Scales.TOKEN)
    for side in coded:
        side[1:] = 1
    zero_tails, twin = (of_coded_pages(each, Scales.TOKEN) for each in (launch_zero_tails, cache_twins.zero_tails))
    assert_same(memory, zero_tails, twin, inputs, coded)
    inputs[2] = ints([5, 6, 4, 9])
    assert_same(memory, of_pages(launch_zero_tails), of_pages(cache_twins.zero_tails), inputs, vectorised_pages(7))


def vectorised_pages(num_pages: int) -> list[Tensor]:
    """Three heads of odd dims in pages of four tokens, the first page zero."""
    k, v = (torch.randn(num_pages, 4, 3, dim) for dim in (24, 40))
    k[0] = v[0] = 0.0
    return [vectorised_keys(k, 4), vectorised_values(v, 4)]


def pads(memory: Memory) -> None:
    """Checks three heads of an odd dim; two tokens are real and three are not."""
    outputs = [gapped(5, 3, 24), torch.randn(3, 5).t()]
    assert_same(memory, launch_clear_pads, clear_pads, [ints([4, 2, 1, 0])], outputs)


def fill(memory: Memory) -> None:
    """Checks five sequences and padded tokens, first with a page for every token.

    Then checks values that only a device can give: a length past its row, more new tokens than tokens, a list too short
    for its pages.
    """
    table = ints(range(1, 13)).view(4, 3)
    right, wrong = ([4, 7, 0, 9, 2], [4, 0, 0, 3, 2]), ([4, 7, 0, 11, 2], [4, 0, 0, 3, 4])
    # The window of a token past the last row begins past it too.
    for (kv_len, q_len), num_tokens, num_tokens_padded, list_len, window_left in (
        (right, 9, 13, 12, ALL_KEYS),
        (wrong, 9, 9, 7, 1),
    ):
        inputs = [ints([5, num_tokens, 1, 0]), ints([2, 1, 3, 3, 2]), ints(kv_len), ints(q_len), table]
        inputs += [ints([3, 3, 0, 6, 0]), ints([2, 2, 3, 5, 5]), ints([0, 3, 0, 1, 0])]
        outputs = [garbage(size) for size in (6, 5, *[num_tokens_padded] * 4, 6, list_len, 5)]
        dense, wide, mask_indptr = garbage(25).view(5, 5), garbage(5).long(), garbage(6).long()
        groups = [garbage(size) for size in (6, 5, 5)]
        tensors = (*inputs, *outputs, dense, wide, mask_indptr, *groups)
        wanted = fill_step(*(tensor.clone() for tensor in tensors))
        got = fill_step(*map(memory.put, tensors))
        launch_fill(got, page_size=PAGE_SIZE, window_left=window_left)
        twins.fill(wanted, page_size=PAGE_SIZE, window_left=window_left)
        for name in FIELDS:
            found, want = getattr(got, name), getattr(wanted, name)
            assert torch.equal(found, want), f"{name}: {found.tolist()} instead of {want.tolist()}"
        memory.assert_surroundings_untouched()


def publish(memory: Memory) -> None:
    """Checks two sequences of three tokens at five and seven, with token ids and without; the slot is written too."""
    for has_ids in (1, 0):
        slot = ints([2, 3, 9, has_ids, 8, -1, -1, 0, 4, 5, 30, 40, 1, 2, *[11, 12, 13] * has_ids, 16, 32, 1, 2])
        outputs = [slot, ints([6, 6, 8, 2]), *(garbage(size) for size in (4, 5, 5, 5, 5, 5, 7))]
        assert_same(memory, of_publish(launch_publish, Pads(5, 0)), of_publish(twins.publish, Pads(5, 0)), [], outputs)


def place_mask(memory: Memory) -> None:
    """Checks seven bytes for words that hold more, positions of three tokens at five; three sequences, one a pad."""
    inputs = [torch.arange(1, 8, dtype=torch.uint8), ints([4, 5, 6, 7]), ints([2, 3, 1, 0])]
    inputs += [ints([9, 2, 0]), ints([2, 1, 0])]
    for keys_before in (0, 3, ALL_KEYS):
        launch, twin = (
            partial(of_place_mask(place), keys_before=keys_before, window_left=4)
            for place in (launch_place_mask, twins.place_mask)
        )
        assert_same(memory, launch, twin, inputs, [garbage(3), garbage(2), garbage(5), garbage(5)])


def merge_sides(memory: Memory) -> None:
    """Checks rows of an odd dim; each side is empty and NaN somewhere, and in one place both are."""
    sides = []
    for empty in (0, 1):
        out, lse = gapped(3, 3, 20), torch.randn(3, 3)
        for token, head in ((empty, 1), (1, 0)):
            out[token, head], lse[token, head] = float("nan"), float("-inf")
        sides += [out, lse]
    out, lse = torch.full((3, 3, 20), GARBAGE * 1.0), torch.full((3, 3), GARBAGE * 1.0)
    placed, placed_lse = memory.put(out), memory.put(lse)
    a, lse_a, b, lse_b = map(memory.put, sides)
    launch_merge_states(a, lse_a, b, lse_b, placed, placed_lse)
    a, lse_a, b, lse_b = sides
    merge_twins.merge_states(a, lse_a, b, lse_b, out, lse)
    torch.testing.assert_close(placed, out)
    torch.testing.assert_close(placed_lse, lse)
    memory.assert_surroundings_untouched()


def table_update(memory: Memory) -> None:
    """Checks three cells, one of them in the reserved row."""
    updates, table = ints([1, 0, 7, 0, 1, 8, 2, 3, 9]), [garbage(12).view(3, 4)]
    assert_same(memory, launch_table_update, twins.table_update, [updates], table, num_updates=3)


def publish_engine(memory: Memory) -> None:
    """Checks three entries at five, in rows of lists; the slot is written too. Then checks no entries at all."""
    for num_seqs, q_form, new in ((3, Q_LENGTHS, [2, 3, 1]), (3, Q_BOUNDARIES, [0, 2, 5, 6]), (0, Q_BOUNDARIES, [7])):
        slot = ints([num_seqs, 3, 9, 0, 8, -1, -1, 0])
        outputs = [slot, ints([6, 6, 8, 2]), *(garbage(size) for size in (4, 5, 5, 5, 5, 3))]
        # The last row is past the table.
        inputs = [ints([9, 40, 1]), ints([2, 0, 40]), ints(new), ints([0, 3, 6, 9])]
        kernel, twin = (
            _of_engine(launch, q_form) for launch in (launch_publish_engine, engine_metadata.publish_engine)
        )
        assert_same(memory, kernel, twin, inputs, outputs)


def _of_engine(publish: Callable[..., None], q_form: int) -> Callable[..., None]:
    """publish as a function of the tensors, with its own bounds and pads."""
    sizes = {"kv_len": 30, "min_q_len": 0, "max_q_len": 9, "num_tokens": 7, "page_size": 3}
    return lambda kv_len, rows, q, csr, slot, before, counts, engine_row, row_of_seq, kept, taken, named: publish(
        slot,
        before,
        EngineLengths(kv_len, rows, q, q_form),
        LengthBounds(EngineRows(3, named, csr), **sizes, causal=True),
        PublishedLengths(counts, engine_row, row_of_seq, kept, taken, pad_kv_len=5, pad_q_len=0, gathered=True),
    )


def gather(memory: Memory) -> None:
    """Checks page and slot tables with a map, in rows that end before the sequences' pages, and lists of pages."""
    rows, kv_len = ints([2, 0, 1]), ints([7, 14, 0])
    pages, slots = ints(range(1, 13)).view(3, 4), ints([*range(14), -1, *range(15, 24)]).view(3, 8)
    sources: tuple[list[Any], ...] = (
        [pages],
        [slots, True, None, ints(range(40, 60))],
        [ints(range(1, 10)), False, ints([0, 4, 6, 9]), ints(range(50, 80))],
    )
    for source in sources:
        table = [garbage(20).view(4, 5)]
        tensors = [x for x in source if isinstance(x, Tensor)]
        kernel, twin = (_from_source(launch, source) for launch in (launch_gather_table, engine_metadata.gather_table))
        assert_same(memory, kernel, twin, [*tensors, rows, kv_len], table, page_size=PAGE_SIZE)


def _from_source(gather: Callable[..., None], source: Sequence[object]) -> Callable[..., None]:
    """gather as a function of the tensors."""

    def of_tensors(*tensors: Tensor, page_size: int) -> None:
        given = iter(tensors)
        placed: list[Any] = [next(given) if isinstance(x, Tensor) else x for x in source]
        gather(GatherSource(*placed), *given, page_size=page_size)

    return of_tensors


def slots(memory: Memory) -> None:
    """Checks four given slots for five padded tokens, three of which are live: correct slots, and an invalid one."""
    cases: tuple[tuple[list[int], list[int] | None], ...] = (
        ([9, 4, 7, 8], None),
        ([9, 5, 7, 8], None),
        ([1, -1, 2, 9], [0, 9, 7, 4]),
        ([1, 3, 50, 9], [0, 9, 7, 4]),
    )
    for given, slot_map in cases:
        options: dict[str, Any] = {"page_size": PAGE_SIZE, "null_page": slot_map is None}
        outputs = [ints([2, 3, 1, 0]), ints([9, 4, 7, 8, 6])]
        inputs = [ints(given), *([] if slot_map is None else [ints(slot_map)])]
        kernel, twin = (_with_map(take, slot_map is None) for take in (launch_take_slots, engine_metadata.take_slots))
        assert_same(memory, kernel, twin, inputs, outputs, **options)


def _with_map(take: Callable[..., None], without: bool) -> Callable[..., None]:
    """take_slots as a function of tensors, with or without a map."""
    return lambda given, *others, **options: take(given, *([None] * without), *others, **options)


def pack_mask(memory: Memory) -> None:
    """Checks thirty-nine cells for words that hold more, and positions of three tokens at five.

    More tokens are given, and then fewer.
    """
    kernel, twin = (
        partial(of_pack_mask(pack), window_left=4) for pack in (launch_pack_mask, engine_metadata.pack_mask)
    )
    for num_cells, positions in ((46, [4, 5, 6, 7]), (21, [4, 5])):
        cells = (torch.arange(num_cells) % 3 > 0).to(torch.uint8)
        lengths = [ints([2, 3, 1, 0]), ints([7, 16]), ints([1, 2]), ints([0, 1, 1, 1, 1]), torch.tensor([0, 7, 39])]
        outputs = [*lengths, garbage(3), garbage(5), garbage(5)]
        assert_same(memory, kernel, twin, [cells, ints(positions)], outputs)


def experts(memory: Memory) -> None:
    """Checks experts with more pairs than a tile has rows and with none; sizes that leave parts of tiles empty."""
    tiles = ExpertTiles(rows=16, columns=16, step=16, num_warps=1, num_stages=1)
    problem = random_problem(25, 5, 2, (19, 21), has_bias=True)
    # the first expert has no token, and the last one, whose matrix ends the memory, has some
    problem = replace(
        problem, x=rows_with_gaps(problem.x), weight=rows_with_gaps(problem.weight), expert=4 - problem.expert
    )
    assert problem.bias is not None
    placed = [memory.put(each) for each in (problem.x, problem.weight, problem.bias)]
    out, groups = memory.put(rows_with_gaps(problem.empty_out())), ExpertGroups(*map(memory.put, problem.groups))
    launch_expert_product(placed[0], placed[1], placed[2], groups, out, tiles=tiles)
    problem.assert_served(out)
    memory.assert_surroundings_untouched()


def rows_with_gaps(rows: Tensor) -> Tensor:
    """The same values, with room after each row."""
    return torch.cat((rows, torch.zeros_like(rows)), -1)[..., : rows.shape[-1]]


CHECKS: dict[str, Callable[[Memory], None]] = {
    "attention/coded.py": decode_of_two_heads,
    "attention/decode.py": decode,
    # V has a narrower last block of columns.
    "attention/decode_columns.py": partial(decode, like=replace(DECODE_TILES, dim_block=32)),
    "attention/decode_schedule.py": decode_schedule,
    "attention/plain_decode.py": plain_decode,
    "attention/extend.py": extend,
    "attention/extend_merge.py": extend,
    "attention/extend_schedule.py": extend_schedule,
    "attention/finish.py": finish,
    "attention/key_loop.py": extend,
    "attention/mask_bits.py": extend,
    "attention/merge.py": merges,
    "attention/merge_states.py": merge_sides,
    "attention/merge_within.py": partial(decode, like=replace(DECODE_TILES, merge_group=8)),
    "attention/new_rows.py": storing_decode,
    "attention/pads.py": pads,
    "attention/query_block.py": extend,
    "attention/segment_decode.py": segments,
    "attention/segment_extend.py": segments,
    "attention/segment_merge.py": segments,
    "attention/segments.py": segments_left_in_memory,
    "cache/move_rows.py": moves,
    "cache/rope.py": rope_store,
    "cache/rope_store.py": rope_store,
    "cache/store.py": store,
    "attention/segment_parts.py": segment_parts,
    "latent/decode.py": latents,
    "latent/extend.py": latents,
    "latent/key_loop.py": latents,
    "latent/segment_decode.py": latent_segments,
    "latent/segment_extend.py": latent_segments,
    "cache/tails.py": tails,
    "experts/product.py": experts,
    "metadata/check_pages.py": check_pages,
    "metadata/device_inputs.py": device_inputs,
    "metadata/draft_steps.py": draft_steps,
    "metadata/fill_roles.py": fill,
    "metadata/gather_table.py": gather,
    "metadata/pack_mask.py": pack_mask,
    "metadata/place_mask.py": place_mask,
    "metadata/place_trees.py": place_trees,
    "metadata/publish.py": publish,
    "metadata/publish_engine.py": publish_engine,
    "metadata/take_inputs.py": take_inputs,
    "metadata/table_update.py": table_update,
    "metadata/take_slots.py": slots,
    "metadata/watch_pages.py": watch_pages,
    "sampling/order.py": pick_rows,
    **ASKS_CHECKS,
    **SPARSE_CHECKS,
    **SPECULATIVE_CHECKS,
}
