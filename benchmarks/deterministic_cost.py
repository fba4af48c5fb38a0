"""What deterministic mode costs: decode and extend of Llama-3-8B's attention, in both modes, in turn.

    python -m benchmarks.deterministic_cost [--sweep] [--out benchmarks/results/deterministic_cost_h200.json]

One layer's launches in a CUDA graph, over input sets that together exceed the L2; medians of rounds that alternate
between the modes. Each case is first compared with the normal mode's output. Exits with 1, after writing the file, if
one cost more than it may. --sweep also times other tiles of the deterministic kernels, for tuning/segment_tiles.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.one_layer import Batch, LayerGraph, medians_in_turn
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.bench.machine import describe_machine
from rocm_attn.bench.prepared import step_kind
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import ExtendTiles
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import BoundKernel, PoolSize
from rocm_attn.providers.select import select

PROBLEM = Problem(32, 8, 128, 128, torch.bfloat16, 16, 128**-0.5)


@dataclass(frozen=True, slots=True)
class Case:
    """A step, and how many times as much deterministic mode may cost in it."""

    name: str
    batch: Batch
    times_allowed: float


CASES = (
    Case("decode 64 x 4k", Batch((4096,) * 64, (1,) * 64), 1.15),
    Case("decode 16 x 4k", Batch((4096,) * 16, (1,) * 16), 1.15),
    Case("decode 1 x 128k", Batch((131072,), (1,)), 1.15),
    Case("extend 1 x 2048 + 6144", Batch((8192,), (2048,)), 1.1),
    Case("extend 8 x 512 + 4096", Batch((4608,) * 8, (512,) * 8), 1.1),
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
            try:
                row = _compare(case, kernel)
            except OutOfResources:  # tiles of the sweep that this GPU has no room for
                continue
            rows.append({"tiles": name, **row})
            print(
                f"{case.name:24} {name:60} {row['normal_us']:8.1f} us {row['deterministic_us']:8.1f} us "
                f"{row['times']:.3f} of {case.times_allowed}",
                flush=True,
            )
    options.out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    sys.exit(any(row["tiles"] == "tuning row" and row["times"] > row["times_allowed"] for row in rows))


def _kernel(case: Case, *, deterministic: bool) -> BoundKernel:
    pool = PoolSize(num_pages=2, max_kv_len=max(case.batch.kv_len), max_num_seqs=len(case.batch.kv_len))
    target = detect_target(torch.device("cuda", 0))
    chosen = select(PROBLEM, target, "triton", pool=pool, deterministic=deterministic)
    return chosen.kernels[step_kind(case.batch.q_len)].bound


def _deterministic_kernels(case: Case, *, sweep: bool) -> Iterator[tuple[str, BoundKernel]]:
    """The kernel of the tuning row, then those of other tiles."""
    kernel: Any = _kernel(case, deterministic=True)
    yield "tuning row", kernel
    if sweep:
        for tiles in _candidates(step_kind(case.batch.q_len)):
            yield _short(tiles), _with(kernel, tiles)


def _candidates(kind: StepKind) -> Iterator[SegmentTiles]:
    """Tiles of which decode and extend could share one key_block and segment_len."""
    row = SegmentTiles(1024, 64, 64, 4, 3, 2, ExtendTiles(128, 64, 8, 3))
    for segment_len in (512, 1024, 2048):
        if kind is StepKind.DECODE:
            for key_block, stages in ((64, 2), (64, 3), (32, 3), (32, 4), (128, 2)):
                extend = replace(row.extend, key_block=key_block)
                yield replace(row, segment_len=segment_len, key_block=key_block, decode_stages=stages, extend=extend)
        else:
            for shape in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2),
                          (64, 64, 4, 3), (64, 32, 4, 3)):  # fmt: skip
                extend = ExtendTiles(*shape)
                yield replace(row, segment_len=segment_len, key_block=extend.key_block, extend=extend)


def _with(kernel: Any, tiles: SegmentTiles) -> BoundKernel:
    if hasattr(kernel, "most_segments"):
        kernel = replace(kernel, most_segments=tiles.most_segments(131072, PROBLEM.window_left))
    changed: BoundKernel = replace(kernel, tiles=tiles)
    return changed


def _short(tiles: SegmentTiles) -> str:
    extend = tiles.extend
    return (f"S {tiles.segment_len}, N {tiles.key_block}, decode stages {tiles.decode_stages}, "
            f"extend {extend.query_rows} x {extend.num_warps} warps x {extend.num_stages}")  # fmt: skip


def _compare(case: Case, deterministic: BoundKernel) -> dict[str, Any]:
    """Both modes in turn; us per layer."""
    kernels = _kernel(case, deterministic=False), deterministic
    graphs = [LayerGraph.capture(PROBLEM, kernel, case.batch) for kernel in kernels]
    out, deterministic_out = (graph.out.float() for graph in graphs)
    assert torch.allclose(out, deterministic_out, atol=2e-2, rtol=2e-2), "the modes differ in their results"
    normal, mine = medians_in_turn(graphs)
    return {
        "case": case.name,
        "normal_us": round(normal, 1),
        "deterministic_us": round(mine, 1),
        "times": mine / normal,
        "times_allowed": case.times_allowed,
    }


if __name__ == "__main__":
    main()
