"""The simulator detects mistakes: copies of the real kernels, each with one mistake in it."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rocm_attn.kernels.attention import decode, extend, key_loop
from rocm_attn.kernels.cache import store
from rocm_attn.kernels.metadata import table_update
from rocm_lab.simulator.faults import SimulationFault
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.kernels import attention_cases
from tests.amd.mutation import metadata_checks
from tests.amd.simulator import kernel_cases
from tests.amd.simulator.check_cases import run_check
from tests.amd.simulator.kernel_cases import BF16, STEP, linear_pools, run_step, run_store
from tests.amd.simulator.other_kernels import imported

SMALL_STEP = replace(STEP, kv_len=[40, 33], q_len=[1, 9], heads=(2, 1), dims=(64, 64), dtype=BF16)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a copy of a kernel's file, and a run that must detect it.

    right, wrong: text of the file, and its replacement
    """

    right: str
    wrong: str
    run: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Launched:
    """How a file's kernel is launched.

    launcher:  its name; used_by is the module that runs take it from
    importers: the files from one that imports the kernel's to that of the launcher, each imported by the next one
    """

    launcher: str
    used_by: ModuleType
    importers: Sequence[ModuleType] = ()


def small_step(*, is_large: bool) -> Callable[[str], None]:
    """A step of one decode and one extend."""
    return lambda arch: run_step(arch, SMALL_STEP, is_large=is_large)


# The memory beyond a table may hold any page number: its place may be unallocated, or beyond the range of an offset.
NOTICED = (
    "nan|not close|outside of every allocation|out of range: it wrapped around|race|the pages are not those of the twin"
)
LAUNCHED = {
    decode: Launched("launch_paged_decode", attention_cases),
    key_loop: Launched("launch_paged_extend", attention_cases, [extend]),
    store: Launched("launch_store_kv", kernel_cases),
    table_update: Launched("launch_table_update", metadata_checks),
}
# File -> mistakes in it, by name.
MISTAKES = {
    decode: {
        "decode_multiplies_page_ids_in_32_bits": Mistake(
            "page = next_page.to(tl.uint32, bitcast=True).to(tl.int64)", "page = next_page", small_step(is_large=True)
        ),
        "decode_reads_v_without_a_mask": Mistake(
            "v = elements(v_rows, live, i, COLUMNS, TAIL, DIM)",
            "v = tl.load(v_rows.first + i * COLUMNS)",
            small_step(is_large=False),
        ),
        "decode_looks_past_the_end_of_the_table": Mistake(
            "next_page = pages_of_block(pages, block + 1, page_lane,",
            "next_page = pages_of_block(TableLine(pages.at, 1 << 30), (block + 1) * 999, page_lane,",
            small_step(is_large=False),
        ),
    },
    key_loop: {
        "extend_multiplies_page_ids_in_32_bits": Mistake(
            "page = next_page.to(tl.int64)", "page = next_page", small_step(is_large=True)
        ),
        "extend_reads_v_without_a_mask": Mistake(
            "x = tl.load(block, mask=live, other=0)", "x = tl.load(block)", small_step(is_large=False)
        ),
    },
    store: {
        "the_store_multiplies_slots_in_32_bits": Mistake(
            "token).to(tl.int64)\n    if (token < tl.load(counts + 1)) & (slot >= FIRST_SLOT)",
            "token)\n    if (token < tl.load(counts + 1)) & (slot >= FIRST_SLOT)",
            lambda _: run_store(BF16, linear_pools, is_large=True),
        ),
        "the_store_writes_pads": Mistake(
            "(token < tl.load(counts + 1)) & (slot >= FIRST_SLOT)",
            "slot >= FIRST_SLOT",
            lambda _: run_store(torch.float16, linear_pools, is_large=False),
        ),
    },
    table_update: {
        "a_table_update_reads_without_a_mask": Mistake(
            "row = tl.load(updates + WORDS * i, mask=live, other=0)",
            "row = tl.load(updates + WORDS * i)",
            lambda _: run_check("metadata/table_update.py"),
        ),
    },
}


# A kernel that is compiled fast, for each way in which the simulator notices. The effect of a mistake hardly depends on
# the arch: the day has one of each.
BY_DAY = {
    "decode_reads_v_without_a_mask": "gfx950",
    "the_store_multiplies_slots_in_32_bits": "gfx942",
    "a_table_update_reads_without_a_mask": "gfx942",
    "the_store_writes_pads": "gfx950",
}


def assert_noticed(
    mistake: Mistake,
    module: ModuleType,
    launched: Launched,
    arch: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks that a run with the launcher of a copy of the kernel's file fails."""
    broken = broken_copy(mistake, module, launched, folder, monkeypatch)
    original = getattr([module, *launched.importers][-1], launched.launcher)
    for name in {launched.launcher, *(name for name, value in vars(launched.used_by).items() if value is original)}:
        monkeypatch.setattr(launched.used_by, name, getattr(broken, launched.launcher))
    with pytest.raises((AssertionError, SimulationFault)) as caught, simulated(arch):
        mistake.run(arch)
    assert re.search(NOTICED, str(caught.value))


def broken_copy(
    mistake: Mistake, module: ModuleType, launched: Launched, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The launcher's module, imported from a file with the mistake in it, or from one that imports such a file."""
    source = source_of(module)
    assert source.count(mistake.right) == 1, f"{mistake.right!r} is not in {module.__name__} once"
    broken = import_copy(module, source.replace(mistake.right, mistake.wrong), folder)
    for importer in launched.importers:
        if importer is module:
            continue
        monkeypatch.setitem(sys.modules, broken.__name__, broken)
        source, own = source_of(importer), f"from {module.__name__} import"
        assert source.count(own) == 1
        module, broken = importer, import_copy(importer, source.replace(own, f"from {broken.__name__} import"), folder)
    return broken


def source_of(module: ModuleType) -> str:
    """The text of a module's file."""
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def import_copy(module: ModuleType, source: str, folder: Path) -> ModuleType:
    """A module of this source, from a file in folder that is named after the module's."""
    assert module.__file__ is not None
    path = folder / f"broken_{Path(module.__file__).name}"
    path.write_text(source)
    return imported(path)


@pytest.mark.parametrize(
    ("module", "name", "arch"),
    [
        pytest.param(module, name, arch, id=f"{name}-{arch}", marks=[pytest.mark.nightly] * (BY_DAY.get(name) != arch))
        for module, mistakes in MISTAKES.items()
        for name in mistakes
        for arch in ARCHS
    ],
)
def test_a_mistake_is_noticed(
    module: ModuleType, name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_noticed(MISTAKES[module][name], module, LAUNCHED[module], arch, tmp_path, monkeypatch)


# By day test_kernels.py has the same runs in other shapes.
@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_runs_without_a_mistake_pass(arch: str) -> None:
    with simulated(arch):
        for is_large in (False, True):
            small_step(is_large=is_large)(arch)
