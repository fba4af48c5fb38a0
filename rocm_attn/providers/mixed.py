"""Mixed steps by two kernels: decode for the sequences with few new tokens, extend for the others."""

import functools
from dataclasses import dataclass

import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.hip_graphs.forked import ForkedStream
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.providers.schedules import Schedules, whole_units


@dataclass(frozen=True, slots=True)
class TritonMixed:
    """Decode for the sequences that it serves, extend for the longer ones; both write disjoint tokens of out."""

    decode: BoundKernel
    extend: BoundKernel

    @property
    def schedule(self) -> Schedules:
        return Schedules((self.extend.schedule, self.decode.schedule))

    def describe(self) -> str:
        return f"{self.extend.describe()} + {self.decode.describe()}"

    def workspace_words(self, shape: PaddedShape) -> int:
        return max(self.extend.workspace_words(shape), self.decode.workspace_words(shape))

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        extend, decode = self.schedule.split(bounds.shape, args.schedule)
        self.extend.attend(args._replace(schedule=extend), step, bounds)
        self.decode.attend(args._replace(schedule=decode), step, bounds)


class MixedAtOnce(TritonMixed):
    """Like `TritonMixed`, but in a graph both kernels run at once, as far as the GPU has room, with a workspace each.

    An eager step runs them in turn, because forking a stream costs the host more than it gains.
    """

    __slots__ = ()

    def describe(self) -> str:
        return f"{super().describe()} at once"

    def workspace_words(self, shape: PaddedShape) -> int:
        return self._words_of_extend(shape) + self.decode.workspace_words(shape)

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        if not is_capturing(args.q.device):
            super().attend(args, step, bounds)
            return
        schedules = self.schedule.split(bounds.shape, args.schedule)
        words = self._words_of_extend(bounds.shape)
        extend = args._replace(schedule=schedules[0], workspace=args.workspace[:words])
        decode = args._replace(schedule=schedules[1], workspace=args.workspace[words:])
        _side_stream(args.q.device).run_both(
            here=lambda: self.extend.attend(extend, step, bounds),
            aside=lambda: self.decode.attend(decode, step, bounds),
        )

    def _words_of_extend(self, shape: PaddedShape) -> int:
        return whole_units(self.extend.workspace_words(shape))


def is_capturing(device: torch.device) -> bool:
    """True if launches on the device's current stream are captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _side_stream(device: torch.device) -> ForkedStream:
    """One stream for all layers: a capture makes branches of it, whichever stream is captured."""
    return ForkedStream(device)
