"""Early launches on sm_90 as Triton compiles them: they wait before they read what an earlier launch writes.

Conditions of the speed of decode and extend: loads of page numbers, and the merge of parts.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.model.few_rows import launch_few_rows
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TritonExtend
from rocm_attn.providers.triton_hopper import TRITONS
from tests.amd.offline import state_matrix
from tests.amd.offline.candidate_kernels import decode_kernels, extend_kernels, storing_decode
from tests.amd.offline.code_object import read_nvidia_code
from tests.amd.offline.early_launches import assert_waits
from tests.amd.offline.matrix import Row, launch_all
from tests.amd.offline.offline_driver import last_compiled_by


@functools.cache
def extending(arch: str, *, early: bool, by_number: bool = False) -> dict[str, CompiledKernel]:
    """Extend that shares rows and its merge, of heads of 64 in pages of 16."""
    tiles = ExtendTiles(64, 64, 4, 3, 2, programs_per_cu=2, one_launch=True, early=early, by_number=by_number)
    return extend_kernels(Row(arch, (32, 8), (64, 64), torch.bfloat16, 16), tiles)


@functools.cache
def decoding(arch: str, *, early: bool, merge_group: int = 0) -> dict[str, CompiledKernel]:
    """Decode and its merge, of heads of 128."""
    row = Row(arch, (32, 8), (128, 128), torch.bfloat16, 16)
    return decode_kernels(row, DecodeTiles(64, 4, 2, 2, early=early, merge_group=merge_group))


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        (partial(extending, early=True), "_extend_kernel"),
        (partial(extending, early=True), "_extend_merge_kernel"),
        (partial(decoding, early=True), "_decode_kernel"),
        (partial(decoding, early=True), "_merge_kernel"),
        (partial(decoding, early=True, merge_group=16), "_decode_kernel"),
    ],
)
def test_an_early_launch_waits_for_the_end_of_the_one_before(
    kernels: partial[dict[str, CompiledKernel]], name: str
) -> None:
    assert_waits(kernels("sm_90")[name], reads_before="merge" in name)


def test_no_other_launch_is_early() -> None:
    extends = extending("sm_90", early=False)
    assert list(extends) == ["_extend_kernel", "_extend_merge_kernel"]
    for kernel in (*extends.values(), *decoding("sm_90", early=False).values()):
        assert not getattr(kernel.metadata, "launch_pdl", False)
        assert "griddepcontrol" not in kernel.asm.get("ptx", "")


def test_page_numbers_are_loaded_once_for_each_page() -> None:
    """Four numbers for 64 keys, extended without a sign (key_loop.py)."""
    numbers = re.compile(r"arith\.extui .*: tensor<4xi32> to tensor<4xi64>")
    assert numbers.search(extending("sm_90", early=False, by_number=True)["_extend_kernel"].asm["ttir"])
    assert not numbers.search(extending("sm_90", early=False)["_extend_kernel"].asm["ttir"])


@pytest.mark.nightly
def test_by_number_changes_nothing_on_amd() -> None:
    on_amd = extending("gfx942", early=False, by_number=True)["_extend_kernel"].asm["ttir"]
    assert on_amd == extending("gfx942", early=False)["_extend_kernel"].asm["ttir"]


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("heads", "dim", "page_size"),
    [
        ((12, 3), 24, 1),
        ((60, 6), 32, 16),
        ((8, 8), 64, 1),
        ((32, 8), 64, 16),
        ((8, 8), 80, 1),
        ((12, 12), 96, 16),
        ((32, 32), 128, 16),
        ((8, 1), 192, 1),
        ((16, 8), 256, 16),
    ],
)
def test_tiles_of_short_prefills_are_launched_once_and_early_and_spill_hardly_anything(
    heads: tuple[int, int], dim: int, page_size: int
) -> None:
    """They were tuned for rows that are shared out."""
    target = replace(known_target("sm_90"), releases=Releases(triton=TRITONS[0]))
    layer = Problem(*heads, dim, torch.bfloat16, page_size)
    kernel = select(layer, target, "triton").kernel(StepKind.PREFILL).bound
    assert isinstance(kernel, KernelByTokens)
    whole = [sized.kernel for sized in kernel.short if isinstance(sized.kernel, TritonExtend)]
    assert whole
    for each in whole:
        found = extend_kernels(Row("sm_90", heads, (dim, dim), torch.bfloat16, page_size), each.tiles)
        (name,) = found
        assert each.tiles.early == (each.tiles.query_rows <= 64)
        if each.tiles.early:
            assert_waits(found[name], reads_before=False)
        code = read_nvidia_code(found[name])
        # Large blocks of 128 columns with Triton 3.9; none with 3.6, which Hopper's table is made for.
        assert code.stack_bytes <= (24 if (dim, each.tiles.query_rows) == (128, 128) else 0)
        assert code.local_bytes == 0
        assert code.shared_bytes <= target.lds_bytes


READ_WEIGHTS = ("_add_norm", "_few_rows", "_normed_product", "_row_product")
OF_A_MODEL = ("_gate", *READ_WEIGHTS)


def compiled_of(arch: str, names: Sequence[str]) -> dict[str, CompiledKernel]:
    """The kernels of these names that a row of the matrix launches."""
    row = Row(arch, (8, 2), (64, 64), torch.bfloat16, 16)
    kernels = last_compiled_by(partial(launch_all, row), arch, [f"{name}_kernel" for name in names])
    assert len(kernels) == len(names)
    return kernels


@pytest.mark.fast
def test_kernels_of_a_model_wait() -> None:
    """Norms, and products of one row and of a few, load weights before they wait, which no launch of a step writes."""
    for name, kernel in compiled_of("sm_90", OF_A_MODEL).items():
        assert_waits(kernel, reads_before=name.removesuffix("_kernel") in READ_WEIGHTS)
        ptx = kernel.asm["ptx"]
        assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("num_in", [64, 256, 2048])
def test_a_bias_is_added_to_a_sum_and_does_not_start_it(num_in: int) -> None:
    """A deterministic model has other kernels for more rows: there it comes last too."""
    x, weight, bias, out = (torch.empty(size) for size in ((3, num_in), (64, num_in), (64,), (1, 3, 64)))
    launch = partial(launch_few_rows, x.half(), weight.half(), bias.half(), out.half(), 132)
    code = last_compiled_by(launch, "sm_90", ["_few_rows_kernel"])["_few_rows_kernel"].asm["ttir"]
    first = re.search(r"tt\.dot [^,]+, [^,]+, (%\w+)", code)
    assert first
    assert f"{first[1]} = arith.constant dense<0.000000e+00>" in code


STORE_AND_EXPERTS = (
    "_rope_store",
    "_choose_experts",
    "_combine_experts",
    "_expert_product",
    "_expert_sums",
    "_inner_products",
    "_sort_pairs",
)
OF_STATES = tuple(f"{name}_kernel" for name in ("_convolve", "_gated_norm", "_gates", "_token_steps"))


def test_these_kernels_read_nothing_before_they_wait() -> None:
    row = next(row for row in state_matrix.ROWS if str(row) == "sm_90-mamba_2")
    of_states = last_compiled_by(row.launch, "sm_90", OF_STATES)
    assert len(of_states) == len(OF_STATES)
    for kernel in (*compiled_of("sm_90", STORE_AND_EXPERTS).values(), *of_states.values()):
        assert_waits(kernel, reads_before=False)


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_no_launch_starts_early_elsewhere(arch: str) -> None:
    for kernel in compiled_of(arch, OF_A_MODEL).values():
        assert not getattr(kernel.metadata, "launch_pdl", False)


def test_a_part_is_there_before_it_counts_and_counts_before_parts_are_read() -> None:
    """One thread of a program counts for all, and orders what it sees itself with the accesses of other programs."""
    found = decoding("sm_90", early=True, merge_group=16)
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
    kernel = decoding("sm_90", early=True, merge_group=16)["_decode_kernel"]
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
    code = decoding("sm_90", early=False)["_decode_kernel"].asm["ttir"]
    assert re.search(r"arith\.extui .*: tensor<64xi32> to tensor<64xi64>", code)


def test_what_a_program_stores_is_there_before_it_reads_keys() -> None:
    code = storing_decode(Row("sm_90", (32, 8), (128, 128), torch.bfloat16, 16), DecodeTiles(64, 4, 2, 2)).asm["ttir"]
    (barrier,) = re.finditer(r"\b(gpu|ttg)\.barrier\b", code)
    assert max(at.start() for at in re.finditer("tt.atomic_rmw", code)) < barrier.start() < code.index("scf.for")
    assert not re.search(r"\.barrier\b", decoding("sm_90", early=False)["_decode_kernel"].asm["ttir"])
