"""The simulator notices mistakes in copies of the kernels for CDNA: each mask, clamp, order and scale is needed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.cdna import (
    codes,
    decode,
    extend,
    extend_steps,
    key_blocks,
    latent,
    latent_blocks,
    latent_codes,
    latent_heads,
    selected,
)
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES
from rocm_attn.providers.triton_later import cdna_launches
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.kernels import cdna_extend_cases, cdna_latent_cases, cdna_selected_cases
from tests.amd.kernels.attention_cases import build
from tests.amd.kernels.cdna_cases import LARGE, PAIRED, PLAIN, WINDOW
from tests.amd.kernels.cdna_extend_cases import CASES as EXTENDS
from tests.amd.kernels.cdna_extend_cases import LARGE as EXTEND_ABOVE
from tests.amd.kernels.cdna_extend_cases import case_of
from tests.amd.kernels.cdna_latent_cases import CASES, coded
from tests.amd.kernels.cdna_selected_cases import CASES as SELECTIONS
from tests.amd.simulator.cdna_cases import (
    run_cdna,
    run_codes,
    run_large_weight,
    run_latents,
    run_selected,
    run_unseen,
    simulate_extend,
)
from tests.amd.simulator.test_broken_kernels import Launched, Mistake, assert_noticed

pytestmark = pytest.mark.nightly
CPU = torch.device("cpu")

SMALL = replace(PLAIN, kv_len=[40, 33], q_len=[1, 1], heads=(4, 2))
SHORT_EXTEND, PLAIN_EXTEND, STEEP_EXTEND, WIDE_EXTEND = (
    partial(simulate_extend, case=EXTENDS[name]) for name in ("short", "plain", "steep", "wide")
)
LATENT = cdna_latent_cases.SMALL
SHORT, LONG, STEEP, FEW, HEADS, LONG_HEADS, MANY_HEADS, BLOCKS = (
    partial(run_latents, case=case)
    for case in (
        LATENT,
        replace(cdna_latent_cases.PLAIN, page_size=16),
        CASES["steep"],
        replace(LATENT, heads=(1, 1), spread=False),
        replace(LATENT, heads=(20, 1), spread=False),
        replace(CASES["steep_heads"], heads=(20, 1), spread=False),
        replace(CASES["steep_heads"], spread=False),
        replace(LATENT, heads=(67, 1), spread=False),
    )
)


def _decode_by_token(arch: str, *, length: int = 40) -> None:
    run_cdna(arch, replace(SMALL, kv_len=[length, 33], kv=EXTEND_CODES[arch], scales=Scales.TOKEN))


def on_gfx950(run: Callable[[str], None]) -> Callable[[str], None]:
    """A run for either arch that is on gfx950, whose code alone has the line."""

    def run_there(arch: str) -> None:
        with simulated("gfx950"):
            run("gfx950")

    return run_there


def _coded_decode(arch: str) -> None:
    run_cdna(arch, replace(SMALL, kv=EXTEND_CODES[arch], scales=Scales.HEAD))


def _coded_extend(arch: str, name: str) -> None:
    simulate_extend(arch, case_of(name, arch))


def latent_over_codes(arch: str) -> None:
    """Scores that differ much over codes."""
    run_latents(arch, coded(replace(LATENT, steep=16.0, spread=False), arch))


def rounds_over_codes(arch: str) -> None:
    """A row of whole rounds and two blocks more on CDNA 4."""
    run_latents(arch, cdna_latent_cases.cases_of(arch)["codes"])


def long_latent_over_codes(arch: str) -> None:
    """A row of many blocks over codes, whose scores rise."""
    run_latents(arch, cdna_latent_cases.cases_of(arch)["codes_of_4_tiles"])


def at_the_tables_end(arch: str, *, over_codes: bool = False) -> None:
    """A sequence whose pages are the last entries of the table."""
    case = replace(LATENT, kv_len=[64], q_len=[1], heads=(20, 1), page_size=16, spread=False)
    tensors = build(coded(case, arch) if over_codes else case, CPU)
    entries = tensors.table[tensors.row_of_seq[:1].long(), :4].clone()
    tensors = replace(tensors, table=entries, row_of_seq=torch.zeros_like(tensors.row_of_seq))
    cdna_latent_cases.launch_cdna_latent(arch, tensors)


def with_room_for_more_heads(arch: str) -> None:
    """A layer whose q and out are the first heads of tensors with more, which must stay as they are."""
    case = replace(LATENT, heads=(67, 1), spread=False)
    tensors = build(case, CPU)
    q, out = (each.new_full((len(each), case.heads[0] + 1, each.shape[2]), -1.0) for each in (tensors.q, tensors.out))
    q[:, :-1] = tensors.q
    tensors = replace(tensors, q=q[:, :-1], out=out[:, :-1])
    cdna_latent_cases.launch_cdna_latent(arch, tensors)
    torch.testing.assert_close(out[:, -1], torch.full_like(out[:, -1], -1.0))


DECODE = Launched("launch_cdna_decode", cdna_launches, (decode,))
EXTEND = Launched("launch_cdna_extend", cdna_launches, (extend,))
LATENT_DECODE = Launched("launch_cdna_latent_decode", cdna_launches, (latent,))
# File -> the launcher that runs it.
LAUNCHED: dict[ModuleType, Launched] = {
    key_blocks: DECODE,
    codes: replace(DECODE, importers=(key_blocks, decode)),
    decode: DECODE,
    **dict.fromkeys((extend, extend_steps), EXTEND),
    **dict.fromkeys((latent, latent_blocks, latent_heads, latent_codes), LATENT_DECODE),
}
# File -> mistakes in it, by name.
MISTAKES: dict[ModuleType, dict[str, Mistake]] = {
    key_blocks: {
        "pages_in_32_bits": Mistake(
            "page.to(gl.int64) * side.page", "page * side.page", partial(run_cdna, case=LARGE, is_large=True)
        ),
        "values_are_not_masked": Mistake(
            "words = gl.where(_is_seen(first, keys, gl.SliceLayout(1, value_words(G)), G)[:, None], words, 0)",
            "words = words",
            partial(run_cdna, case=SMALL),
        ),
        "scores_are_not_masked": Mistake(
            'scores = gl.where(_is_seen(first, keys, gl.SliceLayout(1, P), G)[:, None], scores, float("-inf"))',
            "scores = scores",
            partial(run_cdna, case=SMALL),
        ),
        "windows_have_no_first_key": Mistake(
            "in_range(key, keys.first, keys.end) if G.rows.WINDOWED else key < keys.end",
            "key < keys.end",
            partial(run_cdna, case=WINDOW),
        ),
        "the_first_block_of_a_window_is_whole": Mistake(
            "_attend(state, query, loaded, sides, first, read, logits, G, True)",
            "_attend(state, query, loaded, sides, first, read, logits, G, False)",
            partial(run_cdna, case=WINDOW),
        ),
        "pages_before_a_window_are_read": Mistake(
            "gl.maximum(place, read.keys.first // (CHUNK * OF_PLACE))",
            "place",
            partial(run_cdna, case=replace(WINDOW, page_size=16)),
        ),
        "the_block_that_is_loaded_is_the_one_before": Mistake(
            "k = _load(k_side, places, G)", "k = k", partial(run_cdna, case=PLAIN)
        ),
        "small_weights_are_relative_to_a_large_one": Mistake(
            "gl.maximum(top, largest - _MOST_BELOW)", "largest", partial(run_codes, name="weights")
        ),
        "sums_grow_without_a_bound": Mistake(
            "gl.maximum(top, largest - _MOST_BELOW)", "top", partial(run_codes, name="steep")
        ),
        "large_elements_of_q_are_no_codes": Mistake(
            "moved_to_codes(query, exponent[:, None], G.CDNA)",
            "moved_to_codes(query, exponent[:, None] - 2, G.CDNA)",
            _coded_decode,
        ),
        "scales_of_v_are_not_masked": Mistake(
            "seen_scales(scales.v, read, block, G) if MASKED else scales.v", "scales.v", _decode_by_token
        ),
        "tokens_of_k_have_no_scale": Mistake(
            "scores = single(scores * scale)", "scores = single(scores)", _decode_by_token
        ),
        "tokens_of_v_have_no_scale": Mistake(
            "weight = single(weight * scales_of_chunk(scales_of_v, i, G))", "weight = single(weight)", _decode_by_token
        ),
        "pages_of_scales_are_those_of_the_block_before": Mistake(
            "pages_of_lanes(read, block + 2, G)",
            "pages_of_lanes(read, block + 1, G)",
            partial(_decode_by_token, length=470),
        ),
        "weights_do_not_know_the_largest_scale": Mistake(
            "+ largest_scales(scales_of_v, L)", "+ BIAS", partial(run_codes, name="far_scales")
        ),
        "weights_of_other_lanes_are_not_added_up": Mistake(
            "gl.sum(state.total, 0)", "gl.max(state.total, 0)", partial(run_cdna, case=SMALL)
        ),
        "the_last_chunk_is_passed": Mistake(
            "gl.minimum(block * PLACES + i, read.last_chunk // OF_PLACE)",
            "(block * PLACES + i) * 99",
            partial(run_cdna, case=SMALL),
        ),
    },
    codes: {
        "the_last_code_of_a_word_is_the_one_before": Mistake(
            "(elements >> 8).to(gl.uint8)", "elements.to(gl.uint8)", _coded_decode
        ),
        "a_number_is_one_code": Mistake("numbers -= first", "numbers -= numbers", _coded_decode),
    },
    decode: {
        "values_have_no_scale": Mistake(
            "softmax = scaled_values(softmax, value_scale, G.CODING)", "softmax = softmax", _coded_decode
        ),
        "queries_see_the_other_head_too": Mistake(
            "query = gl.load(at, mask=own & (line < heads.num)[:, None], other=0.0)",
            "query = gl.load(at, mask=(line < heads.num)[:, None], other=0.0)",
            partial(run_cdna, case=PAIRED),
        ),
    },
    extend: {
        "values_are_not_masked": Mistake(
            "gl.where(live[:, None], loaded[i], gl.zeros_like(loaded[i]))", "loaded[i]", SHORT_EXTEND
        ),
        "rows_see_the_keys_after_their_own": Mistake(
            "last_key = gl.minimum(last_key, first_key + gl.arange(0, ROWS, layout=M) // G.BLOCK_HEADS)",
            "last_key = last_key",
            SHORT_EXTEND,
        ),
        "pages_in_32_bits": Mistake(
            "pages.to(gl.int64) * side.page",
            "pages * side.page",
            partial(simulate_extend, case=EXTEND_ABOVE, is_large=True),
        ),
        "the_sum_keeps_an_old_maximum": Mistake("total * decay + part", "total + part", STEEP_EXTEND),
        "a_block_is_taken_for_the_one_before": Mistake(
            "pages = (pages[1], pages[2], later)", "pages = (pages[1], pages[1], later)", PLAIN_EXTEND
        ),
        "parts_of_rows_are_all_the_first": Mistake("gl.load(at + i * G.HEADS.PART)", "gl.load(at)", WIDE_EXTEND),
        "the_second_keys_are_the_first": Mistake("at * OF_ROUND, OF_ROUND, G", "0, OF_ROUND, G", WIDE_EXTEND),
        "late_keys_are_those_before": Mistake(
            "next_keys = _loaded(PARTS, k, pages[1], block + 2, G)",
            "next_keys = _loaded(PARTS, k, pages[0], block + 1, G)",
            partial(_coded_extend, name="codes_wide"),
        ),
        "scores_have_no_scale": Mistake(
            "coded_scales(qk_scale, 0.0, row_scale(k_scale, kv_head, G.CODING), False, G.CODING)",
            "coded_scales(qk_scale, 0.0, 1.0, False, G.CODING)",
            partial(_coded_extend, name="codes_64"),
        ),
        "values_have_no_scale": Mistake(
            "(row_scale(v_scale, kv_head, G.CODING) / total)[:, None]",
            "(1.0 / total)[:, None]",
            partial(_coded_extend, name="codes_64"),
        ),
        "codes_are_numbers": Mistake(
            "store(numbers)", "store(rows[i].to(to[i].dtype))", partial(_coded_extend, name="codes_64")
        ),
    },
    extend_steps: {
        "the_accumulator_keeps_an_old_maximum": Mistake("if x[NUM] < 1.0:", "if x[NUM] < -1.0:", STEEP_EXTEND),
        "weights_count_twice": Mistake(
            "gl.full([DEPTH, 32], 1.0",
            "gl.full([DEPTH, 32], 2.0",
            on_gfx950(partial(simulate_extend, case=EXTENDS["heads_64"])),
        ),
    },
    latent_blocks: {
        "pages_in_32_bits": Mistake(
            "pages.to(gl.int64) * rows.page",
            "(pages * (2 * rows.page.to(gl.int32))).to(gl.int64) // 2",
            partial(run_latents, case=cdna_latent_cases.LARGE, is_large=True),
        ),
        "the_last_key_is_passed": Mistake(
            "gl.minimum(_keys(block, gl.SliceLayout(2, L)), rows.last_key).to(gl.uint32)",
            "_keys(block, gl.SliceLayout(2, L)).to(gl.uint32)",
            SHORT,
        ),
        "scores_are_not_masked": Mistake(
            'scores = gl.where(is_seen[:, :, None], scores, float("-inf"))', "scores = scores", SHORT
        ),
        "a_wave_without_keys_has_a_maximum": Mistake(
            'gl.where(maximum == float("-inf"), 0.0, maximum) if MASKED else maximum', "maximum", SHORT
        ),
        "values_are_those_of_the_block_before": Mistake("block + i + 2, V, G", "block + i + 1, V, G", LONG),
        "keys_are_those_of_the_block_before": Mistake("block + i + BLOCKS + 1, K, G", "block + i + BLOCKS, K, G", LONG),
        "the_last_values_are_those_before": Mistake(
            "values = _load_values(rows, next_v_pages, middle + i + 1, G)", "values = values", LONG
        ),
        "the_sum_keeps_an_old_maximum": Mistake("state.total * of_total +", "state.total +", STEEP),
        "the_accumulator_keeps_an_old_maximum": Mistake("if x[NUM] < 1.0:", "if x[NUM] < -1.0:", STEEP),
        "missing_heads_are_read": Mistake("mask=head < G.rows.GQA_RATIO, other=0.0", "", FEW),
    },
    latent: {
        "waves_have_one_maximum": Mistake(
            "parts = _parts_of(state.acc * gl.convert_layout(scale, gl.SliceLayout(1, value_layout(G)))[:, None, :])",
            "parts = _parts_of(state.acc)",
            STEEP,
        ),
        "a_row_has_its_programs_other_part": Mistake("(first_block == 0).to", "(first_block != 0).to", LONG),
        "missing_heads_are_stored": Mistake("is_head = head < R.GQA_RATIO", "is_head = head < ROWS", FEW),
        "zeros_of_missing_heads_are_stored": Mistake(
            "is_head = head < num_heads",
            "is_head = head < ROWS",
            partial(run_latents, case=replace(LATENT, kv_len=[0], q_len=[1], heads=(1, 1), spread=False)),
        ),
        "programs_of_a_token_have_the_same_heads": Mistake(
            "first_head = launched // num_programs * OF_BLOCK", "first_head = 0", BLOCKS
        ),
        "the_last_program_has_heads_too_many": Mistake(
            "gl.minimum(R.GQA_RATIO - first_head, OF_BLOCK)", "OF_BLOCK", with_room_for_more_heads
        ),
        "an_empty_row_keeps_what_was_there": Mistake(
            "(kv_len == 0) & (done == 0)", "(kv_len == 0) & (done == 1)", LONG
        ),
    },
    latent_heads: {
        "a_half_of_columns_is_left_out": Mistake("gl.sum(halves, 2)", "gl.min(halves, 2)", HEADS),
        "scores_of_shared_rows_are_not_masked": Mistake(
            'scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))', "scores = scores", HEADS
        ),
        "values_after_the_last_key_are_not_masked": Mistake(
            "gl.where(is_seen[:, :, :, None], values, 0)", "values", HEADS
        ),
        "the_last_key_of_shared_rows_is_passed": Mistake(
            "gl.minimum(block * KEYS + (wave // 2 * HALF_KEYS + key), rows.last_key).to",
            "(block * KEYS + (wave // 2 * HALF_KEYS + key)).to",
            at_the_tables_end,
        ),
        "the_last_group_is_passed": Mistake(
            "gl.minimum(block * KEYS + group * GROUP, rows.last_key // GROUP * GROUP).to",
            "(block * KEYS + group * GROUP).to",
            at_the_tables_end,
        ),
        "keys_of_shared_rows_are_those_before": Mistake(
            "k_pages = _key_pages(rows, block + 3, G)",
            "k_pages = _key_pages(rows, block + 2, G)",
            LONG_HEADS,
        ),
        "values_of_shared_rows_are_those_before": Mistake(
            "not G.LISTED:\n            v_pages = _value_pages(rows, block + 1, G)",
            "not G.LISTED:\n            v_pages = _value_pages(rows, block, G)",
            LONG_HEADS,
        ),
        "the_second_block_of_shared_rows_is_the_first": Mistake(
            "here(_key_pages(rows, first + 1, G))",
            "here(_key_pages(rows, first, G))",
            LONG_HEADS,
        ),
        "the_third_block_of_shared_rows_is_the_second": Mistake(
            "here(_key_pages(rows, first + 2, G))",
            "here(_key_pages(rows, first + 1, G))",
            LONG_HEADS,
        ),
        "later_tiles_have_the_last_columns_of_the_first_ones": Mistake(
            "last_queries = _last_queries(lds, _PAIR, G)", "last_queries = _last_queries(lds, 0, G)", MANY_HEADS
        ),
        "scores_of_later_tiles_stay_those_of_the_first_block": Mistake(
            "_store_scores(lds, _half_scores(last_queries, query, keys, key_factors, _PAIR, DTYPE, G), _PAIR)",
            "_half_scores(last_queries, query, keys, key_factors, _PAIR, DTYPE, G)",
            MANY_HEADS,
        ),
        "the_sum_of_shared_rows_keeps_an_old_maximum": Mistake("state.total * of_total +", "state.total +", LONG_HEADS),
    },
    latent_codes: {
        "codes_lack_the_last_bits_of_q": Mistake(
            "codes.store(parts[i].to(gl.uint8, bitcast=True))",
            "codes.store(parts[i].to(gl.uint8, bitcast=True) * (1 - i))",
            latent_over_codes,
        ),
        "codes_lack_the_last_bits_of_weights": Mistake(
            "lds.weights[i].store(codes[i].to(gl.uint8, bitcast=True))",
            "lds.weights[i].store(codes[i].to(gl.uint8, bitcast=True) * (1 - i))",
            latent_over_codes,
        ),
        "scores_over_codes_are_not_masked": Mistake(
            'scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))', "scores = scores", latent_over_codes
        ),
        "the_sum_over_codes_keeps_an_old_base": Mistake(
            "total = state.total * gl.convert_layout(decay, T, assert_trivial=True)[None, :]",
            "total = state.total",
            long_latent_over_codes,
        ),
        "values_over_codes_are_those_before": Mistake(
            "v_pages = pages_of(rows, _read_groups(rows, block + i + 2 * BLOCKS - 1, G), G)",
            "v_pages = pages_of(rows, _read_groups(rows, block + i + 2 * BLOCKS - 2, G), G)",
            rounds_over_codes,
        ),
        "values_over_codes_have_one_slot": Mistake(
            '"s_mov_b32 $0, 1"', '"s_mov_b32 $0, 0"', on_gfx950(rounds_over_codes)
        ),
        "keys_over_codes_are_those_before": Mistake(
            "k_pages = pages_of(rows, _read_keys(rows, block + i + BLOCKS + 2, G), G)",
            "k_pages = pages_of(rows, _read_keys(rows, block + i + BLOCKS + 1, G), G)",
            rounds_over_codes,
        ),
        "scores_over_codes_are_those_before": Mistake("scores = next_scores", "scores = scores", rounds_over_codes),
        "the_second_block_over_codes_is_the_first": Mistake(
            "here(pages_of(rows, _read_keys(rows, first + 1 + i, G), G))",
            "here(pages_of(rows, _read_keys(rows, first + i, G), G))",
            rounds_over_codes,
        ),
        "the_third_block_over_codes_is_the_second": Mistake(
            "here(pages_of(rows, _read_keys(rows, first + 1 + BLOCKS, G), G))",
            "here(pages_of(rows, _read_keys(rows, first + BLOCKS, G), G))",
            rounds_over_codes,
        ),
        "whole_rounds_over_codes_pass_the_last_whole_block": Mistake(
            "whole = (gl.minimum(end, kv_len // num_keys(G)) - first) // BLOCKS * BLOCKS",
            "whole = (end - first) // BLOCKS * BLOCKS",
            rounds_over_codes,
        ),
        "small_weights_over_codes_are_relative_to_a_large_one": Mistake(
            "gl.minimum(largest - top, _MOST_BELOW)",
            "gl.minimum(largest - top, 0.0)",
            partial(run_large_weight, heads=16),
        ),
        "values_over_codes_are_not_masked": Mistake(
            "+ key[None, None, :, None] < kv_len", "+ key[None, None, :, None] < kv_len + 9999", latent_over_codes
        ),
        "keys_over_codes_after_the_last_are_read": Mistake(
            "gl.minimum(block * num_keys(G) + key, rows.last_key)",
            "(block * num_keys(G) + key)",
            partial(at_the_tables_end, over_codes=True),
        ),
        "groups_over_codes_after_the_last_are_read": Mistake(
            "gl.minimum(key, rows.last_key // GROUP * GROUP)", "key", partial(at_the_tables_end, over_codes=True)
        ),
        "codes_lack_their_scale": Mistake("lds.heads.store(row / ", "lds.heads.store(1.0 / ", latent_over_codes),
    },
}


FOUR_TILES, ONE_TILE, LONG_LIST, LONG_OF_ONE_TILE = (
    partial(run_selected, case=SELECTIONS[name], programs=programs)
    for name, programs in (("4_tiles", 60), ("1_tile", 60), ("long_4_tiles", 1), ("long_1_tile", 1))
)
UNSEEN, UNSEEN_WHOLE, UNSEEN_OF_ONE_TILE = (
    partial(run_unseen, case=SELECTIONS[name], programs=programs)
    for name, programs in (("4_tiles", 60), ("4_tiles", 1), ("1_tile", 1))
)


def over_records(arch: str, *, programs: int = 60) -> None:
    run_selected(arch, cdna_selected_cases.cases_of(arch)["records_4_tiles"], programs=programs)


WITH_SINKS = partial(over_records, programs=1)


def over_long_records(arch: str) -> None:
    """Several blocks of a program."""
    run_selected(arch, cdna_selected_cases.cases_of(arch)["long_records"], programs=1)


SELECTED = Launched("launch_cdna_selected", cdna_launches)
# Mistakes over keys that are listed.
LISTED_MISTAKES: dict[ModuleType, dict[str, Mistake]] = {
    selected: {
        "later_tokens_are_seen": Mistake("(unit >= 0) & (unit < visible)", "unit >= 0", FOUR_TILES),
        "negative_entries_are_seen": Mistake("(unit >= 0) & (unit < visible)", "unit < visible", UNSEEN),
        "entries_past_the_count_are_seen": Mistake("mask=key < end, other=-1", "mask=key >= 0, other=-1", UNSEEN_WHOLE),
        "entries_without_a_key_have_weights": Mistake(
            'gl.where(is_seen, 0.0, float("-inf"))', "gl.where(is_seen, 0.0, 0.0)", FOUR_TILES
        ),
        "entries_without_a_key_have_the_row_of_no_token": Mistake(
            "gl.where(is_seen, slot, gl.maximum(largest, 0))", "gl.maximum(slot, 0)", FOUR_TILES
        ),
        "a_part_without_keys_adds_up_a_block": Mistake("gl.where(is_empty, 0, ", "gl.where(is_empty, 1, ", UNSEEN),
        "a_row_without_keys_is_divided_by_0": Mistake("(not S.IS_CUT) & is_empty", "num_parts == 0", UNSEEN_WHOLE),
        "parts_begin_at_the_first_key": Mistake("first = part * part_keys", "first = part * 0", FOUR_TILES),
        "programs_of_a_token_have_the_same_heads": Mistake(
            "q + token * q_token + first_head * q_head",
            "q + token * q_token",
            partial(run_selected, case=SELECTIONS["blocks_of_heads"]),
        ),
        "programs_of_a_token_have_the_same_sinks": Mistake("sinks + first_head", "sinks", WITH_SINKS),
        "records_are_nearer": Mistake("p_token * BYTES", "p_token * BYTES - 4", over_records),
        "programs_of_a_die_have_the_same_row": Mistake(
            "row = launched // _DIES % S.ROWS", "row = 0", partial(run_selected, case=SELECTIONS["blocks_of_heads"])
        ),
    },
    latent_heads: {
        "listed_keys_have_no_bias": Mistake(
            "scores += of_block(rows.bias, rows, block)", "scores += 0 * of_block(rows.slots, rows, block)", FOUR_TILES
        ),
        "listed_keys_have_the_bias_of_the_next_block": Mistake(
            "of_block(rows.bias, rows, block)", "of_block(rows.bias, rows, block + 1)", UNSEEN_WHOLE
        ),
        "blocks_without_keys_have_a_maximum": Mistake(
            'gl.where(maximum == float("-inf"), 0.0, maximum) if G.LISTED else maximum', "maximum", UNSEEN_WHOLE
        ),
        "listed_values_are_those_of_the_block_before": Mistake(
            "if G.LISTED:\n            # Earlier there are no registers for all these slots.\n"
            "            v_pages = _value_pages(rows, block + 1, G)",
            "if G.LISTED:\n            v_pages = _value_pages(rows, block, G)",
            LONG_LIST,
        ),
        "results_lack_sinks": Mistake("divisor = total / decay", "divisor = total * 1.0", WITH_SINKS),
        "lse_lacks_sinks": Mistake("maximum, total, decay = add_sink(", "_, divisor, decay = add_sink(", WITH_SINKS),
        "last_columns_begin_where_scales_do": Mistake("(WAVES if has_records(G) else 0)", "0", over_records),
        "keys_have_the_scale_of_the_other_group": Mistake(
            "scales[j][:, :, None]", "scales[1 - j][:, :, None]", over_records
        ),
        "values_have_the_scale_of_other_columns": Mistake(
            "slice(_place_of_group(GROUP) * KEYS, KEYS)", "slice(GROUP * KEYS, KEYS)", over_records
        ),
        "scores_have_no_scale": Mistake(
            "part = gl.fma(of_groups[j], scales[j][:, :, None].broadcast_to(part.shape), part)",
            "part += of_groups[j] / 64",
            over_records,
        ),
        "keys_have_scales_of_the_block_before": Mistake(
            "key_factors = _key_scales(lds, block + 1, G)",
            "key_factors = _key_scales(lds, block, G)",
            over_long_records,
        ),
        "values_have_scales_of_the_next_block": Mistake(
            "lds.scales.index(block % 2).slice(", "lds.scales.index((block + 1) % 2).slice(", over_long_records
        ),
        "scales_are_those_of_the_block_before": Mistake(
            "scale_slots = _scale_slots(rows, block + 3, G)",
            "scale_slots = _scale_slots(rows, block + 2, G)",
            over_long_records,
        ),
        "listed_keys_are_those_before": Mistake(
            "k_pages = _key_pages(rows, block + 3, G)", "k_pages = _key_pages(rows, block + 2, G)", LONG_LIST
        ),
    },
    latent_blocks: {
        "slots_in_32_bits": Mistake(
            "slots.to(gl.int64) * rows.token",
            "(slots * rows.token.to(gl.int32)).to(gl.int64)",
            partial(run_selected, case=SELECTIONS["1_tile"], is_large=True),
        ),
        "listed_keys_have_no_bias": Mistake("scores += bias.to(gl.float32)[:, :, None]", "scores += 0.0", ONE_TILE),
        "waves_without_keys_have_a_maximum": Mistake(
            "_attend(state, scores, values, qk_scale, DTYPE, G, G.LISTED)",
            "_attend(state, scores, values, qk_scale, DTYPE, G, False)",
            UNSEEN_OF_ONE_TILE,
        ),
        "the_bias_is_that_of_the_next_block": Mistake(
            "of_block(rows.bias, rows, block)", "of_block(rows.bias, rows, block + 1)", UNSEEN_OF_ONE_TILE
        ),
        "listed_keys_are_those_of_the_block_before": Mistake(
            "block + i + BLOCKS + 1, K, G", "block + i + BLOCKS, K, G", LONG_OF_ONE_TILE
        ),
    },
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, id=f"{module.__name__.rpartition('.')[2]}-{name}")
        for module, mistakes in LISTED_MISTAKES.items()
        for name in mistakes
    ],
)
def test_a_mistake_over_a_list_is_noticed(
    module: ModuleType, name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = SELECTED if module is selected else replace(SELECTED, importers=(selected,))
    assert_noticed(LISTED_MISTAKES[module][name], module, launched, arch, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("module", "name", "arch"),
    [
        pytest.param(module, name, arch, id=f"{module.__name__.rpartition('.')[2]}-{name}-{arch}")
        for module, mistakes in MISTAKES.items()
        for name in mistakes
        for arch in (cdna_extend_cases.ARCHS if LAUNCHED[module] is EXTEND else ARCHS)
    ],
)
def test_a_mistake_is_noticed(
    module: ModuleType, name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_noticed(MISTAKES[module][name], module, LAUNCHED[module], arch, tmp_path, monkeypatch)
