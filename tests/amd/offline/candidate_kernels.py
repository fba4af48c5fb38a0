"""Compiles a decode or extend kernel as the runtime would launch it, in any tiles."""

import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_attn.machine.target import known_target
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.tiles import decode_tiles_of, extend_cut
from rocm_attn.providers.triton import TritonDecode, TritonExtend, TritonStoringDecode
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.step_data import empty_step
from tests.amd.offline.compiling import AMD_ARCHS
from tests.amd.offline.matrix import Row
from tests.amd.offline.offline_driver import last_compiled_by

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
    return decode_tiles_of(row.problems[0], known_target(row.arch))


def plain_decode(row: Row) -> CompiledKernel:
    """Decode of the row's plain layer in the tiles that serve it."""
    return decode_kernels(row, chosen_tiles(row))["_decode_kernel"]


def decode_kernels(row: Row, tiles: DecodeTiles) -> dict[str, CompiledKernel]:
    """Decode and its merge, by name, for the row's plain layer."""
    return _kernels(row, TritonDecode(row.problems[0], scores_of(row.problems[0]), tiles, _decode_cut(row, tiles)))


def storing_decode(row: Row, tiles: DecodeTiles) -> CompiledKernel:
    """Decode that stores new K and V, for the row's plain layer."""
    kernel = _Storing(row.problems[0], scores_of(row.problems[0]), tiles, _decode_cut(row, tiles))
    return _kernels(row, kernel)["_decode_kernel"]


class _Storing(TritonStoringDecode):
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        heads = self.problem.num_kv_heads
        k, v = (args.q.new_empty(len(each), heads, each.shape[2]) for each in (args.q, args.out))
        self.store_and_attend(args, NewRows(k, v, step.slot_of_token, step.counts, null_page=True), step, bounds)


def extend_kernels(row: Row, tiles: ExtendTiles) -> dict[str, CompiledKernel]:
    """Extend that shares rows and its merge, by name, for the row's plain layer."""
    problem = row.problems[0]
    cut = extend_cut(problem, known_target(row.arch), tiles, causal=True)
    return _kernels(row, TritonExtend(problem, scores_of(problem), tiles, cut))


def _decode_cut(row: Row, tiles: DecodeTiles) -> DecodeCut:
    programs = known_target(row.arch).compute_units * tiles.programs_per_cu
    return DecodeCut.of(tiles, num_kv_heads=row.heads[1], programs=programs, window_left=-1)


def _kernels(row: Row, kernel: BoundKernel) -> dict[str, CompiledKernel]:
    data = empty_step(row.problems[0], BatchSpec.parse("16d256"), 1)
    names = "_decode_kernel", "_merge_kernel", "_extend_kernel", "_extend_merge_kernel"
    return last_compiled_by(lambda: data.layer(kernel)(), row.arch, names)
