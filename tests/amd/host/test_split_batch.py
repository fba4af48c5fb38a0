"""The cut of a step in two, the padded sizes of the halves, and their parts of every buffer."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.batch.halves import split_batch, split_point
from rocm_attn.batch.inputs import ON_HOST, DeviceInputs
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy, token_places
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, CapacityExceeded
from rocm_attn.hip_graphs.size_ladder import SizeLadder
from rocm_attn.kernels.metadata.step_tensors import Need, Unit
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.buffers import BufferSpec, StepBuffers, TableSizes

CPU = torch.device("cpu")
NEW_TOKENS = st.lists(st.integers(0, 5), max_size=14)


def batch(q_len: list[int]) -> StepBatch:
    """Returns a step of distinct rows and token ids."""
    counts = np.array(q_len, np.int32)
    rows = np.arange(1, len(q_len) + 1, dtype=np.int32)
    return StepBatch(rows, counts + rows, counts, np.arange(sum(q_len), dtype=np.int32))


def test_what_the_device_knows_is_cut_where_the_host_cuts() -> None:
    kv_len, ids = torch.tensor([4, 5, 6], dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    whole = StepBatch(
        np.array([1, 2, 3]), np.array([9, 9, 9]), np.array([2, 2, 2]), inputs=DeviceInputs(kv_len=kv_len, token_ids=ids)
    )
    first, second = (half.inputs for half in split_batch(whole, 2))
    assert isinstance(first, DeviceInputs)
    assert isinstance(second, DeviceInputs)
    assert first.kv_len.tolist() + second.kv_len.tolist() == [4, 5, 6]
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([0, 1, 2, 3], [4, 5])
    assert first.q_len is second.q_len is ON_HOST


def test_new_tokens_that_the_device_counts_are_not_split() -> None:
    packed = DeviceInputs(q_len=torch.tensor([1, 2], dtype=torch.int32))
    whole = StepBatch(np.array([1, 2]), np.array([9, 9]), np.array([2, 2]), inputs=packed)
    with pytest.raises(BadBatch, match="q_len is on the device cannot be split"):
        split_batch(whole, 1)


@given(NEW_TOKENS, st.integers(0, 3))
def test_no_other_cut_shares_the_tokens_better(q_len: list[int], spare: int) -> None:
    most = (len(q_len) + 1) // 2 + spare
    cuts = range(max(0, len(q_len) - most), min(len(q_len), most) + 1)

    def larger(cut: int) -> tuple[int, int]:
        return max(sum(q_len[:cut]), sum(q_len[cut:])), max(cut, len(q_len) - cut)

    assert larger(split_point(np.array(q_len, np.int32), most)) == min(map(larger, cuts))


@given(NEW_TOKENS, st.sampled_from([(1,), (5,), (2, 4, 8), (1, 3, 6)]), st.sampled_from([(1,), (6,), (5, 9, 30)]))
def test_a_split_shape_has_room_for_both_halves(
    q_len: list[int], seqs: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    policy = PaddingPolicy(SizeLadder(seqs), SizeLadder(tokens), 2)
    step = batch(q_len)
    shape = policy.split_shape(step)
    halves = split_batch(step, shape.child.num_seqs)
    assert shape.num_seqs == 2 * shape.child.num_seqs >= max(2, len(q_len))
    assert shape.num_tokens == 2 * shape.child.num_tokens
    assert all(half.num_seqs <= shape.child.num_seqs for half in halves)
    assert all(half.num_tokens <= shape.child.num_tokens for half in halves)
    assert policy.captures(shape) == any(
        shape.num_seqs <= room.num_seqs and shape.num_tokens <= room.num_tokens
        for room in policy.largest_shapes()
        if room.kind is shape.kind and room.num_children == 2
    )


@given(NEW_TOKENS)
def test_real_tokens_lie_in_front_of_each_half(q_len: list[int]) -> None:
    policy, step = PaddingPolicy(SizeLadder((4, 16)), SizeLadder((8, 64)), 2), batch(q_len)
    shape = policy.split_shape(step)
    first, second = split_batch(step, shape.child.num_seqs)
    places = token_places(step, shape).tolist()
    assert sorted(places) == list(range(shape.num_tokens))
    assert places[: first.num_tokens] == list(range(first.num_tokens))
    start = shape.child.num_tokens
    assert places[first.num_tokens : step.num_tokens] == list(range(start, start + second.num_tokens))
    assert token_places(step, policy.shape(step)).tolist() == list(range(policy.shape(step).num_tokens))


@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from([StepKind.DECODE, StepKind.MIXED]))
def test_the_halves_of_every_buffer_lie_one_after_another(half: int, tokens: int, kind: StepKind) -> None:
    num_tokens = 2 * (half if kind is StepKind.DECODE else tokens)
    shape = PaddedShape(kind, 2 * half, num_tokens, 2)
    sizes = TableSizes(row_width=3, list_tail=0, table_width=3, row_tokens=0, mask_keys=0)
    workspace = BufferSpec("workspace", Unit.WORD, torch.float32, lambda shape: 3 * shape.num_seqs, 0, exact=True)
    specs = (*sizes.buffers({Space.FULL: [Need.PAGE_LIST]}, {Space.FULL: [Need.PAGE_LIST]}), workspace)
    buffers = StepBuffers(specs, CPU)
    buffers.ensure(shape)
    for spec in specs:
        first, second = (buffers.step_view(spec.name, shape, child) for child in (0, 1))
        assert first.numel() == second.numel() == spec.elements(shape.child)
        assert first.data_ptr() == buffers.tensors()[spec.name].data_ptr()
        assert second.data_ptr() >= first.data_ptr() + first.nbytes
        assert second.data_ptr() % 16 == 0


def test_a_second_half_past_the_end_raises_where_a_slice_would_truncate() -> None:
    sizes = TableSizes(row_width=3, list_tail=0, table_width=3, row_tokens=0, mask_keys=0)
    buffers = StepBuffers(sizes.buffers({Space.FULL: ()}, {Space.FULL: ()}), CPU)
    buffers.ensure(PaddedShape(StepKind.DECODE, 8, 8))
    with pytest.raises(CapacityExceeded, match="8 elements of counts were requested, and it holds 4"):
        buffers.step_view("counts", PaddedShape(StepKind.DECODE, 8, 8, 2), 1)
