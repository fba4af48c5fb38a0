"""Global memory: widths, masks, and every access that must be refused."""

from typing import Any

import numpy as np
import pytest

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.core import POISON
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.isa.global_memory import MASKED_OFFSET
from rocm_lab.simulator.memory import Allocation, Memory
from tests.amd.simulator.snippet import ALL_LANES, LANE, allocation, execute

BYTES = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
DESCRIPTOR_FLAGS = 0x27000


def pointer(values: Array, index: int = 0) -> dict[int, int]:
    """The address of an array in two scalar registers."""
    return {index: values.ctypes.data & 0xFFFFFFFF, index + 1: values.ctypes.data >> 32}


def descriptor(values: Array) -> dict[int, int]:
    """A buffer descriptor in s[0:3] as Triton makes it."""
    return {**pointer(values), 2: 0x7FFFFFFE, 3: DESCRIPTOR_FLAGS}


@pytest.mark.parametrize(
    ("name", "dtype", "step"),
    [
        ("ubyte", "u1", 1),
        ("sbyte", "i1", 3),
        ("ushort", "<u2", 2),
        ("sshort", "<i2", 5),
        ("dword", "<u4", 4),
        ("dwordx2", "<u8", 8),
        ("dwordx4", "V16", 20),
    ],
)
def test_loads_of_every_width(name: str, dtype: str, step: int) -> None:
    size = np.dtype(dtype).itemsize
    last = max(1, size // 4) + 3
    destination = "v4" if last == 4 else f"v[4:{last}]"
    offsets = LANE * step
    for line in (
        f"buffer_load_{name} {destination}, v0, s[0:3], 0 offen offset:16",
        f"global_load_{name} {destination}, v0, s[0:1] offset:16",
    ):
        core = execute(line, vector={0: offsets}, scalar=descriptor(BYTES), allocations=[allocation(BYTES)])
        for lane, offset in enumerate(offsets + 16):
            loaded = BYTES[offset : offset + size].view(dtype)[0]
            words = [int(core.vector[index][lane]) for index in range(4, last + 1)]
            if size > 4:
                assert np.array(words, np.uint32).tobytes() == loaded.tobytes()
            else:
                assert words == [int(loaded) & 0xFFFFFFFF]


@pytest.mark.parametrize(("name", "size"), [("byte", 1), ("short", 2), ("dword", 4), ("dwordx3", 12), ("dwordx4", 16)])
def test_stores_of_every_width_touch_nothing_else(name: str, size: int) -> None:
    rows = np.random.default_rng(1).integers(0, 1 << 32, (4, 64), np.uint32)
    source = f"v[4:{3 + size // 4}]" if size > 4 else "v4"
    for line in (
        f"buffer_store_{name} {source}, v0, s[0:3], 0 offen",
        f"global_store_{name} v0, {source}, s[0:1]",
    ):
        memory = np.zeros(64 * 24, np.uint8)
        execute(
            line,
            vector={0: LANE * 24, **{4 + index: row for index, row in enumerate(rows)}},
            scalar=descriptor(memory),
            exec_mask=ALL_LANES ^ 0b100,
            allocations=[allocation(memory)],
        )
        for lane, line_of_memory in enumerate(memory.reshape(64, 24)):
            stored = np.ascontiguousarray(rows[:, lane]).view(np.uint8)[:size]
            expected = np.zeros(24, np.uint8)
            expected[:size] = stored if lane != 2 else 0
            assert (line_of_memory == expected).all()


def test_halves_of_registers_are_loaded_and_stored_alone() -> None:
    memory = BYTES.copy()
    core = execute(
        "buffer_load_short_d16 v1, v0, s[0:3], 0 offen",
        "buffer_load_short_d16_hi v1, v0, s[0:3], 0 offen offset:128",
        "buffer_store_short_d16_hi v1, v0, s[0:3], 0 offen offset:256",
        vector={0: LANE * 2, 1: 0},
        scalar=descriptor(memory),
        allocations=[allocation(memory)],
    )
    low, high = BYTES[:128].view(np.uint16), BYTES[128:256].view(np.uint16)
    assert (core.vector[1] == low + (high.astype(np.uint32) << 16)).all()
    assert (memory[256:384] == BYTES[128:256]).all()


def test_64_bit_addresses_of_lanes() -> None:
    addresses = BYTES.ctypes.data + (LANE * 4).astype(np.uint64)
    core = execute(
        "global_load_dword v2, v[0:1], off offset:-4",
        vector={0: ((addresses + 4) & 0xFFFFFFFF).astype(np.uint32), 1: (addresses + 4 >> 32).astype(np.uint32)},
        allocations=[allocation(BYTES)],
    )
    assert (core.vector[2] == BYTES[:256].view(np.uint32)).all()


def test_scalar_loads() -> None:
    core = execute(
        "s_load_dwordx4 s[4:7], s[0:1], 0x10",
        "s_load_dword s8, s[0:1], s9",
        "s_load_dword s10, s[0:1], s9 offset:0x8",
        scalar={**pointer(BYTES), 9: 32},
        allocations=[allocation(BYTES)],
    )
    assert core.scalar[4:8].tolist() == BYTES[16:32].view(np.uint32).tolist()
    assert int(core.scalar[8]) == int(BYTES[32:36].view(np.uint32)[0])
    assert int(core.scalar[10]) == int(BYTES[40:44].view(np.uint32)[0])


def test_masked_lanes_of_a_buffer_load_0_and_store_nothing() -> None:
    memory = BYTES.copy()
    offsets = np.where(LANE % 2 == 0, LANE * 4, MASKED_OFFSET)
    core = execute(
        "buffer_load_dword v1, v0, s[0:3], 0 offen",
        "buffer_store_dword v2, v0, s[0:3], 0 offen",
        vector={0: offsets, 2: 7},
        scalar=descriptor(memory),
        allocations=[allocation(memory)],
    )
    words = BYTES[:256].view(np.uint32)
    assert core.vector[1].tolist() == [int(words[lane]) if lane % 2 == 0 else 0 for lane in range(64)]
    assert memory[:256].view(np.uint32).tolist() == [7 if lane % 2 == 0 else int(words[lane]) for lane in range(64)]


@pytest.mark.parametrize(
    ("name", "result"),
    [
        *(("add", 128), ("sub", 2**32 - 64), ("or", 32 + 3), ("and", 0), ("xor", 32), ("swap", 3)),
        *(("umax", 32), ("umin", 3), ("smax", 32), ("smin", 3)),
    ],
)
def test_atomics_of_all_lanes_take_effect(name: str, result: int) -> None:
    """Half of the lanes apply 3 to one word that holds 32; xor by an even number of lanes leaves it unchanged."""
    for line, returns in (
        (f"buffer_atomic_{name} v1, v0, s[0:3], 0 offen", False),
        (f"buffer_atomic_{name} v1, v0, s[0:3], 0 offen sc0", True),
        (f"global_atomic_{name} v0, v1, s[0:1]", False),
        (f"global_atomic_{name} v1, v0, v1, s[0:1] sc0", True),
    ):
        memory = np.array([7, 32, 7], np.uint32)
        core = execute(
            line,
            vector={0: 4, 1: 3},
            scalar=descriptor(memory),
            exec_mask=0xFFFFFFFF << 32,
            allocations=[allocation(memory)],
        )
        assert memory.tolist() == [7, result, 7]
        assert core.vector[1][:32].tolist() == [3] * 32
        assert int(core.vector[1][32]) == (32 if returns else 3)


@pytest.mark.parametrize(
    ("name", "dtype", "held", "given", "result"),
    [
        ("smin", "<i4", [1], [-2], [-2]),
        ("umin", "<u4", [1], [2**32 - 2], [1]),
        ("smax_x2", "<i8", [-5], [-(2**40)], [-5]),
        ("add_f32", "<f4", [0.5], [0.25], [16.5]),
        ("add_f64", "<f8", [0.5], [2.0**-40], [0.5 + 2.0**-34]),
        ("max_f64", "<f8", [0.5], [-1], [0.5]),
        ("min_f64", "<f8", [0.5], [-1], [-1]),
        ("pk_add_f16", "<f2", [0.5, 2], [0.25, -1], [16.5, -62]),
    ],
)
def test_atomics_compute_in_their_type(
    name: str, dtype: str, held: list[float], given: list[float], result: list[float]
) -> None:
    memory, words = np.array([*held, *held], dtype), np.array(given, dtype).view(np.uint32)
    last = f"v[2:{1 + len(words)}]" if len(words) > 1 else "v2"
    for line in (f"buffer_atomic_{name} {last}, v0, s[0:3], 0 offen", f"global_atomic_{name} v0, {last}, s[0:1]"):
        changed = memory.copy()
        execute(
            line,
            vector={0: 0, **{2 + index: int(word) for index, word in enumerate(words)}},
            scalar=descriptor(changed),
            allocations=[allocation(changed)],
        )
        assert changed.tolist() == [*result, *held]


def test_sums_of_bfloat16_are_rounded_to_it() -> None:
    memory = np.array([0x3F80, 0x4380], np.uint16)  # 1 and 256
    core_memory = allocation(memory)
    line = "global_atomic_pk_add_bf16 v0, v1, s[0:1]"
    execute(line, vector={0: 0, 1: 0x3F803F80}, exec_mask=1, scalar=pointer(memory), allocations=[core_memory])
    assert memory.tolist() == [0x4000, 0x4380]  # 2, and 257 to the nearest even


def test_a_compare_and_swap_stores_where_the_value_is_the_one_to_compare_with() -> None:
    """One word: lane after lane swaps its number in for that of the lane before, but for lanes 3 and later."""
    for line in (
        "buffer_atomic_cmpswap v[2:3], v0, s[0:3], 0 offen sc0",
        "global_atomic_cmpswap v2, v0, v[2:3], s[0:1] sc0",
        "global_atomic_cmpswap v0, v[2:3], s[0:1]",
    ):
        memory = np.array([100, 7], np.uint32)
        compared = np.where(LANE == 0, 100, np.where(LANE < 3, LANE - 1, 99)).astype(np.uint32)
        vector: dict[int, Array | int] = {0: 0, 2: LANE, 3: compared}
        core = execute(line, vector=vector, scalar=descriptor(memory), allocations=[allocation(memory)])
        assert memory.tolist() == [2, 7]
        assert core.vector[3].tolist() == compared.tolist()
        if "sc0" in line:
            assert core.vector[2].tolist() == [100, 0, 1, *[2] * 61]


def test_a_compare_and_swap_of_two_words_compares_both() -> None:
    memory = np.array([5, 6], np.uint32)
    for high, result in ((7, [5, 6]), (6, [1, 2])):
        execute(
            "global_atomic_cmpswap_x2 v0, v[2:5], s[0:1]",
            vector={0: 0, 2: 1, 3: 2, 4: 5, 5: high},
            exec_mask=1,
            scalar=pointer(memory),
            allocations=[allocation(memory)],
        )
        assert memory.tolist() == result


def test_an_atomic_swap_of_two_words_gives_both_that_were_there() -> None:
    """Lane after lane: each gets the value that the previous one has written."""
    for line in (
        "buffer_atomic_swap_x2 v[2:3], v0, s[0:3], 0 offen sc0",
        "global_atomic_swap_x2 v[2:3], v0, v[2:3], s[0:1] sc0",
    ):
        memory = np.array([7, 7, 8, 9, 7], np.uint32)
        core = execute(
            line,
            vector={0: 8, 2: LANE, 3: LANE + 100},
            scalar=descriptor(memory),
            allocations=[allocation(memory)],
        )
        assert memory.tolist() == [7, 7, 63, 163, 7]
        assert core.vector[2].tolist() == [8, *range(63)]
        assert core.vector[3].tolist() == [9, *range(100, 163)]


@pytest.mark.parametrize(
    "line",
    [
        "buffer_load_dwordx4 v[4:7], v0, s[0:3], 0 offen",
        "global_load_dword v4, v0, s[0:1] offset:12",
        "global_store_dword v0, v4, s[0:1] offset:13",
        "buffer_store_short v4, v0, s[0:3], 0 offen offset:15",
        "s_load_dwordx2 s[8:9], s[0:1], 0x1fc",
        "global_atomic_or v0, v4, s[0:1] offset:13",
    ],
)
def test_one_byte_past_an_allocation_is_a_fault(line: str) -> None:
    memory = np.zeros(512, np.uint8)
    offsets = np.full(64, 512 - 16)
    with pytest.raises(SimulationFault, match="outside of every allocation") as caught:
        execute(
            line,
            vector={0: offsets + 1 * (LANE == 63)},
            scalar=descriptor(memory),
            allocations=[allocation(memory[:511], "the table")],
        )
    assert "the table, which has 511" in str(caught.value)


def test_an_inactive_lane_may_point_anywhere() -> None:
    core = execute(
        "global_load_dword v1, v0, s[0:1]",
        vector={0: np.where(LANE == 7, POISON, 0)},
        scalar=pointer(BYTES),
        exec_mask=ALL_LANES ^ 1 << 7,
        allocations=[allocation(BYTES)],
    )
    assert int(core.vector[1][7]) == POISON


LOADS = "buffer_load_dword v1, v0, s[0:3], 0 offen"
WRAPPED = np.where(LANE == 3, 0xFFFFFFF0, 0)


@pytest.mark.parametrize(
    ("code", "v0", "scalar", "error", "sentence"),
    [
        ("global_load_dword v1, v0, s[0:1] offset:-4", 0, pointer(BYTES), SimulationFault, "-4 bytes from the start"),
        # Hardware would load 0.
        (LOADS, WRAPPED, descriptor(BYTES), SimulationFault, r"lane 3 has the buffer offset 0xfffffff0"),
        (LOADS, 0, {**descriptor(BYTES), 1: 1 << 20}, UnknownInstruction, "stride or swizzle"),
    ],
    ids=["before an allocation", "a buffer offset that wrapped around", "a swizzled buffer"],
)
def test_a_load_that_leads_out_of_memory_or_is_not_known_is_refused(
    code: str, v0: Any, scalar: dict[int, int], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        execute(code, vector={0: v0}, scalar=scalar, allocations=[allocation(BYTES)])


def test_what_is_only_read_cannot_be_written() -> None:
    with pytest.raises(SimulationFault, match="which may only be read"):
        execute(
            "global_store_dword v0, v1, s[0:1]",
            vector={0: 0},
            scalar=pointer(BYTES),
            allocations=[allocation(BYTES, is_writable=False)],
        )


def test_memory_that_was_never_touched_takes_none() -> None:
    memory = np.zeros(6 << 30, np.uint8)
    memory[-4:] = (1, 2, 3, 4)
    last = memory.ctypes.data + len(memory) - 4
    core = execute(
        "global_load_dword v2, v[0:1], off",
        vector={0: last & 0xFFFFFFFF, 1: last >> 32},
        allocations=[allocation(memory)],
    )
    assert set(core.vector[2].tolist()) == {0x04030201}


def test_a_stray_access_names_the_allocation_whose_end_is_nearest() -> None:
    """The next allocation's start may be nearer than the start of the one that was overrun."""
    long, short = Allocation("long", 4096, 512), Allocation("short", 4096 + 640, 64)
    with pytest.raises(SimulationFault, match="512 bytes from the start of long, which has 512"):
        Memory([long, short]).load(np.array([4096 + 512]), 8)
    with pytest.raises(SimulationFault, match="-8 bytes from the start of short, which has 64"):
        Memory([long, short]).load(np.array([4096 + 632]), 8)
