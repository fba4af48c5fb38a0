"""This library as a module of a benchmark harness that compares it with its peers.

The harness passes a case with data (`d`): q [T, Hq, D], k_cache and v_cache [pages, page, Hkv, D], block_table int32
[B, W], seq_lens int32 [B], cu_q int32 [B + 1], and out [T, Hq, Dv]. plan() is the work of a step, done once for all
layers; run() is one layer's launches. With ROCM_ATTN_BENCH_SCHEDULE=layer run() builds the schedule instead.
ROCM_ATTN_BENCH_WITHOUT lists kernels, separated by commas, that are left out: without triton.hopper_extend the plain
Triton kernel extends on Hopper.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.select import select
from rocm_lab.bench.prepared import PreparedLayer, ints, step_kind

_SCHEDULE_IN_LAYER = os.environ.get("ROCM_ATTN_BENCH_SCHEDULE") == "layer"
_LEFT_OUT = {name: "left out" for name in os.environ.get("ROCM_ATTN_BENCH_WITHOUT", "").split(",") if name}


def plan(d: Any) -> PreparedLayer:
    """Everything of a step that its layers share."""
    case = d.case
    device = d.q.device
    # The harness counts a query's own key among its window's.
    window_left = case.window - 1 if case.window else UNLIMITED_WINDOW
    pool = PoolKind.LATENT if case.kind == "mla" else PoolKind.SPLIT
    problem = Problem(
        case.Hq,
        case.Hkv,
        case.D,
        d.q.dtype,
        case.page,
        v_head_dim=case.Dv,
        scale=case.scale,
        window_left=window_left,
        pool=pool,
    )
    kernel = select(problem, detect_target(device), "triton", unavailable=_LEFT_OUT).kernel(step_kind(case.ql, case.kv))
    shape = PaddedShape(kernel.entry.kind, case.B, case.T)
    metadata = StepTensors.of(
        ints([], device),
        counts=ints([case.B, case.T, 1, 0], device),
        kv_len=d.seq_lens,
        q_len=ints(case.ql, device),
        q_indptr=d.cu_q,
        table=d.block_table,
        row_of_seq=torch.arange(case.B, dtype=torch.int32, device=device),
    )
    bounds = StepBounds(shape, max(case.ql), max(case.kv))
    pages = LayerPages.plain(d.k_cache, d.v_cache, kind=pool)
    return PreparedLayer.of(kernel.bound, metadata, bounds, (d.q, d.out), pages)


def run(d: Any, prepared: PreparedLayer) -> None:
    """One layer."""
    if _SCHEDULE_IN_LAYER:
        prepared.build_schedule()
    prepared.attend()
