"""The schedules of this project's kernels: how work is divided over programs, computed on the device in each step."""

from dataclasses import dataclass

from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.hip_graphs.size_ladder import round_up
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.attention.cuts import DecodeCut, ExtendCut, Sequences
from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.launch import only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import RangedSchedule, Schedule, StepBounds
from rocm_attn.providers.triton_later import triton_launches


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """The schedule of split-KV decode, deterministic or not."""

    cut: DecodeCut

    def words(self, shape: PaddedShape) -> int:
        return self.cut.most_words(shape.num_seqs)

    @only_launches
    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        triton_launches.launch_decode_schedule(queries, words, self.cut.of_step(queries.num_seqs))


@dataclass(frozen=True, slots=True)
class ExtendSchedule:
    """The schedule of ragged extend, deterministic or not."""

    cut: ExtendCut

    def words(self, shape: PaddedShape) -> int:
        return self.cut.words(shape.num_tokens, shape.num_seqs)

    @only_launches
    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        first_cell = None if self.cut.sequences is Sequences.ALL else step.mask_start
        triton_launches.launch_extend_schedule(queries, words, self.cut, first_cell)


@dataclass(frozen=True, slots=True)
class RangeSchedule:
    """The ranges of keys that a step's tokens see in a layer: first keys of all tokens, then their ends."""

    visibility: Visibility

    def words(self, shape: PaddedShape) -> int:
        return 2 * whole_units(shape.num_tokens)

    @only_launches
    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        self._write(step, bounds, words)

    def build_ranges(self, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        if self.visibility.masked and self.visibility.windowed:
            self._write(step, bounds, words)

    def _write(self, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        triton_launches.launch_visible_ranges(step, self.visibility, *self.parts(words, bounds.shape))

    def parts(self, words: Tensor, shape: PaddedShape) -> tuple[Tensor, Tensor]:
        """First keys and ends, int32 [T] each."""
        num_tokens = shape.num_tokens
        return words[:num_tokens], words[whole_units(num_tokens) :][:num_tokens]


@dataclass(frozen=True, slots=True)
class Schedules:
    """Several schedules of one step, one after the other."""

    parts: tuple[Schedule, ...]

    def words(self, shape: PaddedShape) -> int:
        return sum(_room(part, shape) for part in self.parts)

    def split(self, shape: PaddedShape, words: Tensor) -> list[Tensor]:
        """The words of each schedule."""
        found, first = [], 0
        for part in self.parts:
            found.append(words[first : first + part.words(shape)])
            first += _room(part, shape)
        return found

    @only_launches
    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        for part, its_words in zip(self.parts, self.split(bounds.shape, words), strict=True):
            part.build(queries, step, bounds, its_words)

    def build_ranges(self, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        for part, its_words in zip(self.parts, self.split(bounds.shape, words), strict=True):
            if isinstance(part, RangedSchedule):
                part.build_ranges(step, bounds, its_words)


def _room(part: Schedule, shape: PaddedShape) -> int:
    return whole_units(part.words(shape))


def whole_units(words: int) -> int:
    """The words of whole units of 16 bytes: Triton compiles a kernel again when a pointer's alignment changes."""
    return round_up(words, 4)
