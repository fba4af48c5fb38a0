"""PaddingPolicy: which padded shape a batch takes, and what every input holds in a padded sequence.

input        in a padded sequence              why
row          0                                 row 0 of the table is all page 0
kv_len       the kernels' min_kv_len           0, or 1 for kernels that divide by it
q_len        1 in decode steps, 0 otherwise    q_indptr goes on by one or repeats; it never decreases
token id     0                                 in range for the embedding
position     0                                 in range for rope
slot         0                                 page 0: the store drops it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.halves import HALVES, split_batch
from rocm_attn.batch.inputs import HOST_INPUTS
from rocm_attn.batch.mask import NO_MASK
from rocm_attn.batch.prefixes import NO_PREFIXES
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.errors import NeverFits
from rocm_attn.hip_graphs.size_ladder import SizeLadder, round_up

_NO_EXTRAS = frozenset({Extra.NOTHING})


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """The shape a step runs at.

    num_seqs, num_tokens: padded, of all children together; at least 1 each in every child
    num_children:         parts of one shape that the step runs as, each in buffers of its own; 1 where it is not split
    """

    kind: StepKind
    num_seqs: int
    num_tokens: int
    num_children: int = 1

    @property
    def child(self) -> PaddedShape:
        """The shape of one child; a step that is not split is its own child."""
        if self.num_children == 1:
            return self
        return PaddedShape(self.kind, self.num_seqs // self.num_children, self.num_tokens // self.num_children)

    @property
    def pad_q_len(self) -> int:
        """New tokens of a padded sequence."""
        return 1 if self.kind.decodes else 0


@dataclass(frozen=True, slots=True)
class PaddingPolicy:
    """Pads sequence and token counts to ladders; a count above its ladder keeps its own size.

    seqs:         the sequence counts that graphs are captured at
    tokens:       the token counts that steps with more than one new token a sequence are captured at
    max_children: the most children that a captured step has; a split step takes the sizes of the ladders, rounded up
                  to two equal halves
    extras:       what captured steps may bring
    """

    seqs: SizeLadder
    tokens: SizeLadder
    max_children: int = 1
    extras: frozenset[Extra] = _NO_EXTRAS

    def kinds(self, num_children: int) -> tuple[StepKind, ...]:
        """The kinds of steps that may be captured whole, or in so many parts."""
        return tuple(kind for kind in StepKind if self._captures(kind, num_children))

    def shape(self, batch: StepBatch, pad_to: int | None = None) -> PaddedShape:
        """The padded shape of a batch.

        pad_to: sequences to pad to instead of the ladder's choice (ranks that run in step must agree);
                raises CapacityExceeded when the batch has more
        """
        kind = step_kind(batch)
        num_seqs = _pad(max(1, batch.num_seqs), self.seqs) if pad_to is None else _forced(batch, pad_to)
        num_tokens = num_seqs if kind.decodes else _pad(max(1, batch.num_tokens), self.tokens)
        return PaddedShape(kind, num_seqs, num_tokens)

    def split_shape(self, batch: StepBatch, pad_to: int | None = None) -> PaddedShape:
        """The padded shape of a batch that runs as two halves, either of which may be empty.

        pad_to: as in shape(), and even; raises CapacityExceeded for an odd one
        """
        kind = step_kind(batch)
        if pad_to is not None and pad_to % HALVES:
            raise NeverFits(f"{pad_to} sequences cannot be split into halves of one size; pad to an even number")
        num_seqs = _pad_even(max(1, batch.num_seqs), self.seqs) if pad_to is None else _forced(batch, pad_to)
        num_tokens = num_seqs
        if not (kind.decodes and kind.splits):
            halves = split_batch(batch, num_seqs // HALVES)
            # Both halves have the larger one's room: they have one shape, and so one plan.
            most = max(1, *(half.num_tokens for half in halves))
            num_tokens = _pad_even(HALVES * most, self.tokens)
        return PaddedShape(kind, num_seqs, num_tokens, HALVES)

    def captures(self, shape: PaddedShape) -> bool:
        """Whether steps of this shape may be captured: none of its sizes lies above its ladder."""
        children = shape.num_children
        return (
            children <= self.max_children
            and shape.num_seqs <= round_up(self.seqs.largest, children)
            and (shape.kind.decodes or shape.num_tokens <= round_up(self.tokens.largest, children))
            and self._captures(shape.kind, children)
        )

    def _captures(self, kind: StepKind, num_children: int) -> bool:
        return kind.captured and kind.extra in self.extras and (num_children == 1 or kind.splits)

    def largest_shapes(self) -> tuple[PaddedShape, ...]:
        """The largest shape of each kind of step, whole and split, that may be captured."""
        shapes = []
        for children in range(1, self.max_children + 1):
            seqs, tokens = (round_up(ladder.largest, children) for ladder in (self.seqs, self.tokens))
            shapes += [
                PaddedShape(kind, seqs, seqs if kind.decodes else tokens, children) for kind in self.kinds(children)
            ]
        return tuple(shapes)


def token_places(batch: StepBatch, shape: PaddedShape) -> npt.NDArray[np.int64]:
    """int64 [T]; places of a step's tokens among its padded ones, one half after the other: real tokens, then pads."""
    places = np.arange(shape.num_tokens)
    if shape.num_children == 1:
        return places
    child = shape.child
    first, _ = split_batch(batch, child.num_seqs)
    num_first, num_second = first.num_tokens, batch.num_tokens - first.num_tokens
    is_real = (places < num_first) | ((places >= child.num_tokens) & (places < child.num_tokens + num_second))
    return np.concatenate([places[is_real], places[~is_real]])


def _forced(batch: StepBatch, pad_to: int) -> int:
    wanted = max(1, batch.num_seqs)
    if pad_to < wanted:
        raise NeverFits(f"{batch.num_seqs} sequences cannot be padded to {pad_to}; pad to at least {wanted}")
    return pad_to


def _pad(count: int, ladder: SizeLadder) -> int:
    return ladder.fit(count) if count <= ladder.largest else count


def _pad_even(count: int, ladder: SizeLadder) -> int:
    """To the ladder's sizes, each rounded up to an even one."""
    # An odd size holds one more than it says when it is rounded up.
    return round_up(_pad(round_up(count, HALVES) - 1, ladder), HALVES)


def is_prefill(batch: StepBatch) -> bool:
    """Whether the host knows that no sequence of a batch has a token in the cache from earlier steps."""
    return batch.inputs is HOST_INPUTS and batch.num_seqs > 0 and bool((batch.kv_len == batch.q_len).all())


def step_kind(batch: StepBatch) -> StepKind:
    """The kind of step that a batch is. Without a mask an empty one is a decode step; PREFILL is for the planner."""
    if batch.mask is not NO_MASK:
        return StepKind.MASKED
    if batch.prefixes is not NO_PREFIXES:
        return StepKind.SHARED
    if batch.max_q_len == batch.min_q_len == 1 or batch.num_seqs == 0:
        return StepKind.DECODE
    return StepKind.MIXED if batch.min_q_len <= 1 else StepKind.EXTEND
