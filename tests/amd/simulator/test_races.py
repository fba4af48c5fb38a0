"""Races are found in machine code by hand, each made by the removal of one line, and in our kernels none."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.store import launch_store_kv
from rocm_lab.races.clocks import Clock, Operation, TimedWave
from rocm_lab.races.watch import Race, RaceWatch
from rocm_lab.simulator.faults import NeverWritten
from rocm_lab.simulator.kernel import Launch
from rocm_lab.simulator.launcher import ARCHS, simulated, watched
from rocm_lab.waits.counters import Queue, Wait
from tests.amd.simulator.check_cases import run_check
from tests.amd.simulator.kernel_cases import BF16, linear_pools, run_store
from tests.amd.simulator.snippet import allocation
from tests.amd.simulator.test_launches import simulated_kernel

SEEDS = range(3)


@dataclass(frozen=True, slots=True)
class Code:
    """Code without a race, of programs of two waves, in which each line that begins with "!" is needed.

    s[4:5] is the address of 4096 bytes of zeros, s2 the program, v0 the lane in the program, v1 4 times that, s7 the
    number of the wave; LDS has 1024 bytes.
    """

    lines: str
    programs: int = 1

    def without(self, needed: str = "") -> list[str]:
        """The lines but for one."""
        begin = """
            s_load_dwordx2 s[4:5], s[0:1], 0x0
            s_waitcnt lgkmcnt(0)
            v_readfirstlane_b32 s7, v0
            s_lshr_b32 s7, s7, 6
            v_lshlrev_b32_e32 v1, 2, v0
        """
        lines = [line.strip() for line in f"{begin}{self.lines}\ns_endpgm".splitlines()]
        return [line.removeprefix("! ") for line in lines if line and line != needed]

    @property
    def needed(self) -> list[str]:
        return [line.strip() for line in self.lines.splitlines() if line.strip().startswith("!")]


def races_of(lines: list[str], programs: int, seed: int) -> list[Race]:
    """The races of a launch of this code."""
    memory = np.zeros(1024, np.uint32)
    watch = RaceWatch(seed=seed)
    pointer = memory.ctypes.data.to_bytes(8, "little")
    launch = Launch((programs, 1, 1), 2, 1024, pointer, [allocation(memory)], watch=watch)
    simulated_kernel(*lines).run(launch)
    return watch.races


# The place of the other wave's word.
_OTHER = "v_xor_b32_e32 v2, 0x100, v1"
# Program after program adds its 512 bytes, counts, and the last one loads them all; "{}" is for the last barrier.
_COUNTED = """
    s_lshl_b32 s3, s2, 9
    v_add_u32_e32 v2, s3, v1
    v_add_u32_e32 v3, s2, v0
    global_store_dword v2, v3, s[4:5]
    ! s_waitcnt  vmcnt(0)
    ! s_barrier
    s_cmp_lg_u32 s7, 0
    s_cbranch_scc1 end
    ! buffer_wbl2 sc1
    ! s_waitcnt vmcnt(0)
    v_mov_b32_e32 v4, 0x800
    v_mov_b32_e32 v5, 1
    s_mov_b64 exec, 1
    global_atomic_add v6, v4, v5, s[4:5] sc0
    ! s_waitcnt vmcnt(0) lgkmcnt(0)
    ! buffer_inv sc1
    v_readfirstlane_b32 s6, v6
    s_mov_b64 exec, -1
    s_cmp_lg_u32 s6, 2
    s_cbranch_scc1 end
    global_load_dwordx4 v[8:11], v1, s[4:5]
    global_load_dwordx4 v[8:11], v1, s[4:5] offset:256
    global_load_dwordx4 v[8:11], v1, s[4:5] offset:512
    global_load_dwordx4 v[8:11], v1, s[4:5] offset:1024
    end:
"""
CODES = {
    "LDS: a load after a store": Code(
        f"{_OTHER}\nds_write_b32 v1, v0\n! s_waitcnt lgkmcnt(0)\n! s_barrier\nds_read_b32 v3, v2"),
    "LDS: a store after a load": Code(
        f"ds_write_b32 v1, v0\nds_read_b32 v3, v1\n! s_waitcnt lgkmcnt(0)\n! s_barrier\n{_OTHER}\nds_write_b32 v2, v0"),
    "LDS: a store after a store": Code(
        f"{_OTHER}\nds_write_b32 v1, v0\n! s_waitcnt lgkmcnt(0)\n! s_barrier\nds_write_b32 v2, v0"),
    "LDS: sums of all waves": Code(
        "v_mov_b32_e32 v2, 0\nds_write_b32 v1, v2\n! s_waitcnt lgkmcnt(0)\n! s_barrier\nds_add_u32 v2, v0\n"
        "! s_waitcnt  lgkmcnt(0)\n! s_barrier \nds_read_b32 v3, v2"),
    "LDS: a load into it": Code(
        f"{_OTHER}\ns_lshl_b32 s8, s7, 8\ns_mov_b32 m0, s8\nglobal_load_lds_dword v1, s[4:5]\n! s_waitcnt vmcnt(0)\n"
        "! s_barrier\nds_read_b32 v3, v2"),
    "LDS: a load into it that the wave itself reads": Code(
        "s_lshl_b32 s8, s7, 8\ns_mov_b32 m0, s8\nglobal_load_lds_dword v1, s[4:5]\n! s_waitcnt vmcnt(0)\n"
        "ds_read_b32 v3, v1"),
    "LDS: a load into it over what the wave reads": Code(
        "ds_write_b32 v1, v0\nds_read_b32 v3, v1\n! s_waitcnt lgkmcnt(0)\ns_lshl_b32 s8, s7, 8\ns_mov_b32 m0, s8\n"
        "global_load_lds_dword v1, s[4:5]"),
    "LDS: a load into it, older than another one": Code(
        f"{_OTHER}\ns_lshl_b32 s8, s7, 8\ns_mov_b32 m0, s8\nglobal_load_lds_dword v1, s[4:5]\n"
        "global_load_dword v3, v1, s[4:5]\n! s_waitcnt vmcnt(1)\n! s_barrier\nds_read_b32 v3, v2"),
    "memory: a row of each program": Code(
        "s_lshl_b32 s3, s2, 9\nv_mov_b32_e32 v3, s2\n! v_add_u32_e32 v1, s3, v1\nglobal_store_dword v1, v3, s[4:5]",
        programs=3),
    "memory: waves of a program": Code(
        f"{_OTHER}\nglobal_store_dword v1, v0, s[4:5]\n! s_barrier\nglobal_load_dword v3, v2, s[4:5]"),
    "memory: a count that one wave clears before all add to it": Code(
        "v_mov_b32_e32 v2, 0\ns_cmp_lg_u32 s7, 0\ns_cbranch_scc1 add\nglobal_store_dword v2, v2, s[4:5]\nadd:\n"
        "! s_barrier\nglobal_atomic_add v2, v0, s[4:5]"),
    "memory: a count that one wave loads before all add to it": Code(
        "v_mov_b32_e32 v2, 0\ns_cmp_lg_u32 s7, 0\ns_cbranch_scc1 add\nglobal_load_dword v3, v2, s[4:5]\nadd:\n"
        "! s_barrier\nglobal_atomic_add v2, v0, s[4:5]"),
    "memory: the last program loads what all have stored": Code(_COUNTED, programs=3),
}  # fmt: skip
HARMLESS = {
    "two waves store the same to LDS": "v_and_b32_e32 v2, 63, v0\nv_lshlrev_b32_e32 v2, 2, v2\nds_write_b32 v2, v2",
    "two waves load the same": "v_mov_b32_e32 v2, 0\nglobal_load_dword v3, v2, s[4:5]",
    "atomics": "v_mov_b32_e32 v2, 0\nglobal_atomic_or v2, v0, s[4:5]",
    "a load whose value is compared before the swap": (
        "v_mov_b32_e32 v4, 0\nglobal_load_dword v3, v4, s[4:5]\ns_waitcnt vmcnt(0)\nv_add_u32_e32 v2, v3, v0\n"
        "global_atomic_cmpswap v2, v4, v[2:3], s[4:5] sc0"
    ),
    "neighbouring bytes": "global_store_byte v0, v0, s[4:5]",
}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_each_line_that_is_needed_prevents_a_race(code: Code) -> None:
    assert code.needed
    for seed in SEEDS:
        assert not races_of(code.without(), code.programs, seed)
        for line in code.needed:
            assert races_of(code.without(line), code.programs, seed), f"{line} is not missed"


@pytest.mark.parametrize("lines", HARMLESS.values(), ids=HARMLESS)
def test_what_gives_the_same_in_any_order_is_no_race(lines: str) -> None:
    for seed in SEEDS:
        assert not races_of(Code(lines).without(), 1, seed)


def test_a_plain_load_races_with_an_atomic() -> None:
    lines = "v_mov_b32_e32 v2, 0\nglobal_atomic_add v2, v0, s[4:5]\nglobal_load_dword v3, v2, s[4:5]"
    assert races_of(Code(lines).without(), 1, 0)


def test_a_load_of_other_words_than_those_that_are_compared_races() -> None:
    lines = "v_mov_b32_e32 v4, 0\nglobal_load_dwordx2 v[8:9], v4, s[4:5]\nglobal_load_dword v3, v1, s[4:5]\n"
    lines += "s_waitcnt vmcnt(0)\nv_add_u32_e32 v2, v8, v0\nv_mov_b32_e32 v3, v8\n"
    assert races_of(Code(f"{lines}global_atomic_cmpswap v2, v4, v[2:3], s[4:5] sc0").without(), 1, 0)


def test_a_release_for_the_waves_of_a_program_is_none_for_other_programs() -> None:
    """Without sc1 the caches between programs are left as they are."""
    for control in ("buffer_wbl2", "buffer_inv"):
        assert races_of(Code(_COUNTED.replace(f"{control} sc1", control), programs=3).without(), 3, 0)


def test_only_a_store_publishes_and_only_after_the_wait_for_the_write_back() -> None:
    wave, word = TimedWave((0, 0, 0), 0), Clock()

    def atomic(time: int) -> Operation:
        return Operation(wave, 0, Queue.VECTOR_MEMORY, True, time, wave.segment, wave.clock)

    wave.write_back()
    wave.issue(atomic(1), [], [word])
    assert word == {}
    wave.wait(Wait(vm=0), time=2)
    wave.issue(atomic(3), [word], [])
    assert word == {}
    wave.issue(atomic(4), [word], [word])
    assert word == {wave: 1}


def test_a_race_names_the_byte_both_instructions_and_both_waves() -> None:
    code = CODES["LDS: a load after a store"]
    (race,) = races_of(code.without("! s_barrier"), 1, 0)
    writer, reader = (race.first, race.second) if race.first.is_store else (race.second, race.first)
    assert (race.kernel, writer.text, reader.text) == ("snippet", "ds_write_b32 v1, v0", "ds_read_b32 v3, v2")
    assert (writer.index, reader.index) == (6, 8)
    assert {writer.wave, reader.wave} == {0, 1}
    assert (race.memory, race.byte) == ("LDS", 256 * writer.wave)
    code = CODES["memory: a row of each program"]
    (race,) = races_of(code.without(code.needed[0]), 2, 0)
    assert {race.first.program, race.second.program} == {(0, 0, 0), (1, 0, 0)}
    assert (race.memory, race.byte) == ("memory", 256 * race.first.wave)
    assert race.line().startswith(f"snippet, memory, byte {race.byte}: wave ")


def test_orders_of_programs_and_turns_of_waves_follow_from_the_seed() -> None:
    orders = [tuple(RaceWatch(seed=seed).programs((3, 2, 1))) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted((x, y, 0) for x in range(3) for y in range(2))
    last = set()
    for seed in range(8):
        memory = np.zeros(1, np.uint32)
        pointer = memory.ctypes.data.to_bytes(8, "little")
        launch = Launch((1, 1, 1), 2, 0, pointer, [allocation(memory)], watch=RaceWatch(seed=seed))
        lines = "v_mov_b32_e32 v2, 0\nv_mov_b32_e32 v3, s7\nglobal_store_dword v2, v3, s[4:5]"
        simulated_kernel(*Code(lines).without()).run(launch)
        last.add(int(memory[0]))
    assert last == {0, 1}


def test_lds_that_is_never_written_is_a_fault_under_a_watch_too() -> None:
    with pytest.raises(NeverWritten, match="'ds_read_b32 v3, v1': reads LDS that was never written, byte offset"):
        races_of(Code("ds_read_b32 v3, v1").without(), 1, 0)


OURS = {
    "store": partial(run_store, BF16, linear_pools, is_large=False),
    "take_inputs": partial(run_check, "metadata/take_inputs.py"),
    "publish_engine": partial(run_check, "metadata/publish_engine.py"),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("run", OURS.values(), ids=OURS)
def test_our_kernels_have_none(run: Callable[[], None], arch: str) -> None:
    for seed in SEEDS:
        with watched(RaceWatch(seed=seed)) as watch, simulated(arch) as simulation:
            run()
        assert simulation.kernels
        assert not watch.races


@pytest.mark.parametrize("arch", ARCHS)
def test_two_programs_that_store_the_same_row_are_found(arch: str) -> None:
    """Two tokens have one slot."""
    k, v = torch.randn(2, 3, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    k_pages, v_pages = torch.zeros(2, 4, 16, 2, 64, dtype=BF16)
    counts = torch.tensor([1, 3, 0, 0], dtype=torch.int32)
    for slots, is_found in (([16, 17, 40], False), ([16, 40, 16], True)):
        with watched(RaceWatch(seed=0)) as watch, simulated(arch):
            launch_store_kv(k, v, torch.tensor(slots, dtype=torch.int32), counts, LayerPages.plain(k_pages, v_pages))
        assert bool(watch.races) == is_found
        for race in watch.races:
            assert (race.kernel, race.first.is_store, race.second.is_store) == ("_store_kernel", True, True)
            assert race.first.program != race.second.program
