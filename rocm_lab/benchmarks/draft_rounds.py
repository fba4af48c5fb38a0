"""Speculative rounds of a model of attention alone: host time of drafts and verify, GPU time and the bytes to read.

python -m rocm_lab.benchmarks.draft_rounds --out rocm_lab/benchmarks/results/draft_rounds_h200.json

A round is a graph of S draft steps with K branches and a graph of a verify step, both on lengths that only the device
knows. The lower bound is a plain read of K and V of every prefix, once for each draft step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import NO_MASK, TreeMask
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch, draft_batch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part, Series
from rocm_lab.bench.ceilings import read_us
from rocm_lab.bench.clocks import GraphClock, microseconds_of
from rocm_lab.bench.layers import NAMED
from rocm_lab.benchmarks.script import parser_of, printed, write

PAGE_SIZE = 16
ROUNDS, ROUND_US = 60, 2000.0


@dataclass(frozen=True, slots=True)
class DraftingShape:
    """num_seqs sequences of prefix tokens; drafts of one layer, verified by W = drafts of a branch and one token."""

    num_seqs: int
    prefix: int
    drafts: Drafts

    @property
    def verified(self) -> int:
        """W."""
        return self.drafts.steps + 1


SHAPES = [DraftingShape(256, 1024, Drafts(1, 4)), DraftingShape(64, 8192, Drafts(1, 4))]
SHAPES += [DraftingShape(64, 8192, Drafts(branches, 4)) for branches in (4, 8)]


class DraftingLayer:
    """One layer of attention with the heads of Llama-3-8B, which drafts and verifies."""

    def __init__(self, shape: DraftingShape, device: torch.device) -> None:
        layer = NAMED["llama-8b"].problem(torch.bfloat16, PAGE_SIZE)
        problem = replace(layer, custom_mask=shape.drafts.branches > 1)
        longest = shape.prefix + shape.drafts.tokens + shape.verified + PAGE_SIZE
        pages = -(-longest // PAGE_SIZE)
        self.runtime = build_runtime(
            [problem],
            RuntimeOptions(
                num_pages=shape.num_seqs * pages + shape.num_seqs + 1,
                max_num_seqs=shape.num_seqs,
                max_kv_len=pages * PAGE_SIZE,
                provider="triton",
                capture_sizes=[shape.num_seqs],
                capture_tokens=[shape.num_seqs * shape.verified],
                drafts=[shape.drafts],
            ),
            device=device,
        )
        most = shape.num_seqs * max(shape.drafts.branches, shape.verified)
        self.q = torch.randn(most, 32, 128, dtype=torch.bfloat16, device=device)
        self.kv = torch.randn(most, 8, 128, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.q)
        self.parents = torch.randint(
            shape.drafts.branches, (most,), device=device, dtype=torch.int32, generator=torch.Generator(device)
        )

    def draft(self, drafts: Series) -> Tensor:
        """[S, 32, 128], of the last step."""
        for number, step in enumerate(drafts):
            if number:
                step.set_parents(self.parents[: step.token_ids.shape[0]])
            self._attend(step)
        return self.out[: step.row_of_seq.shape[0]]

    def verify(self, step: Part) -> Tensor:
        """[S, 32, 128]."""
        return self._attend(step)[step.last_token_of_seq]

    def _attend(self, step: Part) -> Tensor:
        num_tokens = step.token_ids.shape[0]
        q, kv, out = self.q[:num_tokens], self.kv[:num_tokens], self.out[:num_tokens]
        step.layers.store_and_attend(0, q, kv, kv, out)
        return out


def measure(shape: DraftingShape, device: torch.device) -> dict[str, Any]:
    """Medians over ROUNDS rounds."""
    model = DraftingLayer(shape, device)
    runtime, drafts = model.runtime, shape.drafts
    runner = StepRunner(runtime, model.verify, recorder_for(device), draft=model.draft)
    # Before rows and pages are taken, for its probe requests need some.
    runner.capture_all()
    rows = np.array([runtime.table.admit() for _ in range(shape.num_seqs)], np.int32)
    prefix = np.full(shape.num_seqs, shape.prefix, np.int32)
    bound = prefix + max(drafts.tokens, shape.verified)
    runtime.table.reserve_all(rows, bound)
    runtime.table.mark_stored(rows, prefix)  # any content of the pages will do
    runtime.pool.layer(0).k[1:].normal_()
    runtime.pool.layer(0).v[1:].normal_()
    on_device = torch.from_numpy(prefix).to(device)
    new = np.full(shape.num_seqs, shape.verified, np.int32)
    # Node n goes on from node (n - 1) // 2, and the first one from none: -1 // 2 is NO_PARENT.
    nodes = torch.arange(shape.verified, device=device, dtype=torch.int32)
    tree = ((nodes - 1) // 2).expand(shape.num_seqs, -1).contiguous()
    mask = TreeMask(tree) if drafts.branches > 1 else NO_MASK

    def draft_round() -> None:
        inputs = DeviceInputs(kv_len=on_device, ahead=drafts.tokens)
        runner.run(draft_batch(rows, prefix, drafts, NO_TOKEN_IDS, inputs=inputs))

    def verify_round() -> None:
        inputs = DeviceInputs(kv_len=on_device, ahead=shape.verified)
        runner.run(StepBatch(rows, prefix + new, new, NO_TOKEN_IDS, inputs=inputs, mask=mask))

    for _ in range(5):
        draft_round()
        verify_round()
    host = [_host_us((draft_round, verify_round), device) for _ in range(ROUNDS)]
    kv_bytes = shape.num_seqs * shape.prefix * 2 * 8 * 128 * 2
    lower_bound = drafts.steps * read_us(kv_bytes, device, GraphClock(device, ROUND_US))
    times = {"draft": gpu_us(draft_round, device), "verify": gpu_us(verify_round, device)}
    runtime.check_device()
    return {
        "num_seqs": shape.num_seqs,
        "prefix": shape.prefix,
        "branches": drafts.branches,
        "steps": drafts.steps,
        "host_us_median": round(statistics.median(host), 1),
        "draft_gpu_us": round(times["draft"], 1),
        "draft_lower_bound_us": round(lower_bound, 1),
        "draft_by_bound": round(times["draft"] / lower_bound, 3),
        "verify_gpu_us": round(times["verify"], 1),
        "replays": runner.counters.replays,
        "graphs_off": runner.counters.graphs_off,
    }


def _host_us(parts: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Host time of a round of these parts that finds the device idle."""
    torch.cuda.synchronize(device)
    before = time.perf_counter()
    for run in parts:
        run()
    return (time.perf_counter() - before) * 1e6


def gpu_us(run: Callable[[], object], device: torch.device, count: int = 20) -> float:
    """GPU time of one of many runs that were launched before the first of them could start."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        # Two ring slots: the host waits for the device after two rounds, so the queue stays short and full.
        times.append(microseconds_of(run, count))
    return min(times)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    write(options.out, rows=printed(measure(shape, torch.device("cuda")) for shape in SHAPES))


if __name__ == "__main__":
    main()
