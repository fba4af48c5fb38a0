"""Host time of a captured decode step that an engine like vLLM begins: filled by launches, and by a graph of them.

python -m benchmarks.fill_graph --out benchmarks/results/fill_graph_h200.json

Needs a GPU. Of each way the median over rounds of several steps, in microseconds of the host; the device is waited for
between rounds, so that no launch waits for room in its queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rocm_attn.bench.machine import describe_machine
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.external import Bounds, ExternalAttention, LayerSource
from rocm_attn.paging.adopted import TableSource
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import ONE_EACH, ExternalStep

_DEVICE = torch.device("cuda", 0)
_PAGE_SIZE, _KV_LEN = 16, 8192
_ROUNDS, _STEPS = 41, 20


def measure(num_seqs: int, windows: tuple[int, ...]) -> dict[str, object]:
    """Times of steps of so many sequences; windows: of the layers, -1 for none."""
    pages_of_seq = _KV_LEN // _PAGE_SIZE
    problem = Problem(32, 8, 128, torch.bfloat16, _PAGE_SIZE, v_head_dim=128, scale=128**-0.5)
    table = torch.randint(1, num_seqs * pages_of_seq, (num_seqs, pages_of_seq), dtype=torch.int32, device=_DEVICE)
    attention = ExternalAttention(
        [LayerSource(replace(problem, window_left=window)) for window in windows],
        TableSource(table),
        device=_DEVICE,
        bounds=Bounds(num_seqs=num_seqs, kv_len=_KV_LEN, num_pages=num_seqs * pages_of_seq),
    )
    pages = torch.zeros(num_seqs * pages_of_seq, _PAGE_SIZE, 8, 128, dtype=torch.bfloat16, device=_DEVICE)
    for layer in range(len(windows)):
        attention.pages.bind(layer, pages, pages)
    attention.seal()
    kv_len = torch.randint(1, _KV_LEN, (num_seqs,), dtype=torch.int32, device=_DEVICE)
    places = (kv_len - 1).long()
    slots = table.gather(1, (places // _PAGE_SIZE)[:, None])[:, 0] * _PAGE_SIZE + places % _PAGE_SIZE
    step = ExternalStep(
        num_seqs,
        num_seqs,
        num_seqs,
        kv_len,
        ONE_EACH,
        None,
        min_q_len=1,
        max_q_len=1,
        max_kv_len=_KV_LEN,
        captured=True,
    )
    attention.begin(step)
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
    return {"sequences": num_seqs, "windows": list(windows), **times}


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
