"""Host time of one graphed decode step, from its StepBatch to the replay call, for an attention-only model.

python -m rocm_lab.benchmarks.host_time --out rocm_lab/benchmarks/results/host_time.json
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from rocm_lab.bench.host_time import HostOptions, HostSteps
from rocm_lab.bench.layers import NAMED
from rocm_lab.benchmarks.script import Row, parser_of, printed, write

WARM_UP, STEPS = 50, 900
ROUNDS = 48  # of 20 steps each: there are pages for all of them


def measure(num_seqs: int, *, is_graph: bool, max_kv_len: int) -> Row:
    """Returns figures of steps of num_seqs sequences, which grow by one token each time."""
    problem, options = NAMED["llama-8b"].problem(torch.bfloat16, 16), HostOptions(rounds=ROUNDS, max_kv_len=max_kv_len)
    steps = HostSteps(problem, "triton", num_seqs, torch.device("cuda"), options, is_graph=is_graph)
    times = [steps.step() for _ in range(WARM_UP + STEPS)][WARM_UP:]
    reserve_us, batch_us, run_us = zip(*times, strict=True)
    # A graph's batch is made while the device runs the step before; an eager step begins with it.
    step_us = run_us if is_graph else [batch + run for batch, run in zip(batch_us, run_us, strict=True)]
    return {
        "num_seqs": num_seqs,
        "layers": options.num_layers,
        "step_us_median": round(statistics.median(step_us), 1),
        "step_us_p10": round(float(np.quantile(step_us, 0.1)), 1),
        "step_us_p90": round(float(np.quantile(step_us, 0.9)), 1),
        "batch_us_median": round(statistics.median(batch_us), 1),
        "reserve_us_median": round(statistics.median(reserve_us), 1),
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    write(options.out, rows=printed(measure(num_seqs, is_graph=True, max_kv_len=1024) for num_seqs in (1, 64, 256)))


if __name__ == "__main__":
    main()
