"""Steps that need together what any step without a graph does: what is compiled for a step hangs on its sizes.

By how many sequences and new tokens a step has, launchers choose among tiles, among ways to cut rows into parts, and
among ways to add these up; a kernel of each choice is compiled when it is met first. They alone know where one choice
ends and the next begins, so none of that is said here: there is a step of every number of sequences that a step can be
padded to, and of new tokens enough to meet each choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rocm_attn.batch.halves import HALVES
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy
from rocm_attn.batch.step_kinds import Extra, StepKind

# New tokens of a step, at most: as many as the chunks of prompts that engines run at a time.
MOST_TOKENS = 8192
# New tokens of a sequence where there may be more sequences: a mask of few long ones would have many cells.
_MOST_EACH = 256


def eager_steps(
    padding: PaddingPolicy, *, max_seqs: int, max_kv_len: int, uncaptured: Sequence[StepKind] = ()
) -> Iterator[tuple[PaddedShape, list[int]]]:
    """The steps: of each the shape, and new tokens of sequences that are padded to it.

    max_seqs:   sequences that a step may have
    max_kv_len: tokens that a sequence may have
    uncaptured: kinds that never are graphs and have kernels of their own
    """
    for size, fewest in _padded_seqs(padding, max_seqs).items():
        num_seqs = min(size, max_seqs)
        longest = min(max(_MOST_EACH, -(-MOST_TOKENS // max(1, num_seqs - 1))), max_kv_len)
        for kind in (*padding.kinds(1), *uncaptured):
            if kind.decodes:
                yield PaddedShape(kind, size, size), [1]
                continue
            # Those from `size` on, since tiles end at a mean over padded sequences. Some end at a number of tokens. It
            # may lie between the last of these and as many as there can be.
            counts = {*_token_counts(kind, fewest, is_dense=False), *_token_counts(kind, size, is_dense=True)}
            most = min((num_seqs - 1) * longest + (1 if kind.mixes else longest), MOST_TOKENS)
            if most > min(counts):
                counts.add(most)
            for num_tokens in sorted(counts):
                q_len = _new_tokens(kind, num_tokens, longest)
                if len(q_len) <= num_seqs and _is_of(kind, q_len):
                    yield PaddedShape(kind, size, num_tokens), q_len


def _padded_seqs(padding: PaddingPolicy, max_seqs: int) -> dict[int, int]:
    """The numbers of sequences that steps, or their halves where they may be split, can be padded to: of each the
    fewest that are padded so.
    """
    fewest: dict[int, int] = {}
    for count in range(1, max_seqs + 1):
        fewest.setdefault(padding.round_seqs(count, 1), count)
        if padding.max_children > 1:
            # One half may have a sequence and the other all others.
            fewest[padding.round_seqs(count, HALVES) // HALVES] = 1
    return fewest


def _token_counts(kind: StepKind, num_seqs: int, *, is_dense: bool) -> Iterator[int]:
    """Tokens of steps of so many sequences or more: each at most double of the last, as are the bounds of tiles.

    is_dense: one more than each of these, too: of more sequences, some step has as many query blocks
    """
    each = 1 if kind.extra is Extra.MASK else 2
    num_tokens = max(num_seqs, 2) + 1 if kind.mixes else num_seqs * each
    while True:
        yield num_tokens
        if num_tokens >= MOST_TOKENS:
            return
        if is_dense:
            yield num_tokens + 1
        num_tokens = min(2 * num_tokens, MOST_TOKENS)


def _new_tokens(kind: StepKind, num_tokens: int, longest: int) -> list[int]:
    """So many new tokens, shared out among as few sequences as can have them; one with a single one where kinds mix."""
    if kind.mixes:
        return [1, *_new_tokens(StepKind.EXTEND, num_tokens - 1, longest)]
    num_seqs = -(-num_tokens // longest)
    each, rest = divmod(num_tokens, num_seqs)
    return [each + 1] * rest + [each] * (num_seqs - rest)


def _is_of(kind: StepKind, q_len: list[int]) -> bool:
    """Whether a step with these new tokens is of a kind that does not decode."""
    return kind.extra is Extra.MASK or (max(q_len) > 1 and (min(q_len) == 1) == kind.mixes)
