"""Conditions of decode's speed on sm_90, and of correct early launches, as Triton compiles them."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.offline.candidate_kernels import decode_kernels, storing_decode
from tests.amd.offline.early_launches import assert_waits
from tests.amd.offline.matrix import Row


@functools.cache
def kernels(arch: str, *, early: bool, merge_group: int = 0) -> dict[str, CompiledKernel]:
    """Decode and its merge, of heads of 128."""
    row = Row(arch, (32, 8), (128, 128), torch.bfloat16, 16)
    return decode_kernels(row, DecodeTiles(64, 4, 2, 2, early=early, merge_group=merge_group))


@pytest.mark.parametrize(("name", "merge_group"), [("_decode_kernel", 0), ("_merge_kernel", 0), ("_decode_kernel", 16)])
def test_an_early_launch_waits_for_the_end_of_the_one_before(name: str, merge_group: int) -> None:
    kernel = kernels("sm_90", early=True, merge_group=merge_group)[name]
    assert_waits(kernel, reads_before=name != "_decode_kernel")


def test_no_other_launch_is_early() -> None:
    for kernel in kernels("sm_90", early=False).values():
        assert not getattr(kernel.metadata, "launch_pdl", False)
        assert "griddepcontrol" not in kernel.asm.get("ptx", "")


def test_a_part_is_there_before_it_counts_and_counts_before_parts_are_read() -> None:
    """One thread of a program counts for all, and orders what it sees itself with the accesses of other programs."""
    found = kernels("sm_90", early=True, merge_group=16)
    assert list(found) == ["_decode_kernel"], "there is no other launch"
    code = found["_decode_kernel"].asm["ptx"]
    (count,) = re.finditer(r"atom\.global\.gpu\.acq_rel\.add", code)
    before, after = code[: count.start()], code[count.end() :]
    assert before.rindex("bar.sync") > before.rindex("st.global")
    assert after.index("bar.sync") < after.index("ld.global")
    # This is the source's barrier, not one that the compiler adds: shared memory may need none there.
    source = found["_decode_kernel"].asm["ttir"]
    assert re.search(r"\b(gpu|ttg)\.barrier\b(?:(?!tt\.store)[\s\S])*tt\.atomic_rmw add, acq_rel, gpu", source)


def test_all_threads_have_read_the_parts_of_a_group_before_their_sum_takes_the_place_of_the_first() -> None:
    """Another thread may store an element than the one that read it: layouts are the compiler's choice."""
    kernel = kernels("sm_90", early=True, merge_group=16)["_decode_kernel"]
    source, code = kernel.asm["ttir"], kernel.asm["ptx"]
    merge = source[source.index("tt.atomic_rmw") :]
    # The parts are float32; the row's output is not.
    loads, stores = (
        [found.start() for found in re.finditer(rf"tt\.{name} .*tensor<\S+x!tt\.ptr<f32>>", merge)]
        for name in ("load", "store")
    )
    assert len(stores) == 2
    assert re.search(r"\b(gpu|ttg)\.barrier\b", merge[max(loads) : min(stores)])
    merge = code[code.index("atom.global.gpu.acq_rel.add") :]
    last_load = merge.rindex("ld.global")
    assert "bar.sync" in merge[last_load : merge.index("st.global", last_load)]


def test_page_numbers_are_extended_without_a_sign() -> None:
    """ptxas moves the extension of a sign far ahead, and waits for the load of the number at once."""
    code = kernels("sm_90", early=False)["_decode_kernel"].asm["ttir"]
    assert re.search(r"arith\.extui .*: tensor<64xi32> to tensor<64xi64>", code)


def test_what_a_program_stores_is_there_before_it_reads_keys() -> None:
    code = storing_decode(Row("sm_90", (32, 8), (128, 128), torch.bfloat16, 16), DecodeTiles(64, 4, 2, 2)).asm["ttir"]
    (barrier,) = re.finditer(r"\b(gpu|ttg)\.barrier\b", code)
    assert max(at.start() for at in re.finditer("tt.atomic_rmw", code)) < barrier.start() < code.index("scf.for")
    assert not re.search(r"\.barrier\b", kernels("sm_90", early=False)["_decode_kernel"].asm["ttir"])
