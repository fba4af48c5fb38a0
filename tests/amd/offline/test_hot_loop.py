"""All bytes of a loop are seen, and decode's hot loop loads a tile."""

import pytest

from rocm_lab.cycles.loops import Loop
from rocm_lab.simulator.assembly import parse_instruction
from tests.amd.offline.candidate_kernels import DECODE_LAYERS, chosen_tiles, plain_decode
from tests.amd.offline.hot_loop import hot_loop_of, lds_bytes, loaded_bytes


@pytest.mark.parametrize(
    ("instruction", "of_lds", "loaded"),
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
def test_bytes_of_a_lane(instruction: str, of_lds: int, loaded: int) -> None:
    loop = Loop("", (parse_instruction(instruction),))
    assert (lds_bytes(loop), loaded_bytes(loop)) == (of_lds, loaded)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.nightly)])
def test_the_hot_loop_of_decode_loads_a_tile_of_k_and_v(arch: str) -> None:
    row = next(row for row in DECODE_LAYERS if row.arch == arch and row.dims == (128, 128))
    tiles, loop = chosen_tiles(row), hot_loop_of(plain_decode(row))
    tile_bytes = tiles.key_block * sum(row.dims) * row.dtype.itemsize
    # Page ids are loaded too, a word or two for each lane that loads.
    loaded = loaded_bytes(loop) * tiles.num_warps * 64
    assert tile_bytes <= loaded <= 1.5 * tile_bytes
    assert loop.matrix_ops > 0
