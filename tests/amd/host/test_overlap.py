"""may_overlap() against the bytes of every element."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.step.layers import may_overlap


def bytes_of(tensor: Tensor) -> set[int]:
    at = tensor.data_ptr()
    places = itertools.product(*map(range, tensor.shape))
    firsts = [at + 4 * sum(i * s for i, s in zip(place, tensor.stride(), strict=True)) for place in places]
    return {first + byte for first in firsts for byte in range(4)}


@given(st.data())
def test_no_overlap_is_missed_and_columns_of_one_tensor_do_not_overlap(data: st.DataObject) -> None:
    memory, heads, dim = torch.zeros(600), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    tensors = []
    for _ in range(2):
        pitch = data.draw(st.sampled_from([heads * dim, 16, 24]))
        shape = data.draw(st.integers(0, 5)), heads, dim
        tensors.append(memory.as_strided(shape, (pitch, dim, 1), data.draw(st.integers(0, 120))))
    one, other = tensors
    if bytes_of(one) & bytes_of(other):
        assert may_overlap(one, other)
        assert may_overlap(other, one)
    fused = torch.zeros(5, 24)
    columns = [fused[:, first : first + 8] for first in (0, 8, 16)]
    assert not any(may_overlap(*pair) for pair in itertools.combinations(columns, 2))
    assert all(may_overlap(column, fused) for column in columns)
