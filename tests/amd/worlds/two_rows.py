"""A runtime of one layer with two rows whose tokens are all zeros, for steps whose lengths the device has wrong."""

import numpy as np
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.guards.registry import Guards
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import ALL_ON


def runtime_of_two_rows(guards: Guards = ALL_ON) -> AttentionRuntime:
    """Returns a runtime with two admitted rows, 1 and 2, of 16 tokens."""
    options = RuntimeOptions(num_pages=32, max_num_seqs=2, max_kv_len=16, provider="torch")
    made = build_runtime([small_problem()], options, device="cpu", guards=guards)
    for _ in range(2):
        made.table.reserve(made.table.admit(), 16)
    made.table.mark_stored(np.array([1, 2], np.int32), np.array([16, 16], np.int32))
    return made


def decode_of_both(*on_device: int) -> StepBatch:
    """Returns a decode step of both rows at length 10. on_device: the lengths that the device has"""
    arrays = [np.array(values, np.int32) for values in ([1, 2], [10, 10], [1, 1])]
    if not on_device:
        return StepBatch(*arrays)
    return StepBatch(*arrays, inputs=DeviceInputs(kv_len=torch.tensor(on_device, dtype=torch.int32)))


def run_whole(runtime: AttentionRuntime, batch: StepBatch) -> None:
    """Runs a step without layers."""
    runtime.step(batch)
    runtime.end_step()


def run_split(runtime: AttentionRuntime, batch: StepBatch) -> None:
    """Runs it as two halves."""
    runtime.step(batch, runtime.plan(batch, halves=2))
    runtime.end_step()
