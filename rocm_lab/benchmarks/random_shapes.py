"""Time of one layer over random shapes, compared with the nearest tuned layout and, if given, FlashAttention-3.

python -m rocm_lab.benchmarks.random_shapes --seconds 140 --out rocm_lab/benchmarks/results/random_shapes_h200.json

Kernels are chosen by select(), as for a user. Processes in parallel compile the kernels of a shape and its neighbour.
One process at a time has the GPU, makes data, compares a few rows with float32, times both in CUDA graphs over pages
past the L2, and compares again after the last replay; a wrong result gets no time. Meanwhile the others launch at most
a kernel that they have just compiled, once, and a time is the median of rounds. The result file keeps the results of
other parts, and of runs that ran out of time; another run measures the rest. A process in which the device fails
reports the shape and ends; the others continue. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Lock
from typing import Any

import torch

from rocm_lab.bench.ceilings import measured_ceilings
from rocm_lab.bench.clocks import GraphClock, Timed, median_of
from rocm_lab.bench.contestant import LayerLaunch, NotServed
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.machine import commit, describe_machine
from rocm_lab.bench.peers.flash_attention import FlashAttention3
from rocm_lab.bench.step_data import StepData, random_steps
from rocm_lab.benchmarks.powers import LANES, POWERS, powers_kernel
from rocm_lab.benchmarks.script import parser_of
from rocm_lab.benchmarks.shape_sweep import LAUNCHES_US, SweepShape, random_shapes

COUNT, SEED = 300, 14
# Bytes of K and V that lie between two uses of a page: more than the L2 holds.
PAST_L2 = 160 << 20
MOST_SETS = 8
ROUNDS, ROUND_US = 7, 3000.0
# Relative error of rows of bfloat16 against float32.
MOST_ERROR = 1e-2
SAMPLED = 4
# Bytes of a process, before it frees memory: freeing waits for all of them.
MOST_RESERVED = 4 << 30


@dataclass(frozen=True, slots=True)
class ShapeCase:
    """A shape's layer with data, and its launch."""

    data: StepData
    launch: LayerLaunch


def cases_of(shape: SweepShape, count: int) -> list[ShapeCase]:
    """Returns cases with separate pages, which lie anywhere in a pool of all."""
    steps = random_steps(shape.problem, shape.batch, count, torch.device("cuda", 0), seed=1)
    return [ShapeCase(data, OwnProvider("triton").prepare(data)) for data in steps]


def error_of(shape: SweepShape, case: ShapeCase) -> float:
    """Returns the error of a few tokens, relative to float32: |out - wanted| / |wanted|, the largest of all."""
    data, scale = case.data, case.data.problem.scale
    num_seqs = len(shape.q_len)
    worst = 0.0
    for seq in sorted({0, num_seqs // 2, num_seqs - 1}):
        kv_len, q_len = shape.kv_len[seq], shape.q_len[seq]
        pages = data.step.table[seq, : -(-kv_len // shape.page_size)].long()
        k, v = (side[pages].flatten(0, 1)[:kv_len].float() for side in (data.pages.k, data.pages.v))
        for new in sorted({0, q_len // 2, q_len - 1})[:SAMPLED]:
            token, end = sum(shape.q_len[:seq]) + new, kv_len - q_len + new + 1
            begin = max(0, end - 1 - shape.window_left) if shape.is_windowed else 0
            q = data.q[token].float().view(shape.num_kv_heads, shape.gqa_ratio, shape.head_dim)
            scores = torch.einsum("hrd,khd->hrk", q, k[begin:end]) * scale
            wanted = torch.einsum("hrk,khd->hrd", scores.softmax(-1), v[begin:end]).flatten(0, 1)
            found = data.out[token].float()
            worst = max(worst, float((found - wanted).norm() / wanted.norm()))
            if not math.isfinite(float(found.sum())):
                return float("inf")
    return worst


def _compared(shape: SweepShape, case: ShapeCase) -> tuple[float, str]:
    """Returns the error of a case that has run, and the failure."""
    try:
        return error_of(shape, case), ""
    except Exception as failure:
        return float("inf"), _said(failure)


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def _what_is_wrong(error: float, failure: str) -> str:
    """Returns the fault; empty if there is none."""
    return failure or ("" if error <= MOST_ERROR else f"error {error:.2e}")


def num_sets(shape: SweepShape) -> int:
    """Returns the number of sets of a shape's data that together are past the L2."""
    return min(MOST_SETS, max(1, -(-PAST_L2 // shape.needs.num_bytes)))


def _microseconds(cases: Sequence[ShapeCase]) -> float:
    """Returns the time of one layer. Afterwards the cases hold the results of the last replay."""

    def all_runs() -> None:
        for case in cases:
            case.launch.run()

    timed = _graph_of(all_runs)
    us = median_of(timed, ROUNDS) / len(cases)
    for case in cases:
        case.data.out.fill_(float("nan"))
    timed.run(0.0)
    return us


def _graph_of(work: Callable[[], object]) -> Timed:
    return GraphClock(torch.device("cuda", torch.cuda.current_device()), ROUND_US).timed((work,))


def ceilings() -> dict[str, float]:
    """Returns the bytes that this GPU copies, and the operations of products that it does, per second."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = measured_ceilings(device, torch.bfloat16, GraphClock(device, ROUND_US))
    return {"bytes_per_s": found.copied_per_s, "flops_per_s": found.flops_per_s}


def powers_per_s() -> float:
    """Returns the powers of two that this GPU computes per second, as softmax does: in float32."""
    programs = 32 * torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(programs * LANES, dtype=torch.float32, device="cuda")
    timed = _graph_of(lambda: powers_kernel[(programs,)](out, LANES=LANES, POWERS=POWERS))
    us = median_of(timed, ROUNDS)
    return 1e6 * programs * LANES * POWERS / us


@dataclass(frozen=True, slots=True)
class ShapeResults:
    """A process's results for a shape and its neighbour.

    wrong: name -> fault; then there are no times
    times: fields of a row of the result file
    """

    number: int
    wrong: Mapping[str, str]
    times: Mapping[str, Any]


class Worker:
    """A process that measures shapes.

    gpu:   the lock that a process holds while it makes data, compares and times
    until: of time.monotonic(), after which no other shape is begun
    """

    def __init__(self, gpu: Lock, fa3: str, until: float) -> None:
        self._gpu, self._until = gpu, until
        self._peer = FlashAttention3(fa3) if fa3 else None
        self._has_failed = False

    def measured(self, number: int, shape: SweepShape) -> ShapeResults | None:
        """Returns None if the time is up, and after a fault of the device: nothing works in this process then."""
        if self._has_failed or time.monotonic() > self._until:
            return None
        wrong: dict[str, str] = {}
        cases: dict[SweepShape, list[ShapeCase]] = {}
        for each in dict.fromkeys((shape, shape.neighbour())):
            try:
                with self._gpu:
                    cases[each] = cases_of(each, num_sets(each))
                    torch.cuda.synchronize()
                # This compiles. It also makes one launch, which may run while another process times.
                cases[each][0].launch.run()
            except Exception as failure:
                wrong[str(each)] = _said(failure)
        with self._gpu:
            times = {} if wrong else self._times(shape, cases, wrong)
            cases.clear()
            try:
                torch.cuda.synchronize()
                if torch.cuda.memory_reserved() > MOST_RESERVED:
                    torch.cuda.empty_cache()
            except RuntimeError as failure:
                self._has_failed = True
                # If there is no other fault, it is the peer's.
                wrong = wrong or {f"{shape}, of the peer": _said(failure)}
        return ShapeResults(number, wrong, times)

    def _times(
        self, shape: SweepShape, cases: Mapping[SweepShape, list[ShapeCase]], wrong: dict[str, str]
    ) -> dict[str, Any]:
        """Returns no times if an output is wrong, which is added to wrong. The caller has the GPU."""
        found = {each: _compared(each, mine[0]) for each, mine in cases.items()}
        wrong |= {str(each): what for each, result in found.items() if (what := _what_is_wrong(*result))}
        if wrong:
            return {}
        of_each: dict[SweepShape, float] = {}
        for each, mine in cases.items():
            try:
                of_each[each] = round(_microseconds(mine), 2)
            except RuntimeError as failure:
                wrong[str(each)] = f"in a graph: {_said(failure)}"
                return {}
            if what := _what_is_wrong(*_compared(each, mine[-1])):
                wrong[str(each)] = f"after replays: {what}"
        if wrong:
            return {}
        times: dict[str, Any] = {"us": of_each[shape], "neighbour_us": of_each[shape.neighbour()]}
        if self._peer is not None:
            times |= self._of_peer(self._peer, cases[shape])
        return times | {"error": found[shape][0]}

    def _of_peer(self, peer: FlashAttention3, cases: Sequence[ShapeCase]) -> dict[str, Any]:
        try:
            theirs = [ShapeCase(case.data, peer.prepare(case.data)) for case in cases]
            return {"peer": "FA3", "peer_us": round(_microseconds(theirs), 2)}
        except NotServed:
            return {}
        except RuntimeError as refusal:
            return {"peer_refuses": str(refusal).splitlines()[0]}


# The worker of a process of a pool; made by _begin.
_workers: list[Worker] = []


def _begin(gpu: Lock, fa3: str, until: float) -> None:
    _workers.append(Worker(gpu, fa3, until))


def _measured(numbered: tuple[int, SweepShape]) -> ShapeResults | None:
    return _workers[0].measured(*numbered)


def row_of(shape: SweepShape, found: ShapeResults, limits: dict[str, float], powers: float) -> dict[str, Any]:
    """Returns a row of the result file. powers: per second"""
    neighbour = shape.neighbour()
    return {
        "name": str(shape),
        "commit": commit(),
        "limit_us": round(shape.limit_us(**limits), 2),
        "neighbour": str(neighbour),
        "neighbour_limit_us": round(neighbour.limit_us(**limits), 2),
        "powers_us": round(shape.powers_us(powers), 2),
        "neighbour_powers_us": round(neighbour.powers_us(powers), 2),
        **found.times,
    }


def main() -> None:
    """Measures a part of the shapes."""
    parser = parser_of(__doc__)
    parser.add_argument("--part", default="1/1", help="which part of the shapes, as 1/4 (default: all)")
    parser.add_argument("--fa3", default="", help="a shared library of FlashAttention-3, as vLLM ships it")
    parser.add_argument("--processes", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--seconds", type=float, default=7200, help="after which no other shape is begun")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    part, parts = map(int, args.part.split("/"))
    kept = json.loads(args.out.read_text()) if args.out.exists() else {"rows": {}, "wrong": {}}
    numbered = {number: shape for number, shape in enumerate(random_shapes(COUNT, SEED)) if number % parts == part - 1}
    left = {number: shape for number, shape in numbered.items() if str(number) not in kept["rows"]}
    kept |= {"machine": describe_machine(), "seed": SEED, "count": COUNT, "launches_us": LAUNCHES_US}
    processes = multiprocessing.get_context("spawn")
    gpu = processes.Lock()
    with gpu:
        pool = processes.Pool(args.processes, _begin, (gpu, args.fa3, until))
        kept["ceilings"] = limits = ceilings()
        kept["powers_per_s"] = powers = powers_per_s()
    with pool:
        for found in filter(None, pool.imap_unordered(_measured, left.items())):
            number = str(found.number)
            if found.wrong:
                print(f"WRONG {number}: {found.wrong}", flush=True)
                kept["wrong"][number] = found.wrong
            else:
                kept["wrong"].pop(number, None)
                kept["rows"][number] = row_of(left[found.number], found, limits, powers)
            # After each shape: an early end of this process loses no row.
            args.out.write_text(json.dumps(kept, indent=1) + "\n")
    done = [number for number in numbered if str(number) in kept["rows"] or str(number) in kept["wrong"]]
    print(f"{len(done)} of {len(numbered)} shapes; wrong: {kept['wrong'] or 'none'}")
    sys.exit(bool(kept["wrong"]))


if __name__ == "__main__":
    main()
