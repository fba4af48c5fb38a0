"""The jobs of a search: for each kind of layer a row of each table, at the shapes of steps that the row serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.latent.limits import MOST_SPLIT_TOKENS
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice, Provenance, Tiles, TileTable
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, NoTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import AllKeys, PoolKind, Problem
from rocm_attn.providers.by_tokens import likely_q_len, serving
from rocm_attn.providers.select import select
from rocm_attn.providers.tiles import (
    decode_tiles_of,
    extend_choices_of_table,
    hopper_latent_tiles_of,
    hopper_tiles_of,
    latent_decode_tiles_of_table,
    latent_extend_tiles_of_table,
    layer_of,
)
from rocm_attn.providers.triton import TritonDecode
from rocm_attn.providers.triton_cdna import CdnaDecode, CdnaExtend
from rocm_attn.providers.triton_cdna_latent import CdnaLatentDecode
from rocm_attn.providers.triton_hopper import HopperExtend
from rocm_attn.providers.triton_hopper_latent import HopperLatentDecode
from rocm_lab.bench.batch_spec import BatchSpec

# Default shapes: decode of one long and of many sequences, a chunk of a prompt, many chunks, and verified drafts.
SHAPES = tuple(map(BatchSpec.parse, ("1d16k", "64d4k", "1x2k+6k", "8x512+4k", "64x5+2k")))


@dataclass(frozen=True, slots=True)
class TuneJob:
    """The search for one row.

    max_rows: see MeasuredTileChoice
    tiles:    tiles of the table's choice, from which candidates differ
    in_use:   tiles that serve if nothing is measured, with which candidates are compared: `tiles`, or another table's
              if another kernel comes first
    """

    table: TileTable
    problem: Problem
    max_rows: int
    tiles: Tiles
    in_use: Tiles
    shapes: tuple[BatchSpec, ...]

    @classmethod
    def of(cls, table: TileTable, problem: Problem, tiles: Tiles, shapes: tuple[BatchSpec, ...]) -> TuneJob:
        """A job for a row that serves by itself, in all steps."""
        return cls(table, problem, ANY_ROWS, tiles, tiles, shapes)

    def choice(self, tiles: Tiles, measured: Provenance) -> MeasuredTileChoice:
        """The row with these tiles, in this table or in the one that has tiles of this type."""
        table = next(table for table in self.table.rivals if type(tiles) is table.tiles)
        return MeasuredTileChoice(table, layer_of(self.problem), self.max_rows, tiles, measured)

    @property
    def kind(self) -> StepKind:
        """The kind of the steps that are timed."""
        return StepKind.DECODE if self.table.is_decode else StepKind.EXTEND

    def __str__(self) -> str:
        rows = "" if self.max_rows == ANY_ROWS else f", of steps with up to {self.max_rows} rows a KV head"
        return f"{self.table.value} of {layer_of(self.problem)}{rows}, at {', '.join(map(str, self.shapes))}"


def shapes_named(text: str) -> tuple[BatchSpec, ...]:
    """Parses the steps of --shapes, separated by commas. Raises BadSetting."""
    return tuple(dict.fromkeys(BatchSpec.parse(word.strip()) for word in text.split(",")))


def kind_of(batch: BatchSpec) -> StepKind:
    """The kind of a step whose row is searched: those of prompts alone have that of EXTEND."""
    return StepKind.EXTEND if batch.kind is StepKind.PREFILL else batch.kind


def jobs_of(
    problems: Iterable[Problem], target: Target, shapes: Sequence[BatchSpec]
) -> tuple[list[TuneJob], list[str]]:
    """The searches for layers on a target, and a sentence for each kind of layer, or shape, that has none."""
    jobs: list[TuneJob] = []
    left_out = []
    for problem in dict.fromkeys(problems):
        if problem.pool is PoolKind.VECTORIZED or not isinstance(problem.indexer, AllKeys):
            left_out.append(f"{layer_of(problem)}: only layers that attend to all keys of linear pages can be tuned")
            continue
        try:
            found = list(_jobs_of(problem, target, shapes))
        except NoTiles as missing:
            left_out.append(f"{layer_of(problem)}: {missing}")
            continue
        jobs += found
        # Latent steps with a few new tokens share their tiles with other steps, so they have none of their own to
        # search.
        searched = {shape for job in found for shape in job.shapes}
        left_out += [f"{layer_of(problem)}: no row is for {shape} alone" for shape in shapes if shape not in searched]
    return jobs, left_out


def _jobs_of(problem: Problem, target: Target, shapes: Sequence[BatchSpec]) -> Iterator[TuneJob]:
    decodes = tuple(shape for shape in shapes if kind_of(shape).decodes)
    extends = tuple(shape for shape in shapes if shape not in decodes)
    static = replace(target, measured=())
    if problem.pool is PoolKind.LATENT:
        chosen = select(problem, static, "triton")
        decode = chosen.kernel(StepKind.DECODE).bound
        if decodes and isinstance(decode, HopperLatentDecode):
            yield TuneJob.of(TileTable.HOPPER_LATENT_DECODE, problem, hopper_latent_tiles_of(problem, static), decodes)
        # CDNA's kernel is written for its tiles; a row of latent decode would take its place without a comparison.
        elif decodes and not isinstance(decode, CdnaLatentDecode):
            yield TuneJob.of(
                TileTable.LATENT_DECODE, problem, latent_decode_tiles_of_table(problem, target, 1), decodes
            )
        longer = tuple(shape for shape in extends if max(shape.q_len) > MOST_SPLIT_TOKENS)
        # Hopper's kernel has no rows for several new tokens.
        if longer and not isinstance(chosen.kernel(StepKind.EXTEND).bound, HopperLatentDecode):
            yield TuneJob.of(TileTable.LATENT_EXTEND, problem, latent_extend_tiles_of_table(problem, target), longer)
        return
    selection = select(problem, static, "triton")
    by_hopper: tuple[BatchSpec, ...] = ()
    if decodes and isinstance(selection.kernel(StepKind.DECODE).bound, HopperExtend):
        by_hopper = decodes
    elif decodes:
        yield from _decode_jobs(problem, static, decodes)
    bound = {shape: serving(selection.kernel(StepKind.EXTEND).bound, _padded(shape)) for shape in extends}
    by_hopper += tuple(shape for shape in extends if isinstance(bound[shape], HopperExtend))
    # The tiles of extend for CDNA are not searched.
    left = [shape for shape in extends if not isinstance(bound[shape], HopperExtend | CdnaExtend)]
    for choice in extend_choices_of_table(problem, target):
        of_choice = tuple(shape for shape in left if _choices(problem, shape) <= choice.max_rows)
        left = [shape for shape in left if shape not in of_choice]
        if of_choice:
            yield TuneJob(TileTable.EXTEND, problem, choice.max_rows, choice.tiles, choice.tiles, of_choice)
    if by_hopper:
        yield TuneJob.of(TileTable.HOPPER_EXTEND, problem, hopper_tiles_of(problem, static), by_hopper)


def _decode_jobs(problem: Problem, static: Target, shapes: tuple[BatchSpec, ...]) -> Iterator[TuneJob]:
    """Jobs for paged decode, after one for CDNA decode if that serves: both are compared with CDNA decode.

    Elsewhere candidates differ from the tiles of these numbers of rows, if all shapes are served by the same ones.
    """
    tiles = decode_tiles_of(problem, static)
    bound = select(problem, static, "triton").kernel(StepKind.DECODE).bound
    if not isinstance(bound, CdnaDecode):
        others = {bound.cut.other_of(shape.num_seqs) for shape in shapes} if isinstance(bound, TritonDecode) else {None}
        other = others.pop() if len(others) == 1 else None
        searched = tiles if other is None else other.tiles
        yield TuneJob(TileTable.DECODE, problem, ANY_ROWS, searched, tiles, shapes)
        return
    yield TuneJob.of(TileTable.CDNA_DECODE, problem, bound.tiles, shapes)
    yield TuneJob(TileTable.DECODE, problem, ANY_ROWS, tiles, bound.tiles, shapes)


def _choices(problem: Problem, shape: BatchSpec) -> int:
    """New tokens times query heads per KV head, computed by a kernel from a step's shape."""
    return likely_q_len(_padded(shape)) * problem.gqa_ratio


def _padded(shape: BatchSpec) -> PaddedShape:
    return PaddedShape(kind_of(shape), shape.num_seqs, shape.num_tokens)
