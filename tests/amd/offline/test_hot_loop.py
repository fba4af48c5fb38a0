"""The loop that is costed is the loop in which a kernel spends its time, and all of its bytes are seen."""

from __future__ import annotations

import pytest

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.offline.candidate_kernels import plain_kernel
from tests.amd.offline.hot_loop import HotLoop, hot_loop
from tests.amd.offline.tile_candidates import DECODE_LAYERS, chosen_tiles

ASSEMBLY = """\
kernel:
	s_mov_b32 s0, 0
.LBB0_1:                                ; =>This Loop Header: Depth=1
	s_add_i32 s0, s0, 1
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
	.loc	1 72 5
	buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen ; a comment
	v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], v[4:7]
	v_add_f32_e32 v8, v8, v8
	s_cbranch_scc1 .LBB0_2
.LBB0_3:
	ds_read_b128 v[0:3], v9
	v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], v[4:7]
	s_cbranch_scc0 .LBB0_4
	buffer_load_dword v1, v9, s[4:7], 0 offen
	s_cbranch_scc1 .LBB0_3
.LBB0_4:
	s_cbranch_scc1 .LBB0_1
	s_endpgm
"""


def test_the_shorter_of_two_equal_innermost_loops_is_hot() -> None:
    loop = hot_loop(ASSEMBLY)
    assert [text.split()[0] for text in loop.instructions] == [
        "buffer_load_dwordx4",
        "v_mfma_f32_16x16x16_bf16",
        "v_add_f32_e32",
        "s_cbranch_scc1",
    ]
    assert (loop.matrix_ops, loop.loads) == (1, 1)


def test_matrix_instructions_count_more_than_loads() -> None:
    without_product = ASSEMBLY.replace("v_mfma_f32_16x16x16_bf16 v[4:7], v[0:1], v[2:3], v[4:7]\n\tv_add", "v_add")
    assert hot_loop(without_product).instructions[0] == "ds_read_b128 v[0:3], v9"


def test_no_loop_is_an_error() -> None:
    with pytest.raises(ValueError, match="no loop"):
        hot_loop("kernel:\n\ts_endpgm\n")


@pytest.mark.parametrize(
    ("instruction", "lds_bytes", "loaded_bytes"),
    [
        ("ds_read_b128 v[0:3], v9", 16, 0),
        ("ds_read2_b64 v[0:3], v9 offset1:4", 16, 0),
        ("ds_write2st64_b64 v9, v[0:1], v[2:3] offset1:8", 16, 0),
        ("ds_write_b32 v9, v0", 4, 0),
        ("ds_read_b64_tr_b16 v[0:1], v9", 8, 0),
        ("ds_read_u16_d16 v0, v9", 2, 0),
        ("ds_bpermute_b32 v0, v1, v2", 4, 0),
        ("buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen", 0, 16),
        ("buffer_load_dwordx4 v9, s[4:7], 0 offen lds", 16, 16),
        ("global_load_dword v0, v[2:3], off", 0, 4),
        ("global_load_lds_dwordx4 v[2:3], off", 16, 16),
        ("buffer_load_ushort v0, v9, s[4:7], 0 offen", 0, 2),
        ("s_load_dwordx4 s[0:3], s[4:5], 0x0", 0, 0),
        ("v_add_f32_e32 v8, v8, v8", 0, 0),
    ],
)
def test_bytes_of_a_lane(instruction: str, lds_bytes: int, loaded_bytes: int) -> None:
    loop = HotLoop((instruction,))
    assert (loop.lds_bytes, loop.loaded_bytes) == (lds_bytes, loaded_bytes)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.nightly)])
def test_the_hot_loop_of_decode_loads_a_tile_of_k_and_v(arch: str) -> None:
    row = next(row for row in DECODE_LAYERS if row.arch == arch and row.dims == (128, 128))
    tiles = chosen_tiles(row, DecodeTiles)
    assert isinstance(tiles, DecodeTiles)
    loop = hot_loop(plain_kernel(row, tiles).asm["amdgcn"])
    tile_bytes = tiles.key_block * sum(row.dims) * row.dtype.itemsize
    # Page ids are loaded too, a word or two for each lane that loads.
    loaded = loop.loaded_bytes * tiles.num_warps * 64
    assert tile_bytes <= loaded <= 1.5 * tile_bytes
    assert loop.matrix_ops > 0
