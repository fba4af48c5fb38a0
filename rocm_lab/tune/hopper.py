"""Candidates of the tiles of Hopper's kernels, from a description of the kernels: rings, registers, warp groups.

A layout is the part of the tiles that says how keys pass through shared memory. Every layout that fits shared memory
and a consumer's registers is ranked by a model of a step. The other fields are tried one at a time.

    step = max(matrix, powers) + PASSING + max(0, LATENCY - (steps in flight) * (matrix or powers))      clocks
    matrix = 128 rows * keys * (dim of K + dim of V) / 2048        products of an SM's four matrix units per clock
    powers = 128 rows * keys / 16                                  of its unit for special functions

The rates are those of NVIDIA's "H100 Tensor Core GPU Architecture" (2022). PASSING, of barriers and reductions, and
LATENCY, of a box from L2, are assumed: they rank layouts, and predict no time.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles, padded_dim
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles
from rocm_attn.kernels.tuning.tiles import equal_columns
from rocm_attn.problem import UNLIMITED_WINDOW, Problem

# Barriers, and gaps between allocations, in bytes.
_BARRIERS = 768
# Registers of a consumer's thread besides accumulators, scores and weights: addresses, rows, maxima and sums.
_OTHER_REGISTERS = 44
_MOST_REGISTERS = 240
_PASSING, _LATENCY = 300.0, 1500.0
_ROWS = 128
# Layouts whose predicted step takes this much more per key than the best one's are not tried, and no more than this
# many of the others are.
_UNLIKELY, _MOST_LAYOUTS = 1.25, 8
# The least registers of a thread of the warps that load, and of those that gather keys or decode codes.
_LEAST_PRODUCER = 24


class Layout(NamedTuple):
    """The way that keys pass through shared memory: fields of ExtendTiles and of HopperTiles."""

    key_block: int
    num_stages: int
    value_keys: int
    value_tiles: int
    code_tiles: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value)


def layout_of(tiles: HopperTiles) -> Layout:
    """The layout of tiles."""
    extend = tiles.extend
    return Layout(extend.key_block, extend.num_stages, tiles.value_keys, tiles.value_tiles, tiles.code_tiles)


def shared_bytes(tiles: HopperTiles, problem: Problem) -> int:
    """Shared memory of a program of extend, at most: q, both rings, and codes with their scales."""
    k, v, block = padded_dim(problem.head_dim), padded_dim(problem.v_head_dim), tiles.extend.key_block
    keys, values = tiles.extend.num_stages * block, tiles.value_stages * tiles.value_block
    codes = tiles.code_tiles * block * max(k, v) + 2 * keys * 4 * bool(tiles.code_tiles)
    return 2 * (_ROWS * k + keys * k + values * v) + codes + _BARRIERS


def registers_needed(tiles: HopperTiles, problem: Problem) -> int:
    """Registers of a consumer's thread: 64 rows of accumulators and scores in float32, weights in pairs, by 128."""
    return padded_dim(problem.v_head_dim) // 2 + tiles.extend.key_block // 2 + tiles.value_block // 4 + _OTHER_REGISTERS


def clocks_per_key(tiles: HopperTiles, problem: Problem) -> float:
    """The model's clocks of a key for a program."""
    block, dims = tiles.extend.key_block, padded_dim(problem.head_dim) + padded_dim(problem.v_head_dim)
    matrix, powers = _ROWS * block * dims / 2048, _ROWS * block / 16
    busy = max(matrix, powers) if tiles.overlaps else matrix + powers
    in_flight = min(tiles.extend.num_stages, tiles.value_stages * tiles.value_block / block) - 1
    return (busy + _PASSING + max(0.0, _LATENCY - in_flight * busy)) / block


def with_layout(tiles: HopperTiles, layout: Layout) -> HopperTiles:
    """Tiles with another layout. Raises ValueError if its rings exclude each other."""
    within = replace(tiles.extend, key_block=layout.key_block, num_stages=layout.num_stages)
    return replace(
        tiles,
        extend=within,
        value_keys=layout.value_keys,
        value_tiles=layout.value_tiles,
        code_tiles=layout.code_tiles,
    )


@functools.cache
def layouts(tiles: HopperTiles, problem: Problem, shared: int) -> tuple[Layout, ...]:
    """Layouts that fit, those that the model likes first. tiles: the other fields; shared: bytes of a program"""
    ranked: dict[Layout, float] = {}
    for layout in _all_layouts(is_coded=tiles.code_tiles > 0):
        try:
            given = with_layout(tiles, layout)
        except ValueError:
            continue
        fits = shared_bytes(given, problem) <= shared
        if fits and registers_needed(given, problem) <= _MOST_REGISTERS:
            ranked[layout] = clocks_per_key(given, problem)
    least = min(ranked.values(), default=0.0)
    # The model holds some layouts for equal; the one with fewer bytes leaves more of shared memory to L1.
    likely = sorted(ranked, key=lambda each: (round(ranked[each], 2), each.value_keys > 0, each.num_stages, each))
    return tuple(each for each in likely if ranked[each] <= _UNLIKELY * least)[:_MOST_LAYOUTS]


def _all_layouts(*, is_coded: bool) -> Iterator[Layout]:
    stages, codes = range(2, 7), (2, 4, 6) if is_coded else (0,)
    for key_block, num_stages, code_tiles in itertools.product((128, 64), stages, codes):
        yield Layout(key_block, num_stages, 0, 0, code_tiles)
        if not is_coded:
            yield from (Layout(key_block, num_stages, 0, tiles, 0) for tiles in range(2, num_stages))
            yield from (
                Layout(key_block, num_stages, key_block // 2, tiles, 0) for tiles in range(2, 2 * num_stages + 1)
            )


def extend_values(tiles: HopperTiles, problem: Problem, shared: int) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Values of fields that may be tried, those first that gained most for some row of the table."""
    yield "layout", layouts(tiles, problem, shared)
    yield "scales_seldom", (True, False)
    yield "alike_keys", (256, 384, 128, 0)
    yield "split_keys", (384, 512, 256)
    consumers = (200, 208, 216, 224) if tiles.code_tiles else (216, 224, 232, 240)
    yield "registers", consumers
    if tiles.code_tiles:
        yield "decoder_registers", (40, 48, 56, 64, 72)
    if problem.logits_soft_cap > 0:
        yield "powers_by_products", (0, 1, 2, 3)
    if problem.window_left != UNLIMITED_WINDOW:
        yield "open_middle", (0, problem.window_left + 1)
    yield "dim_block", _dim_blocks(problem.head_dim)
    if problem.v_head_dim != problem.head_dim:
        yield "v_dim_block", (0, *(block for block in (64, 128, 256) if block <= padded_dim(problem.v_head_dim)))
    yield "row_keys", (256, 128, 384)
    yield "overlaps", (True, False)


def latent_values() -> Iterator[tuple[str, tuple[object, ...]]]:
    """The same for latent decode: loads, weights and values have a warp group each, and two for values."""
    yield "score_registers", (112, 120, 128, 136, 144)
    yield "loader_registers", (32, 40, 48, 56, 72)
    yield "row_cost", (1, 2, 3, 4)
    yield "even", (True, False)
    yield "key_block", (32, 64)
    yield "num_stages", (2, 3, 4)


def latent_shared_bytes(tiles: HopperLatentTiles, problem: Problem) -> int:
    """Shared memory of a program of latent decode, at most: q, latents, weights, and factors and sums of rows."""
    latent = tiles.latent
    rows = latent.query_rows + latent.num_stages * latent.key_block
    return 2 * (rows * problem.head_dim + latent.query_rows * latent.key_block) + 2 * 4 * latent.query_rows


def fits(tiles: HopperTiles | HopperLatentTiles, problem: Problem, shared: int) -> bool:
    """True if a program's shared memory holds it, and registers are enough for its warp groups."""
    if isinstance(tiles, HopperLatentTiles):
        return latent_shared_bytes(tiles, problem) <= shared
    least = _LEAST_PRODUCER if problem.page_size % 16 == 0 or tiles.code_tiles else 40
    return shared_bytes(tiles, problem) <= shared and tiles.producer_registers >= least


def _dim_blocks(dim: int) -> tuple[int, ...]:
    """Blocks of columns that cut rows of a head differently."""
    found = {equal_columns(padded_dim(dim), block): block for block in (256, 128, 64, 0)}
    return tuple(found.values())
