"""Host time of one eager decode step, from its StepBatch to the last layer's launch, for an attention-only model.

python -m rocm_lab.benchmarks.eager_step --out rocm_lab/benchmarks/results/eager_step.json

This is the time that a graph saves. The device is idle at each start, so that no wait for it is counted; the first
decile of many steps is the host's time without disturbance.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.benchmarks.script import parser_of, printed, write

NUM_LAYERS = 32
WARM_UP, ROUNDS = 30, 200
# A server's length: if no sequence may be long, the launches of a layer are fewer.
MAX_KV_LEN, PAGE_SIZE = 1 << 17, 16
# The most tokens of a sequence here.
MOST_TOKENS = 512


def main() -> None:
    """Measures batches of three sizes."""
    options = parser_of(__doc__).parse_args()
    write(options.out, rows=printed(measure(num_seqs, torch.device("cuda")) for num_seqs in (1, 64, 256)))


def measure(num_seqs: int, device: torch.device) -> dict[str, float | int]:
    """Measures steps of num_seqs sequences, which grow by one token each time."""
    problem = Problem(32, 8, 128, torch.bfloat16, PAGE_SIZE, v_head_dim=128, scale=128**-0.5)
    options = RuntimeOptions(
        num_pages=num_seqs * (MOST_TOKENS // PAGE_SIZE) + 1,
        max_num_seqs=num_seqs,
        max_kv_len=MAX_KV_LEN,
        provider="triton",
        capture_sizes=[num_seqs],
    )
    runtime = build_runtime([problem] * NUM_LAYERS, options, device=device)
    rows = np.array([runtime.table.admit() for _ in range(num_seqs)], np.int32)
    kv_len = np.full(num_seqs, 64, np.int32)
    runtime.table.reserve_all(rows, kv_len)
    runtime.table.mark_stored(rows, kv_len)
    times = [_step_us(runtime, rows, kv_len + 1 + step) for step in range(WARM_UP + ROUNDS)][WARM_UP:]
    return {
        "num_seqs": num_seqs,
        "layers": NUM_LAYERS,
        "step_us_median": round(statistics.median(times), 1),
        "step_us_p10": round(float(np.quantile(times, 0.1)), 1),
    }


def _step_us(runtime: AttentionRuntime, rows: np.ndarray, kv_len: np.ndarray) -> float:
    problem = runtime.selections[0].problem
    ones = np.ones(len(rows), np.int32)
    runtime.table.reserve_all(rows, kv_len)
    q = torch.zeros(len(rows), problem.num_q_heads, problem.head_dim, dtype=problem.dtype, device=runtime.device)
    k, v, out = *(torch.zeros_like(q[:, : problem.num_kv_heads]) for _ in "kv"), torch.empty_like(q)
    torch.cuda.synchronize(runtime.device)
    before = time.perf_counter()
    step = runtime.step(StepBatch(rows, kv_len, ones)).parts[0]
    for layer in range(NUM_LAYERS):
        step.layers.store_and_attend(layer, q, k, v, out)
    runtime.end_step()
    after = time.perf_counter()
    torch.cuda.synchronize(runtime.device)
    return (after - before) * 1e6


if __name__ == "__main__":
    main()
