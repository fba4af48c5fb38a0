"""Steps that verify drafts are padded to a fixed number of tokens per padded sequence, whatever they bring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.batch.padding import PaddedShape, PaddingPolicy
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import capture_shapes
from rocm_attn.capture.probe_requests import typical_q_len
from rocm_attn.hip_graphs.size_ladder import SizeLadder

POLICY = PaddingPolicy(SizeLadder((1, 2, 4, 8)), SizeLadder((1,)), verify=5)


def batch(*q_len: int) -> StepBatch:
    return StepBatch(list(range(1, len(q_len) + 1)), [tokens + 7 for tokens in q_len], q_len)


@pytest.mark.parametrize(
    ("q_len", "shape"),
    [
        ((5, 5, 5), PaddedShape(StepKind.EXTEND, 4, 20)),
        ((2, 5), PaddedShape(StepKind.EXTEND, 2, 10)),
        ((1, 3, 1), PaddedShape(StepKind.MIXED, 4, 20)),
        ((1, 1, 1), PaddedShape(StepKind.DECODE, 4, 4)),
        ((1, 6, 1), PaddedShape(StepKind.MIXED, 4, 8)),  # a prompt
        ((2,) * 9, PaddedShape(StepKind.EXTEND, 9, 18)),  # above the ladder
    ],
    ids=str,
)
def test_their_shape_follows_from_the_number_of_sequences(q_len: tuple[int, ...], shape: PaddedShape) -> None:
    padded = POLICY.shape(batch(*q_len))
    assert (padded.kind, padded.num_seqs) == (shape.kind, shape.num_seqs)
    assert padded.num_tokens == shape.num_tokens
    assert POLICY.captures(padded) == (max(q_len) <= 5 and len(q_len) <= 8)


@given(q_len=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_captured_memory_has_room_for_every_one(q_len: list[int]) -> None:
    padded = POLICY.shape(batch(*q_len))
    room = {shape.kind: shape for shape in POLICY.largest_shapes()}[padded.kind]
    assert padded.num_seqs <= room.num_seqs
    assert sum(q_len) <= padded.num_tokens <= room.num_tokens


def test_a_graph_of_each_size_is_made_ahead_and_checked_on_steps_of_its_plan() -> None:
    shapes = [shape for shape in capture_shapes(POLICY) if shape.num_tokens == 5 * shape.num_seqs]
    assert [(shape.kind.value, shape.num_seqs) for shape in shapes] == [
        ("extend", 8),
        ("mixed", 8),
        ("extend", 4),
        ("mixed", 4),
        ("extend", 2),
        ("mixed", 2),
        ("extend", 1),
    ]
    for shape in shapes:
        q_len = typical_q_len(shape, most=POLICY.most_q_len(shape), max_seqs=8, max_kv_len=64)
        assert q_len is not None
        assert q_len.max() == 5
        assert POLICY.shape(batch(*q_len.tolist())) == shape
        assert POLICY.fixed_q_len(shape) == 5, "one graph serves steps of fewer, too"
    for other in (PaddedShape(StepKind.EXTEND, 4, 20, 2), PaddedShape(StepKind.EXTEND, 4, 19)):
        assert POLICY.fixed_q_len(other) == 0


def test_without_them_nothing_is_padded_so() -> None:
    plain = PaddingPolicy(SizeLadder((1, 2, 4, 8)), SizeLadder((1,)))
    assert plain.shape(batch(5, 5, 5)).num_tokens == 15
    assert not plain.captures(plain.shape(batch(5, 5, 5)))
