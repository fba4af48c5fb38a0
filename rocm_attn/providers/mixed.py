"""Two kernels that serve one step: decode for its sequences with few new tokens, extend for the others."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.providers.schedules import TwoSchedules


@dataclass(frozen=True, slots=True)
class TritonMixed:
    """Decode for the sequences that it serves, extend for the longer ones; both write disjoint tokens of out."""

    decode: BoundKernel
    extend: BoundKernel

    @property
    def schedule(self) -> TwoSchedules:
        return TwoSchedules(self.extend.schedule, self.decode.schedule)

    def describe(self) -> str:
        return f"{self.extend.describe()} + {self.decode.describe()}"

    def workspace_words(self, shape: PaddedShape) -> int:
        return max(self.extend.workspace_words(shape), self.decode.workspace_words(shape))

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        extend, decode = self.schedule.split(bounds.shape, args.schedule)
        self.extend.attend(args._replace(schedule=extend), step, bounds)
        self.decode.attend(args._replace(schedule=decode), step, bounds)
