"""Host time of one graphed decode step, from its StepBatch to the replay call, for an attention-only model.

python rocm_lab/benchmarks/host_time.py --out rocm_lab/benchmarks/results/host_time.json
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.problem import Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from rocm_lab.benchmarks.script import parser_of, printed, write

NUM_LAYERS = 32
# max_kv_len has room for this number.
ROUNDS = 900
MAX_KV_LEN = 1024


def measure(num_seqs: int, device: torch.device) -> dict[str, float | int]:
    """Returns medians over ROUNDS steps of num_seqs sequences, lengths growing by one token per step as in serving."""
    problem = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
    runtime = build_runtime(
        [problem] * NUM_LAYERS,
        RuntimeOptions(
            num_pages=num_seqs * (MAX_KV_LEN // 16) + 1,
            max_num_seqs=num_seqs,
            max_kv_len=MAX_KV_LEN,
            provider="triton",
            capture_sizes=[num_seqs],
        ),
        device=device,
    )
    q = torch.randn(num_seqs, 32, 128, dtype=torch.bfloat16, device=device)
    kv = torch.randn(num_seqs, 8, 128, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(q)

    def forward(step: Part) -> Tensor:
        for layer in range(NUM_LAYERS):
            step.layers.store_and_attend(layer, q, kv, kv, out)
        return out

    runner = StepRunner(runtime, forward, recorder_for(device))
    runner.capture_all()  # before rows and pages are taken, since its probe requests need some
    rows = np.array([runtime.table.admit() for _ in range(num_seqs)], np.int32)
    kv_len = np.full(num_seqs, 64, np.int32)
    runtime.table.reserve_all(rows, kv_len)
    runtime.table.mark_stored(rows, kv_len)  # any content of the pages will do
    ones, ids = np.ones(num_seqs, np.int32), np.arange(num_seqs, dtype=np.int32)
    host_us, batch_us, table_us = [], [], []
    for round_ in range(ROUNDS + 50):
        kv_len = kv_len + 1
        before = time.perf_counter()
        runtime.table.reserve_all(rows, kv_len)
        between = time.perf_counter()
        batch = StepBatch(rows, kv_len, ones, ids)
        batched = time.perf_counter()
        runner.run(batch)
        after = time.perf_counter()
        torch.cuda.synchronize(device)  # the device is idle at each start, so that no wait for it is counted
        if round_ >= 50:
            table_us.append((between - before) * 1e6)
            batch_us.append((batched - between) * 1e6)
            host_us.append((after - batched) * 1e6)
    return {
        "num_seqs": num_seqs,
        "layers": NUM_LAYERS,
        "step_us_median": round(statistics.median(host_us), 1),
        "step_us_p90": round(float(np.quantile(host_us, 0.9)), 1),
        "batch_us_median": round(statistics.median(batch_us), 1),
        "reserve_us_median": round(statistics.median(table_us), 1),
        "replays": runner.counters.replays,
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    write(options.out, rows=printed(measure(num_seqs, torch.device("cuda")) for num_seqs in (1, 64, 256)))


if __name__ == "__main__":
    main()
