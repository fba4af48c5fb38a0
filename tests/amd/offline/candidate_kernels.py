"""Compiles a decode or extend kernel as the runtime would launch it, in any tiles."""

import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows, Queries
from rocm_attn.kernels.attention.cuts import DecodeCut, ExtendCut
from rocm_attn.kernels.attention.decode import launch_paged_decode, launch_storing_decode
from rocm_attn.kernels.attention.extend import launch_paged_extend
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.tuning.decode_tiles import decode_tiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.scores import scores_of
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights
from tests.amd.offline.compiling import AMD_ARCHS
from tests.amd.offline.matrix import LARGE_POOL_BYTES, SMALL_POOL_BYTES, Row
from tests.amd.offline.offline_driver import compiled_by

_SEQS, _WIDTH = 16, 256
# For each decode row of 2-byte elements for gfx942 and gfx950 a layer of the widest heads that it serves.
DECODE_LAYERS = tuple(
    Row(arch, heads, dims, torch.bfloat16, page_size=16)
    for arch in AMD_ARCHS
    for heads, dims in (
        ((64, 8), (64, 64)),
        ((32, 8), (128, 128)),
        ((8, 4), (256, 256)),
        ((32, 1), (128, 128)),
        ((32, 1), (256, 256)),
    )
)


def chosen_tiles(row: Row) -> DecodeTiles:
    """Returns the tiles that the tuning choices give the layer's decode."""
    problem = row.problems[0]
    return decode_tiles(
        row.arch,
        gqa_ratio=problem.gqa_ratio,
        num_kv_heads=problem.num_kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
    )


def plain_decode(row: Row) -> CompiledKernel:
    """Decode of the row's plain layer in the tiles that serve it."""
    return decode_kernels(row, chosen_tiles(row))["_decode_kernel"]


def decode_kernels(row: Row, tiles: DecodeTiles) -> dict[str, CompiledKernel]:
    """Decode and its merge, by name, for the row's plain layer."""
    problem = row.problems[0]

    def launches() -> None:
        cut, args = _cut_and_args(row, problem, tiles)
        launch_paged_decode(args, scores=scores_of(problem), cut=cut, tiles=tiles)

    return {kernel.name: kernel for kernel in compiled_by(launches, row.arch)}


def storing_decode(row: Row, tiles: DecodeTiles) -> CompiledKernel:
    """Decode that stores new K and V, for the row's plain layer."""
    problem = row.problems[0]

    def launches() -> None:
        cut, args = _cut_and_args(row, problem, tiles)
        k, v = (torch.empty(_SEQS, problem.num_kv_heads, dim, dtype=row.dtype) for dim in row.dims)
        new = NewRows(k, v, torch.empty(_SEQS, dtype=torch.int32), torch.empty(4, dtype=torch.int32), null_page=True)
        launch_storing_decode(args, new, scores=scores_of(problem), cut=cut, tiles=tiles)

    return next(kernel for kernel in compiled_by(launches, row.arch) if kernel.name == "_decode_kernel")


def extend_kernels(row: Row, tiles: ExtendTiles) -> dict[str, CompiledKernel]:
    """Extend that shares rows and its merge, by name, for the row's plain layer."""
    problem = row.problems[0]

    def launches() -> None:
        heads = problem.num_kv_heads, problem.gqa_ratio
        cut = ExtendCut.of(tiles, gqa_ratio=problem.gqa_ratio).shared_by(
            tiles, compute_units=known_target(row.arch).compute_units, heads=heads, causal=True, window_left=-1
        )
        words = cut.partials_words(query_rows=tiles.query_rows, v_head_dim=problem.v_head_dim)
        args = _args(row, problem, _SEQS, cut.words(_SEQS, _SEQS), words)
        launch_paged_extend(args, scores=scores_of(problem), cut=cut, tiles=tiles)

    return {kernel.name: kernel for kernel in compiled_by(launches, row.arch)}


def _cut_and_args(row: Row, problem: Problem, tiles: DecodeTiles) -> tuple[DecodeCut, AttendArgs]:
    programs = known_target(row.arch).compute_units * tiles.programs_per_cu
    cut = DecodeCut.of(tiles, num_kv_heads=problem.num_kv_heads, programs=programs, window_left=problem.window_left)
    words = cut.partials_words(gqa_ratio=problem.gqa_ratio, v_head_dim=problem.v_head_dim, tiles=tiles)
    return cut, _args(row, problem, _SEQS, cut.words(_SEQS), words)


def _args(row: Row, problem: Problem, num_tokens: int, schedule_words: int, workspace_words: int) -> AttendArgs:
    """Arguments of one layer's attention of _SEQS sequences, over pages as launch_all of the matrix has them."""
    page_bytes = row.page_size * row.heads[1] * min(row.dims) * row.dtype.itemsize
    shape = ((LARGE_POOL_BYTES if row.is_large else SMALL_POOL_BYTES) // page_bytes + 1, row.page_size, row.heads[1])
    row_of_seq, kv_len, q_indptr = (torch.empty(size, dtype=torch.int32) for size in (_SEQS, _SEQS, _SEQS + 1))
    weights = _weights(problem)
    return AttendArgs(
        q=torch.empty(num_tokens, problem.num_q_heads, problem.head_dim, dtype=problem.dtype),
        pages=LayerPages.plain(
            torch.empty(*shape, problem.head_dim, dtype=problem.dtype),
            torch.empty(*shape, problem.v_head_dim, dtype=problem.dtype),
        ),
        table=torch.empty(_SEQS + 1, _WIDTH, dtype=torch.int32),
        queries=Queries(row_of_seq, kv_len, q_indptr, num_tokens, num_tokens // _SEQS, _WIDTH * row.page_size),
        out=torch.empty(num_tokens, problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype),
        lse=None,
        sinks=weights.sinks,
        slopes=weights.alibi_slopes,
        schedule=torch.empty(schedule_words, dtype=torch.int32),
        workspace=torch.empty(workspace_words),
    )


def _weights(problem: Problem) -> HeadWeights:
    if problem.has_sinks or problem.has_alibi_slopes:
        return HeadWeights.random(problem, torch.Generator())
    return NO_HEAD_WEIGHTS
