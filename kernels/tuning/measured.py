"""Tile choices that were measured on one GPU, for layers of one geometry: the results of `rocm-attn tune`.

A measured choice replaces the table's choice for the layer that it was measured with, and for no other one: it is a
fact about that layer and GPU. Tiles of masked steps, of deterministic attention and of sparse attention never are.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeVar

from rocm_attn.kernels.tuning.cdna_tiles import KEY_BLOCKS
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles, LatentTiles
from rocm_attn.kernels.tuning.tiles import (
    ANY_ROWS,
    CdnaTiles,
    DecodeTiles,
    ExtendTiles,
    equal_columns,
    next_power_of_2,
)

Tiles = DecodeTiles | ExtendTiles | LatentTiles | HopperTiles | HopperLatentTiles
AnyTiles = TypeVar("AnyTiles", DecodeTiles, ExtendTiles, LatentTiles, HopperTiles, HopperLatentTiles)

_WARPS = (1, 2, 4, 8, 16)
_LARGEST_BLOCK = 256


class TileTable(enum.Enum):
    """The table that a row of tiles belongs to."""

    DECODE = "decode"
    CDNA_DECODE = "cdna_decode"
    EXTEND = "extend"
    HOPPER_EXTEND = "hopper_extend"
    LATENT_DECODE = "latent_decode"
    LATENT_EXTEND = "latent_extend"
    HOPPER_LATENT_DECODE = "hopper_latent_decode"

    @property
    def tiles(self) -> type[Tiles]:
        """The class of its tiles."""
        classes: dict[TileTable, type[Tiles]] = {
            TileTable.DECODE: DecodeTiles,
            TileTable.CDNA_DECODE: CdnaTiles,
            TileTable.EXTEND: ExtendTiles,
            TileTable.HOPPER_EXTEND: HopperTiles,
            TileTable.HOPPER_LATENT_DECODE: HopperLatentTiles,
        }
        return classes.get(self, LatentTiles)

    @property
    def is_decode(self) -> bool:
        """True if its rows are for steps with one new token per sequence."""
        return "decode" in self.value

    @property
    def rivals(self) -> tuple[TileTable, ...]:
        """Itself, and the others whose kernels take the same steps: only one row of theirs serves a layer."""
        decodes = TileTable.DECODE, TileTable.CDNA_DECODE
        return decodes if self in decodes else (self,)


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """The values that a layer's kernel is compiled for and time depends on; plain ones, which a file can hold.

    dtype:       of q, by torch's name without "torch."
    kv_encoding: how K and V are encoded, and kv_scales which elements share a scale; names of members of their enums
    soft_cap, sinks, alibi, causal: whether the layer has them
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    kv_encoding: str
    kv_scales: str
    page_size: int
    window_left: int
    soft_cap: bool
    sinks: bool
    alibi: bool
    causal: bool

    def __str__(self) -> str:
        names = ("soft_cap", "sinks", "alibi")
        extras = [name.replace("_", " ") for name in names if getattr(self, name)]
        extras += [f"window of {self.window_left}"] if self.window_left >= 0 else []
        extras += [] if self.causal else ["not causal"]
        extras += [f"{self.kv_encoding} by {self.kv_scales}"] if self.kv_scales != "NONE" else []
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        heads = f"{self.num_q_heads} over {self.num_kv_heads} heads of {dims}"
        return ", ".join([heads, self.dtype, f"pages of {self.page_size}", *extras])


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Medians at one shape of a step (sequences x cached + new tokens): of the choice in use, of the measured one."""

    shape: str
    in_use_us: float
    us: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a measured choice.

    device, compute_units: the GPU; arch and triton must match those of a GPU that the row serves
    rocm:     of torch's build, or CUDA's release; software is this package's version, commit the checkout's
    date:     ISO 8601, UTC
    shapes:   the timed steps
    samples:  of each of the two, taken in turn
    gain:     in time over all shapes, as a fraction of that of the choice in use; low and high are quartiles
    spilled:  registers that the compiler keeps in memory
    """

    device: str
    arch: str
    compute_units: int
    triton: str
    torch: str
    rocm: str
    software: str
    commit: str
    date: str
    shapes: tuple[ShapeTimes, ...]
    samples: int
    gain: float
    gain_low: float
    gain_high: float
    spilled: int


@dataclass(frozen=True, slots=True)
class MeasuredTileChoice:
    """Tiles that serve a layer on GPUs of an arch, with one release of Triton.

    max_rows: for EXTEND: the row's steps are those of the table's choice with that bound; ANY_ROWS elsewhere
    """

    table: TileTable
    layer: MeasuredLayer
    max_rows: int
    tiles: Tiles
    measured: Provenance

    def serves(self, table: TileTable, layer: MeasuredLayer, max_rows: int = ANY_ROWS) -> bool:
        """True if it is the row of a layer."""
        return (self.table, self.layer, self.max_rows) == (table, layer, max_rows)

    def origin(self) -> str:
        """The row's origin, in words."""
        of = self.measured
        return (
            f"measured on {of.device} ({of.arch}, {of.compute_units} units) with Triton {of.triton}, commit "
            f"{of.commit}, {of.date}: {of.gain:.1%} ({of.gain_low:.1%} to {of.gain_high:.1%}) less time than the row "
            f"of the table at {', '.join(times.shape for times in of.shapes)}"
        )


# The value of MeasuredLayer.kv_encoding if elements are in q's dtype.
_NOT_CODED = "LIKE_Q"


def refusal(table: TileTable, tiles: Tiles, layer: MeasuredLayer) -> str:
    """Returns why no kernel takes these tiles for a layer; empty if, as far as is known without it, one does."""
    if type(tiles) is not table.tiles:
        return f"tiles of {table.value} are {table.tiles.__name__}, not {type(tiles).__name__}"
    wrong = _wrong_numbers(tiles)
    if wrong:
        return "; ".join(wrong)
    if isinstance(tiles, CdnaTiles):
        return _cdna_refusal(tiles, layer)
    if isinstance(tiles, DecodeTiles):
        return _decode_refusal(tiles, layer)
    if isinstance(tiles, ExtendTiles):
        return _extend_refusal(tiles, layer)
    if isinstance(tiles, HopperTiles):
        return _hopper_refusal(tiles, layer)
    if isinstance(tiles, HopperLatentTiles):
        return _hopper_latent_refusal(tiles)
    return "what is read in pairs has V's columns in two parts, not wide" if tiles.paired and tiles.wide else ""


_CDNA_BLOCKS = tuple(sorted({keys for of_arch in KEY_BLOCKS.values() for keys in of_arch}))


def _wrong_numbers(tiles: Tiles) -> list[str]:
    """Fields that no kernel accepts, with the allowed values, in words; those of tiles within tiles too."""
    blocks, registers = _powers(16, _LARGEST_BLOCK), (range(24, 241, 8), "a multiple of 8 from 24 to 240")
    fields: dict[tuple[str, ...], tuple[tuple[int, ...] | range, str]] = {
        ("query_rows",): blocks,
        ("key_block",): (_CDNA_BLOCKS, " or ".join(map(str, _CDNA_BLOCKS))) if isinstance(tiles, CdnaTiles) else blocks,
        ("share_block",): ((0, *blocks[0]), f"0 or {blocks[1]}"),
        ("dim_block", "v_dim_block"): ((0, *_powers(16, 512)[0]), "0 or a power of two from 16 to 512"),
        ("num_warps",): (_WARPS, "1, 2, 4, 8 or 16"),
        ("heads_per_row",): _numbers(1, 16),
        ("chains",): ((1, 2), "1 or 2"),
        ("head_blocks",): _numbers(1, 64),
        ("merge_group",): ((0, *range(8, 1025)), "0 or 8 to 1024"),
        ("programs_per_cu",): _numbers(0 if isinstance(tiles, ExtendTiles) else 1, 32),
        ("row_cost",): _numbers(0 if getattr(tiles, "row_end", 0) else 1, 64),
        ("row_end", "whole_blocks"): _numbers(0, 64),
        ("waves_per_eu", "value_tiles"): _numbers(0, 8),
        ("max_registers",): ((0, *range(16, 256)), "0 or 16 to 255"),
        ("row_keys", "split_keys", "alike_keys", "open_middle"): _numbers(0, 1 << 16),
        ("registers", "score_registers", "loader_registers"): registers,
        ("decoder_registers",): ((0, *registers[0]), f"0 or {registers[1]}"),
        ("code_tiles",): ((0, *range(2, 9)), "0 or 2 to 8"),
        ("powers_by_products",): _numbers(0, 4),
        ("segment_len", "most_segments"): ((0,), "0 except in deterministic attention"),
        ("num_stages", "diagonal_stages", "share_stages", "merge_stages"): _numbers(1, 8),
    }
    allowed = {name: of for names, of in fields.items() for name in names}
    given = {name: getattr(tiles, name) for name in type(tiles).__dataclass_fields__}
    within = [wrong for each in given.values() if isinstance(each, Tiles) for wrong in _wrong_numbers(each)]
    own = {name: allowed[name] for name in given if name in allowed}
    return within + [f"{name} {given[name]} is not {of[1]}" for name, of in own.items() if given[name] not in of[0]]


def _powers(first: int, last: int) -> tuple[tuple[int, ...], str]:
    found = range(first.bit_length() - 1, last.bit_length())
    return tuple(1 << n for n in found), f"a power of two from {first} to {last}"


def _numbers(first: int, last: int) -> tuple[range, str]:
    return range(first, last + 1), f"{first} to {last}"


def _decode_refusal(tiles: DecodeTiles, layer: MeasuredLayer) -> str:
    heads = tiles.heads_per_row
    ratio = layer.num_q_heads // layer.num_kv_heads
    if tiles.paired and tiles.transposed:
        return "codes that are read in pairs are not transposed"
    if tiles.dim_block and tiles.paired:
        return "blocks of columns go with no pairs of codes"
    if tiles.dim_block and heads > 1 and heads * layer.head_dim > 2 * tiles.dim_block:
        return f"{heads} heads a row are two blocks of columns at most, and not of {tiles.dim_block}"
    if heads > 1 and (tiles.head_blocks > 1 or layer.head_dim != layer.v_head_dim or layer.num_kv_heads % heads):
        return f"{heads} KV heads a row go with a multiple of {heads} of them, of one dim, in one block"
    is_power = layer.head_dim == next_power_of_2(layer.head_dim)
    if heads > 1 and layer.kv_encoding != _NOT_CODED and (heads > 2 or not is_power):
        return "KV heads of codes are read as one two by two, of a dim that is a power of two"
    if tiles.head_blocks > ratio or tiles.q_rows(ratio) > 128:
        return f"{ratio} query heads of a KV head in {tiles.head_blocks} blocks make rows of none or of more than 128"
    return _dim_block_refusal(tiles.dim_block, layer)


def _cdna_refusal(tiles: CdnaTiles, layer: MeasuredLayer) -> str:
    """Only these numbers and blocks are searched."""
    searched = ("programs_per_cu", "row_cost", "row_end", "waves_per_eu")
    given = {name: getattr(tiles, name) for name in searched}
    heads = 2 if layer.head_dim == 64 else 1
    if tiles != CdnaTiles(tiles.key_block, 1, 1, heads_per_row=heads, **given):
        return f"decode for CDNA has one block in flight, one wave, {heads} KV heads a row, and nothing else changed"
    return ""


def _hopper_refusal(tiles: HopperTiles, layer: MeasuredLayer) -> str:
    searched = ("key_block", "num_stages", "dim_block", "row_keys", "split_keys", "alike_keys")
    given = {name: getattr(tiles.extend, name) for name in searched}
    if tiles.extend != ExtendTiles(128, num_warps=4, programs_per_cu=1, merge_stages=4, **given):
        return "extend for Hopper has 128 rows in groups of four warps, and a cut that differs in nothing else"
    if {layer.kv_encoding != _NOT_CODED} != {tiles.code_tiles > 0, tiles.decoder_registers > 0}:
        return "tiles of codes, and registers of a group that decodes them, are for pages of eight bits"
    if tiles.extend.key_block not in (64, 128) or tiles.value_keys not in (0, tiles.extend.key_block // 2):
        return "extend for Hopper has blocks of 64 or 128 keys, and tiles of V of all of them or half"
    if tiles.code_tiles and (tiles.value_keys or tiles.value_tiles):
        return "codes of V are decoded by key blocks"
    return "" if tiles.producer_registers >= 24 else f"{tiles.registers} registers leave too few for other warps"


def _hopper_latent_refusal(tiles: HopperLatentTiles) -> str:
    latent = tiles.latent
    given = {name: getattr(latent, name) for name in ("num_stages", "row_cost", "early", "even")}
    if latent.key_block not in (32, 64) or latent != LatentTiles(64, latent.key_block, num_warps=4, **given):
        return (
            "latent decode for Hopper has 64 rows and 32 or 64 keys in groups of four warps, and nothing else changed"
        )
    return "" if tiles.value_registers >= 24 else "too few registers are left to groups that add up values"


def _extend_refusal(tiles: ExtendTiles, layer: MeasuredLayer) -> str:
    heads = tiles.heads_per_row
    if heads > 1:
        fits = layer.num_q_heads // layer.num_kv_heads * heads <= tiles.query_rows and not tiles.dim_block
        if not fits or layer.num_kv_heads % heads or layer.kv_encoding != _NOT_CODED:
            return f"{heads} KV heads a row go with a multiple of {heads} of them without codes, in one block"
        if tiles.fills:
            return f"{heads} KV heads a row are one block of query heads, so fewer of them cannot fill a block"
    return _dim_block_refusal(tiles.dim_block, layer)


def _dim_block_refusal(dim_block: int, layer: MeasuredLayer) -> str:
    if dim_block and equal_columns(layer.head_dim, dim_block) != equal_columns(layer.v_head_dim, dim_block):
        return f"blocks of {dim_block} columns are not as wide in K as in V"
    return ""
