"""The triton provider's sparse kernels: an indexer over paged keys, and attention over a selection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.attention import limits
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.page_format import RECORDS, SCALES_BESIDE_ROWS
from rocm_attn.kernels.latent import limits as latent_limits
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.sparse.arguments import IndexArgs, Indexing, SelectedArgs, SelectedKeys
from rocm_attn.kernels.sparse.cuts import segment_cut, select_words, selected_words
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles, SelectedTiles
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.sparse_tiles import (
    CDNA_MOST_KEYS,
    HOPPER_RECORD_TILES,
    HOPPER_SELECTED_TILES,
    IndexTiles,
    cdna_selected_tiles,
    index_tiles,
    selected_segment_tiles,
    selected_tiles,
)
from rocm_attn.machine.target import Target
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys, Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.contract import NO_SCHEDULE, Bind, Limits, PoolSize, Schedule, StepBounds
from rocm_attn.providers.sparse import BoundSelected, IndexerEntry, IndexLimits, SelectedKeysEntry, every_row
from rocm_attn.providers.tiles import codes_of
from rocm_attn.providers.triton_cdna_latent import LIMITS as CDNA_LATENT_LIMITS
from rocm_attn.providers.triton_cdna_latent import check_codes
from rocm_attn.providers.triton_entries import ARCHS, deterministic_entry, triton_entry
from rocm_attn.providers.triton_hopper import TRITONS
from rocm_attn.providers.triton_later import cdna_launches, hopper_launches, triton_launches

_DTYPES = limits.DTYPES


@dataclass(frozen=True, slots=True)
class TritonIndexer:
    """Scores and top-k, for as many tokens at a time as scratch holds.

    tiles:         for queries of the layer's dtype
    coded_q_tiles: for queries of eight bits
    max_kv_len:    of a sequence, whole pages; the length of a line of scores
    compute_units: of the device
    """

    indexing: Indexing
    tiles: IndexTiles
    coded_q_tiles: IndexTiles
    max_kv_len: int
    compute_units: int

    def describe(self) -> str:
        return (
            f"triton.indexer({self.indexing}, {self.tiles}, coded_q_tiles={self.coded_q_tiles}, "
            f"max_kv_len={self.max_kv_len}, compute_units={self.compute_units})"
        )

    def workspace_words(self, shape: PaddedShape) -> int:
        return select_words(shape.num_tokens, self.max_kv_len, self.indexing)

    def select(self, args: IndexArgs, selection: SelectedKeys, workspace: Tensor) -> None:
        tiles = self.coded_q_tiles if args.q.dtype.itemsize == 1 else self.tiles
        programs = self.compute_units * tiles.programs_per_cu
        triton_launches.launch_select(
            args, selection, workspace, indexing=self.indexing, tiles=tiles, programs=programs
        )


@dataclass(frozen=True, slots=True)
class TritonSelected:
    """Attention over a selection, cut so that few tokens fill the device too. programs: target number on the device"""

    problem: Problem
    keys: int
    tiles: SelectedTiles
    programs: int

    def describe(self) -> str:
        return f"triton.selected({self.problem}, {self.tiles}, programs={self.programs})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return selected_words(
            shape.num_tokens,
            self.keys,
            heads=(self.problem.num_kv_heads, self.problem.gqa_ratio),
            tiles=self.tiles,
            programs=self.programs,
            v_head_dim=self.problem.v_head_dim,
        )

    def attend(self, args: SelectedArgs) -> None:
        triton_launches.launch_selected_attention(
            args, scale=self.problem.scale, tiles=self.tiles, programs=self.programs
        )


@dataclass(frozen=True, slots=True)
class HopperSelected(TritonSelected):
    """The same by Hopper's own kernel. registers: of its warp groups, whose other tiles are `tiles`"""

    registers: HopperLatentTiles

    def describe(self) -> str:
        return f"triton.hopper_selected({self.problem}, {self.registers}, programs={self.programs})"

    def attend(self, args: SelectedArgs) -> None:
        hopper_launches.launch_hopper_selected(
            args, scale=self.problem.scale, tiles=self.registers, programs=self.programs
        )


@dataclass(frozen=True, slots=True)
class CdnaSelected(TritonSelected):
    """The same over latent pages by CDNA's own kernel."""

    arch: str

    def describe(self) -> str:
        return f"triton.cdna_selected({self.problem}, {self.arch}, {self.tiles}, programs={self.programs})"

    def attend(self, args: SelectedArgs) -> None:
        cdna_launches.launch_cdna_selected(
            args, arch=self.arch, scale=self.problem.scale, tiles=self.tiles, programs=self.programs
        )


@dataclass(frozen=True, slots=True)
class TritonEveryRow:
    """Attention of every kind of step to all rows that a token sees, each token for itself.

    name:     of the kernel
    selected: attention over a selection, of as many rows as a token may see
    """

    name: str
    selected: AnySelected
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def describe(self) -> str:
        return f"{self.name}({self.selected.describe()}, keys={self.selected.keys})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return self.selected.workspace_words(shape)

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.selected.attend(every_row(args, step, bounds, self.selected.keys))


@dataclass(frozen=True, slots=True)
class TritonSelectedSegments:
    """Like `TritonSelected`, but cut at absolute places: a token that selects all its keys gets deterministic bits."""

    problem: Problem
    keys: int
    tiles: SegmentTiles
    by_pairs: bool

    def describe(self) -> str:
        return f"triton.selected_segments({self.problem}, {self.tiles})"

    def workspace_words(self, shape: PaddedShape) -> int:
        cut = segment_cut(self.keys, heads=(self.problem.num_kv_heads, self.problem.gqa_ratio), tiles=self.tiles)
        return cut.words(shape.num_tokens, self.problem.v_head_dim)

    def attend(self, args: SelectedArgs) -> None:
        triton_launches.launch_selected_segments(
            args, scale=self.problem.scale, tiles=self.tiles, by_pairs=self.by_pairs
        )


AnySelected = TritonSelected | TritonSelectedSegments


def _bind_indexer(indexer: Indexer, problem: Problem, target: Target, pool: PoolSize) -> TritonIndexer:
    key_dtype = indexer.key_encoding.over(problem.dtype).dtype
    tiles, coded_q_tiles = (
        index_tiles(target.arch, heads=indexer.num_heads, dim=indexer.head_dim, key_dtype=key_dtype, coded_q=coded_q)
        for coded_q in (False, True)
    )
    max_kv_len = round_up(pool.max_kv_len, problem.page_size)
    return TritonIndexer(indexer.indexing, tiles, coded_q_tiles, max_kv_len, target.compute_units)


def _every_row(name: str, bind_selected: Callable[[Problem, Target, int], AnySelected]) -> Bind:
    """Returns a function that binds a kernel. bind_selected: binds attention over a selection of that number of rows"""

    def bind(problem: Problem, target: Target, pool: PoolSize) -> TritonEveryRow:
        return TritonEveryRow(f"triton.{name}", bind_selected(problem, target, _most_rows(problem, pool)))

    return bind


def _most_rows(problem: Problem, pool: PoolSize) -> int:
    """Rows that a token of the longest sequence sees."""
    rows = round_up(pool.max_kv_len, problem.page_size) // problem.row.tokens
    return rows if problem.window_left == UNLIMITED_WINDOW else min(rows, problem.window_left + 1)


def _selected(problem: Problem, target: Target, keys: int) -> TritonSelected:
    tiles = selected_tiles(
        target.arch,
        gqa_ratio=problem.gqa_ratio,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
        is_coded=problem.kv_encoding is not KVEncoding.LIKE_Q,
        is_record=problem.page_format.record is not None,
    )
    return TritonSelected(problem, keys, tiles, target.compute_units * tiles.programs_per_cu)


def _hopper(problem: Problem, target: Target, keys: int) -> HopperSelected:
    registers = HOPPER_SELECTED_TILES if problem.page_format.record is None else HOPPER_RECORD_TILES
    return HopperSelected(problem, keys, registers.latent, target.compute_units, registers)


def _cdna(problem: Problem, target: Target, keys: int) -> CdnaSelected:
    """Binds CDNA's own kernel. Raises NoTiles for codes that the arch's hardware does not read."""
    check_codes(problem, target)
    is_record = problem.page_format.record is not None
    tiles = cdna_selected_tiles(target.arch, problem.gqa_ratio, is_record=is_record)
    programs = target.compute_units * tiles.programs_per_cu
    return CdnaSelected(problem, keys, tiles, programs, target.arch)


def _cdna_refusals(indexing: Indexing) -> list[str]:
    """The reasons for which CDNA's own kernel does not serve selections."""
    reasons = []
    if indexing.unit_tokens != 1:
        reasons.append(f"it selects single tokens, not units of {indexing.unit_tokens}")
    if indexing.width > CDNA_MOST_KEYS:
        reasons.append(f"a token selects {indexing.width} keys; at most {CDNA_MOST_KEYS} are allowed")
    return reasons


def _segments(problem: Problem, target: Target, keys: int) -> TritonSelectedSegments:
    tiles, by_pairs = selected_segment_tiles(
        target.arch,
        dims=(problem.head_dim, problem.v_head_dim),
        dtype=problem.dtype,
        codes=codes_of(problem),
        is_latent=problem.pool is PoolKind.LATENT,
    )
    return TritonSelectedSegments(problem, keys, tiles, by_pairs)


def _keys(problem: Problem) -> int:
    """Rows that a selection of the layer has room for."""
    assert not isinstance(problem.indexer, AllKeys)
    indexing = problem.indexer.indexing
    return indexing.width * indexing.unit_tokens // problem.row.tokens


INDEXER_ENTRIES = (
    IndexerEntry(
        name="triton.indexer",
        limits=IndexLimits(
            archs=ARCHS,
            dtypes=_DTYPES,
            head_dim=(1, limits.MAX_HEAD_DIM),
            num_heads=128,
            whole_blocks=True,
            encodings=tuple(KVEncoding),
            scales=(Scales.NONE, Scales.LAYER, Scales.TOKEN),
        ),
        batch_invariant=True,
        bind=_bind_indexer,
    ),
)

_SELECTED_LIMITS = Limits(
    archs=ARCHS,
    dtypes=_DTYPES,
    head_dim=(1, 576),
    v_head_dim=(1, 512),
    page_size=(1, limits.MAX_PAGE_SIZE),
    max_gqa_ratio=limits.MAX_GQA_RATIO,
    sinks=True,
    pools=(PoolKind.SPLIT, PoolKind.LATENT),
    encodings=tuple(KVEncoding),
    scales=tuple(Scales),
    page_strides=True,
    row_tokens=(1, limits.MAX_PAGE_SIZE),
)

_HOPPER_LIMITS = replace(
    _SELECTED_LIMITS,
    archs=("sm_90",),
    dtypes=(torch.bfloat16, torch.float16),
    exact_dims=((576, 512),),
    max_gqa_ratio=latent_limits.MAX_HEADS,
    sinks=False,
    pools=(PoolKind.LATENT,),
    encodings=(KVEncoding.LIKE_Q,),
    scales=(Scales.NONE,),
    page_strides=False,
    row_tokens=(1, 1),
    # Rows are copied by 16 bytes.
    aligned_sides=True,
    tritons=TRITONS,
)
_HOPPER_RECORD_LIMITS = replace(
    _HOPPER_LIMITS, dtypes=(torch.bfloat16,), encodings=(KVEncoding.E4M3FN,), scales=(Scales.GROUP,), window=True
)

_CDNA_LIMITS = replace(
    CDNA_LATENT_LIMITS,
    sinks=True,
    encodings=(KVEncoding.LIKE_Q,),
    scales=(Scales.NONE,),
    non_causal=False,
    short_kv=False,
    page_strides=False,
    even_slots=True,
)
_CDNA_RECORD_LIMITS = replace(
    _CDNA_LIMITS,
    dtypes=(torch.bfloat16,),
    encodings=(KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ),
    scales=(Scales.GROUP,),
)


def _selection_entry(
    name: str, limits: Limits, bind: Callable[[Problem, Target, int], BoundSelected], **more: Any
) -> SelectedKeysEntry:
    """Returns a row of kernels. bind: the int is the number of rows that a selection of the layer has room for"""

    def bind_keys(problem: Problem, target: Target, pool: PoolSize) -> BoundSelected:
        return bind(problem, target, _keys(problem))

    return SelectedKeysEntry(f"triton.{name}", limits, bind_keys, **more)


_OF_CDNA: dict[str, Any] = {"serves": _cdna_refusals, "is_probed": True}
SELECTED_ENTRIES = (
    _selection_entry("hopper_selected", _HOPPER_LIMITS, _hopper),
    _selection_entry("hopper_selected_records", _HOPPER_RECORD_LIMITS, _hopper),
    _selection_entry("cdna_selected", _CDNA_LIMITS, _cdna, **_OF_CDNA),
    _selection_entry("cdna_selected_records", _CDNA_RECORD_LIMITS, _cdna, **_OF_CDNA),
    _selection_entry("selected", _SELECTED_LIMITS, _selected),
    _selection_entry(
        "selected_segments", replace(_SELECTED_LIMITS, scales=SCALES_BESIDE_ROWS), _segments, batch_invariant=True
    ),
)

_RECORD_LIMITS = replace(
    _SELECTED_LIMITS,
    dtypes=(torch.bfloat16, torch.float32),
    pools=(PoolKind.LATENT,),
    encodings=(KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ),
    scales=tuple(RECORDS),
    window=True,
)

_ROW_LIMITS = replace(
    _SELECTED_LIMITS,
    pools=(PoolKind.LATENT,),
    scales=SCALES_BESIDE_ROWS,
    row_tokens=(2, limits.MAX_PAGE_SIZE),
)

# Attention to all records, and to all rows of several tokens, which no other kernels of dense steps read.
EVERY_ROW_ENTRIES = tuple(
    entry(name, kind, of_rows, bind)
    for entry, name, of_rows, bind in (
        (triton_entry, "hopper_records", _HOPPER_RECORD_LIMITS, _every_row("hopper_records", _hopper)),
        (triton_entry, "records", _RECORD_LIMITS, _every_row("records", _selected)),
        (triton_entry, "rows", _ROW_LIMITS, _every_row("rows", _selected)),
        (deterministic_entry, "row_segments", _ROW_LIMITS, _every_row("row_segments", _segments)),
    )
    for kind in (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED)
)
