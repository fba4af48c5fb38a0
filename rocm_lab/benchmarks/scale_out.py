"""TP, DP attention and disaggregated prefill on nodes of eight MI300X: expected effects, simulated, never measured.

python -m rocm_lab.benchmarks.scale_out                  simulates and writes the result file
python -m rocm_lab.benchmarks.scale_out --page  writes docs/scale_simulation.md and its picture from the result file

Requests come at random (Poisson), the same ones for every cluster. A cluster keeps a rate if 99 of 100 requests have
their first token within TTFT_LIMIT and 99 of 100 tokens come within a limit of the one before. The most tokens of a
step are chosen for each layout and limit, as an operator would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rocm_lab.bench.machine import commit
from rocm_lab.benchmarks.scale_engines import Cluster, EngineKind, SimulatedJob, gaps
from rocm_lab.benchmarks.scale_nodes import (
    BEST,
    LLAMA_70B,
    MIDDLE,
    QWEN_235B,
    WORST,
    Layout,
    NodeGpu,
    NodeModel,
    NodeStep,
    kv_bytes_of_token,
    kv_tokens,
    step_seconds,
)

MACHINES = {"worst": WORST, "middle": MIDDLE, "best": BEST}
RESULT = Path(__file__).parent / "results" / "scale_out.json"
TTFT_LIMIT, GAP_LIMITS = 2.0, (0.1, 0.025)  # seconds
NUM_JOBS, SEED = 200, 17
PROMPTS, OUTPUTS = (512, 1024, 2048, 4096, 8192), (64, 128, 256, 512)
STEP_TOKENS = (256, 512, 1024, 2048)  # an operator's choices for the most tokens of a step
TYPICAL = (64, 4096)  # sequences that decode, tokens of each
SPARE = 0.8  # the part of a limit that a typical step may take
RATES = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)  # requests per second
# Lengths, and the new tokens of chunks, are rounded up to them, so that few shapes are predicted.
KV_STEP, CHUNK_STEP = 256, 64


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to serve a model. layout: of each engine; counts as in Cluster; kv_links: NICs that a transfer uses"""

    name: str
    model: NodeModel
    layout: Layout
    num_whole: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    over_nics: bool = False

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of all its engines."""
        return self.layout.ranks * (self.num_whole + self.num_prefill + self.num_decode)

    def cluster(self, machine: NodeGpu, gap_limit: float) -> Cluster:
        """Returns its engines on such machines, for such a limit."""
        ranks = self.layout.ranks

        def transfer(job: SimulatedJob) -> float:
            # Each rank sends its heads to the rank that has them on the other engine.
            link = machine.nic if self.over_nics else machine.link
            return job.prompt * kv_bytes_of_token(self.model, self.layout) / link

        def kind(max_step: int) -> EngineKind:
            max_chunk = max_step // ranks if self.layout.own_attention else max_step
            tokens = kv_tokens(self.model, self.layout)
            return EngineKind(step, tokens, max_step=max_step, max_chunk=max_chunk)

        step = _step_of(self.model, self.layout, machine)
        decode, prefill = kind(tokens_of_steps(self.model, self.layout, machine, gap_limit)), kind(STEP_TOKENS[-1])
        return Cluster(decode, prefill, self.num_whole, self.num_prefill, self.num_decode, transfer)


def tokens_of_steps(model: NodeModel, layout: Layout, machine: NodeGpu, gap_limit: float) -> int:
    """Returns the most of STEP_TOKENS whose steps keep a limit with TYPICAL decodes; the least, if none does."""
    decodes, kv_len = TYPICAL

    def keeps_gap(tokens: int) -> bool:
        parts = layout.ranks if layout.own_attention else 1
        chunks = (((tokens - decodes) // parts, kv_len),) * parts
        return step_seconds(model, layout, machine, NodeStep(decodes, kv_len, chunks)) <= SPARE * gap_limit

    return max((tokens for tokens in STEP_TOKENS if keeps_gap(tokens)), default=STEP_TOKENS[0])


def up(number: int, multiple: int) -> int:
    """Returns the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


def _step_of(model: NodeModel, layout: Layout, machine: NodeGpu) -> Callable[[NodeStep], float]:
    @cache
    def exactly(batch: NodeStep) -> float:
        return step_seconds(model, layout, machine, batch)

    def step(batch: NodeStep) -> float:
        chunks = tuple((up(new, CHUNK_STEP), up(cached, KV_STEP)) for new, cached in batch.chunks)
        return exactly(NodeStep(batch.num_decodes, up(batch.kv_len, KV_STEP), chunks))

    return step


SETUPS = (
    Setup("70B, one node, 8 x TP1", LLAMA_70B, Layout(1), num_whole=8),
    Setup("70B, one node, 4 x TP2", LLAMA_70B, Layout(2), num_whole=4),
    Setup("70B, one node, 2 x TP4", LLAMA_70B, Layout(4), num_whole=2),
    Setup("70B, one node, TP8", LLAMA_70B, Layout(8), num_whole=1),
    Setup("70B, one node, TP4 prefills, TP4 decodes", LLAMA_70B, Layout(4), num_prefill=1, num_decode=1),
    Setup("70B, two nodes, 2 x TP8", LLAMA_70B, Layout(8), num_whole=2),
    Setup(
        "70B, two nodes, TP8 prefills, TP8 decodes", LLAMA_70B, Layout(8), num_prefill=1, num_decode=1, over_nics=True
    ),
    Setup("235B-A22B, one node, TP8", QWEN_235B, Layout(8), num_whole=1),
    Setup("235B-A22B, one node, DP attention", QWEN_235B, Layout(8, own_attention=True), num_whole=1),
)


def jobs_at(rate: float, num_jobs: int = NUM_JOBS) -> list[SimulatedJob]:
    """Returns the same requests for every cluster, closer together at a higher rate."""
    chance, now, jobs = random.Random(SEED), 0.0, []
    for _ in range(num_jobs):
        now += chance.expovariate(1.0) / rate
        jobs.append(SimulatedJob(now, chance.choice(PROMPTS), chance.choice(OUTPUTS)))
    return jobs


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the least value that this share of values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def figures(jobs: Sequence[SimulatedJob]) -> dict[str, float]:
    """Returns the times that users see, of jobs that are done."""
    ttft, between = [job.tokens[0] - job.arrival for job in jobs], list(gaps(jobs))
    seconds = max(job.tokens[-1] for job in jobs) - jobs[0].arrival
    return {
        "ttft_p50_s": round(quantile(ttft, 0.5), 4),
        "ttft_p99_s": round(quantile(ttft, 0.99), 4),
        "gap_p50_s": round(quantile(between, 0.5), 5),
        "gap_p99_s": round(quantile(between, 0.99), 5),
        "tokens_per_s": round(sum(len(job.tokens) for job in jobs) / seconds, 1),
    }


def keeps(found: Mapping[str, float], gap_limit: float) -> bool:
    """True if the limits hold."""
    return found["ttft_p99_s"] <= TTFT_LIMIT and found["gap_p99_s"] <= gap_limit


def simulate(setup: Setup, machine: NodeGpu, gap_limit: float) -> list[dict[str, float]]:
    """Returns a row for each rate, up to the second one at which the limits do not hold."""
    rows: list[dict[str, float]] = []
    for rate in RATES:
        jobs = jobs_at(rate)
        setup.cluster(machine, gap_limit).serve(jobs)
        rows.append({"rate": rate, **figures(jobs)})
        if sum(not keeps(row, gap_limit) for row in rows) == 2:
            break
    return rows


def highest(rows: Sequence[Mapping[str, float]], gap_limit: float) -> float:
    """Returns the highest rate up to which the limits hold at every one; 0: at none."""
    kept = itertools.takewhile(lambda row: keeps(row, gap_limit), rows)
    return max((row["rate"] for row in kept), default=0.0)


def results() -> dict[str, Any]:
    """Returns the results of all setups at the three ends of the assumptions."""
    found = []
    for setup in SETUPS:
        limits = []
        for limit in GAP_LIMITS:
            ends = {name: simulate(setup, machine, limit) for name, machine in MACHINES.items()}
            limits.append(
                {
                    "gap_s": limit,
                    "step_tokens": tokens_of_steps(setup.model, setup.layout, MIDDLE, limit),
                    "highest": {name: highest(rows, limit) for name, rows in ends.items()},
                    "rows": ends["middle"],
                }
            )
        found.append(
            {
                "setup": setup.name,
                "gpus": setup.num_gpus,
                "kv_tokens": kv_tokens(setup.model, setup.layout),
                "limits": limits,
            }
        )
        print(setup.name, [limit["highest"] for limit in limits], flush=True)
    return {"commit": commit(), "jobs": NUM_JOBS, "ttft_p99_s": TTFT_LIMIT, "setups": found}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page from the result file; simulate nothing")
    if parser.parse_args().page:
        from rocm_lab.benchmarks.scale_page import write

        write(json.loads(RESULT.read_text()))
        return
    RESULT.write_text(json.dumps(results(), indent=1) + "\n")


if __name__ == "__main__":
    main()
