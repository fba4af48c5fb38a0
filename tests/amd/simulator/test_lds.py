"""LDS: widths and strides, bytes that were never written, races between waves."""

from collections.abc import Callable

import numpy as np
import pytest

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.core import LANES, POISON, Core
from rocm_lab.simulator.faults import SimulationFault
from rocm_lab.simulator.lds import Lds
from tests.amd.simulator.snippet import LANE, allocation, execute

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 1 << 32, (4, LANES), np.uint32)


@pytest.mark.parametrize(
    ("write", "read", "size"),
    [
        ("ds_write_b32 v0, v4 offset:8", "ds_read_b32 v8, v0 offset:8", 4),
        ("ds_write_b64 v0, v[4:5]", "ds_read_b64 v[8:9], v0", 8),
        ("ds_write_b96 v0, v[4:6]", "ds_read_b96 v[8:10], v0", 12),
        ("ds_write_b128 v0, v[4:7] offset:16", "ds_read_b128 v[8:11], v0 offset:16", 16),
        ("ds_write2_b32 v0, v4, v5 offset0:1 offset1:3", "ds_read2_b32 v[8:9], v0 offset0:1 offset1:3", 8),
        ("ds_write2_b64 v0, v[4:5], v[6:7] offset1:1", "ds_read2_b64 v[8:11], v0 offset1:1", 16),
        ("ds_write2st64_b32 v0, v4, v5 offset1:7", "ds_read2st64_b32 v[8:9], v0 offset1:7", 8),
    ],
)
def test_what_is_written_is_read_back(write: str, read: str, size: int) -> None:
    vector = {0: LANE * 16, **{4 + index: row for index, row in enumerate(WORDS)}}
    core = execute(write, read, vector=vector, lds_bytes=4096)
    for index in range(size // 4):
        assert (core.vector[8 + index] == WORDS[index]).all()
    assert set(core.vector[8 + size // 4].tolist()) == {POISON}


def test_waves_add_to_one_word_in_any_order() -> None:
    core = execute(
        "ds_write_b32 v0, v1",
        "ds_add_u32 v2, v3 offset:4",
        "ds_read_b32 v4, v0",
        vector={0: LANE * 4, 1: LANE, 2: 0, 3: LANE},
        exec_mask=0xFF,
        lds_bytes=64,
    )
    assert core.vector[4][:8].tolist() == [0, 1 + sum(range(8)), *range(2, 8)]
    lds, word, one = Lds(64, POISON), np.array([0]), np.array([1], np.uint32)
    lds.store(word, np.zeros((1, 4), np.uint8), 0)
    lds.barrier()
    for wave in (0, 1, 2):
        lds.add(word, one, wave)
    for access in (lambda: lds.load(word, 4, 1), lambda: lds.store(word, np.ones((1, 4), np.uint8), 1)):
        with pytest.raises(SimulationFault, match="without a barrier"):
            access()
    lds.barrier()
    assert lds.load(word, 4, 1).tolist() == [[3, 0, 0, 0]]
    with pytest.raises(SimulationFault, match="adds to LDS that another wave reads"):
        lds.add(word, one, 0)


def test_strides_of_two_accesses_are_counted_in_elements() -> None:
    core = execute(
        "ds_write2_b32 v0, v1, v2 offset1:1",
        "ds_read2_b32 v[4:5], v3 offset0:2 offset1:5",
        "ds_read2st64_b32 v[6:7], v3 offset1:1",
        "ds_read2_b64 v[8:11], v3 offset0:1 offset1:2",
        vector={0: LANE * 8, 1: LANE * 2, 2: LANE * 2 + 1, 3: 0},
        lds_bytes=512,
    )
    assert [int(core.vector[index][0]) for index in range(4, 12)] == [2, 5, 0, 64, 2, 3, 4, 5]


def test_parts_of_words() -> None:
    core = execute(
        "ds_write_b32 v0, v1",
        "ds_write_b16 v0, v2 offset:2",
        "ds_write_b8 v0, v3 offset:1",
        "ds_read_b32 v4, v0",
        "ds_read_u8 v5, v0 offset:3",
        "ds_read_i16 v6, v0 offset:2",
        "ds_write_b16_d16_hi v0, v1",
        "ds_read_u16 v7, v0",
        "ds_read_u16_d16_hi v8, v0 offset:2",
        vector={0: LANE * 4, 1: 0x11223344, 2: 0x9988, 3: 0x77, 8: 0x5555},
        lds_bytes=256,
    )
    found = [int(core.vector[index][0]) for index in range(4, 9)]
    assert found == [0x99887744, 0x99, 0xFFFF9988, 0x1122, 0x99885555]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint8])
def test_a_transposing_read_turns_tiles_of_16_lanes(dtype: type[np.uint16 | np.uint8]) -> None:
    """Sixteen lanes point at rows of 16 elements, 4 of them or 8; each then holds a column."""
    bits = 8 * np.dtype(dtype).itemsize
    elements = RANDOM.integers(0, 1 << bits, 64 * 64 // bits).astype(dtype)
    words = elements.view(np.uint32).reshape(64, 2)
    core = execute(
        "ds_write_b64 v0, v[2:3]",
        f"ds_read_b64_tr_b{bits} v[4:5], v0",
        vector={0: LANE * 8, 2: words[:, 0], 3: words[:, 1]},
        lds_bytes=512,
    )
    tiles = elements.reshape(4, 64 // bits, 16)  # [tile, row, column]
    for lane in range(64):
        held = core.vector[4:6, lane].copy().view(dtype)
        assert held.tolist() == tiles[lane // 16, :, lane % 16].tolist()


@pytest.mark.parametrize("line", ["global_load_lds_dwordx4 v[0:1], off", "buffer_load_dwordx4 v2, s[0:3], 0 offen lds"])
def test_memory_is_loaded_to_lds_lane_after_lane_from_m0_on(line: str) -> None:
    memory = RANDOM.integers(0, 1 << 32, 1024, np.uint32)
    lanes = RANDOM.permutation(64)
    address = memory.ctypes.data
    addresses = (address + lanes * 16).astype(np.uint64)
    core = execute(
        line,
        "ds_read_b128 v[4:7], v3 offset:32",
        vector={
            0: (addresses & 0xFFFFFFFF).astype(np.uint32),
            1: (addresses >> np.uint64(32)).astype(np.uint32),
            2: lanes * 16,
            3: LANE * 16,
        },
        scalar={0: address & 0xFFFFFFFF, 1: address >> 32, 2: 0x7FFFFFFE, 3: 0x27000, 124: 32},
        lds_bytes=2048,
        allocations=[allocation(memory)],
    )
    assert (memory.reshape(-1, 4)[lanes] == core.vector[4:8].T).all()


@pytest.mark.parametrize("line", ["ds_read_b64 v[4:5], v0", "ds_write_b64 v0, v[4:5]"])
def test_beyond_the_programs_lds_is_a_fault(line: str) -> None:
    with pytest.raises(SimulationFault, match="the program has 511 bytes"):
        execute(line, vector={0: LANE * 8}, lds_bytes=511)


def test_reading_what_nobody_wrote_is_a_fault() -> None:
    lds = Lds(512, POISON)
    lds.store(offsets(0, 63), values(63), wave=0)
    lds.load(offsets(0, 63), 4, wave=0)
    with pytest.raises(SimulationFault, match="never written, byte offset 252"):
        lds.load(offsets(0, 64), 4, wave=0)


def offsets(first: int, count: int) -> Array:
    """Byte offsets of count words from a word on."""
    return (first + np.arange(count)) * 4


def values(count: int, fill: int = 1) -> Array:
    """uint8 [count, 4]."""
    return np.full((count, 4), fill, np.uint8)


def write(wave: int, fill: int = 1) -> Callable[[Lds], object]:
    return lambda lds: lds.store(offsets(0, 64), values(64, fill), wave=wave)


def read(wave: int) -> Callable[[Lds], object]:
    return lambda lds: lds.load(offsets(0, 64), 4, wave=wave)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (write(0), read(1)),
        (read(1), write(0)),
        (write(0), write(1, fill=2)),
    ],
    ids=["write_read", "read_write", "write_write"],
)
def test_two_waves_without_a_barrier_are_a_race(
    first: Callable[[Lds], object], second: Callable[[Lds], object]
) -> None:
    lds = Lds(256, POISON)
    write(1)(lds)
    lds.barrier()
    first(lds)
    with pytest.raises(SimulationFault, match="without a barrier between them"):
        second(lds)


def test_a_barrier_orders_waves() -> None:
    lds = Lds(256, POISON)
    for wave in range(4):
        write(wave, fill=wave)(lds)
        lds.barrier()
        for reader in range(4):
            assert (lds.load(offsets(0, 64), 4, wave=reader) == wave).all()
        lds.barrier()


def test_the_same_value_from_two_waves_is_no_race() -> None:
    lds = Lds(256, POISON)
    write(0)(lds)
    write(1)(lds)


def test_one_wave_alone_needs_no_barrier() -> None:
    lds = Lds(256, POISON)
    for fill in (1, 2):
        write(0, fill)(lds)
        assert (lds.load(offsets(0, 64), 4, wave=0) == fill).all()


def test_no_active_lane_reads_nothing() -> None:
    core: Core = execute("ds_read_b32 v1, v0", vector={0: 0}, exec_mask=0)
    assert set(core.vector[1].tolist()) == {POISON}
