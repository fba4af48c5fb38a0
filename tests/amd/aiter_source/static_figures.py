"""Figures of AITER's Triton and Gluon kernels from the compiler and from the model of docs/amd_tuning.md.

They are compiled with the installed Triton, in the tiles that AITER's own wrappers choose. Nothing runs: launches of
compiled kernels do nothing, and tensors hold no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import BoundKernel, PoolSize, StepBounds
from rocm_lab.cost.static_figures import PeerFigures
from tests.amd.aiter_source.checkout import Checkout, imported
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.figures_of_kernels import busy_of, kernel_figures
from tests.amd.offline.hot_loop import hot_loop
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.offline_driver import offline
from tests.amd.offline.tile_candidates import Kind
from tests.amd.offline.tile_cost import PAIRS, Running, cost_of, programs_on_a_cu

# Steps whose lengths determine the tiles and splits of AITER's wrappers: kv_len and q_len of each sequence.
_DECODE = ((4096,) * 64, (1,) * 64)
_EXTEND = ((8192,) * 4, (2048,) * 4)
_NUM_PAGES = 64

# Kernels that attend -> the constant with the number of keys per iteration of the hot loop.
_KEYS = {
    "kernel_unified_attention_2d": "TILE_SIZE",
    "kernel_unified_attention_3d": "TILE_SIZE",
    "paged_attention_decode_sliding_window": "CONTEXT_PARTITION_SIZE",
    "paged_attention_decode_sliding_window_head_1": "CONTEXT_PARTITION_SIZE",
}
_QUERY_ROWS = "BLOCK_M"
# The pool that each AITER function reads.
_FUNCTIONS = {
    StepKind.DECODE: {"aiter.unified_attention": PoolKind.SPLIT, "aiter.pa_decode_gluon": PoolKind.VECTORIZED},
    StepKind.EXTEND: {"aiter.unified_attention": PoolKind.SPLIT},
}


class _Launched:
    """Kernels that Triton was asked to launch, with the constants they were given."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, CompiledKernel, dict[str, Any]]] = []

    def __enter__(self) -> _Launched:
        run = JITFunction.run

        def kept(function: Any, *args: Any, **named: Any) -> Any:
            kernel = run(function, *args, **named)
            self.kernels.append((function.fn.__name__, kernel, named))
            return kernel

        self._patch = mock.patch.object(JITFunction, "run", kept)
        self._patch.start()
        return self

    def __exit__(self, *why: object) -> None:
        self._patch.stop()


def of_layer(checkout: Checkout, row: Row, kind: Kind) -> tuple[tuple[PeerFigures, ...], dict[str, str]]:
    """Returns the figures of AITER's kernels for a layer, and the reasons for functions that our provider refuses."""
    step_kind = StepKind.DECODE if kind is DecodeTiles else StepKind.EXTEND
    peers: list[PeerFigures] = []
    refused: dict[str, str] = {}
    for function, pool in _FUNCTIONS[step_kind].items():
        problem = replace(row.problems[0], pool=pool)
        aiters = next(each for each in ENTRIES if each.name == function and each.kind is step_kind)
        try:
            kernel = aiters.bind(
                problem, checkout.target(row.arch), PoolSize(_NUM_PAGES, max(_DECODE[0]), len(_DECODE[0]))
            )
        except LookupError as error:
            refused[function] = str(error)
            continue
        peers += _launched_by(checkout, row, kind, problem, kernel)
    return tuple(peers), refused


def _launched_by(
    checkout: Checkout, row: Row, kind: Kind, problem: Problem, kernel: BoundKernel
) -> Iterator[PeerFigures]:
    """Yields the figures of each kernel with products that an AITER function launches."""
    with offline(row.arch), imported(checkout, row.arch), _Launched() as launched:
        _attend(problem, kernel, StepKind.DECODE if kind is DecodeTiles else StepKind.EXTEND)
    # The other kernels merge parts.
    attending = [launch for launch in launched.kernels if launch[0] in _KEYS]
    assert attending, f"AITER attends with {[name for name, *_ in launched.kernels]}; _KEYS knows none of them"
    for name, compiled, constants in attending:
        keys, rows = constants[_KEYS[name]], constants.get(_QUERY_ROWS, 0)
        num_warps = compiled.metadata.num_warps
        code, loop = read_amd_code(compiled), hot_loop(compiled.asm["amdgcn"])
        running = Running(
            num_warps,
            programs_on_a_cu(code.waves_per_simd, num_warps),
            keys if kind is DecodeTiles else rows * keys / PAIRS,
        )
        tiles = f"{keys} keys, {num_warps} warps" if kind is DecodeTiles else f"{rows} x {keys}, {num_warps} warps"
        cycles = loop_cycles(loop, row.arch)
        cost = cost_of(row, kind, loop, cycles, running)
        yield PeerFigures(f"{name}: {tiles}", kernel_figures(code, code.waves_per_simd, cost), busy_of(cycles))


def _attend(problem: Problem, kernel: BoundKernel, kind: StepKind) -> None:
    """Launches a layer of a step of this kind, with tensors of the right shapes and no values."""
    kv_len, q_len = _DECODE if kind is StepKind.DECODE else _EXTEND
    num_seqs, num_tokens, width = len(kv_len), sum(q_len), max(kv_len) // problem.page_size
    bounds = StepBounds(PaddedShape(kind, num_seqs, num_tokens), max(q_len), max(kv_len))
    table = torch.zeros(num_seqs, width, dtype=torch.int32)
    step = StepTensors.of(
        torch.empty(0, dtype=torch.int32),
        counts=torch.tensor([num_seqs, num_tokens, 1, 0], dtype=torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        kv_len_int64=torch.tensor(kv_len),
        q_len=torch.tensor(q_len, dtype=torch.int32),
        q_indptr=torch.tensor([0, *accumulate(q_len)], dtype=torch.int32),
        table=table,
        block_table=table,
        row_of_seq=torch.arange(num_seqs, dtype=torch.int32),
    )
    pool = KVPool([problem], num_pages=_NUM_PAGES, page_size=problem.page_size, device=torch.device("cpu"))
    q = torch.empty(num_tokens, problem.num_q_heads, problem.head_dim, dtype=problem.dtype)
    out = torch.empty(num_tokens, problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype)
    memory = (
        torch.empty(size, dtype=torch.int32)
        for size in (kernel.schedule.words(bounds.shape), kernel.workspace_words(bounds.shape))
    )
    args = AttendArgs(q, pool.layers[0], table, bounds.queries(step), out, None, None, None, *memory)
    kernel.attend(args, step, bounds)
