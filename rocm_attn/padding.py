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

import enum
from dataclasses import dataclass

from rocm_attn.errors import CapacityExceeded
from rocm_attn.hip_graphs.size_ladder import SizeLadder
from rocm_attn.step_batch import StepBatch

PAD_ROW = 0


class StepKind(enum.Enum):
    """What a step asks of the kernels, by its new tokens."""

    DECODE = "decode"  # one new token in every sequence
    EXTEND = "extend"  # no sequence with exactly one new token
    MIXED = "mixed"  # some sequences with one new token, others with more, or none


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """The shape a step runs at.

    num_seqs, num_tokens: padded; at least 1 each
    """

    kind: StepKind
    num_seqs: int
    num_tokens: int

    @property
    def pad_q_len(self) -> int:
        """New tokens of a padded sequence."""
        return 1 if self.kind is StepKind.DECODE else 0


@dataclass(frozen=True, slots=True)
class PaddingPolicy:
    """Pads sequence and token counts to ladders; a count above its ladder keeps its own size.

    seqs:   the sequence counts that graphs are captured at
    tokens: the token counts that steps with more than one new token a sequence are captured at
    """

    seqs: SizeLadder
    tokens: SizeLadder

    def shape(self, batch: StepBatch, pad_to: int | None = None) -> PaddedShape:
        """The padded shape of a batch.

        pad_to: sequences to pad to instead of the ladder's choice (ranks that run in step must agree);
                raises CapacityExceeded when the batch has more
        """
        kind = step_kind(batch)
        wanted = max(1, batch.num_seqs)
        if pad_to is not None:
            if pad_to < wanted:
                raise CapacityExceeded(
                    f"{batch.num_seqs} sequences cannot be padded to {pad_to}; pad to at least {wanted}"
                )
            num_seqs = pad_to
        else:
            num_seqs = _pad(wanted, self.seqs)
        num_tokens = num_seqs if kind is StepKind.DECODE else _pad(max(1, batch.num_tokens), self.tokens)
        return PaddedShape(kind, num_seqs, num_tokens)

    def captures(self, shape: PaddedShape) -> bool:
        """Whether steps of this shape may be captured: none of its sizes lies above its ladder."""
        return shape.num_seqs <= self.seqs.largest and (
            shape.kind is StepKind.DECODE or shape.num_tokens <= self.tokens.largest
        )

    def largest_shapes(self) -> tuple[PaddedShape, ...]:
        """The largest shape of each kind of step that may be captured."""
        seqs, tokens = self.seqs.largest, self.tokens.largest
        return (
            PaddedShape(StepKind.DECODE, seqs, seqs),
            PaddedShape(StepKind.EXTEND, seqs, tokens),
            PaddedShape(StepKind.MIXED, seqs, tokens),
        )


def _pad(count: int, ladder: SizeLadder) -> int:
    return ladder.fit(count) if count <= ladder.largest else count


def step_kind(batch: StepBatch) -> StepKind:
    """The kind of step that a batch is. An empty batch is a decode step."""
    if batch.max_q_len == batch.min_q_len == 1 or batch.num_seqs == 0:
        return StepKind.DECODE
    return StepKind.MIXED if batch.min_q_len <= 1 else StepKind.EXTEND
