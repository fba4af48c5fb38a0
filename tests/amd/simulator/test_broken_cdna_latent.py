"""The simulator notices mistakes in copies of latent decode for CDNA: each mask, clamp, order and scale is needed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rocm_attn.kernels.cdna import latent, latent_blocks
from rocm_lab.simulator.launcher import ARCHS
from tests.amd.kernels import cdna_latent_cases
from tests.amd.kernels.cdna_latent_cases import CASES, LARGE, PLAIN, SMALL
from tests.amd.simulator.cdna_cases import run_latents
from tests.amd.simulator.test_broken_kernels import STRAYS, Mistake, broken_copy

pytestmark = pytest.mark.nightly

SHORT, LONG, STEEP, FEW = (
    partial(run_latents, case=case)
    for case in (SMALL, replace(PLAIN, page_size=16), CASES["steep"], replace(SMALL, heads=(1, 1), spread=False))
)
WRONG = f"nan|not close|{STRAYS}"
# Name -> file, its text, the replacement, a run that must fail.
_MISTAKES = {
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
        "is_head = head < G.rows.GQA_RATIO",
        "is_head = head < ROWS",
        partial(run_latents, case=replace(SMALL, kv_len=[0], q_len=[1], heads=(1, 1), spread=False)),
    ),
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
        launched_from=None if module is latent else latent,
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
