"""Machine code for sm_90 reads no register that nothing has written; the check of it finds what a compiler broke."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.errors import Unsupported
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.machine.target import known_target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import select
from rocm_attn.providers.triton_segments import RIGHT_TRITON
from tests.amd.offline import sparse_matrix, state_matrix
from tests.amd.offline.compiling import OLDEST_TRITON, ONLY_OLDEST, compiled_kernels
from tests.amd.offline.matrix import ROWS, Row, launch_mixed_step, launch_rest
from tests.amd.offline.nvidia_code import machine_code
from tests.amd.offline.offline_driver import compiled_by, last_compiled_by
from tests.amd.offline.unwritten_registers import reads_of_unwritten, unwritten_registers

# Registers of each kind, of which a listing here has few.
COLUMNS = {"R": 8, "P": 2, "UR": 8, "UP": 2}
HEADS = """\
\t.section\t.text.kernel,"ax",@progbits
 // |  GPR  | PRED  |  UGPR  | UPRED  |
 // |  # 01234567  |  # 01  |  # 01234567  |  # 01  |
"""


def listing(*lines: str) -> str:
    """A listing of nvdisasm. A line: an instruction; its reads; its writes; or a label, which ends in a colon."""
    text, address = HEADS, 0
    for line in lines:
        if line.endswith(":"):
            text += f"{line}\n"
            continue
        instruction, reads, writes = (part.strip() for part in f"{line};;".split(";")[:3])
        cells = []
        for kind, count in COLUMNS.items():
            names = [f"{kind}{number}" for number in range(count)]
            marks = [
                {(1, 0): "v", (0, 1): "^", (1, 1): "x"}.get((n in reads.split(), n in writes.split()), " ")
                for n in names
            ]
            cells.append("    " + "".join(marks) + "  ")
        text += f"        /*{address:04x}*/    {instruction} ; // |{'|'.join(cells)}|\n"
        address += 16
    return text


def found(*lines: str) -> list[str]:
    return reads_of_unwritten(listing(*lines))


BRANCH = "BRA `(.L_x_0);P0"
TABLE = 'BRX R0 -0x3f0 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
WRITE, READ = "UMOV UR4, 0x1;;UR4", "UIADD3 UR5, UR4, 0x20, URZ;UR4;UR5"
PRODUCT = "HGMMA.64x16x16.F32.BF16 R0, R2, gdesc[UR4].tnspB, R0, gsb0;R2 UR4 UR5 UR6 UR7;R0"


def test_a_read_before_a_write_is_found_with_its_place() -> None:
    (line,) = found(READ, WRITE, READ, "EXIT")
    assert line.startswith("kernel: 0x0000 UIADD3 UR5, UR4, 0x20, URZ reads UR4, ")


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ((WRITE, READ, "EXIT"), 0),
        # One of two paths writes.
        (("ISETP P0;;P0", f"@P0 {BRANCH}", WRITE, ".L_x_0:", READ, "EXIT"), 1),
        (("ISETP P0;;P0", f"@P0 {BRANCH}", WRITE, "BRA `(.L_x_1)", ".L_x_0:", WRITE, ".L_x_1:", READ, "EXIT"), 0),
        # A loop writes at its end what it reads at its beginning.
        (("ISETP P0;;P0", ".L_x_0:", READ, WRITE, f"@P0 {BRANCH}", "EXIT"), 1),
        ((WRITE, "ISETP P0;;P0", ".L_x_0:", READ, WRITE, f"@P0 {BRANCH}", "EXIT"), 0),
        # A branch with a second predicate goes on.
        (("ISETP P0;;P0", WRITE, "BRA !P0, `(.L_x_0);P0", "NOP", ".L_x_0:", READ, "EXIT"), 0),
        (("ISETP P0;;P0", "BRA !P0, `(.L_x_0);P0", WRITE, ".L_x_0:", READ, "EXIT"), 1),
        ((WRITE, "BRA.DIV UR4, `(.L_x_0);UR4", READ, "EXIT", ".L_x_0:", READ, "EXIT"), 0),
        # A table of branches.
        ((WRITE, TABLE, ".L_x_0:", READ, "EXIT", ".L_x_1:", READ, "EXIT"), 0),
        ((TABLE, ".L_x_0:", WRITE, ".L_x_1:", READ, "EXIT"), 1),
        # A function writes for its caller, and reads what its callers have written.
        (("CALL.REL.NOINC `($f)", READ, "EXIT", "$f:", WRITE, "RET.REL.NODEC R0 `(kernel)"), 0),
        (("CALL.REL.NOINC `($f)", WRITE, "EXIT", "$f:", READ, "RET.REL.NODEC R0 `(kernel)"), 1),
        ((WRITE, "CALL.REL.NOINC `($f)", READ, "EXIT", "$f:", READ, "RET.REL.NODEC R0 `(kernel)"), 0),
        # A write under a predicate is a write; a predicate is a register.
        (("ISETP P0;;P0", f"@P0 {WRITE}", READ, "EXIT"), 0),
        (("@P1 EXIT;P1", "EXIT"), 1),
        (("USEL UR4, UP0;UP0;UR4", READ, "EXIT"), 1),
        # A copy of nothing is no read, and no write either.
        (("MOV R0, UR4;UR4;R0", "R2UR UR4, R0;R0;UR4", WRITE, READ, "EXIT"), 0),
        (("MOV R0, UR4;UR4;R0", "R2UR UR4, R0;R0;UR4", READ, "EXIT"), 1),
        ((WRITE, "MOV R0, UR4;UR4;R0", "R2UR UR5, R0;R0;UR5", "UIADD3 UR6, UR5, 1, URZ;UR5;UR6", "EXIT"), 0),
        # Half a word and a bit begin a register.
        (("PRMT R0, RZ, 0x7610, R0;R0;R0", "FADD R1, R0, R0;R0;R1", "EXIT"), 0),
        (("LOP3.LUT R0, R0, 0xfffffffb, RZ, 0xc0, !PT;R0;R0", "EXIT"), 0),
        (("LOP3.LUT R0, R1, 0xfffffffb, RZ, 0xc0, !PT;R1;R0", "EXIT"), 1),
        # Only the description of the second matrix is read if the first is in registers.
        (("MOV R2, 1;;R2", "UMOV UR6, 1;;UR6", "UMOV UR7, 1;;UR7", PRODUCT, "EXIT"), 0),
        (("MOV R2, 1;;R2", "UMOV UR4, 1;;UR4", "UMOV UR5, 1;;UR5", PRODUCT, "EXIT"), 1),
    ],
)  # fmt: skip
def test_each_path_counts(lines: tuple[str, ...], number: int) -> None:
    assert len(found(*lines)) == number


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((), "lists no instruction"),
        (("JMP `(.L_x_0)", ".L_x_0:", "EXIT"), "is not followed"),
        (("BRX R0 -0x3f0", "EXIT"), "does not say where it leads"),
        (("EXIT", READ, "EXIT"), "no path that is known leads to"),
        ((WRITE, READ), "is the last instruction, and leads on"),
        (("CALL.REL.NOINC `($f)", "EXIT", "$f:", "EXIT"), "does not return"),
    ],
)
def test_code_that_is_not_followed_is_no_right_code(lines: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        found(*lines)


ON_SM_90 = [row for row in ROWS if row.arch == "sm_90"]
SCORED = {"window_left": 13, "logits_soft_cap": 2.0, "has_sinks": True}
# Deterministic layers that the oldest Triton breaks: head dims, whether they are SCORED, and the kernel.
BROKEN = (
    ((24, 8), True, "_segment_decode_kernel"),
    ((24, 8), False, "_segment_extend_kernel"),
    ((128, 16), False, "_segment_extend_kernel"),
    ((128, 32), False, "_segment_extend_kernel"),
    ((40, 24), False, "_segment_extend_kernel"),
    ((256, 32), False, "_segment_extend_kernel"),
)
# Heads whose V has a block of 16 columns or of 32, and uneven ones. Deterministic mode serves the second and third.
NARROW = ((24, 8), (64, 16), (128, 16), (128, 32), (256, 32), (512, 32))
SERVED = ((16, 8), (16, 16), (24, 24), (24, 32))
UNEVEN = ((8, 24), (16, 64), (64, 128), (72, 40), (128, 64), (128, 256), (256, 128), (320, 256))


def found_in(kernels: Iterable[CompiledKernel]) -> list[str]:
    kernels = list(kernels)
    assert kernels
    return [line for kernel in kernels for line in unwritten_registers(machine_code(kernel))]


def layer_of(dims: tuple[int, int], *, scored: bool) -> Problem:
    plain = Problem(3, 1, dims[0], torch.bfloat16, 4, v_head_dim=dims[1])
    return replace(plain, **SCORED) if scored else plain  # type: ignore[arg-type]


def attention_of(problem: Problem, *, deterministic: bool) -> dict[str, CompiledKernel]:
    """The kernels of decode and of extend of a layer on sm_90, by name."""
    dims = problem.head_dim, problem.v_head_dim
    row = Row("sm_90", (problem.num_q_heads, problem.num_kv_heads), dims, problem.dtype, problem.page_size)
    names = {f"_segment_{kind}_kernel" if deterministic else f"_{kind}_kernel" for kind in ("decode", "extend")}
    return last_compiled_by(lambda: launch_mixed_step(row, [problem], deterministic=deterministic), row.arch, names)


def only_oldest(test: Callable[..., None]) -> Callable[..., None]:
    for mark in ONLY_OLDEST:
        test = mark(test)
    return test


def by_night(name: str, rows: Iterable[object], by_day: Collection[object] = ()) -> pytest.MarkDecorator:
    """Runs a test with each of these rows, those of by_day in every run."""
    marks = {row: [pytest.mark.nightly] * (row not in by_day) for row in rows}
    return pytest.mark.parametrize(name, [pytest.param(row, id=str(row), marks=marks[row]) for row in marks])


@only_oldest
@by_night("broken", BROKEN, (BROKEN[0], BROKEN[3]))
def test_what_the_oldest_triton_breaks_is_found_and_refused(broken: tuple[tuple[int, int], bool, str]) -> None:
    dims, scored, name = broken
    problem = layer_of(dims, scored=scored)
    assert found_in([attention_of(problem, deterministic=True)[name]])
    target = known_target("sm_90")
    target = replace(target, releases=replace(target.releases, triton=Release.of(OLDEST_TRITON)))
    with pytest.raises(Unsupported):
        select(problem, target, "triton", deterministic=True)


@pytest.mark.nightly
@pytest.mark.skipif(
    Release.of(triton_version()).numbers < RIGHT_TRITON,
    reason="Triton before 3.9 breaks these layers, and they are refused",
)
def test_the_release_that_serves_these_layers_again_compiles_them_well() -> None:
    for dims, scored, _ in BROKEN:
        assert not found_in(attention_of(layer_of(dims, scored=scored), deterministic=True).values())


@only_oldest
@by_night(
    "served",
    [*((dims, True) for dims in (*SERVED, *UNEVEN)), *((dims, False) for dims in (*NARROW, *SERVED, *UNEVEN))],
    [((24, 32), True)],
)
def test_narrow_and_uneven_heads_read_what_is_written(served: tuple[tuple[int, int], bool]) -> None:
    dims, deterministic = served
    for scored in (False, True):
        assert not found_in(attention_of(layer_of(dims, scored=scored), deterministic=deterministic).values())


@only_oldest
@by_night("row", [row for row in (*sparse_matrix.ROWS, *state_matrix.ROWS) if row.arch == "sm_90"])
def test_sparse_and_recurrent_layers_do_too(row: sparse_matrix.SparseRow | state_matrix.StateRow) -> None:
    assert not found_in(compiled_by(row.launch, row.arch))


@only_oldest
@by_night("row", ON_SM_90)
def test_every_kernel_of_a_row_does_too(row: Row) -> None:
    assert not found_in(compiled_kernels(row))


@only_oldest
@pytest.mark.nightly
def test_kernels_of_metadata_and_of_engines_do_too() -> None:
    row = next(row for row in ON_SM_90 if row.dims == (128, 128) and row.pool is PoolKind.SPLIT)
    assert not found_in(compiled_by(lambda: launch_rest(row), row.arch))
