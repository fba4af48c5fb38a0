"""Base classes of the triton provider's kernels: their tiles for a problem, and how a step's keys are split."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.cuts import DecodeCut, ExtendCut, Sequences
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import Schedule, StepBounds
from rocm_attn.providers.schedules import DecodeSchedule, ExtendSchedule

Tiles = TypeVar("Tiles")


@dataclass(frozen=True, slots=True)
class CutDecode(Generic[Tiles]):
    """Decode of sequences with one new token; other sequences are skipped. scores: the problem's"""

    problem: Problem
    scores: Scores
    tiles: Tiles
    cut: DecodeCut

    @property
    def schedule(self) -> DecodeSchedule:
        return DecodeSchedule(self.cut)


@dataclass(frozen=True, slots=True)
class CutSegmentDecode(CutDecode[Tiles], ABC):
    """Deterministic decode.

    cut:           its key blocks are segments
    most_segments: that a token may see; the workspace has a slot for each
    """

    most_segments: int

    @property
    @abstractmethod
    def q_rows(self) -> int:
        """Query heads that a program computes at once."""

    def workspace_words(self, shape: PaddedShape) -> int:
        words = self.cut.segment_words(
            shape.num_seqs, self.most_segments, q_rows=self.q_rows, v_head_dim=self.problem.v_head_dim
        )
        return sum(words)


@dataclass(frozen=True, slots=True)
class CutExtend(Generic[Tiles]):
    """Ragged extend over a cached prefix, for sequences with cut.min_q_len new tokens or more. scores: the problem's"""

    problem: Problem
    scores: Scores
    tiles: Tiles
    cut: ExtendCut

    @property
    def schedule(self) -> ExtendSchedule:
        return ExtendSchedule(self.cut)


class Maskable(ABC):
    """A bound kernel (BoundKernel has the other docstrings) that may also be given the keys that tokens see."""

    __slots__ = ()

    @property
    @abstractmethod
    def schedule(self) -> Schedule: ...

    @abstractmethod
    def describe(self) -> str: ...

    @abstractmethod
    def workspace_words(self, shape: PaddedShape) -> int: ...

    @only_launches
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        self.attend_by(args, None)

    @property
    def reads_cells(self) -> bool:
        """False if the sequences that it serves have no cells in a mask: it is given ranges of keys alone."""
        return True

    @abstractmethod
    def attend_by(self, args: AttendArgs, mask: VisibleKeys | None) -> None:
        """Attends like `attend`, but over these keys if they are given."""


@dataclass(frozen=True, slots=True)
class MaskableExtend(CutExtend[Tiles], Maskable):
    """Extend in which every row belongs to one program, unless a kernel says that it needs a workspace."""

    @property
    def reads_cells(self) -> bool:
        return self.cut.sequences is not Sequences.WITHOUT_CELLS

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0
