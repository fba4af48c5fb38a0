"""The simulator detects mistakes: copies of the real kernels, each with one mistake in it."""

from __future__ import annotations

import importlib.util
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
from rocm_lab.simulator.launcher import ARCHS, Simulation
from tests.amd.kernels import attention_cases
from tests.amd.mutation import metadata_checks
from tests.amd.simulator import kernel_cases
from tests.amd.simulator.check_cases import run_check
from tests.amd.simulator.kernel_cases import BF16, STEP, linear_pools, run_step, run_store

SMALL_STEP = replace(STEP, kv_len=[40, 33], q_len=[1, 9], heads=(2, 1), dims=(64, 64), dtype=BF16)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in a copy of a kernel's file, and a run that must detect it.

    right, wrong:  text of the file, and its replacement
    launcher:      name of the launcher; used_by is the module that the run takes it from
    says:          part of the message, as a regular expression
    importers:     the files from one that imports the module to that of the launcher, each imported by the next one
    """

    module: ModuleType
    right: str
    wrong: str
    launcher: str
    used_by: ModuleType
    run: Callable[[str], Simulation]
    notices: type[Exception]
    says: str
    importers: Sequence[ModuleType] = ()


def small_step(*, is_large: bool) -> Callable[[str], Simulation]:
    """A step of one decode and one extend."""
    return lambda arch: run_step(arch, SMALL_STEP, is_large=is_large)


STRAYS = "outside of every allocation"
MISTAKES = {
    "decode_multiplies_page_ids_in_32_bits": Mistake(
        decode,
        "page = next_page.to(tl.uint32, bitcast=True).to(tl.int64)",
        "page = next_page",
        "launch_paged_decode",
        attention_cases,
        small_step(is_large=True),
        SimulationFault,
        STRAYS,
    ),
    "extend_multiplies_page_ids_in_32_bits": Mistake(
        key_loop,
        "page = next_page.to(tl.int64)",
        "page = next_page",
        "launch_paged_extend",
        attention_cases,
        small_step(is_large=True),
        SimulationFault,
        STRAYS,
        importers=[extend],
    ),
    "the_store_multiplies_slots_in_32_bits": Mistake(
        store,
        "token).to(tl.int64)\n    if (token < tl.load(counts + 1)) & (slot >= FIRST_SLOT)",
        "token)\n    if (token < tl.load(counts + 1)) & (slot >= FIRST_SLOT)",
        "launch_store_kv",
        kernel_cases,
        lambda arch: run_store(arch, BF16, linear_pools, is_large=True),
        SimulationFault,
        STRAYS,
    ),
    "decode_reads_v_without_a_mask": Mistake(
        decode,
        "v = elements(v_rows, live, i, COLUMNS, TAIL, DIM)",
        "v = tl.load(v_rows.first + i * COLUMNS)",
        "launch_paged_decode",
        attention_cases,
        small_step(is_large=False),
        AssertionError,
        "nan",
    ),
    "extend_reads_v_without_a_mask": Mistake(
        key_loop,
        "x = tl.load(block, mask=live, other=0)",
        "x = tl.load(block)",
        "launch_paged_extend",
        attention_cases,
        small_step(is_large=False),
        AssertionError,
        "nan",
        importers=[extend],
    ),
    "decode_looks_past_the_end_of_the_table": Mistake(
        decode,
        "next_page = pages_of_block(pages, block + 1, page_lane,",
        "next_page = pages_of_block(TableLine(pages.at, 1 << 30), (block + 1) * 999, page_lane,",
        "launch_paged_decode",
        attention_cases,
        small_step(is_large=False),
        SimulationFault,
        # The memory there may hold any page number: its place may be unallocated, or beyond the range of an offset.
        f"{STRAYS}|out of range: it wrapped around",
    ),
    "a_table_update_reads_without_a_mask": Mistake(
        table_update,
        "row = tl.load(updates + WORDS * i, mask=live, other=0)",
        "row = tl.load(updates + WORDS * i)",
        "launch_table_update",
        metadata_checks,
        lambda arch: run_check(arch, "metadata/table_update.py"),
        SimulationFault,
        STRAYS,
    ),
    "the_store_writes_pads": Mistake(
        store,
        "(token < tl.load(counts + 1)) & (slot >= FIRST_SLOT)",
        "slot >= FIRST_SLOT",
        "launch_store_kv",
        kernel_cases,
        lambda arch: run_store(arch, torch.float16, linear_pools, is_large=False),
        AssertionError,
        "the pages are not those of the twin",
    ),
}


# A kernel that is compiled fast, for each way in which the simulator notices.
IN_EVERY_RUN = {
    "decode_reads_v_without_a_mask",
    "the_store_multiplies_slots_in_32_bits",
    "a_table_update_reads_without_a_mask",
    "the_store_writes_pads",
}


def broken_copy(mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The launcher's module, imported from a file with the mistake in it, or from one that imports such a file."""
    source = source_of(mistake.module)
    assert source.count(mistake.right) == 1, f"{mistake.right!r} is not in {mistake.module.__name__} once"
    module, broken = mistake.module, import_copy(mistake.module, source.replace(mistake.right, mistake.wrong), folder)
    for importer in mistake.importers:
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
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return copied


@pytest.mark.parametrize(
    ("mistake", "arch"),
    [
        # The effect of a mistake hardly depends on the arch: every run alternates between them.
        pytest.param(
            mistake,
            arch,
            id=f"{name}-{arch}",
            marks=[pytest.mark.nightly] * (name not in IN_EVERY_RUN or at % len(ARCHS) != turn),
        )
        for at, (name, mistake) in enumerate(MISTAKES.items())
        for turn, arch in enumerate(ARCHS)
    ],
)
def test_a_mistake_is_noticed(mistake: Mistake, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = broken_copy(mistake, tmp_path, monkeypatch)
    original = getattr([mistake.module, *mistake.importers][-1], mistake.launcher)
    for name, value in vars(mistake.used_by).items():
        if value is original:
            monkeypatch.setattr(mistake.used_by, name, getattr(broken, mistake.launcher))
    with pytest.raises(mistake.notices) as caught:
        mistake.run(arch)
    assert re.search(mistake.says, str(caught.value))


# By day test_kernels.py has the same runs in other shapes.
@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_the_same_runs_without_a_mistake_pass(arch: str) -> None:
    for is_large in (False, True):
        small_step(is_large=is_large)(arch)
