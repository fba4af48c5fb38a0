"""A captured decode step that an engine like vLLM begins: host time of its fill, and GPU time with watched pages.

python -m rocm_lab.benchmarks.fill_graph --out rocm_lab/benchmarks/results/fill_graph_h200.json

Needs a GPU. Host times are medians over rounds of several steps, in microseconds; the device is waited for between
rounds, so that no launch waits for room in its queue. GPU times are medians of replays of one graph, which fills and
stores in NUM_LAYERS layers, with ExternalOptions.watches_pages and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.paging.adopted import TableSource
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import ExternalStep
from rocm_lab.bench.clocks import microseconds_of
from rocm_lab.bench.machine import describe_machine

_DEVICE = torch.device("cuda", 0)
_PAGE_SIZE, _KV_LEN = 16, 8192
NUM_LAYERS = 32
_ROUNDS, _STEPS = 41, 20
_REPLAYS = 400


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's pages, and a decode step whose rows share none of them."""

    attention: ExternalAttention
    step: ExternalStep
    slots: Tensor

    @classmethod
    def of(cls, num_seqs: int, windows: Sequence[int], *, watches_pages: bool) -> Engine:
        """An engine with a layer for each window; -1: none."""
        pages_of_seq = _KV_LEN // _PAGE_SIZE
        problem = Problem(32, 8, 128, torch.bfloat16, _PAGE_SIZE, v_head_dim=128, scale=128**-0.5)
        num_pages = 1 + num_seqs * pages_of_seq
        table = (1 + torch.randperm(num_pages - 1, device=_DEVICE)).to(torch.int32).view(num_seqs, pages_of_seq)
        attention = ExternalAttention(
            [LayerSource(replace(problem, window_left=window)) for window in windows],
            TableSource(table),
            device=_DEVICE,
            bounds=Bounds(num_seqs=num_seqs, kv_len=_KV_LEN, num_pages=num_pages),
            options=ExternalOptions(watches_pages=watches_pages),
        )
        pages = torch.zeros(num_pages, _PAGE_SIZE, 8, 128, dtype=torch.bfloat16, device=_DEVICE)
        for layer in range(len(windows)):
            attention.pages.bind(layer, pages, pages)
        attention.seal()
        kv_len = torch.randint(1, _KV_LEN, (num_seqs,), dtype=torch.int32, device=_DEVICE)
        places = (kv_len - 1).long()
        slots = table.gather(1, (places // _PAGE_SIZE)[:, None])[:, 0] * _PAGE_SIZE + places % _PAGE_SIZE
        step = ExternalStep.decode(kv_len, num_seqs=num_seqs, max_kv_len=_KV_LEN, captured=True)
        attention.begin(step)
        return cls(attention, step, slots)


def measure(num_seqs: int, windows: Sequence[int]) -> dict[str, object]:
    """Returns times of steps of num_seqs sequences; windows: of two layers, -1 for none."""
    engine = Engine.of(num_seqs, windows, watches_pages=False)
    attention, step, slots = engine.attention, engine.step, engine.slots
    recorded = attention.record_fill(recorder_for(_DEVICE), slots)
    attention.check_device()

    def by_launches() -> None:
        attention.begin(step)
        attention.fill(slots)

    def by_graph() -> None:
        attention.begin(step)
        attention.replay_fill(recorded)

    times = {"us_by_launches": host_us(by_launches), "us_by_graph": host_us(by_graph)}
    attention.check_device()
    of_layers = [windows[layer % len(windows)] for layer in range(NUM_LAYERS)]
    times |= {
        name: gpu_us(Engine.of(num_seqs, of_layers, watches_pages=watched))
        for name, watched in (("gpu_us", False), ("gpu_us_watched", True))
    }
    return {"sequences": num_seqs, "windows": list(windows), **times}


def gpu_us(engine: Engine) -> float:
    """The median time of a graph that fills the step and stores in every layer."""
    attention = engine.attention
    k, v = torch.randn(2, engine.step.num_seqs, 8, 128, dtype=torch.bfloat16, device=_DEVICE)

    def run() -> None:
        attention.fill(engine.slots)
        for layer in range(NUM_LAYERS):
            attention.layers.store(layer, k, v)

    run()
    torch.cuda.synchronize()
    with recorder_for(_DEVICE).capture() as graph:
        run()
    median = statistics.median(microseconds_of(graph.replay, 1) for _ in range(_REPLAYS))
    attention.check_device()
    return round(median, 2)


def host_us(run: Callable[[], None]) -> float:
    """The median time until it returns."""
    rounds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(_STEPS):
            run()
        rounds.append((time.perf_counter() - before) / _STEPS * 1e6)
    return round(statistics.median(rounds), 2)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = []
    for num_seqs in (8, 64, 256):
        for windows in ((-1, -1), (-1, 1023)):
            rows.append(measure(num_seqs, windows))
            print(rows[-1], flush=True)
    out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
