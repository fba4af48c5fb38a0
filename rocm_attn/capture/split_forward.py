"""SplitForward: how a forward runs over the two halves of a split step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.hip_graphs.forked import ForkedStream
from rocm_attn.step.step import SplitStep, Step

Forward = Callable[[Step], Tensor]
# The rows of each half, [S / 2, ...], as Forward gives them.
SplitForward = Callable[[SplitStep], tuple[Tensor, Tensor]]


def one_after_the_other(forward: Forward) -> SplitForward:
    """The first half, then the second, on the stream of the step. forward: gets the halves in turn"""

    def run(step: SplitStep) -> tuple[Tensor, Tensor]:
        first, second = step.halves
        return forward(first), forward(second)

    return run


def side_by_side(forward: Forward, side: ForkedStream) -> SplitForward:
    """The second half on a stream that is forked from the first one's and joined to it again.

    forward: gets both halves; what it writes besides its result must not be shared by them
    """

    def run(step: SplitStep) -> tuple[Tensor, Tensor]:
        first, second = step.halves
        return side.run_both(lambda: forward(first), lambda: forward(second))

    return run


def require_rows(rows: object) -> None:
    """Raise BadTensor unless this, which a forward has returned, is a tensor of rows."""
    if not isinstance(rows, Tensor) or rows.dim() == 0:
        what = "a tensor without dimensions" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise BadTensor(
            f"forward returned {what}; it returns one tensor [S, ...] with a row for each padded sequence of its step"
        )


def in_batch_order(step: SplitStep, rows: tuple[Tensor, Tensor]) -> Tensor:
    """The rows of both halves in one tensor [S, ...], those of real sequences first and in the order of the batch.

    Device work only, of fixed shape: where the second half's rows go follows from a count on the device. Rows after
    the real ones are any of the others. Raises BadTensor.
    """
    first, second = rows
    for half in rows:
        require_rows(half)
    num_rows = step.plan.shape.child.num_seqs
    if first.shape[0] != num_rows or second.shape[0] != num_rows:
        raise BadTensor(
            f"forward returned {first.shape[0]} and {second.shape[0]} rows for halves of {num_rows} padded sequences"
        )
    place = torch.arange(2 * num_rows, device=first.device)
    in_second = (place - step.num_first + num_rows).clamp(max=2 * num_rows - 1)
    return torch.cat(rows).index_select(0, torch.where(place < step.num_first, place, in_second))
