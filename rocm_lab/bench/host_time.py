"""The host's time for a decode step: microseconds per layer if it runs eagerly, and per step if it is a graph.

All tokens of a sequence have the same V here, so the output is known. If it is wrong, no time is reported.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.machine.devices import wait_for_device
from rocm_attn.problem import Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from rocm_lab.bench import layers
from rocm_lab.bench.choices import HOST
from rocm_lab.bench.layers import NAMED

_LAYER, _PAGE_SIZE = "llama-8b", 16
# Tokens that each sequence has when the first step begins.
_STORED = 64
# A sample is the median of this many steps. Warm-up steps come before the first one.
_STEPS_OF_A_SAMPLE, _WARM_UP = 20, 30
# The tolerance of the outputs, which are weighted means of equal values.
_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The settings of the measurement.

    num_layers: of the model, which has only attention
    num_seqs:   of the steps, one after the other
    rounds:     samples of each
    """

    num_layers: int = 32
    num_seqs: tuple[int, ...] = (1, 64, 256)
    rounds: int = 15


def host_rows(providers: tuple[str, ...], device: torch.device, options: HostOptions) -> Iterator[dict[str, Any]]:
    """Yields rows of a result file for every provider and number of sequences: of eager steps, and of graphs."""
    problem = NAMED[_LAYER].problem(torch.bfloat16, _PAGE_SIZE)
    for provider in providers:
        for num_seqs in options.num_seqs:
            for way, unit in (("eager", "a layer"), ("a graph", "a step")):
                steps = HostSteps(problem, provider, num_seqs, device, options, is_graph=way == "a graph")
                samples = [us / (options.num_layers if way == "eager" else 1) for us in steps.samples()]
                found = {
                    "suite": HOST,
                    "case": f"{_LAYER}, {options.num_layers} layers: {way}, host time of {unit}",
                    "batch": f"{num_seqs}d{_STORED}",
                    "layer": layers.as_json(problem),
                    "provider": provider,
                }
                wrong = steps.wrong()
                if wrong:
                    yield {**found, "status": "wrong", "reason": wrong}
                else:
                    yield {**found, "status": "ok", "us": statistics.median(samples), "samples_us": samples}


class HostSteps:
    """Decode steps whose sequences grow by one token each time."""

    def __init__(
        self,
        problem: Problem,
        provider: str,
        num_seqs: int,
        device: torch.device,
        options: HostOptions,
        *,
        is_graph: bool,
    ) -> None:
        self._num_layers, self._device, self._rounds = options.num_layers, device, options.rounds
        most = _STORED + _WARM_UP + options.rounds * _STEPS_OF_A_SAMPLE + 1
        sizes = RuntimeOptions(
            num_pages=num_seqs * -(-most // problem.page_size) + 1,
            max_num_seqs=num_seqs,
            max_kv_len=most,
            provider=provider,
            capture_sizes=[num_seqs],
        )
        self._runtime = build_runtime([problem] * self._num_layers, sizes, device=device)
        q_heads, kv_heads, dtype = problem.num_q_heads, problem.num_kv_heads, problem.dtype
        self._q = torch.randn(num_seqs, q_heads, problem.head_dim, dtype=dtype, device=device)
        self._k = torch.randn(num_seqs, kv_heads, problem.head_dim, dtype=dtype, device=device)
        self._v = torch.randn(num_seqs, kv_heads, problem.v_head_dim, dtype=dtype, device=device)
        self._out = self._q.new_zeros(num_seqs, problem.num_q_heads, problem.v_head_dim)
        self._run: Callable[[StepBatch], object] = self._eagerly
        if is_graph:
            runner = StepRunner(self._runtime, self._forward, recorder_for(device))
            runner.capture_all()  # before rows are taken, because its probe requests need some
            self._run = runner.run
        self._rows = np.array([self._runtime.table.admit() for _ in range(num_seqs)], np.int32)
        self._kv_len = np.full(num_seqs, _STORED, np.int32)
        _store(self._runtime, self._rows, self._kv_len, (self._q, self._k, self._v), self._num_layers)

    def samples(self) -> list[float]:
        """Returns samples of a step's time in microseconds."""
        for _ in range(_WARM_UP):
            self.step()
        return [statistics.median(self.step() for _ in range(_STEPS_OF_A_SAMPLE)) for _ in range(self._rounds)]

    def wrong(self) -> str:
        """Returns why the last step's output is wrong, in a clause; "" if it is right."""
        expected = self._v.repeat_interleave(self._q.shape[1] // self._v.shape[1], dim=1).float()
        worst = float((self._out.float() - expected).abs().max())
        return "" if worst <= _TOLERANCE * float(expected.abs().max()) else f"its output is off by up to {worst:.3g}"

    def step(self) -> float:
        """Runs the next step. Returns the host's microseconds, without those for its pages and its batch."""
        self._kv_len = self._kv_len + 1
        ones, ids = np.ones(len(self._rows), np.int32), np.arange(len(self._rows), dtype=np.int32)
        self._runtime.table.reserve_all(self._rows, self._kv_len)
        batch = StepBatch(self._rows, self._kv_len, ones, ids)
        self._wait()  # the device is idle when a step begins, so that waiting for it is not counted
        begin = time.perf_counter()
        self._run(batch)
        end = time.perf_counter()
        self._wait()
        return 1e6 * (end - begin)

    def _eagerly(self, batch: StepBatch) -> None:
        with self._runtime.step(batch) as step:
            self._forward(step.parts[0])

    def _forward(self, step: Part) -> Tensor:
        for layer in range(self._num_layers):
            step.layers.store_and_attend(layer, self._q, self._k, self._v, self._out)
        return self._out

    def _wait(self) -> None:
        wait_for_device(self._device)


def _store(
    runtime: AttentionRuntime, rows: Int32Array, kv_len: Int32Array, qkv: tuple[Tensor, Tensor, Tensor], layers: int
) -> None:
    """Stores the first tokens of each sequence."""
    runtime.table.reserve_all(rows, kv_len)
    q, k, v = (each.repeat_interleave(_STORED, dim=0) for each in qkv)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    with runtime.step(StepBatch(rows, kv_len, kv_len)) as step:
        for layer in range(layers):
            step.parts[0].layers.store_and_attend(layer, q, k, v, out)
