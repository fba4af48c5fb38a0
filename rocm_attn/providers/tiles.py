"""The tile sizes of a problem's kernels: those that the user has measured on this GPU, else those of the tables."""

import math
from dataclasses import replace
from typing import TypedDict

import torch

from rocm_attn.kernels.attention.cuts import CutByRows, DecodeCut, ExtendCut
from rocm_attn.kernels.tuning.cdna_tiles import cdna_tiles, key_blocks
from rocm_attn.kernels.tuning.decode_tiles import decode_tiles, others_of
from rocm_attn.kernels.tuning.extend_tiles import extend_choices
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles, hopper_tiles
from rocm_attn.kernels.tuning.latent_tiles import (
    HOPPER_LATENT_TILES,
    HopperLatentTiles,
    LatentTiles,
    latent_decode_tiles,
    latent_extend_tiles,
)
from rocm_attn.kernels.tuning.measured import AnyTiles, MeasuredLayer, MeasuredTileChoice, TileTable
from rocm_attn.kernels.tuning.tiles import (
    ANY_ROWS,
    CdnaTiles,
    CodeKind,
    DecodeTiles,
    ExtendTileChoice,
    ExtendTiles,
    NoTiles,
)
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem, Scales


class _Shape(TypedDict):
    gqa_ratio: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    codes: CodeKind


def codes_of(problem: Problem) -> CodeKind:
    """The form of codes that the choice of tiles depends on, in addition to arch and shape."""
    if problem.kv_encoding is KVEncoding.LIKE_Q:
        return CodeKind.NONE
    return CodeKind.BY_TOKEN if problem.kv_scales is Scales.TOKEN else CodeKind.BY_ROW


def layer_of(problem: Problem) -> MeasuredLayer:
    """The properties of a problem that the time of its kernels depends on."""
    return MeasuredLayer(
        num_q_heads=problem.num_q_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=str(problem.dtype).removeprefix("torch."),
        kv_encoding=problem.kv_encoding.name,
        kv_scales=problem.kv_scales.name,
        page_size=problem.page_size,
        window_left=problem.window_left,
        soft_cap=problem.logits_soft_cap > 0,
        sinks=problem.has_sinks,
        alibi=problem.has_alibi_slopes,
        causal=problem.causal,
    )


def measured_choice(
    table: TileTable, problem: Problem, target: Target, max_rows: int = ANY_ROWS
) -> MeasuredTileChoice | None:
    """The target's row for a problem, if it has one. max_rows: for EXTEND, the bound of the table's choice"""
    if not target.measured:
        return None
    layer = layer_of(problem)
    return next((choice for choice in target.measured if choice.serves(table, layer, max_rows)), None)


def decode_tiles_of(problem: Problem, target: Target) -> DecodeTiles:
    """The tiles of paged decode. Raises NoTiles."""
    static = decode_tiles(target.arch, **_shape(problem))
    tiles = _or_measured(static, measured_choice(TileTable.DECODE, problem, target))
    return replace(tiles, merge_group=0) if tiles.merge_group and not target.orders_by_barriers else tiles


def cdna_tiles_of(problem: Problem, target: Target) -> CdnaTiles:
    """The tiles of CDNA decode. Raises NoTiles."""
    static = cdna_tiles_of_table(problem, target.arch)
    choice = measured_choice(TileTable.CDNA_DECODE, problem, target)
    if choice is None:
        return static
    assert isinstance(choice.tiles, CdnaTiles), "a row's tiles are those of its table"
    allowed = key_blocks(target.arch, problem.page_format.encoding)
    if choice.tiles.key_block not in allowed:
        raise NoTiles(
            f"its measured tiles have blocks of {choice.tiles.key_block} keys, and {target.arch} takes "
            f"{' or '.join(map(str, allowed))}"
        )
    return choice.tiles


def cdna_tiles_of_table(problem: Problem, arch: str) -> CdnaTiles:
    """The tiles of CDNA decode from the table, without measured ones. Raises NoTiles."""
    return cdna_tiles(
        arch,
        num_kv_heads=problem.num_kv_heads,
        gqa_ratio=problem.gqa_ratio,
        head_dim=problem.head_dim,
        encoding=problem.page_format.encoding,
        scales=problem.kv_scales,
        windowed=problem.window_left != UNLIMITED_WINDOW,
    )


def extend_choices_of(problem: Problem, target: Target) -> tuple[ExtendTileChoice, ...]:
    """The rows of paged extend; see `extend_choices`. Raises NoTiles."""
    return tuple(
        replace(
            choice,
            tiles=_or_measured(choice.tiles, measured_choice(TileTable.EXTEND, problem, target, choice.max_rows)),
        )
        for choice in extend_choices_of_table(problem, target)
    )


def extend_choices_of_table(problem: Problem, target: Target) -> tuple[ExtendTileChoice, ...]:
    """Like `extend_choices_of`, but without measured choices: for masked steps, with which none was measured."""
    sides = problem.window_left, problem.window_right
    window = ANY_ROWS if UNLIMITED_WINDOW in sides else sum(sides) + 1
    return extend_choices(target.arch, **_shape(problem), window=window)


def latent_decode_tiles_of(problem: Problem, target: Target) -> LatentTiles:
    """The tiles of latent decode with one new token. Raises NoTiles."""
    static = latent_decode_tiles_of_table(problem, target, 1)
    return _or_measured(static, measured_choice(TileTable.LATENT_DECODE, problem, target))


def latent_decode_tiles_of_table(problem: Problem, target: Target, most: int) -> LatentTiles:
    """The tiles of latent decode with up to `most` new tokens per sequence, without measured ones. Raises NoTiles."""
    return latent_decode_tiles(
        target.arch,
        num_rows=problem.num_q_heads * most,
        dims=(problem.head_dim, problem.v_head_dim),
        dtype=problem.dtype,
        is_coded=problem.page_format.encoding.is_fp8,
    )


def latent_extend_tiles_of(problem: Problem, target: Target) -> LatentTiles:
    """The tiles of latent extend. Raises NoTiles."""
    static = latent_extend_tiles_of_table(problem, target)
    return _or_measured(static, measured_choice(TileTable.LATENT_EXTEND, problem, target))


def latent_extend_tiles_of_table(problem: Problem, target: Target) -> LatentTiles:
    """The tiles of latent extend, without measured ones. Raises NoTiles."""
    return latent_extend_tiles(
        target.arch,
        dims=(problem.head_dim, problem.v_head_dim),
        dtype=problem.dtype,
        is_coded=problem.page_format.encoding.is_fp8,
    )


def hopper_tiles_of(problem: Problem, target: Target) -> HopperTiles:
    """The tiles of extend for Hopper, for a problem within its limits."""
    is_coded = problem.kv_encoding is not KVEncoding.LIKE_Q
    static = hopper_tiles(problem.head_dim, problem.v_head_dim, problem.page_size, coded=is_coded)
    return _or_measured(static, measured_choice(TileTable.HOPPER_EXTEND, problem, target))


def hopper_latent_tiles_of(problem: Problem, target: Target) -> HopperLatentTiles:
    """The tiles of latent decode for Hopper with one new token."""
    return _or_measured(HOPPER_LATENT_TILES, measured_choice(TileTable.HOPPER_LATENT_DECODE, problem, target))


def _shape(problem: Problem) -> _Shape:
    return {
        "gqa_ratio": problem.gqa_ratio,
        "num_kv_heads": problem.num_kv_heads,
        "head_dim": problem.head_dim,
        "v_head_dim": problem.v_head_dim,
        "dtype": problem.dtype,
        "codes": codes_of(problem),
    }


def _or_measured(static: AnyTiles, choice: MeasuredTileChoice | None) -> AnyTiles:
    if choice is None:
        return static
    assert isinstance(choice.tiles, type(static)), "a row's tiles are those of its table"
    return choice.tiles


def decode_cut_of(problem: Problem, target: Target, tiles: DecodeTiles) -> DecodeCut:
    """The cut of decode of a problem, over as many programs as a target runs at once."""
    cut = _decode_cut(problem, target, tiles)
    # Rows of a window are shared by no programs: each has one to itself with any tiles.
    is_windowed = problem.window_left != UNLIMITED_WINDOW
    others = (each for each in others_of(tiles) if each.most == math.inf or not is_windowed)
    cuts = ((each, _decode_cut(problem, target, each.tiles)) for each in others)
    by_rows = (CutByRows(own, each.tiles, each.least * own.programs, each.most * own.programs) for each, own in cuts)
    return replace(cut, others=tuple(by_rows))


def extend_cut(problem: Problem, target: Target, tiles: ExtendTiles, *, causal: bool, min_q_len: int = 1) -> ExtendCut:
    """The cut of extend steps, with the longest rows shared out if the tiles say so.

    causal: True if no token sees a later one
    """
    return ExtendCut.of(tiles, gqa_ratio=problem.gqa_ratio, causal=causal, min_q_len=min_q_len).shared_by(
        tiles,
        compute_units=target.compute_units,
        heads=(problem.num_kv_heads, problem.gqa_ratio),
        window_left=problem.window_left,
    )


def _decode_cut(problem: Problem, target: Target, tiles: DecodeTiles) -> DecodeCut:
    return DecodeCut.of(
        tiles,
        num_kv_heads=problem.num_kv_heads,
        programs=target.compute_units * tiles.programs_per_cu,
        window_left=problem.window_left,
    )
