"""Compiles rows of the matrix, or records what they launch, and chooses the rows that a test runs with."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from triton.compiler import CompiledKernel

from rocm_attn.kernels.launch import observe_launches
from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_later import triton_launches
from tests.amd.offline.matrix import ROWS, Row, launch_all
from tests.amd.offline.offline_driver import compiled_by, first_compiled_by

AMD_ARCHS = ("gfx942", "gfx950")
NVIDIA_ARCHS = ("sm_80", "sm_90")


# Every run compiles the first variant of each kernel of these rows (test_first_variants.py): on CDNA 3 heads of 128, on
# CDNA 4 codes, on Hopper latent pages; the simulator executes all three on both kinds of CDNA. All variants, and all
# other rows, are the night's: a whole row takes a core for a minute or two, mostly inside LLVM. A layer's window, cap
# or mask rarely makes it spill if the layer without does not; the simulator compiles those.
IN_EVERY_RUN = frozenset(
    {
        "gfx942-32x8-128-128-bfloat16-page16-below_2gib",
        "gfx950-64x8-64-64-bfloat16-e4m3fn_head-page16-below_2gib",
        "sm_90-16x1-576-512-latent-bfloat16-page64-below_2gib",
    }
)

OLDEST_TRITON = "3.6.0"
# Marks of a test that only the oldest Triton has.
ONLY_OLDEST = (
    pytest.mark.oldest_triton,
    pytest.mark.skipif(
        Release.of(triton_version()) != Release.of(OLDEST_TRITON),
        reason=f"the stages oldest and oldest-long have it, with Triton {OLDEST_TRITON}",
    ),
)


def rows_for(archs: tuple[str, ...]) -> pytest.MarkDecorator:
    """Runs a test with every row for these archs, at night; rows that the oldest Triton compiles too are marked so."""
    return pytest.mark.parametrize(
        "row",
        [
            pytest.param(
                row,
                id=str(row),
                marks=[pytest.mark.xdist_group(str(row)), pytest.mark.nightly]
                + [pytest.mark.oldest_triton] * row.on_oldest,
            )
            for row in ROWS
            if row.arch in archs
        ],
    )


@functools.cache
def compiled_kernels(row: Row) -> tuple[CompiledKernel, ...]:
    """The distinct kernels that a row launches, in order of launch."""
    kernels = compiled_by(lambda: launch_all(row), row.arch)
    return tuple({kernel.hash: kernel for kernel in kernels}.values())


@functools.cache
def first_kernels(row: Row) -> dict[str, CompiledKernel]:
    """The first variant of each kernel that a row launches, by name."""
    return first_compiled_by(lambda: launch_all(row), row.arch)


# The launchers that take tiles of decode, of extend or of segments.
_WITH_TILES = (
    "launch_paged_decode",
    "launch_storing_decode",
    "launch_paged_extend",
    "launch_segment_decode",
    "launch_segment_extend",
)


class LaunchedTiles(NamedTuple):
    """The parameters that a launch is compiled with.

    tiles:         those of a tuning choice, the very object
    has_window:    true if tokens see a limited number of keys
    merges_within: true if decode adds up parts in its own launch
    """

    tiles: Any
    has_window: bool
    merges_within: bool


@functools.cache
def launched_tiles(row: Row) -> tuple[LaunchedTiles, ...]:
    """Returns the parameters of a row's kernels over pages, launch by launch, without compiling them."""
    found: list[LaunchedTiles] = []

    def noting(launcher: Callable[..., None]) -> Callable[..., None]:
        def note(*args: Any, **options: Any) -> None:
            has_window = options["scores"].visibility.windowed
            found.append(LaunchedTiles(options["tiles"], has_window, getattr(options["cut"], "merge_group", 0) > 0))
            launcher(*args, **options)

        return note

    with ExitStack() as stack:
        for name in _WITH_TILES:
            stack.enter_context(patch.object(triton_launches, name, noting(getattr(triton_launches, name))))
        stack.enter_context(observe_launches(lambda thunk: None))
        launch_all(row)
    return tuple(found)
