"""The cost of graphs: seconds and bytes of capturing every decode size, GPU time of captured and eager steps.

python -m rocm_lab.benchmarks.graph_cost --out rocm_lab/benchmarks/results/graph_cost_h200.json

A model of attention alone with the geometry of Llama-3-8B, in bfloat16. Exits with 1, after writing the file, if a
captured step took more than 2 % longer than the eager one or the capture took longer than 20 s.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.hip_graphs.size_ladder import default_ladder
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from rocm_lab.benchmarks.script import parser_of, write

LAYER = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
NUM_LAYERS = 32
LARGEST_BATCH = 256
CONTEXT = 4096
VOCABULARY = 512
# Limit of the KV pool; batches whose context does not fit into it are measured with fewer layers.
MOST_POOL_BYTES = 64 << 30
ROUNDS = 40
# Longer than the host needs to launch an eager step; the GPU has all of the step's launches when it wakes up.
SLEEP_CYCLES = 100_000_000

CAPTURE_SECONDS, SLOWER = 20.0, 1.02


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers of attention, each of which reads the output of the previous one."""

    runtime: AttentionRuntime
    embedding: Tensor
    num_layers: int

    @classmethod
    def build(
        cls, device: torch.device, num_layers: int, *, num_seqs: int, kv_len: int, capture_sizes: Sequence[int]
    ) -> LayerStack:
        """Returns a model with pages for num_seqs requests of kv_len tokens, all of them random."""
        runtime = build_runtime(
            [LAYER] * num_layers,
            RuntimeOptions(
                num_pages=1 + num_seqs * -(-kv_len // LAYER.page_size),
                max_num_seqs=num_seqs,
                max_kv_len=CONTEXT,
                capture_sizes=capture_sizes,
            ),
            device=device,
        )
        for layer in range(num_layers):
            pages = runtime.pool.layer(layer)
            pages.k[1:].normal_()
            pages.v[1:].normal_()
        width = LAYER.num_q_heads * LAYER.head_dim
        return cls(runtime, torch.randn(VOCABULARY, width, dtype=LAYER.dtype, device=device), num_layers)

    def forward(self, step: Part) -> Tensor:
        """[S, hidden]; decode steps only, in which tokens are sequences."""
        hidden = self.embedding[step.token_ids]
        for layer in range(self.num_layers):
            q = hidden.view(-1, LAYER.num_q_heads, LAYER.head_dim)
            kv, out = q[:, : LAYER.num_kv_heads], torch.empty_like(q)
            step.layers.store_and_attend(layer, q, kv, kv, out)
            hidden = out.flatten(1)
        return hidden

    def decode_step(self, num_seqs: int, kv_len: int) -> StepBatch:
        """Returns a step of fresh requests."""
        rows = np.array([self.runtime.table.admit() for _ in range(num_seqs)], np.int32)
        lengths = np.full(num_seqs, kv_len, np.int32)
        self.runtime.table.reserve_all(rows, lengths)
        self.runtime.table.mark_stored(rows, lengths)  # the pages have random content from the start
        ids = 1 + np.arange(num_seqs, dtype=np.int32) % (VOCABULARY - 1)
        return StepBatch(rows, lengths, np.ones(num_seqs, np.int32), ids)


def capture_row(
    name: str, device: torch.device, *, num_layers: int = NUM_LAYERS, largest: int = LARGEST_BATCH
) -> dict[str, Any]:
    """Captures all decode sizes up to largest, with pages for 1,024 tokens per sequence; recording and checks apart."""
    sizes = default_ladder(largest).sizes
    model = LayerStack.build(device, num_layers, num_seqs=largest, kv_len=1024, capture_sizes=sizes)
    started = time.perf_counter()
    report = StepRunner(model.runtime, model.forward, recorder_for(device)).capture_all()
    seconds = time.perf_counter() - started
    if report.graphs_off or report.skipped:
        raise RuntimeError("; ".join(report.lines()))
    return {
        "capture": name,
        "layers": num_layers,
        "graphs": len(report.buckets),
        "seconds": round(seconds, 2),
        "record_seconds": round(sum(bucket.seconds for bucket in report.buckets), 2),
        "check_seconds": round(sum(bucket.check_seconds for bucket in report.buckets), 2),
        "bytes": report.num_bytes,
        "buckets": [
            {
                "num_seqs": bucket.key.shape.num_seqs,
                "seconds": round(bucket.seconds, 3),
                "check_seconds": round(bucket.check_seconds, 3),
                "bytes": bucket.num_bytes,
            }
            for bucket in report.buckets
        ],
    }


def gpu_us(run: Callable[[], object]) -> float:
    """Returns the GPU time of run's launches, from the first to the last kernel, none of which waits for the host."""
    asleep, started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    asleep.record()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    started.record()
    before = time.perf_counter()
    run()
    launch_ms = (time.perf_counter() - before) * 1e3
    ended.record()
    torch.cuda.synchronize()
    slept_ms = asleep.elapsed_time(started)
    if launch_ms > slept_ms:
        raise RuntimeError(f"the GPU woke up after {slept_ms:.1f} ms, before the host was done ({launch_ms:.1f} ms)")
    return float(started.elapsed_time(ended)) * 1e3


def step_row(num_seqs: int, device: torch.device) -> dict[str, Any]:
    """Medians of ROUNDS decode steps of num_seqs sequences with CONTEXT tokens, captured and eager ones in turn."""
    pages = num_seqs * CONTEXT // LAYER.page_size
    num_layers = min(NUM_LAYERS, MOST_POOL_BYTES // (pages * page_bytes([LAYER])))
    model = LayerStack.build(device, num_layers, num_seqs=num_seqs, kv_len=CONTEXT, capture_sizes=[num_seqs])
    runner = StepRunner(model.runtime, model.forward, recorder_for(device))
    runner.capture_all()
    batch = model.decode_step(num_seqs, CONTEXT)
    for _ in range(3):
        runner.run(batch)
        runner.run_eagerly(batch)
    replays = runner.counters.replays
    captured, eager = [], []
    for _ in range(ROUNDS):
        captured.append(gpu_us(lambda: runner.run(batch)))
        eager.append(gpu_us(lambda: runner.run_eagerly(batch)))
    if runner.counters.replays - replays != ROUNDS:
        raise RuntimeError(f"steps of {num_seqs} sequences were not replayed: {runner.counters.graphs_off}")
    captured_us, eager_us = statistics.median(captured), statistics.median(eager)
    return {
        "num_seqs": num_seqs,
        "context": CONTEXT,
        "layers": num_layers,
        "captured_us": round(captured_us, 1),
        "eager_us": round(eager_us, 1),
        "times_eager": round(captured_us / eager_us, 4),
    }


def give_memory_back() -> None:
    """Frees the memory of the previous model, whose graphs and their functions refer to each other."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    options = parser_of(__doc__).parse_args()
    device = torch.device("cuda")
    captures = []
    for name in ("first in the process", "again"):
        captures.append(capture_row(name, device))
        print({key: value for key, value in captures[-1].items() if key != "buckets"})
        give_memory_back()
    steps = []
    for num_seqs in (1, 8, 64, 256):
        steps.append(step_row(num_seqs, device))
        print(steps[-1])
        give_memory_back()
    write(options.out, captures=captures, steps=steps)
    slow = [row for row in captures if row["seconds"] > CAPTURE_SECONDS]
    slow += [row for row in steps if row["times_eager"] > SLOWER]
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
