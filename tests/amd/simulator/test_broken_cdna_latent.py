"""The simulator notices mistakes in copies of latent decode for CDNA: each mask, clamp, order and scale is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rocm_attn.kernels.cdna import latent, latent_blocks, latent_codes, latent_heads
from rocm_lab.simulator.launcher import ARCHS, Simulation, simulated
from tests.amd.kernels import cdna_latent_cases
from tests.amd.kernels.attention_cases import build
from tests.amd.kernels.cdna_latent_cases import CASES, LARGE, PLAIN, SMALL, coded
from tests.amd.simulator.cdna_cases import run_large_weight, run_latents
from tests.amd.simulator.test_broken_kernels import STRAYS, Mistake, broken_copy

pytestmark = pytest.mark.nightly
CPU = torch.device("cpu")

SHORT, LONG, STEEP, FEW = (
    partial(run_latents, case=case)
    for case in (SMALL, replace(PLAIN, page_size=16), CASES["steep"], replace(SMALL, heads=(1, 1), spread=False))
)
HEADS, LONG_HEADS, BLOCKS = (
    partial(run_latents, case=case)
    for case in (
        replace(SMALL, heads=(20, 1), spread=False),
        replace(CASES["steep_heads"], heads=(20, 1), spread=False),
        replace(SMALL, heads=(67, 1), spread=False),
    )
)


def codes(arch: str) -> Simulation:
    """Scores that differ much over codes."""
    return run_latents(arch, coded(replace(SMALL, steep=16.0, spread=False), arch))


def long_codes(arch: str) -> Simulation:
    """A row of many blocks over codes, whose scores rise."""
    return run_latents(arch, cdna_latent_cases.cases_of(arch)["codes_of_4_tiles"])


def at_the_tables_end(arch: str, *, over_codes: bool = False) -> Simulation:
    """A sequence whose pages are the last entries of the table."""
    case = replace(SMALL, kv_len=[64], q_len=[1], heads=(20, 1), page_size=16, spread=False)
    tensors = build(coded(case, arch) if over_codes else case, CPU)
    entries = tensors.table[tensors.row_of_seq[:1].long(), :4].clone()
    tensors = replace(tensors, table=entries, row_of_seq=torch.zeros_like(tensors.row_of_seq))
    with simulated(arch) as simulation:
        cdna_latent_cases.launch_cdna_latent(arch, tensors)
    return simulation


def with_room_for_more_heads(arch: str) -> Simulation:
    """A layer whose q and out are the first heads of tensors with more, which must stay as they are."""
    case = replace(SMALL, heads=(67, 1), spread=False)
    tensors = build(case, CPU)
    q, out = (each.new_full((len(each), case.heads[0] + 1, each.shape[2]), -1.0) for each in (tensors.q, tensors.out))
    q[:, :-1] = tensors.q
    tensors = replace(tensors, q=q[:, :-1], out=out[:, :-1])
    with simulated(arch) as simulation:
        cdna_latent_cases.launch_cdna_latent(arch, tensors)
    torch.testing.assert_close(out[:, -1], torch.full_like(out[:, -1], -1.0))
    return simulation


WRONG = f"nan|not close|{STRAYS}"
# Name -> file, its text, the replacement, a run that must fail.
_MISTAKES: dict[str, tuple[ModuleType, str, str, Callable[[str], Simulation]]] = {
    # Pairs of elements reach 8 GiB in 32 bits; elements do not.
    "pages_in_32_bits": (
        latent_blocks,
        "pages.to(gl.int64) * rows.page",
        "(pages * (2 * rows.page.to(gl.int32))).to(gl.int64) // 2",
        partial(run_latents, case=LARGE, is_large=True),
    ),
    "the_last_key_is_passed": (
        latent_blocks,
        "gl.minimum(_keys(block, gl.SliceLayout(2, L)), rows.last_key).to(gl.uint32)",
        "_keys(block, gl.SliceLayout(2, L)).to(gl.uint32)",
        SHORT,
    ),
    "scores_are_not_masked": (
        latent_blocks,
        'scores = gl.where(is_seen[:, :, None], scores, float("-inf"))',
        "scores = scores",
        SHORT,
    ),
    "a_wave_without_keys_has_a_maximum": (
        latent_blocks,
        'gl.where(maximum == float("-inf"), 0.0, maximum) if MASKED else maximum',
        "maximum",
        SHORT,
    ),
    "values_are_those_of_the_block_before": (latent_blocks, "block + i + 2, V, G", "block + i + 1, V, G", LONG),
    "keys_are_those_of_the_block_before": (
        latent_blocks,
        "block + i + BLOCKS + 1, K, G",
        "block + i + BLOCKS, K, G",
        LONG,
    ),
    "the_last_values_are_those_before": (
        latent_blocks,
        "values = _load_values(rows, next_v_pages, middle + i + 1, G)",
        "values = values",
        LONG,
    ),
    "the_sum_keeps_an_old_maximum": (latent_blocks, "state.total * of_total +", "state.total +", STEEP),
    "the_accumulator_keeps_an_old_maximum": (latent_blocks, "if x[NUM] < 1.0:", "if x[NUM] < -1.0:", STEEP),
    "missing_heads_are_read": (latent_blocks, "mask=head < G.rows.GQA_RATIO, other=0.0", "", FEW),
    "waves_have_one_maximum": (
        latent,
        "parts = _parts_of(state.acc * gl.convert_layout(scale, gl.SliceLayout(1, value_layout(G)))[:, None, :])",
        "parts = _parts_of(state.acc)",
        STEEP,
    ),
    "a_row_has_its_programs_other_part": (latent, "(first_block == 0).to", "(first_block != 0).to", LONG),
    "missing_heads_are_stored": (latent, "is_head = head < R.GQA_RATIO", "is_head = head < ROWS", FEW),
    "zeros_of_missing_heads_are_stored": (
        latent,
        "is_head = head < num_heads",
        "is_head = head < ROWS",
        partial(run_latents, case=replace(SMALL, kv_len=[0], q_len=[1], heads=(1, 1), spread=False)),
    ),
    "a_half_of_columns_is_left_out": (latent_heads, "gl.sum(halves, 2)", "gl.min(halves, 2)", HEADS),
    "scores_of_shared_rows_are_not_masked": (
        latent_heads,
        'scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))',
        "scores = scores",
        HEADS,
    ),
    "values_after_the_last_key_are_not_masked": (
        latent_heads,
        "gl.where(is_seen[:, :, :, None], values, 0)",
        "values",
        HEADS,
    ),
    "the_last_key_of_shared_rows_is_passed": (
        latent_heads,
        "gl.minimum(block * KEYS + (wave // 2 * HALF_KEYS + key), rows.last_key).to",
        "(block * KEYS + (wave // 2 * HALF_KEYS + key)).to",
        at_the_tables_end,
    ),
    "the_last_group_is_passed": (
        latent_heads,
        "gl.minimum(block * KEYS + group * GROUP, rows.last_key // GROUP * GROUP).to",
        "(block * KEYS + group * GROUP).to",
        at_the_tables_end,
    ),
    "keys_of_shared_rows_are_those_before": (
        latent_heads,
        "k_pages = pages_of(rows, _read_keys(rows, block + 2, G), G)",
        "k_pages = pages_of(rows, _read_keys(rows, block + 1, G), G)",
        LONG_HEADS,
    ),
    "values_of_shared_rows_are_those_before": (
        latent_heads,
        "v_pages = pages_of(rows, _read_groups(rows, block + 2, G), G)",
        "v_pages = pages_of(rows, _read_groups(rows, block + 1, G), G)",
        LONG_HEADS,
    ),
    "the_sum_of_shared_rows_keeps_an_old_maximum": (
        latent_heads,
        "state.total * of_total +",
        "state.total +",
        LONG_HEADS,
    ),
    "programs_of_a_token_have_the_same_heads": (
        latent,
        "first_head = launched // num_programs * OF_BLOCK",
        "first_head = 0",
        BLOCKS,
    ),
    "the_last_program_has_heads_too_many": (
        latent,
        "gl.minimum(R.GQA_RATIO - first_head, OF_BLOCK)",
        "OF_BLOCK",
        with_room_for_more_heads,
    ),
    "codes_lack_the_last_bits_of_q": (
        latent_codes,
        "codes.store(parts[i].to(gl.uint8, bitcast=True))",
        "codes.store(parts[i].to(gl.uint8, bitcast=True) * (1 - i))",
        codes,
    ),
    "codes_lack_the_last_bits_of_weights": (
        latent_codes,
        "lds.weights[i].store(codes[i].to(gl.uint8, bitcast=True))",
        "lds.weights[i].store(codes[i].to(gl.uint8, bitcast=True) * (1 - i))",
        codes,
    ),
    "scores_over_codes_are_not_masked": (
        latent_codes,
        'scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))',
        "scores = scores",
        codes,
    ),
    "the_sum_over_codes_keeps_an_old_base": (
        latent_codes,
        "total = state.total * gl.convert_layout(decay, T, assert_trivial=True)[None, :]",
        "total = state.total",
        long_codes,
    ),
    "values_over_codes_are_those_before": (
        latent_codes,
        "v_pages = pages_of(rows, _read_groups(rows, block + 1, G), G)",
        "v_pages = pages_of(rows, _read_groups(rows, block, G), G)",
        long_codes,
    ),
    "keys_over_codes_are_those_before": (
        latent_codes,
        "k_pages = pages_of(rows, _read_keys(rows, block + 3, G), G)",
        "k_pages = pages_of(rows, _read_keys(rows, block + 2, G), G)",
        long_codes,
    ),
    "scores_over_codes_are_those_before": (latent_codes, "scores = next_scores", "scores = scores", long_codes),
    "the_second_block_over_codes_is_the_first": (
        latent_codes,
        "here(pages_of(rows, _read_keys(rows, first + 1, G), G))",
        "here(pages_of(rows, _read_keys(rows, first, G), G))",
        long_codes,
    ),
    "the_third_block_over_codes_is_the_second": (
        latent_codes,
        "here(pages_of(rows, _read_keys(rows, first + 2, G), G))",
        "here(pages_of(rows, _read_keys(rows, first + 1, G), G))",
        long_codes,
    ),
    "small_weights_over_codes_are_relative_to_a_large_one": (
        latent_codes,
        "gl.minimum(largest - top, _MOST_BELOW)",
        "gl.minimum(largest - top, 0.0)",
        partial(run_large_weight, heads=16),
    ),
    "values_over_codes_are_not_masked": (
        latent_codes,
        "+ key[None, None, :, None] < kv_len",
        "+ key[None, None, :, None] < kv_len + 9999",
        codes,
    ),
    "keys_over_codes_after_the_last_are_read": (
        latent_codes,
        "gl.minimum(block * num_keys(G) + key, rows.last_key)",
        "(block * num_keys(G) + key)",
        partial(at_the_tables_end, over_codes=True),
    ),
    "groups_over_codes_after_the_last_are_read": (
        latent_codes,
        "gl.minimum(key, rows.last_key // GROUP * GROUP)",
        "key",
        partial(at_the_tables_end, over_codes=True),
    ),
    "codes_lack_their_scale": (latent_codes, "lds.heads.store(row / total)", "lds.heads.store(1.0 / total)", codes),
    "an_empty_row_keeps_what_was_there": (latent, "(kv_len == 0) & (done == 0)", "(kv_len == 0) & (done == 1)", LONG),
}
MISTAKES = {
    name: Mistake(
        module,
        right,
        wrong,
        "launch_cdna_latent_decode",
        cdna_latent_cases,
        run,
        Exception,
        WRONG,
        importers=[] if module is latent else [latent],
    )
    for name, (module, right, wrong, run) in _MISTAKES.items()
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = MISTAKES[name]
    broken = broken_copy(mistake, tmp_path, monkeypatch)
    monkeypatch.setattr(mistake.used_by, mistake.launcher, getattr(broken, mistake.launcher))
    with pytest.raises(mistake.notices, match=mistake.says):
        mistake.run(arch)
