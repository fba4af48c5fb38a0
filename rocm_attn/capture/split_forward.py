"""The forwards of a StepRunner as one function: of a whole step, a draft round, or the two halves of either."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.hip_graphs.forked import ForkedStream
from rocm_attn.hip_graphs.tensor_trees import branches_of, with_branches
from rocm_attn.step.outputs import Outputs, PerToken, structure_of
from rocm_attn.step.step import Part, Series, Step

Forward = Callable[[Part], Outputs]
# Called with the draft steps of a round, or of a half of one.
DraftForward = Callable[[Series], Outputs]
# Returns a forward's outputs of each of Step.halves, S / 2 sequences and T / 2 tokens each.
SplitForward = Callable[[Step], tuple[Outputs, Outputs]]


def side_by_side(forward: Forward[Outputs], side: ForkedStream) -> SplitForward[Outputs]:
    """Runs the second half on a stream that is forked from the first one's and joined to it again.

    forward: called with both halves; memory that it writes in addition to its result must not be shared by them
    """

    def run(step: Step) -> tuple[Outputs, Outputs]:
        first, second = step.parts
        return side.run_both(lambda: forward(first), lambda: forward(second))

    return run


def in_batch_order(step: Step, outputs: tuple[Outputs, Outputs]) -> Outputs:
    """Joins the outputs of both halves: rows of real sequences, or tokens, first and in the order of the batch.

    Device work only, of fixed shape: the places of the second half's rows depend on counts on the device. Rows after
    the real ones hold any of the others. Raises BadTensor if the halves returned different trees.
    """
    first, second = (structure_of(half) for half in outputs)
    if first != second:
        raise BadTensor(
            f"forward returned {first} for one half and {second} for the other; both must have the same structure"
        )
    return cast(Outputs, _joined(step, *outputs))


def _joined(step: Step, first: Any, second: Any) -> Any:
    """Joins two trees of the same structure."""
    if first is None:
        return None
    if isinstance(first, Tensor):
        return _in_order(step.num_first, first, second)
    if isinstance(first, PerToken):
        return PerToken(_in_order(step.num_first_tokens, first.tensor, second.tensor))
    pairs = zip(branches_of(first), branches_of(second), strict=True)
    return with_branches(first, [_joined(step, one, other) for (_, one), (_, other) in pairs])


def _in_order(num_first: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The first `num_first` rows of one tensor, then the rows of another of the same shape, then the rest."""
    num_rows = first.shape[0]
    place = torch.arange(2 * num_rows, device=first.device)
    in_second = (place - num_first + num_rows).clamp(max=2 * num_rows - 1)
    return torch.cat([first, second]).index_select(0, torch.where(place < num_first, place, in_second))
