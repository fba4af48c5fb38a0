"""The simulator notices mistakes in copies of decode and extend for CDNA: each mask and each clamp is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.cdna import codes, decode, extend, extend_steps, key_blocks
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES
from rocm_lab.simulator.faults import SimulationFault
from rocm_lab.simulator.launcher import ARCHS, Simulation
from tests.amd.kernels import cdna_cases, cdna_extend_cases
from tests.amd.kernels.cdna_cases import LARGE, PAIRED, PLAIN, WINDOW
from tests.amd.kernels.cdna_extend_cases import CASES as EXTENDS
from tests.amd.kernels.cdna_extend_cases import LARGE as EXTEND_ABOVE
from tests.amd.kernels.cdna_extend_cases import case_of
from tests.amd.simulator.cdna_cases import run_cdna, run_codes, simulate_extend
from tests.amd.simulator.test_broken_kernels import STRAYS, Mistake, broken_copy

pytestmark = pytest.mark.nightly

SMALL = replace(PLAIN, kv_len=[40, 33], q_len=[1, 1], heads=(4, 2))


def _decode_by_token(arch: str, *, length: int = 40) -> Simulation:
    return run_cdna(arch, replace(SMALL, kv_len=[length, 33], kv=EXTEND_CODES[arch], scales=Scales.TOKEN))


def _coded_decode(arch: str) -> Simulation:
    return run_cdna(arch, replace(SMALL, kv=EXTEND_CODES[arch], scales=Scales.HEAD))


# Name of a mistake -> text of key_blocks.py, its replacement, a run that must fail, the exception and its message.
IN_KEY_BLOCKS: dict[str, tuple[str, str, Callable[[str], Simulation], type[Exception], str]] = {
    "pages_in_32_bits": (
        "page.to(gl.int64) * side.page",
        "page * side.page",
        partial(run_cdna, case=LARGE, is_large=True),
        SimulationFault,
        STRAYS,
    ),
    "values_are_not_masked": (
        "words = gl.where(_is_seen(first, keys, gl.SliceLayout(1, value_words(G)), G)[:, None], words, 0)",
        "words = words",
        partial(run_cdna, case=SMALL),
        AssertionError,
        "nan",
    ),
    "scores_are_not_masked": (
        'scores = gl.where(_is_seen(first, keys, gl.SliceLayout(1, P), G)[:, None], scores, float("-inf"))',
        "scores = scores",
        partial(run_cdna, case=SMALL),
        AssertionError,
        "nan",
    ),
    "windows_have_no_first_key": (
        "in_range(key, keys.first, keys.end) if G.rows.WINDOWED else key < keys.end",
        "key < keys.end",
        partial(run_cdna, case=WINDOW),
        AssertionError,
        "nan",
    ),
    "the_first_block_of_a_window_is_whole": (
        "_attend(state, query, loaded, sides, first, read, logits, G, True)",
        "_attend(state, query, loaded, sides, first, read, logits, G, False)",
        partial(run_cdna, case=WINDOW),
        AssertionError,
        "nan",
    ),
    "pages_before_a_window_are_read": (
        "gl.maximum(place, read.keys.first // (CHUNK * OF_PLACE))",
        "place",
        partial(run_cdna, case=replace(WINDOW, page_size=16)),
        SimulationFault,
        STRAYS,
    ),
    "the_block_that_is_loaded_is_the_one_before": (
        "k = _load(k_side, places, G)",
        "k = k",
        partial(run_cdna, case=PLAIN),
        AssertionError,
        "Tensor-likes are not close",
    ),
    "small_weights_are_relative_to_a_large_one": (
        "gl.maximum(top, largest - _MOST_BELOW)",
        "largest",
        partial(run_codes, name="weights"),
        AssertionError,
        "Tensor-likes are not close",
    ),
    "sums_grow_without_a_bound": (
        "gl.maximum(top, largest - _MOST_BELOW)",
        "top",
        partial(run_codes, name="steep"),
        AssertionError,
        "nan",
    ),
    "large_elements_of_q_are_no_codes": (
        "moved_to_codes(query, exponent[:, None], G.CDNA)",
        "moved_to_codes(query, exponent[:, None] - 2, G.CDNA)",
        _coded_decode,
        AssertionError,
        "nan",
    ),
    "scales_of_v_are_not_masked": (
        "seen_scales(scales.v, read, block, G) if MASKED else scales.v",
        "scales.v",
        _decode_by_token,
        AssertionError,
        "nan",
    ),
    "tokens_of_k_have_no_scale": (
        "scores = single(scores * scale)",
        "scores = single(scores)",
        _decode_by_token,
        AssertionError,
        "Tensor-likes are not close",
    ),
    "tokens_of_v_have_no_scale": (
        "weight = single(weight * scales_of_chunk(scales_of_v, i, G))",
        "weight = single(weight)",
        _decode_by_token,
        AssertionError,
        "nan|Tensor-likes are not close",
    ),
    "pages_of_scales_are_those_of_the_block_before": (
        "pages_of_lanes(read, block + 2, G)",
        "pages_of_lanes(read, block + 1, G)",
        partial(_decode_by_token, length=470),
        AssertionError,
        "nan|Tensor-likes are not close",
    ),
    "weights_do_not_know_the_largest_scale": (
        "+ largest_scales(scales_of_v, L)",
        "+ BIAS",
        partial(run_codes, name="far_scales"),
        AssertionError,
        "nan|Tensor-likes are not close",
    ),
    "weights_of_other_lanes_are_not_added_up": (
        "gl.sum(state.total, 0)",
        "gl.max(state.total, 0)",
        partial(run_cdna, case=SMALL),
        AssertionError,
        "Tensor-likes are not close",
    ),
    "the_last_chunk_is_passed": (
        "gl.minimum(block * PLACES + i, read.last_chunk // OF_PLACE)",
        "(block * PLACES + i) * 99",
        partial(run_cdna, case=SMALL),
        SimulationFault,
        f"{STRAYS}|out of range: it wrapped around",
    ),
}
# Name of a mistake -> text of codes.py, and its replacement.
IN_CODES = {
    "the_last_code_of_a_word_is_the_one_before": ("(elements >> 8).to(gl.uint8)", "elements.to(gl.uint8)"),
    "a_number_is_one_code": ("numbers -= first", "numbers -= numbers"),
}
# The same for extend.py, or of it for extend_steps.py.
SHORT_EXTEND, PLAIN_EXTEND, STEEP_EXTEND = (
    partial(simulate_extend, case=EXTENDS[name]) for name in ("short", "plain", "steep")
)


def _coded_extend(arch: str, name: str) -> Simulation:
    return simulate_extend(arch, case_of(name, arch))


WIDE_EXTEND = partial(simulate_extend, case=EXTENDS["wide"])
IN_EXTEND = {
    "extend_values_are_not_masked": (
        extend,
        "gl.where(live[:, None], loaded[i], gl.zeros_like(loaded[i]))",
        "loaded[i]",
        SHORT_EXTEND,
    ),
    "extend_rows_see_the_keys_after_their_own": (
        extend,
        "last_key = gl.minimum(last_key, first_key + gl.arange(0, ROWS, layout=M) // G.BLOCK_HEADS)",
        "last_key = last_key",
        SHORT_EXTEND,
    ),
    "extend_pages_in_32_bits": (
        extend,
        "pages.to(gl.int64) * side.page",
        "pages * side.page",
        partial(simulate_extend, case=EXTEND_ABOVE, is_large=True),
    ),
    "extend_the_sum_keeps_an_old_maximum": (extend, "total * decay + part", "total + part", STEEP_EXTEND),
    "extend_the_accumulator_keeps_an_old_maximum": (
        extend_steps,
        "if x[NUM] < 1.0:",
        "if x[NUM] < -1.0:",
        STEEP_EXTEND,
    ),
    "extend_a_block_is_taken_for_the_one_before": (
        extend,
        "pages = (pages[1], pages[2], later)",
        "pages = (pages[1], pages[1], later)",
        PLAIN_EXTEND,
    ),
    "extend_parts_of_rows_are_all_the_first": (extend, "gl.load(at + i * G.HEADS.PART)", "gl.load(at)", WIDE_EXTEND),
    "extend_the_second_keys_are_the_first": (extend, "at * OF_ROUND, OF_ROUND, G", "0, OF_ROUND, G", WIDE_EXTEND),
    "extend_late_keys_are_those_before": (
        extend,
        "next_keys = _loaded(PARTS, k, pages[1], block + 2, G)",
        "next_keys = _loaded(PARTS, k, pages[0], block + 1, G)",
        partial(_coded_extend, name="codes_wide"),
    ),
    "extend_scores_have_no_scale": (
        extend,
        "coded_scales(qk_scale, 0.0, row_scale(k_scale, kv_head, G.CODING), False, G.CODING)",
        "coded_scales(qk_scale, 0.0, 1.0, False, G.CODING)",
        partial(_coded_extend, name="codes_64"),
    ),
    "extend_values_have_no_scale": (
        extend,
        "(row_scale(v_scale, kv_head, G.CODING) / total)[:, None]",
        "(1.0 / total)[:, None]",
        partial(_coded_extend, name="codes_64"),
    ),
    "extend_codes_are_numbers": (
        extend,
        "store(numbers)",
        "store(rows[i].to(to[i].dtype))",
        partial(_coded_extend, name="codes_64"),
    ),
}
MISTAKES = {
    **{
        name: Mistake(
            module,
            right,
            wrong,
            "launch_cdna_extend",
            cdna_extend_cases,
            run,
            Exception,
            f"nan|not close|{STRAYS}|race",
            importers=[] if module is extend else [extend],
        )
        for name, (module, right, wrong, run) in IN_EXTEND.items()
    },
    **{
        name: Mistake(
            key_blocks, right, wrong, "launch_cdna_decode", cdna_cases, run, notices, says, importers=[decode]
        )
        for name, (right, wrong, run, notices, says) in IN_KEY_BLOCKS.items()
    },
    **{
        name: Mistake(
            codes,
            right,
            wrong,
            "launch_cdna_decode",
            cdna_cases,
            _coded_decode,
            AssertionError,
            "Tensor-likes are not close",
            importers=[key_blocks, decode],
        )
        for name, (right, wrong) in IN_CODES.items()
    },
    "values_have_no_scale": Mistake(
        decode,
        "softmax = scaled_values(softmax, value_scale, G.CODING)",
        "softmax = softmax",
        "launch_cdna_decode",
        cdna_cases,
        _coded_decode,
        AssertionError,
        "Tensor-likes are not close",
    ),
    "queries_see_the_other_head_too": Mistake(
        decode,
        "query = gl.load(at, mask=own & (line < heads.num)[:, None], other=0.0)",
        "query = gl.load(at, mask=(line < heads.num)[:, None], other=0.0)",
        "launch_cdna_decode",
        cdna_cases,
        partial(run_cdna, case=PAIRED),
        AssertionError,
        "Tensor-likes are not close",
    ),
}


@pytest.mark.parametrize(
    ("mistake", "arch"),
    [
        pytest.param(mistake, arch, id=f"{name}-{arch}")
        for name, mistake in MISTAKES.items()
        for arch in (cdna_extend_cases.ARCHS if name in IN_EXTEND else ARCHS)
    ],
)
def test_a_mistake_is_noticed(mistake: Mistake, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = broken_copy(mistake, tmp_path, monkeypatch)
    monkeypatch.setattr(mistake.used_by, mistake.launcher, getattr(broken, mistake.launcher))
    with pytest.raises(mistake.notices, match=mistake.says):
        mistake.run(arch)
