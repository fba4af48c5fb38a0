"""PaddingPolicy: the padded shape of a batch, as captured graphs need it, and the inputs of a padded sequence.

input        in a padded sequence              why
row          0                                 row 0 of the table is all page 0
kv_len       the kernels' min_kv_len           0, or 1 for kernels that divide by it; also a sequence without a token
q_len        1 in decode steps, 0 otherwise    q_indptr increases by one or stays equal; it never decreases
token id     0                                 in range for the embedding
position     0                                 in range for rope
slot         0                                 page 0: the store drops it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.drafts import NO_DRAFTS, AnyDrafts, Drafts
from rocm_attn.batch.halves import HALVES, split_batch
from rocm_attn.batch.inputs import HOST_INPUTS
from rocm_attn.batch.mask import NO_MASK, NoMask
from rocm_attn.batch.prefixes import NO_PREFIXES
from rocm_attn.batch.step_batch import INT32_MAX, StepBatch
from rocm_attn.batch.step_kinds import FEW_TOKENS, Extra, StepKind
from rocm_attn.errors import BadBatch, NeverFits
from rocm_attn.hip_graphs.size_ladder import SizeLadder, round_up

_NO_EXTRAS = frozenset({Extra.NOTHING})


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """The padded shape that a step runs at.

    num_seqs:     padded sequences of both halves together; at least 1 in each
    num_tokens:   padded tokens of all children together; at least 1 in each
    num_children: number of equal parts that the step runs in, each with its own buffers: halves, draft steps, or the
                  draft steps of the first half and then those of the second; 1 if it runs whole
    drafts:       the draft round; each of its steps has all sequences of the half
    """

    kind: StepKind
    num_seqs: int
    num_tokens: int
    num_children: int = 1
    drafts: AnyDrafts = NO_DRAFTS

    @classmethod
    def of_drafts(cls, drafts: Drafts, num_seqs: int, num_halves: int) -> PaddedShape:
        """The shape of a draft round: decode if the drafts are chains, else the step kind with masks."""
        kind = StepKind.DECODE if drafts.branches == 1 else StepKind.MASKED
        return cls(kind, num_seqs, num_seqs * drafts.tokens, num_halves * drafts.steps, drafts)

    @property
    def num_halves(self) -> int:
        """Parts that the sequences are cut into: 1 or 2."""
        # A draft step alone is less than a half.
        return max(1, self.num_children // self.drafts.steps)

    @property
    def is_sound(self) -> bool:
        """True if each part has one size, with at least one sequence and token."""
        halves, decodes = self.num_halves, self.kind.decodes and self.drafts is NO_DRAFTS
        return (
            halves in (1, HALVES)
            and self.num_children == halves * self.drafts.steps
            and (self.num_children == 1 or self.kind.splits)
            and self.num_seqs >= halves
            and self.num_tokens >= self.num_children
            and self.num_seqs % halves == self.num_tokens % self.num_children == 0
            and (self.num_tokens == self.num_seqs or not decodes)
        )

    @property
    def child(self) -> PaddedShape:
        """The shape of one child; a step that runs whole is its own child."""
        if self.num_children == 1:
            return self
        num_seqs, num_tokens = self.num_seqs // self.num_halves, self.num_tokens // self.num_children
        return PaddedShape(self.kind, num_seqs, num_tokens, drafts=self.drafts)

    def of_few(self, max_q_len: int) -> PaddedShape:
        """Returns itself, or the verify step of the same sizes if that has room for max_q_len tokens per sequence."""
        is_verified = self.kind in (StepKind.EXTEND, StepKind.MIXED) and self.num_children == 1
        return replace(self, kind=StepKind.VERIFY) if is_verified and max_q_len <= FEW_TOKENS else self

    @property
    def pad_q_len(self) -> int:
        """New tokens of a padded sequence."""
        return 1 if self.kind.decodes else 0


class PadTo(NamedTuple):
    """The sizes that a step is padded to if data-parallel ranks must agree: integers, to be sent to them unchanged.

    seqs:   padded sequences
    tokens: padded tokens, if on some rank the new tokens are not one per sequence. A rank that decodes, or has no
            sequence, uses the same number. If steps of this size may be captured, all ranks run mixed steps, so that
            all replay the same graph. 0: kind and tokens are the batch's own, as when each rank decodes or is idle
    kv_len: tokens of the longest sequence on any rank, for kernels that bake it in; 0: that of the batch
    """

    seqs: int
    tokens: int = 0
    kv_len: int = 0

    @classmethod
    def of(cls, batch: StepBatch, padding: PaddingPolicy, num_children: int = 1) -> PadTo:
        """The sizes that a batch would be padded to on this rank alone. num_children: 2 if it runs as halves"""
        shape = padding.shape(batch) if num_children == 1 else padding.split_shape(batch)
        is_uniform = shape.kind.decodes or batch.drafts is not NO_DRAFTS
        return cls(shape.num_seqs, 0 if is_uniform else shape.num_tokens, batch.max_kv_len)

    @classmethod
    def all_of(cls, each: Iterable[PadTo], padding: PaddingPolicy, num_children: int = 1) -> PadTo:
        """The sizes that fit the steps of all ranks. each: PadTo.of() of every rank, in any order

        Raises BadBatch if there is none.
        """
        each = [cls(*one) for one in each]
        if not each:
            raise BadBatch("no rank has sizes; give PadTo.of() of every rank")
        seqs, kv_len = max(one.seqs for one in each), max(one.kv_len for one in each)
        if not any(one.tokens for one in each):
            return cls(seqs, 0, kv_len)
        # One sequence more than either kind alone has, since capture_all() makes graphs of steps that mix two kinds.
        seqs = padding.round_seqs(max(seqs, num_children + 1), num_children)
        most = max(one.tokens or one.seqs for one in each)
        return cls(seqs, padding.round_tokens(most, num_children), kv_len)


@dataclass(frozen=True, slots=True)
class PaddingPolicy:
    """Pads sequence and token counts up to capture sizes (ladders); a count above the largest is not padded.

    seqs:         the sequence counts that graphs are captured at
    tokens:       the token counts that steps with more than one new token per sequence are captured at
    max_children: the most parts that the sequences of a captured step are split into; a split step uses the same sizes,
                  rounded up to two equal halves
    extras:       extra inputs that captured steps may have
    drafts:       the draft rounds that may be captured
    mask_keys:    keys before the new ones for which masks of captured steps have room
    verify:       new tokens per sequence in steps that verify draft tokens. A step with at most this number per
                  sequence, and no more sequences than the largest of seqs, is padded to this number in each sequence,
                  and may be captured; 0: none are
    prompts:      token counts of steps with prompts. A step that neither decodes nor verifies, and has no more tokens
                  than the largest of them, is padded to one of them and to the largest sequence count. It may be
                  captured, with one graph per count
    """

    seqs: SizeLadder
    tokens: SizeLadder
    max_children: int = 1
    extras: frozenset[Extra] = _NO_EXTRAS
    drafts: tuple[Drafts, ...] = ()
    mask_keys: int = 0
    verify: int = 0
    prompts: tuple[int, ...] = ()

    def kinds(self, num_children: int) -> tuple[StepKind, ...]:
        """The kinds of steps that may be captured, whole or in num_children parts; the planner finds verify steps."""
        kinds = (kind for kind in StepKind if kind is not StepKind.VERIFY)
        return tuple(kind for kind in kinds if self._captures(kind, num_children))

    def round_seqs(self, num_seqs: int, num_children: int) -> int:
        """The padded sequences, of all children together."""
        return _pad(num_seqs, self.seqs) if num_children == 1 else _pad_even(num_seqs, self.seqs)

    def round_tokens(self, num_tokens: int, num_children: int) -> int:
        """The padded tokens, of all children together, of a step whose children each have room for their share."""
        return _pad(num_tokens, self.tokens) if num_children == 1 else _pad_even(num_tokens, self.tokens)

    def shape(self, batch: StepBatch, pad_to: PadTo | None = None) -> PaddedShape:
        """The padded shape of a batch. pad_to: sizes to use instead of this policy's

        Raises NeverFits if the batch has more than pad_to, and BadBatch for shared prefixes in a step with more than
        one new token per sequence.
        """
        return self._shape(batch, pad_to, 1)

    def split_shape(self, batch: StepBatch, pad_to: PadTo | None = None) -> PaddedShape:
        """The padded shape of a batch that runs as two halves, either of which may be empty.

        pad_to: as in shape(), of both halves together; even numbers, or NeverFits is raised
        """
        return self._shape(batch, pad_to, HALVES)

    def _shape(self, batch: StepBatch, pad_to: PadTo | None, num_children: int) -> PaddedShape:
        kind = step_kind(batch)
        if pad_to is None:
            num_seqs = self.round_seqs(max(1, batch.num_seqs), num_children)
        else:
            _check(batch, pad_to, num_children)
            num_seqs = pad_to.seqs
        if isinstance(batch.drafts, Drafts):
            return PaddedShape.of_drafts(batch.drafts, num_seqs, num_children)
        if pad_to is None or not pad_to.tokens:
            if kind.decodes and (num_children == 1 or kind.splits):
                return PaddedShape(kind, num_seqs, num_seqs, num_children)
            if self._is_verified(batch, num_seqs) and num_children == 1:
                return PaddedShape(kind, num_seqs, num_seqs * self.verify)
            if self._is_prompts(batch) and num_children == 1:
                # A sequence of a mixed step may have any number of tokens, so one graph serves all that have no mask.
                kind = kind if kind.extra is Extra.MASK else StepKind.MIXED
                return PaddedShape(kind, self.seqs.largest, SizeLadder(self.prompts).fit(batch.num_tokens))
            needed = _tokens_of_children(batch, num_seqs, num_children)
            return PaddedShape(kind, num_seqs, self.round_tokens(needed, num_children), num_children)
        needed = _tokens_of_children(batch, num_seqs, num_children)
        if pad_to.tokens < needed:
            raise NeverFits(f"{batch.num_tokens} tokens cannot be padded to {pad_to.tokens}; pad to at least {needed}")
        mixed = PaddedShape(StepKind.MIXED, num_seqs, pad_to.tokens, num_children)
        if kind.extra is Extra.NOTHING and (kind.decodes or self.captures(mixed)):
            return mixed
        return PaddedShape(kind, num_seqs, pad_to.tokens, num_children)

    def captures(self, shape: PaddedShape) -> bool:
        """True if steps of this shape may be captured: no size is above its largest capture size."""
        halves = shape.num_halves
        if halves > self.max_children or shape.num_seqs > round_up(self.seqs.largest, halves):
            return False
        if isinstance(shape.drafts, Drafts):
            return shape.drafts in self.drafts and shape.kind.extra in self.extras
        fits_tokens = shape.num_tokens <= round_up(self.tokens.largest, halves) or (
            self.verifies(shape) or self._holds_prompts(shape)
        )
        return (shape.kind.decodes or fits_tokens) and self._captures(shape.kind, halves)

    def has_room(self, batch: StepBatch, shape: PaddedShape) -> bool:
        """True if captured steps of this shape have room for a batch's mask."""
        if isinstance(batch.mask, NoMask):
            return True
        return batch.mask.num_cells(batch.kv_len, batch.q_len) <= room_for_cells(shape.num_tokens, self.mask_keys)

    def pads_as_verified(self, batch: StepBatch) -> bool:
        """True if a batch with several new tokens per sequence, run whole, is padded like verify steps."""
        return batch.drafts is NO_DRAFTS and batch.max_q_len <= self.verify and batch.num_seqs <= self.seqs.largest

    def _is_verified(self, batch: StepBatch, num_seqs: int) -> bool:
        """True if a batch that is padded to num_seqs sequences is one of those that verify drafts."""
        return self.verify > 0 and batch.max_q_len <= self.verify and num_seqs <= self.seqs.largest

    def _is_prompts(self, batch: StepBatch) -> bool:
        """True if a batch that does not decode is padded like those that take in prompts."""
        return (
            bool(self.prompts)
            and batch.num_seqs <= self.seqs.largest
            and self.tokens.largest < batch.num_tokens <= self.prompts[-1]
        )

    def _holds_prompts(self, shape: PaddedShape) -> bool:
        """True if steps that take in prompts have this shape."""
        return shape in self.prompt_shapes()

    def prompt_shapes(self) -> tuple[PaddedShape, ...]:
        """The shapes of steps with prompts."""
        kinds = [kind for kind in (StepKind.MIXED, StepKind.MASKED) if self._captures(kind, 1)]
        return tuple(PaddedShape(kind, self.seqs.largest, tokens) for kind in kinds for tokens in self.prompts)

    def verifies(self, shape: PaddedShape) -> bool:
        """True if steps that verify drafts have this shape."""
        uniform = shape.num_children == 1 and not shape.kind.decodes
        return self.verify > 0 and uniform and shape.num_tokens == shape.num_seqs * self.verify

    def fixed_q_len(self, shape: PaddedShape) -> int:
        """New tokens per sequence that the kernels of a shape with a single graph have room for; 0: it has several."""
        if self.verifies(shape):
            return self.verify
        return shape.num_tokens if self._holds_prompts(shape) else 0

    def most_q_len(self, shape: PaddedShape) -> int:
        """New tokens of a sequence, at most, in steps of a shape."""
        return self.verify if self.verifies(shape) else shape.child.num_tokens

    def _captures(self, kind: StepKind, num_children: int) -> bool:
        return kind.captured and kind.extra in self.extras and (num_children == 1 or kind.splits)

    def largest_shapes(self) -> tuple[PaddedShape, ...]:
        """The largest shape of each kind of step, whole and split, that may be captured."""
        shapes = []
        for children in range(1, self.max_children + 1):
            seqs, tokens = (round_up(ladder.largest, children) for ladder in (self.seqs, self.tokens))
            most = max(tokens, seqs * self.verify, *self.prompts) if children == 1 else tokens
            shapes += [
                PaddedShape(kind, seqs, seqs if kind.decodes else most, children) for kind in self.kinds(children)
            ]
            shapes += [PaddedShape.of_drafts(drafts, seqs, children) for drafts in self.drafts]
        if 0 < self.verify <= FEW_TOKENS:
            shapes.append(PaddedShape(StepKind.VERIFY, self.seqs.largest, self.seqs.largest * self.verify))
        return tuple(shapes)


def room_for_cells(num_tokens: int, mask_keys: int) -> int:
    """Cells of any mask of num_tokens new tokens that covers up to mask_keys keys before each sequence's new ones."""
    return num_tokens * (num_tokens + mask_keys)


def fits(batch: StepBatch, shape: PaddedShape) -> bool:
    """True if a batch can run at a padded shape, each of its parts in a child of it."""
    if shape.drafts is not NO_DRAFTS or batch.drafts is not NO_DRAFTS:
        return batch.num_seqs <= shape.num_seqs and batch.drafts == shape.drafts
    if batch.num_seqs > shape.num_seqs or (shape.kind.decodes and step_kind(batch).decodes != shape.kind.decodes):
        return False
    return shape.kind.decodes or _tokens_of_children(batch, shape.num_seqs, shape.num_children) <= shape.num_tokens


def token_places(batch: StepBatch, shape: PaddedShape) -> npt.NDArray[np.int64]:
    """int64 [T]; places of a step's tokens among its padded ones, one half after the other: real tokens, then pads.

    Not for drafts, whose steps have the same places.
    """
    places = np.arange(shape.num_tokens)
    if shape.num_children == 1:
        return places
    child = shape.child
    first, _ = split_batch(batch, child.num_seqs)
    num_first, num_second = first.num_tokens, batch.num_tokens - first.num_tokens
    is_real = (places < num_first) | ((places >= child.num_tokens) & (places < child.num_tokens + num_second))
    return np.concatenate([places[is_real], places[~is_real]])


def require_pad_to(pad_to: object) -> None:
    """Raises BadBatch for a value that is no PadTo, such as a number alone, and for sizes that are no int32."""
    if not isinstance(pad_to, PadTo):
        raise BadBatch(f"pad_to is {pad_to!r}; give PadTo(seqs), or PadTo(seqs, tokens) if a rank does not decode")
    if not all(type(size) is int and 0 <= size <= INT32_MAX for size in pad_to):
        raise BadBatch(f"pad_to is {pad_to!r}; each of its sizes must be an int from 0 to {INT32_MAX}")


def _check(batch: StepBatch, pad_to: PadTo, num_children: int) -> None:
    """Refuses sizes that a batch cannot be padded to."""
    wanted = max(1, batch.num_seqs)
    if pad_to.seqs < wanted:
        raise NeverFits(f"{batch.num_seqs} sequences cannot be padded to {pad_to.seqs}; pad to at least {wanted}")
    if pad_to.tokens and batch.drafts is not NO_DRAFTS:
        raise BadBatch(
            "a round of drafts cannot be padded to a number of tokens, because its sequences determine it; use "
            f"PadTo({pad_to.seqs})"
        )
    for count, what in ((pad_to.seqs, "sequences"), (pad_to.tokens, "tokens")):
        if count % num_children:
            raise NeverFits(f"{count} {what} cannot be split into two equal halves; pad to an even number")
    if pad_to.tokens and batch.prefixes is not NO_PREFIXES:
        raise BadBatch(
            f"a step with shared prefixes cannot be padded to {pad_to.tokens} tokens, because it only decodes; leave "
            "the prefixes out while another rank does not decode"
        )


def _tokens_of_children(batch: StepBatch, num_seqs: int, num_children: int) -> int:
    """Tokens that all children of a batch need room for together; both have the larger one's, and so one plan."""
    if num_children == 1:
        return max(1, batch.num_tokens)
    return HALVES * max(1, *(half.num_tokens for half in split_batch(batch, num_seqs // HALVES)))


def _pad(count: int, ladder: SizeLadder) -> int:
    return ladder.fit(count) if count <= ladder.largest else count


def _pad_even(count: int, ladder: SizeLadder) -> int:
    """Pads to the ladder's sizes, each rounded up to an even one."""
    # An odd size, rounded up, holds one more than it says.
    return round_up(_pad(round_up(count, HALVES) - 1, ladder), HALVES)


def is_prefill(batch: StepBatch) -> bool:
    """True if the host knows that no sequence of a batch has a token in the cache from earlier steps."""
    return batch.inputs is HOST_INPUTS and batch.num_seqs > 0 and bool((batch.kv_len == batch.q_len).all())


def step_kind(batch: StepBatch) -> StepKind:
    """The kind of step that a batch is. Without a mask an empty one is a decode step; PREFILL is for the planner.

    Not for a round of drafts: PaddedShape.of_drafts() has the kind of its steps.
    """
    if batch.mask is not NO_MASK:
        return StepKind.MASKED
    if batch.prefixes is not NO_PREFIXES:
        return StepKind.SHARED
    if batch.max_q_len == batch.min_q_len == 1 or batch.num_seqs == 0:
        return StepKind.DECODE
    return StepKind.MIXED if batch.min_q_len <= 1 else StepKind.EXTEND
