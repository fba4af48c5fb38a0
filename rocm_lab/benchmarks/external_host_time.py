"""Host time of a step over an engine's storage, with every launch replaced by nothing: the cost of the adapter itself.

python rocm_lab/benchmarks/external_host_time.py --out rocm_lab/benchmarks/results/external_host_time.json

Needs no GPU. Reports for each call the median over rounds of many, per step for begin and fill, per layer for store and
attend. It is CPU time, so that other processes do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.paging.adopted import CsrSource, Source, TableSource, TableUnit
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import LayerKernel, StepBounds, StepOps
from rocm_attn.providers.select import Selection
from rocm_attn.providers.torch_ref import TorchDecode
from rocm_attn.step.core import LaunchGuards, StepGuards
from rocm_attn.step.external_step import ONE_EACH, ExternalStep
from rocm_attn.step.publisher import PublishingGuards
from rocm_lab.benchmarks.script import parser_of, write
from rocm_lab.faults.wrong_twins import EchoIgnored

NUM_SEQS, MAX_KV_LEN = 64, 1024
ROUNDS, CALLS = 21, 500
# Microseconds that a call may cost on the project's machines; only for the reader, since no test reads a clock.
ALLOWED_US = {"begin": 6.0, "fill": 4.0, "store": 3.0, "attend": 3.0}


@dataclass(frozen=True, slots=True)
class _AttendsNothing(TorchDecode):
    """A kernel that is not launched."""

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        pass


def _nothing(*args: object, **options: object) -> None:
    """A launch that is not made."""


def _launch_nothing(ops: StepOps) -> StepOps:
    return replace(ops, **{field.name: _nothing for field in fields(ops)})


def _attend_nothing(selection: Selection) -> Selection:
    kernel = _AttendsNothing(selection.problem)
    kernels = {kind: LayerKernel(kernel_of.entry, kernel) for kind, kernel_of in selection.kernels.items()}
    return replace(selection, kernels=kernels)


def engines() -> Mapping[str, tuple[int, Mapping[Space, Source]]]:
    """Page size and tables, by the conventions of engines."""
    slots = torch.zeros(NUM_SEQS + 1, MAX_KV_LEN, dtype=torch.int32)
    to_swa = torch.zeros(NUM_SEQS * MAX_KV_LEN, dtype=torch.int64)
    pages = torch.zeros(NUM_SEQS, MAX_KV_LEN // 16, dtype=torch.int32)
    lists = CsrSource(torch.zeros(NUM_SEQS + 1, dtype=torch.int32), torch.zeros(4096, dtype=torch.int32))
    full, swa = (TableSource(slots, TableUnit.SLOT, slot_map) for slot_map in (None, to_swa))
    return {
        "SGLang, page 1": (1, {Space.FULL: full}),
        "SGLang, page 16": (16, {Space.FULL: full}),
        "SGLang, page 16, two pools": (16, {Space.FULL: full, Space.SWA: swa}),
        "vLLM, page 16": (16, {Space.FULL: TableSource(pages)}),
        "FlashInfer, page 16": (16, {Space.FULL: lists}),
    }


def measure(page_size: int, tables: Mapping[Space, Source]) -> dict[str, float]:
    """Returns medians of each call of a captured decode step, in microseconds."""
    problem = Problem(32, 8, 128, torch.bfloat16, page_size, v_head_dim=128, scale=128**-0.5)
    layers = [
        LayerSource(replace(problem, window_left=-1 if at == 0 else 127), space) for at, space in enumerate(tables)
    ]
    launches = LaunchGuards(pads=_launch_nothing, v_mask=_attend_nothing)
    guards = Guards(step=StepGuards(launches=launches), publishing=PublishingGuards(new_echo_check=EchoIgnored))
    bounds = Bounds(num_seqs=NUM_SEQS, kv_len=MAX_KV_LEN, num_pages=64)
    attention = ExternalAttention(
        layers, tables, device="cpu", bounds=bounds, options=ExternalOptions(provider="torch"), guards=guards
    )
    pages = torch.zeros(64, page_size, 8, 128, dtype=torch.bfloat16)
    for layer in range(len(layers)):
        attention.pages.bind(layer, pages, pages)
    attention.seal()
    lengths, rows = torch.ones(NUM_SEQS, dtype=torch.int64), torch.arange(NUM_SEQS)
    step = ExternalStep(
        NUM_SEQS, NUM_SEQS, NUM_SEQS, lengths, ONE_EACH, rows, min_q_len=1, max_q_len=1, max_kv_len=1, captured=True
    )
    slots = torch.zeros(NUM_SEQS, dtype=torch.int64)
    q, out = (torch.zeros(NUM_SEQS, 32, 128, dtype=torch.bfloat16) for _ in range(2))
    kv = torch.zeros(NUM_SEQS, 8, 128, dtype=torch.bfloat16)
    attention.begin(step)
    attention.fill(slots)
    return {
        "begin": _median_us(lambda: attention.begin(step)),
        "fill": _median_us(lambda: attention.fill(slots)),
        "store": _median_us(lambda: attention.layers.store(0, kv, kv)),
        "attend": _median_us(lambda: attention.layers.attend(0, q, out)),
    }


def _median_us(call: Callable[[], object]) -> float:
    rounds = []
    for _ in range(ROUNDS):
        before = time.process_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.process_time() - before) / CALLS * 1e6)
    return round(statistics.median(rounds), 2)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    rows = {name: measure(*given) for name, given in engines().items()}
    for name, row in rows.items():
        print(name, row)
    write(options.out, allowed_us=ALLOWED_US, rows=rows)


if __name__ == "__main__":
    main()
