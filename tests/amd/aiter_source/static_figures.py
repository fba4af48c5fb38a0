"""Figures of AITER's decode in Gluon from the model of docs/amd_tuning.md.

It is compiled with the installed Triton, in the tiles that AITER's own wrapper chooses. Nothing runs: launches of
compiled kernels do nothing, and tensors hold no values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import BoundKernel, PoolSize
from rocm_lab.bench.prepared import PreparedLayer, bounds_of_step, step_of
from rocm_lab.cost.static_figures import LoopFigures
from tests.amd.aiter_source.checkout import Checkout, imported
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.hot_loop import hot_loop
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.offline_driver import offline
from tests.amd.offline.tile_cost import Running, cost_of, loop_figures, programs_on_a_cu

# The step whose lengths determine the tiles and splits of AITER's wrapper.
_NUM_SEQS, _KV_LEN, _NUM_PAGES = 64, 4096, 64
_FUNCTION = "aiter.pa_decode_gluon"
_KERNEL, _KEYS = "paged_attention_decode_sliding_window", "CONTEXT_PARTITION_SIZE"


def gluon_decode(checkout: Checkout, row: Row) -> LoopFigures:
    """Returns the figures of AITER's decode in Gluon for a layer. Raises LookupError if it does not serve the layer."""
    problem = replace(row.problems[0], pool=PoolKind.VECTORIZED)
    entry = next(each for each in ENTRIES if each.name == _FUNCTION and each.kind is StepKind.DECODE)
    kernel = entry.bind(problem, checkout.target(row.arch), PoolSize(_NUM_PAGES, _KV_LEN, _NUM_SEQS))
    launched: list[tuple[CompiledKernel, dict[str, Any]]] = []
    run = JITFunction.run

    def kept(function: Any, *args: Any, **named: Any) -> Any:
        compiled = run(function, *args, **named)
        if function.fn.__name__ == _KERNEL:  # the others merge parts
            launched.append((compiled, named))
        return compiled

    with offline(row.arch), imported(checkout, row.arch), mock.patch.object(JITFunction, "run", kept):
        _attend(problem, kernel)
    ((compiled, constants),) = launched
    num_warps = compiled.metadata.num_warps
    code, loop = read_amd_code(compiled), hot_loop(compiled.asm["amdgcn"])
    running = Running(num_warps, programs_on_a_cu(code.waves_per_simd, num_warps), constants[_KEYS])
    return loop_figures(cost_of(row, DecodeTiles, loop, loop_cycles(loop, row.arch), running))


def _attend(problem: Problem, kernel: BoundKernel) -> None:
    """Launches a layer of a decode step, with tensors of the right shapes and no values."""
    kv_len, q_len = (_KV_LEN,) * _NUM_SEQS, (1,) * _NUM_SEQS
    bounds = bounds_of_step(kv_len, q_len)
    table = torch.zeros(_NUM_SEQS, _KV_LEN // problem.page_size, dtype=torch.int32)
    step = step_of(kv_len, q_len, table, kv_len_int64=torch.tensor(kv_len), block_table=table)
    pool = KVPool([problem], num_pages=_NUM_PAGES, page_size=problem.page_size, device=torch.device("cpu"))
    q = torch.empty(_NUM_SEQS, problem.num_q_heads, problem.head_dim, dtype=problem.dtype)
    out = torch.empty(_NUM_SEQS, problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype)
    PreparedLayer.of(kernel, step, bounds, (q, out), pool.layers[0]).attend()
