"""What deterministic mode costs: decode and extend of Llama-3-8B's attention, in both modes, in turn.

    python -m benchmarks.deterministic_cost [--sweep] [--out benchmarks/results/deterministic_cost_h200.json]

One layer's launches in a CUDA graph, over input sets that together exceed the L2; medians of rounds that alternate
between the modes. Decode must cost at most 1.15 x of the normal mode, extend 1.1 x. Each case is first compared with
the normal mode's output. --sweep also times other tiles of the deterministic kernels, for tuning/segment_tiles.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.attention_module import ints, step_kind
from benchmarks.machine import describe_machine
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import ExtendTiles
from rocm_attn.padding import PaddedShape, StepKind
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import AttendArgs, BoundKernel, PoolSize, StepMetadata
from rocm_attn.providers.select import select
from rocm_attn.table_view import TableView
from rocm_attn.target import detect_target

PROBLEM = Problem(32, 8, 128, 128, torch.bfloat16, 16, 128**-0.5)
SETS = 3
ROUNDS = 15
REPLAYS = 10


@dataclass(frozen=True, slots=True)
class Case:
    """A step: kv_len and q_len of its sequences, and how much more deterministic mode may cost."""

    name: str
    kv_len: tuple[int, ...]
    q_len: tuple[int, ...]
    times_allowed: float


CASES = (
    Case("decode 64 x 4k", (4096,) * 64, (1,) * 64, 1.15),
    Case("decode 16 x 4k", (4096,) * 16, (1,) * 16, 1.15),
    Case("decode 1 x 128k", (131072,), (1,), 1.15),
    Case("extend 1 x 2048 + 6144", (8192,), (2048,), 1.1),
    Case("extend 8 x 512 + 4096", (4608,) * 8, (512,) * 8, 1.1),
)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/deterministic_cost_h200.json"))
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        for name, kernel in _deterministic_kernels(case, sweep=options.sweep):
            row = _compare(case, kernel)
            rows.append({"tiles": name, **row})
            print(
                f"{case.name:24} {name:60} {row['normal_us']:8.1f} us {row['deterministic_us']:8.1f} us "
                f"{row['times']:.3f} of {case.times_allowed}",
                flush=True,
            )
    options.out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


def _kernel(case: Case, *, deterministic: bool) -> BoundKernel:
    pool = PoolSize(num_pages=2, max_kv_len=max(case.kv_len), max_num_seqs=len(case.kv_len))
    target = detect_target(torch.device("cuda", 0))
    chosen = select(PROBLEM, target, "triton", pool=pool, deterministic=deterministic)
    return chosen.kernels[step_kind(case.q_len)].bound


def _deterministic_kernels(case: Case, *, sweep: bool) -> Iterator[tuple[str, BoundKernel]]:
    """The kernel of the tuning row, then those of other tiles."""
    kernel: Any = _kernel(case, deterministic=True)
    yield "tuning row", kernel
    if sweep:
        for tiles in _candidates(step_kind(case.q_len)):
            yield _short(tiles), _with(kernel, tiles)


def _candidates(kind: StepKind) -> Iterator[SegmentTiles]:
    """Tiles of which decode and extend could share one block_n and segment_len."""
    row = SegmentTiles(1024, 64, 64, 4, 3, 2, ExtendTiles(128, 64, 8, 3))
    for segment_len in (512, 1024, 2048):
        if kind is StepKind.DECODE:
            for block_n, stages in ((64, 2), (64, 3), (32, 3), (32, 4), (128, 2)):
                extend = replace(row.extend, block_n=block_n)
                yield replace(row, segment_len=segment_len, block_n=block_n, decode_stages=stages, extend=extend)
        else:
            for shape in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2),
                          (64, 64, 4, 3), (64, 32, 4, 3)):  # fmt: skip
                extend = ExtendTiles(*shape)
                yield replace(row, segment_len=segment_len, block_n=extend.block_n, extend=extend)


def _with(kernel: Any, tiles: SegmentTiles) -> BoundKernel:
    if hasattr(kernel, "most_segments"):
        kernel = replace(kernel, most_segments=tiles.most_segments(131072, PROBLEM.window_left))
    changed: BoundKernel = replace(kernel, tiles=tiles)
    return changed


def _short(tiles: SegmentTiles) -> str:
    extend = tiles.extend
    return (f"S {tiles.segment_len}, N {tiles.block_n}, decode stages {tiles.decode_stages}, "
            f"extend {extend.block_m} x {extend.num_warps} warps x {extend.num_stages}")  # fmt: skip


def _compare(case: Case, deterministic: BoundKernel) -> dict[str, Any]:
    """Both modes in turn; us per layer."""
    try:
        graphs = [_graph(case, kernel) for kernel in (_kernel(case, deterministic=False), deterministic)]
    except OutOfResources as error:  # tiles of the sweep that this GPU has no room for
        return {"case": case.name, "normal_us": 0.0, "deterministic_us": 0.0, "times": 0.0, "error": str(error)[:200]}
    outs = [args[-1].out for _, args in graphs]
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=2e-2, rtol=2e-2), "the modes differ in their results"
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for index, (graph, _) in enumerate(graphs):
            times[index].append(_microseconds(graph) / SETS)
    normal, mine = map(median, times)
    return {
        "case": case.name,
        "normal_us": round(normal, 1),
        "deterministic_us": round(mine, 1),
        "times": mine / normal,
        "times_allowed": case.times_allowed,
    }


def _graph(case: Case, kernel: BoundKernel) -> tuple[torch.cuda.CUDAGraph, list[AttendArgs]]:
    """A graph that attends over SETS sets of pages, and what it reads and writes."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    num_seqs, num_tokens, pages = len(case.kv_len), sum(case.q_len), sum(case.kv_len) // PROBLEM.page_size
    shape = PaddedShape(step_kind(case.q_len), num_seqs, num_tokens)
    starts = torch.tensor([0, *case.q_len]).cumsum(0).int().to(device)
    empty = ints([], device)
    args = []
    for _ in range(SETS):
        table = (torch.randperm(pages, device=device).int() + 1).view(num_seqs, -1)
        step = StepMetadata(
            shape=shape,
            max_q_len=max(case.q_len),
            max_kv_len=max(case.kv_len),
            counts=ints([num_seqs, num_tokens, 1, 0], device),
            kv_len=ints(case.kv_len, device),
            q_len=ints(case.q_len, device),
            q_indptr=starts,
            table=TableView(table, torch.arange(num_seqs, dtype=torch.int32, device=device)),
            page_indptr=empty,
            page_list=empty,
            last_page_len=empty,
            block_table=empty,
            kv_len_int64=empty,
            mask_indptr=empty,
            mask_words=empty,
            slot_of_token=empty,
        )
        schedule = torch.empty(kernel.schedule_words(shape), dtype=torch.int32, device=device)
        workspace = torch.empty(kernel.workspace_words(shape), dtype=torch.float32, device=device)
        kernel.build_schedule(step, schedule)
        q = torch.randn(num_tokens, 32, 128, device=device).bfloat16()
        k, v = (torch.randn(pages + 1, 16, 8, 128, device=device).bfloat16() for _ in range(2))
        args.append(AttendArgs(step, schedule, workspace, q, k, v, torch.empty_like(q), None, None, None))
    for each in args:
        kernel.attend(each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in args:
            kernel.attend(each)
    graph.replay()
    return graph, args


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of a replay, over REPLAYS of them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1000 / REPLAYS


if __name__ == "__main__":
    main()
