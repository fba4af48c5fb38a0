"""Packed masks of draft trees, against walks from each token to its root."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.batch.inputs import HOST_INPUTS, DeviceInputs, Inputs
from rocm_attn.batch.mask import StepMask, kv_positions, mask_bytes
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.tree_mask import NO_PARENT, tree_mask
from rocm_attn.errors import BadBatch, BadTensor


def batch_of(kv_len: Sequence[int], q_len: Sequence[int], inputs: Inputs = HOST_INPUTS) -> StepBatch:
    rows = np.arange(1, len(kv_len) + 1, dtype=np.int32)
    return StepBatch(rows, np.array(kv_len, np.int32), np.array(q_len, np.int32), inputs=inputs)


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def walked(prefix: Sequence[int], trees: Sequence[Sequence[int]]) -> tuple[list[bool], list[int]]:
    """The cells and positions of trees, token by token."""
    cells, positions = [], []
    for before, parents in zip(prefix, trees, strict=True):
        for token in range(len(parents)):
            branch, at = [token], parents[token]
            while at != NO_PARENT:
                branch.append(at)
                at = parents[at]
            cells += [True] * before + [other in branch for other in range(len(parents))]
            positions.append(before + len(branch) - 1)
    return cells, positions


def bits_of(mask: StepMask, count: int) -> list[bool]:
    bits: list[bool] = np.unpackbits(mask.bits.numpy(), bitorder="little")[:count].astype(bool).tolist()
    return bits


trees = st.lists(
    st.integers(0, 9).flatmap(lambda n: st.tuples(*(st.integers(NO_PARENT, token - 1) for token in range(n)))),
    min_size=1,
    max_size=5,
)


@given(drawn=trees, data=st.data())
def test_a_draft_sees_the_prefix_its_ancestors_and_itself(drawn: list[tuple[int, ...]], data: st.DataObject) -> None:
    prefix = data.draw(st.lists(st.integers(0, 70), min_size=len(drawn), max_size=len(drawn)))
    batch = batch_of([p + len(t) for p, t in zip(prefix, drawn, strict=True)], [len(t) for t in drawn])
    mask = tree_mask(batch, ints([parent for tree in drawn for parent in tree]))
    cells, positions = walked(prefix, drawn)
    assert bits_of(mask, len(cells)) == cells
    assert mask.positions.tolist() == positions
    assert len(mask.bits) == -(-len(cells) // 8)


def test_a_chain_is_causal_and_its_positions_are_places() -> None:
    batch = batch_of([20], [5])
    mask = tree_mask(batch, ints([-1, 0, 1, 2, 3]))
    assert bits_of(mask, 100) == [key <= 15 + token for token in range(5) for key in range(20)]
    assert torch.equal(mask.positions, kv_positions(batch.kv_len, batch.q_len, torch.device("cpu")))


def test_long_branches_are_followed_to_their_ends() -> None:
    """Ancestors are found by doubling: 33 tokens need one doubling more than 32."""
    for num_tokens in (31, 32, 33, 64, 65):
        mask = tree_mask(batch_of([num_tokens], [num_tokens]), ints(range(-1, num_tokens - 1)))
        assert mask.positions.tolist() == list(range(num_tokens))


def test_lengths_on_the_device_pack_the_mask() -> None:
    """The host knows only bounds; the trees are packed by what the device says, and cut where that is beyond them."""
    inputs = DeviceInputs(kv_len=ints([7, 14]), q_len=ints([2, 5]))
    mask = tree_mask(batch_of([9, 12], [4, 3], inputs), ints([-1, 0, -1, 0, 0, 9, 9]))
    cells, positions = walked([5, 9], [[-1, 0], [-1, 0, 0]])
    assert bits_of(mask, len(cells)) == cells
    assert mask.positions[:5].tolist() == positions
    assert len(mask.bits) == mask_bytes(np.array([9, 12], np.int32), np.array([4, 3], np.int32))


@pytest.mark.parametrize("parents", [[5, 0, 1], [0, 1, 2], [2, 2, 2], [-7, 100, 1]])
def test_parents_that_are_none_stay_within_the_mask(parents: list[int]) -> None:
    mask = tree_mask(batch_of([8, 4], [3, 0]), ints(parents))
    assert len(mask.bits) == 3
    prefix = [cell for token in range(3) for cell in range(token * 8, token * 8 + 5)]
    assert all(bits_of(mask, 24)[cell] for cell in prefix)


def test_a_step_without_tokens_has_an_empty_mask() -> None:
    mask = tree_mask(batch_of([], []), ints([]))
    assert (len(mask.bits), len(mask.positions)) == (0, 0)


def test_parents_of_a_wrong_kind_are_refused() -> None:
    with pytest.raises(BadTensor, match=r"parents is torch.int64 of shape \[3\]; it must be a vector of torch.int32"):
        tree_mask(batch_of([8], [3]), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(BadBatch, match="2 parents for 3 new tokens; give one each, -1 for none"):
        tree_mask(batch_of([8], [3]), ints([0, 0]))
