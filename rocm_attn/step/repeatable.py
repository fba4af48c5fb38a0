"""Repeatable: a step that may run again, on inputs that the device has put in the place of its own."""

from __future__ import annotations

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.plan import StepPlan

# A whole step that was staged, and after it nothing else was: its batch, its plan, and where its inputs are.
Repeatable = tuple[StepBatch, StepPlan, DeviceStep]


def inputs_of(repeatable: Repeatable) -> StepTensors:
    """Where its inputs are, in the full space.

    The device may write those of another step there, of the same rows and sizes, and with lengths for which the host
    has reserved pages.
    """
    return repeatable[2].spaces[0]
