"""Runs workloads of flashinfer-bench: makes or reads inputs, calls our solution, checks outputs with the reference."""

from __future__ import annotations

import itertools
import math
import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadSetting
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import PoolKind
from rocm_attn.machine.devices import wait_for_device
from rocm_attn.problem import Problem
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.flashinfer_schema import Definition, Solution, Trace, Workload
from rocm_lab.bench.flashinfer_solution import entry_of, environment, function_of
from rocm_lab.bench.judge import Truth, Verdict
from rocm_lab.bench.step_data import StepData, step_over

_FLOATS = ("float32", "float16", "bfloat16")
_WARM_UP, _CALLS, _ROUNDS = 2, 10, 7
_MILLI = 1e3


@dataclass(frozen=True, slots=True)
class WorkloadRun:
    """The way workloads are run.

    root:          the folder that paths of a workload are relative to
    run_reference: whether the definition's own source is run and timed too. It is a program of the file's author
    """

    device: torch.device
    root: Path
    run_reference: bool = False

    def trace(self, definition: Definition, workload: Workload, solution: Solution) -> Trace:
        """Returns the result of a workload. Raises BadSetting for one that contradicts its definition."""
        inputs = self.inputs(definition, workload)
        truth = Truth.of(step_of(definition, workload, inputs))
        try:
            run = entry_of(solution)
        except Exception as error:  # somebody else's source may raise anything
            return self._ended(definition, workload, solution, "COMPILE_ERROR", f"{type(error).__name__}: {error}")
        try:
            outputs = run(**inputs)
            status, correctness = judged(definition, truth, outputs)
        except Exception as error:
            return self._ended(definition, workload, solution, "RUNTIME_ERROR", f"{type(error).__name__}: {error}")
        if status != "PASSED":
            return self._ended(definition, workload, solution, status, "", correctness)
        latency = self._latency_ms(lambda: run(**inputs))
        reference = self._latency_ms(self._reference(definition, inputs, truth)) if self.run_reference else 0.0
        performance = {
            "latency_ms": latency,
            "reference_latency_ms": reference,
            "speedup_factor": reference / latency,
        }
        return self._ended(definition, workload, solution, status, "", correctness, performance)

    def inputs(self, definition: Definition, workload: Workload) -> dict[str, Any]:
        """Makes normally distributed inputs, or reads them; the same ones for a workload's uuid. Raises BadSetting."""
        missing = definition.variables - workload.axes.keys()
        if missing:
            raise BadSetting(f"workload {workload.uuid} has no size of {', '.join(sorted(missing))}")
        sizes = {**definition.constants, **workload.axes}
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(workload.uuid.encode()))
        found: dict[str, Any] = {}
        for name, spec in definition.inputs.items():
            if name not in workload.inputs:
                raise BadSetting(f"workload {workload.uuid} has no input {name}, which {definition.name} takes")
            source = workload.inputs[name]
            where = f"workload {workload.uuid}: input {name}"
            if spec.shape is None:
                if source["type"] != "scalar":
                    raise BadSetting(f"{where} is a scalar, and the workload gives it as {source['type']}")
                found[name] = source["value"]
                continue
            shape = [sizes[axis] for axis in spec.shape]
            if source["type"] == "random":
                if spec.dtype not in _FLOATS:
                    raise BadSetting(
                        f"{where} is {spec.dtype}, and random indices would name no pages; give safetensors"
                    )
                dtype = getattr(torch, spec.dtype)
                found[name] = torch.randn(shape, device=self.device, dtype=dtype, generator=generator)
            elif source["type"] == "safetensors":
                found[name] = self._read(source, where, shape, spec.dtype)
            else:
                raise BadSetting(f"{where} is a tensor, and the workload gives it as a scalar")
        return found

    def _read(self, source: Mapping[str, Any], where: str, shape: list[int], dtype: str) -> Tensor:
        from safetensors import SafetensorError, safe_open  # rocm_serve installs it

        path = (self.root / source["path"]).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise BadSetting(f"{where} is at {source['path']}, outside of {self.root}; give --root")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensor: Tensor = file.get_tensor(source["tensor_key"])
        except (OSError, SafetensorError) as error:
            raise BadSetting(f"{where} cannot be read from {path} ({error}); give --root") from error
        if list(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
            raise BadSetting(f"{where} is {tensor.dtype} {list(tensor.shape)}; the definition has {dtype} {shape}")
        return tensor.to(self.device)

    def _reference(self, definition: Definition, inputs: Mapping[str, Any], truth: Truth) -> Callable[[], object]:
        run = function_of(definition.reference, f"the reference of {definition.name}")
        status, _ = judged(definition, truth, run(**inputs))
        if status != "PASSED":
            raise BadSetting(f"the reference of {definition.name} gives {status} by our reference; its file is wrong")
        return lambda: run(**inputs)

    def _latency_ms(self, run: Callable[[], object]) -> float:
        """Returns the time of a call as its caller sees it, planning included: the median of means."""
        for _ in range(_WARM_UP):
            run()
        means = []
        for _ in range(_ROUNDS):
            self._wait()
            before = time.perf_counter()
            for _ in range(_CALLS):
                run()
            self._wait()
            means.append((time.perf_counter() - before) / _CALLS)
        return statistics.median(means) * _MILLI

    def _wait(self) -> None:
        wait_for_device(self.device)

    def _ended(
        self,
        definition: Definition,
        workload: Workload,
        solution: Solution,
        status: str,
        log: str,
        correctness: Mapping[str, float] | None = None,
        performance: Mapping[str, float] | None = None,
    ) -> Trace:
        evaluation = {
            "status": status,
            "log": log,
            "correctness": correctness,
            "performance": performance,
            "environment": environment(self.device),
            "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        return Trace(definition.name, workload, solution.name, evaluation)


def step_of(definition: Definition, workload: Workload, inputs: Mapping[str, Any]) -> StepData:
    """Returns the step that a workload describes. Raises BadSetting if its lists contradict each other."""
    latent = "ckv_cache" in inputs
    if latent:
        q = torch.cat([inputs["q_nope"], inputs["q_pe"]], dim=-1)
        rows = torch.cat([inputs["ckv_cache"], inputs["kpe_cache"]], dim=-1).unsqueeze(2)
        k, v = rows, rows[..., : inputs["ckv_cache"].shape[-1]]
    else:
        q, k, v = inputs["q"], inputs["k_cache"], inputs["v_cache"]
    kind = PoolKind.LATENT if latent else PoolKind.SPLIT
    pages = LayerPages.plain(k, v, kind=kind)
    form = pages.format
    problem = Problem(
        q.shape[1],
        form.num_kv_heads,
        form.head_dim,
        q.dtype,
        form.page_size,
        v_head_dim=form.v_head_dim,
        scale=float(inputs["sm_scale"]),
        pool=kind,
        wants_lse="lse" in definition.outputs,
    )
    batch, pages_of_seq = _sequences(workload, inputs, len(k), form.page_size)
    return step_over(problem, batch, q, pages, NO_HEAD_WEIGHTS, pages_of_seq)


def _sequences(
    workload: Workload, inputs: Mapping[str, Any], num_pages: int, page_size: int
) -> tuple[BatchSpec, list[Tensor]]:
    """Returns the lengths and the pages of each sequence."""
    where = f"workload {workload.uuid}"
    indptr = inputs["kv_indptr"].tolist()
    counts = [end - begin for begin, end in itertools.pairwise(indptr)]
    last = inputs["kv_last_page_len"].tolist() if "kv_last_page_len" in inputs else [page_size] * len(counts)
    q_indptr = inputs["qo_indptr"].tolist() if "qo_indptr" in inputs else list(range(len(indptr)))
    new = [end - begin for begin, end in itertools.pairwise(q_indptr)]
    indices = inputs["kv_indices"].long()
    if len(indices) != indptr[-1] or indptr[0] != 0 or len(new) != len(counts):
        raise BadSetting(f"{where}: kv_indptr ends at {indptr[-1]}, and there are {len(indices)} pages")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < num_pages:
        raise BadSetting(f"{where}: kv_indices must be below {num_pages}")
    kv_len = [(count - 1) * page_size + tail if count > 0 else 0 for count, tail in zip(counts, last, strict=True)]
    for seq, (length, q_len) in enumerate(zip(kv_len, new, strict=True)):
        if length < max(q_len, 1) or q_len < 1:
            raise BadSetting(f"{where}: sequence {seq} has {q_len} new tokens and {length} in its pages")
    batch = BatchSpec.of_lengths((q_len, length - q_len) for length, q_len in zip(kv_len, new, strict=True))
    return batch, list(indices.split(counts))


def judged(definition: Definition, truth: Truth, outputs: Any) -> tuple[str, dict[str, float] | None]:
    """Returns the status of outputs, and their errors."""
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    named = dict(zip(definition.outputs, found, strict=False))
    if len(found) != len(definition.outputs):
        return "INCORRECT_SHAPE", None
    for name, tensor in named.items():
        if str(tensor.dtype) != f"torch.{definition.outputs[name].dtype}":
            return "INCORRECT_DTYPE", None
    if named["output"].shape != truth.data.out.shape:
        return "INCORRECT_SHAPE", None
    verdicts = [truth.judge(named["output"])]
    if "lse" in named:
        if named["lse"].shape != named["output"].shape[:2]:
            return "INCORRECT_SHAPE", None
        verdicts.append(truth.judge_lse(named["lse"].double() * math.log(2)))
    correctness = {
        "max_relative_error": max(verdict.max_relative for verdict in verdicts),
        "max_absolute_error": max(verdict.max_error for verdict in verdicts),
    }
    return ("PASSED" if all(map(_is_right, verdicts)) else "INCORRECT_NUMERICAL"), correctness


def _is_right(verdict: Verdict) -> bool:
    return verdict.is_right
