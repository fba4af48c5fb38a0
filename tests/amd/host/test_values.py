"""The values of a step: they check themselves and report an error in one sentence."""

import copy
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.batch.inputs import HOST_INPUTS, ON_HOST, DeviceInputs
from rocm_attn.batch.mask import NO_MASK, TokenSpans, spans_of_blocks
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy, step_kind
from rocm_attn.batch.prefixes import NO_PREFIXES, PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, BadProblem, BadSetting, BadTensor, CapacityExceeded
from rocm_attn.external import ExternalOptions
from rocm_attn.hip_graphs.size_ladder import SizeLadder
from rocm_attn.kernels.metadata.step_tensors import Need, Unit
from rocm_attn.paging.index_spaces import Space, num_pages
from rocm_attn.problem import PoolKind, Problem, Row
from rocm_attn.step.buffers import BufferSpec, StepBuffers, TableSizes

CPU = torch.device("cpu")


def batch(q_len: list[int], prefix: int = 0) -> StepBatch:
    lengths = np.array(q_len, np.int32)
    return StepBatch(np.arange(1, len(q_len) + 1, dtype=np.int32), lengths + np.int32(prefix), lengths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_q_heads": 7}, "multiple"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"scale": -1.0}, "scale is -1"),
        ({"scale": 1e39}, "scale is 1e"),
        ({"scale": "1"}, "scale is '1'; it must be a number"),
        ({"scale": 10**400}, "scale is inf"),
        ({"pool": "latent"}, "pool is 'latent'; it must be a PoolKind"),
        ({"row": None}, "row is None; it must be a Row"),
        ({"indexer": None}, r"indexer is None; it must be a AllKeys \| Indexer \| EarlierSelection"),
        ({"kv_encoding": "float8_e4m3fn"}, "kv_encoding is 'float8_e4m3fn'; it must be a KVEncoding"),
        ({"head_dim": 8.0}, "head_dim is 8.0; it must be a whole number"),
        ({"page_size": True}, "page_size is True; it must be a whole number"),
        ({"window_left": 3.5}, "window_left is 3.5; it must be a whole number"),
        ({"window_left": float("nan")}, "window_left is nan; it must be a whole number"),
        ({"window_left": sys.maxsize}, "it must be a number of previous keys below"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap is 1e"),
        ({"custom_mask": "no"}, "custom_mask is 'no'; it must be True or False"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"dtype": torch.int8}, "dtype"),
        ({"window_left": -2}, "window_left is -2"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"pool": PoolKind.VECTORIZED, "head_dim": 60}, "head_dim is 60 in a vectorised pool.* hold 8 elements"),
        ({"pool": PoolKind.VECTORIZED, "v_head_dim": 63}, "v_head_dim is 63 in a vectorised pool"),
        ({"pool": PoolKind.VECTORIZED, "page_size": 4}, "page_size is 4 in a vectorised pool"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "num_q_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "dtype": torch.bfloat16,
        "page_size": 16,
        "scale": 0.125,
    }
    with pytest.raises(BadProblem, match=message):
        Problem(**(good | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Row(2, overlaps="no"), "overlaps is 'no'; it must be True or False"),  # type: ignore[arg-type]
        (lambda: ExternalOptions(zero_tails="no"), "zero_tails is 'no'; it must be True or False"),  # type: ignore[arg-type]
        (lambda: ExternalOptions(provider=None), "provider is None; it must be a text"),  # type: ignore[arg-type]
    ],
)
def test_a_switch_that_is_no_bool_is_refused(make: Callable[[], object], message: str) -> None:
    """Any text counted as True: zero_tails="no" let kernels write to slots of an engine's pages."""
    with pytest.raises((BadProblem, BadSetting), match=f"^{message}$"):
        make()


def test_a_window_that_no_sequence_fills_is_cut_so_that_kernels_can_add_to_it() -> None:
    problem = Problem(8, 2, 64, torch.bfloat16, 16, window_left=2**31 - 2, window_right=2**31 - 2)
    assert problem.window_left == problem.window_right == 2**30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (([1, 2], [3], [1]), "2 rows, 1 kv_len and 1 q_len"),
        (([1], [3], [4]), "q_len 4 and kv_len 3"),
        (([1], [3], [-1]), "q_len -1"),
        (([1], [2**40], [1]), "outside of int32"),
        (([1.5], [3], [1]), "integers"),
        (([[1]], [3], [1]), "vector"),
        (([1, 2, 3], [2**30] * 3, [1, 1, 1]), "overflow an int32 indptr"),
        (([1, 2], [2**28] * 2, [2**27, 2**27 + 1]), "268435457 new tokens in one step are more than 268435456"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(fields: tuple[object, object, object], message: str) -> None:
    rows, kv_len, q_len = map(np.array, fields)
    with pytest.raises(BadBatch, match=message):
        StepBatch(rows, kv_len, q_len)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("inputs", "DeviceInputs"),
        ("mask", "StepMask or TreeMask or TokenSpans"),
        ("prefixes", "SharedPrefixes"),
        ("drafts", "Drafts"),
    ],
)
def test_none_is_no_part_of_a_batch(name: str, instead: str) -> None:
    """With None for drafts a step began, and could not be ended: the runtime was lost, and all requests with it."""
    with pytest.raises(BadBatch, match=f"{name} of a batch is None; give {instead}, or leave it out"):
        StepBatch([1], [3], [1], **{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [-1, 2.5, "1", 2**31, np.array([1, 2])])
def test_tokens_ahead_are_a_whole_number(ahead: object) -> None:
    """They are published as an int32, which 2**32 would have made 0."""
    with pytest.raises(BadTensor, match=f"ahead is {re.escape(repr(ahead))}; it must be a"):
        DeviceInputs(kv_len=torch.ones(1, dtype=torch.int32), ahead=ahead)  # type: ignore[arg-type]


def test_numbers_of_groups_and_of_blocks_are_whole_and_fit() -> None:
    with pytest.raises(BadSetting, match=r"prefix_len of a group is 4.5; it must be a whole number"):
        SharedPrefixes([PrefixGroup(1, 4.5)])  # type: ignore[arg-type]
    with pytest.raises(BadBatch, match=f"groups have {2**40} sequences"):
        SharedPrefixes([PrefixGroup(2**40, 0)])
    with pytest.raises(BadBatch, match="a sequence must be longer than its prefix"):
        StepBatch([1], [8], [1], prefixes=SharedPrefixes([PrefixGroup(1, 2**40)]))
    with pytest.raises(BadBatch, match=r"spans are object of shape \[2\]; give integers of shape \[n, 3\]"):
        TokenSpans([[0, 1, 2], [0, 3]], CPU)
    assert spans_of_blocks([5, 0], [4, 0], 3, CPU).spans.tolist() == [[0, 1, 4], [0, 4, 5]]
    assert len(spans_of_blocks([], [], 3, CPU).spans) == 0
    for dtype in (np.uint8, np.int8, np.uint64):  # 4 was 252 below zero
        narrow = spans_of_blocks(np.array([5, 0], dtype), np.array([4, 0], dtype), torch.tensor(3), CPU)  # type: ignore[arg-type]
        assert narrow.spans.tolist() == [[0, 1, 4], [0, 4, 5]]
    for block in (0, 2**31, 2**63):
        with pytest.raises(BadBatch, match=f"a block is of {block} tokens"):
            spans_of_blocks([5], [4], block, CPU)
    for kv_len, q_len in (([3], [4]), ([3], [-1]), ([3], [1, 1]), ([3.5], [2])):
        with pytest.raises(BadBatch, match="give whole numbers, one of each per sequence"):
            spans_of_blocks(kv_len, q_len, 2, CPU)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_copied_or_unpickled_batch_is_the_same_step(again: Callable[[StepBatch], StepBatch]) -> None:
    plain = again(batch([1, 1]))
    assert plain.inputs is HOST_INPUTS
    assert plain.mask is NO_MASK
    assert plain.prefixes is NO_PREFIXES
    assert plain.kv_len.tolist() == [1, 1]
    inputs = again(replace(batch([1, 1]), inputs=DeviceInputs(q_len=torch.ones(2, dtype=torch.int32)))).inputs
    assert isinstance(inputs, DeviceInputs)
    assert inputs.kv_len_on_host
    assert inputs.token_ids is ON_HOST
    assert inputs.q_len.tolist() == [1, 1]


def test_token_ids_come_for_all_tokens_or_for_none() -> None:
    with pytest.raises(BadBatch, match="2 token ids for 3 new tokens"):
        StepBatch(np.array([1]), np.array([3]), np.array([3]), np.array([5, 6]))


@given(page_size=st.integers(1, 130), kv_len=st.integers(1, 10_000))
def test_pages_hold_all_tokens_and_one_page_less_does_not(page_size: int, kv_len: int) -> None:
    assert (num_pages(kv_len, page_size) - 1) * page_size < kv_len <= num_pages(kv_len, page_size) * page_size


@pytest.mark.parametrize(
    ("q_len", "kind"),
    [
        ([], StepKind.DECODE),
        ([1], StepKind.DECODE),
        ([1, 1], StepKind.DECODE),
        ([1, 0], StepKind.MIXED),
        ([0], StepKind.MIXED),
        ([5, 1], StepKind.MIXED),
        ([5, 2], StepKind.EXTEND),
    ],
)
def test_the_kind_of_a_step_follows_from_its_new_tokens(q_len: list[int], kind: StepKind) -> None:
    assert step_kind(batch(q_len)) is kind


@given(st.lists(st.integers(0, 4), max_size=12))
def test_a_padded_shape_holds_its_batch(q_len: list[int]) -> None:
    policy = PaddingPolicy(SizeLadder((2, 4, 8)), SizeLadder((1, 6)))
    shape = policy.shape(batch(q_len))
    assert shape.num_seqs >= max(1, len(q_len))
    assert shape.num_tokens >= max(1, sum(q_len))
    assert shape.num_seqs in (2, 4, 8) or shape.num_seqs == len(q_len) > 8
    if shape.kind is StepKind.DECODE:
        assert shape.num_tokens == shape.num_seqs


SIZES = TableSizes(row_width=3, list_tail=0, table_width=3, row_tokens=0, mask_keys=0)


def decode(num_seqs: int) -> PaddedShape:
    return PaddedShape(StepKind.DECODE, num_seqs, num_seqs)


def test_sealed_buffers_refuse_to_move_and_name_the_knob() -> None:
    buffers = StepBuffers(SIZES.buffers({Space.FULL: [Need.PAGE_LIST]}, {Space.FULL: [Need.PAGE_LIST]}), CPU)
    buffers.ensure(decode(8))
    buffers.seal()
    buffers.ensure(decode(5))
    before = {name: tensor.data_ptr() for name, tensor in buffers.tensors().items()}
    with pytest.raises(CapacityExceeded, match="capture_sizes"):
        buffers.ensure(decode(64))
    assert {name: tensor.data_ptr() for name, tensor in buffers.tensors().items()} == before


def test_a_buffer_has_room_to_spare_unless_it_is_exact() -> None:
    """The workspace may take hundreds of megabytes."""
    specs = [
        BufferSpec(name, Unit.WORD, torch.float32, lambda shape: 5 * shape.num_seqs, pad=0, exact=name == "exact")
        for name in ("exact", "spare")
    ]
    buffers = StepBuffers(specs, CPU)
    buffers.ensure(decode(5))
    assert {name: tensor.numel() for name, tensor in buffers.tensors().items()} == {"exact": 25, "spare": 32}
    buffers.seal()
    with pytest.raises(CapacityExceeded, match=r"need 30 elements of exact .* capture_sizes"):
        buffers.ensure(decode(6))


def test_a_batch_stays_what_it_was_when_the_callers_arrays_change() -> None:
    """The checked batch and the published one are the same."""
    given = [np.array(values, np.int32) for values in ([1, 2], [7, 9], [1, 2])]
    batch = StepBatch(*given)
    for array in given:
        array[:] = 50
    assert [batch.rows.tolist(), batch.kv_len.tolist(), batch.q_len.tolist()] == [[1, 2], [7, 9], [1, 2]]
    rows, start, kv_len, q_len = (np.array(values, np.int32).tobytes() for values in ([1, 2], [6, 7], [7, 9], [1, 2]))
    held = batch.row_bytes, batch.before, batch.after, batch.data
    assert held == (rows, (rows, start), (rows, kv_len), rows + kv_len + q_len)
    with pytest.raises(ValueError, match="read-only"):
        batch.kv_len[0] = 5


def test_a_batch_takes_plain_sequences() -> None:
    """The README's batch has such sequences, and the types allow them."""
    batch = StepBatch(rows=[1, 2], kv_len=(10, 3), q_len=range(1, 3), token_ids=[5, 6, 7])
    assert batch.num_tokens == 3
    assert [values.tolist() for values in (batch.rows, batch.kv_len, batch.q_len)] == [[1, 2], [10, 3], [1, 2]]
    assert batch.rows.dtype == np.int32


def test_what_was_checked_of_a_batch_is_what_a_step_reads() -> None:
    ids = np.array([5, 6], np.int32)
    prefixes = SharedPrefixes([PrefixGroup(2, 4)])
    one = np.array([1, 1], np.int32)
    made = StepBatch(one.copy(), one + 7, one, ids, prefixes=prefixes)
    ids[:] = 0
    assert made.token_ids.tolist() == [5, 6]
    assert made.start.tolist() == [7, 7]
    of_batch = made.rows, made.kv_len, made.q_len, made.start, made.token_ids
    for array in (*of_batch, prefixes.prefix_len, prefixes.group_end):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 8


def test_v_and_scale_are_those_of_most_models_unless_they_are_given() -> None:
    problem = Problem(8, 2, 64, torch.bfloat16, 16)
    assert (problem.v_head_dim, problem.scale) == (64, 0.125)
    wider = replace(problem, head_dim=128)
    assert (wider.v_head_dim, wider.scale) == (64, 0.125), "they were given by now"
