"""Kernels that misread their arguments, put in the place of a runtime's own."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import BoundKernel, LayerKernel, Schedule, StepBounds
from rocm_attn.providers.select import Selection
from rocm_attn.step.core import OpsChange, SelectionChange, unchanged

# A kernel's arguments -> the arguments that a faulty one reads.
Fault = Callable[[AttendArgs], AttendArgs]


@dataclass(frozen=True)
class FaultyKernel:
    """A kernel that reads other arguments than it is given."""

    inner: BoundKernel
    fault: Fault

    @property
    def schedule(self) -> Schedule:
        return self.inner.schedule

    def describe(self) -> str:
        return f"faulty {self.inner.describe()}"

    def workspace_words(self, shape: PaddedShape) -> int:
        return self.inner.workspace_words(shape)

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.inner.attend(self.fault(args), step, bounds)


def with_launches(kernels: SelectionChange, ops: OpsChange = unchanged) -> Guards:
    """Returns guards with faults in place of their launches."""
    guards = Guards()
    launches = replace(guards.step.launches, v_mask=kernels, store_drops=ops)
    return replace(guards, step=replace(guards.step, launches=launches))


def faulty(fault: Fault, selection: Selection) -> Selection:
    kernels = {
        kind: LayerKernel(kernel.entry, FaultyKernel(kernel.bound, fault)) for kind, kernel in selection.kernels.items()
    }
    return replace(selection, kernels=kernels)
