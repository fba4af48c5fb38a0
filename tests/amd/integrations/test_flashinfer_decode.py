"""Decode by FlashInfer's names equals FlashInfer's definition."""

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadProblem, BadSetting, BadTensor, Unsupported, WrongState
from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer import planned
from rocm_attn.machine.devices import StreamOrder
from tests.amd.host.test_stream_order import Streams
from tests.amd.integrations.batches import DIM, SIZES, SLOPES, check, ints, new_batch, queries, wanted, workspace
from tests.amd.integrations.oracle import Scores
from tests.amd.runtime.interrupts import OutOfMemory

LENS = (1, 17, 0, 33, 16)


@pytest.mark.parametrize(
    ("page_size", "layout", "window", "cap", "positions"),
    [
        (16, "NHD", -1, 0.0, "NONE"),
        (1, "NHD", 7, 0.0, "NONE"),
        (5, "HND", 20, 30.0, "NONE"),
        (16, "HND", -1, 0.0, "ALIBI"),
    ],
)
def test_each_token_is_the_last_of_its_sequence(
    page_size: int, layout: str, window: int, cap: float, positions: str, device: torch.device
) -> None:
    batch = new_batch(LENS, page_size, layout, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(
        *batch.lists,
        *SIZES,
        page_size,
        pos_encoding_mode=positions,
        window_left=window,
        logits_soft_cap=cap,
        q_data_type=torch.float32,
        sm_scale=0.3,
    )
    q = queries(len(LENS), device=device)
    scores = Scores(0.3, window_left=window, cap=cap, slopes=SLOPES if positions == "ALIBI" else None)
    expected = wanted(batch, q, [1] * len(LENS), [scores] * len(LENS))
    check(wrapper.run(q, batch.cache, return_lse=True), expected)
    check(wrapper.run_return_lse(q, (batch.cache[:, 0], batch.cache[:, 1])), expected)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    found = wrapper.run(q, batch.cache, out=out, lse=lse, return_lse=True)
    assert isinstance(found, tuple)
    assert found[0] is out
    assert found[1] is lse
    check(found, expected)


def plan(wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper, device: torch.device, *more: object) -> Tensor:
    """Returns the KV of a plan of two sequences, with more arguments by position."""
    batch = new_batch((6, 3), 4, device=device)
    wrapper.plan(*batch.lists, *SIZES, 4, *more)
    return batch.cache


def test_optional_arguments_of_plan_may_come_by_position(device: torch.device) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    named = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    with pytest.warns(DeprecationWarning, match="name them"):
        cache = plan(wrapper, device, "NONE", 2, 5.0, "float32", None, None, None, 0.3)
    batch = new_batch((6, 3), 4, device=device)
    more: dict[str, Any] = {"window_left": 2, "logits_soft_cap": 5.0, "q_data_type": torch.float32, "sm_scale": 0.3}
    named.begin_forward(*batch.lists, *SIZES, 4, **more)
    q = queries(2, device=device)
    found, wanted_out = wrapper.run(q, cache), named.run(q, cache)
    assert isinstance(found, Tensor)
    assert isinstance(wanted_out, Tensor)
    assert found.equal(wanted_out)
    with pytest.raises(TypeError, match="at most 16 arguments by position"):
        plan(wrapper, device, *range(17))
    with (
        pytest.warns(DeprecationWarning, match="name them|give it to plan"),
        pytest.raises(TypeError, match="got window_left twice"),
    ):
        wrapper.plan(*batch.lists, *SIZES, 4, "NONE", 2, window_left=2)


def test_a_wrapper_is_planned_in_one_thread_and_run_in_another(device: torch.device) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    q = queries(2, device=device)
    with ThreadPoolExecutor(1) as other:
        for lens in ((6, 9), (3, 30)):
            batch = new_batch(lens, 4, device=device)
            more: dict[str, Any] = {"q_data_type": torch.float32, "sm_scale": 0.3}
            other.submit(wrapper.plan, *batch.lists, *SIZES, 4, **more).result()
            expected = wanted(batch, q, [1, 1], [Scores(0.3)] * 2)
            check(wrapper.run(q, batch.cache, return_lse=True), expected)
            check(other.submit(wrapper.run, q, batch.cache, return_lse=True).result(), expected)


@pytest.mark.parametrize("captured", [False, True])
def test_inference_mode_may_begin_and_end_between_two_plans(captured: bool, device: torch.device) -> None:
    batch, q = new_batch((6, 3), 4, device=device), queries(2, device=device)
    buffers = [torch.zeros(9, dtype=torch.int32, device=device)[:size] for size in (3, 9, 2)] if captured else []
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "NHD", captured, False, *buffers)
    for is_on in (True, False, True):
        with torch.inference_mode(is_on):
            wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32", sm_scale=0.3)
            found = wrapper.run(q, batch.cache, return_lse=True)
        check(found, wanted(batch, q, [1, 1], [Scores(0.3)] * 2))


def test_after_memory_has_run_out_in_a_plan_of_longer_lists_it_may_be_made_again(device: torch.device) -> None:
    """The wrapper kept its short lists, and believed that they were long."""
    q, short, long = (
        queries(2, device=device),
        new_batch((6, 3), 4, device=device),
        new_batch((40, 30), 4, device=device),
    )
    more: dict[str, Any] = {"q_data_type": torch.float32, "sm_scale": 0.3}
    expected, operation, ran_out = wanted(long, q, [1, 1], [Scores(0.3)] * 2), 0, True
    while ran_out:
        operation, wrapper = operation + 1, flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
        wrapper.plan(*short.lists, *SIZES, 4, **more)
        try:
            with OutOfMemory(operation):
                wrapper.plan(*long.lists, *SIZES, 4, **more)
            ran_out = False
        except torch.OutOfMemoryError:
            wrapper.plan(*long.lists, *SIZES, 4, **more)
        check(wrapper.run(q, long.cache, return_lse=True), expected)


def test_functions_without_a_plan_may_be_called_in_several_threads_at_a_time(device: torch.device) -> None:
    batch = new_batch((40, 23), 1, device=device)
    q = queries(2, device=device)
    expected = wanted(batch, q, [1, 1], [Scores(DIM**-0.5)] * 2)
    k, v = (
        [batch.cache[batch.indices[begin:end].long(), side, 0] for begin, end in ((0, 40), (40, 63))] for side in (0, 1)
    )

    def attend(seq: int) -> list[Any]:
        return [flashinfer.single_decode_with_kv_cache(q[seq], k[seq], v[seq], return_lse=True) for _ in range(20)]

    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(attend, (0, 1)))
    finally:
        sys.setswitchinterval(interval)
    for first, second in zip(*found, strict=True):
        check(tuple(torch.stack(pair) for pair in zip(first, second, strict=True)), expected)


def test_calls_may_come_on_several_streams(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths of one call would replace those of another one that still runs."""
    streams = Streams()
    monkeypatch.setattr(planned, "StreamOrder", partial(StreamOrder, streams=streams))
    batch, q = new_batch((6, 3), 4, device=device), queries(2, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    for plan_on, run_on in ((0, 7), (0, 8)):
        streams.now = plan_on
        wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32")
        streams.now = run_on
        wrapper.run(q, batch.cache)
    assert streams.take_log() == ["7 waits for 0", "0 waits for 0", "0 waits for 7", "8 waits for 0"]


@pytest.mark.parametrize(("left", "right"), [(3, 1), (-1, 2), (4, -1), (0, 0), (-1, -1)])
def test_windows_have_two_sides_among_a_requests_new_tokens(left: int, right: int, device: torch.device) -> None:
    batch = new_batch((9, 4, 21), 4, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    windows: dict[str, Any] = {"window_left": left, "window_right": right}
    q = queries(12, device=device)
    scores = Scores(0.3, causal=right == 0, window_left=left, window_right=right)
    for tokens in (4, 1):
        rows = q[: 3 * tokens]
        wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32", sm_scale=0.3, q_len_per_req=tokens, **windows)
        check(wrapper.run(rows, batch.cache, return_lse=True), wanted(batch, rows, [tokens] * 3, [scores] * 3))


def test_a_planned_window_can_be_read_as_flashinfers(device: torch.device) -> None:
    batch = new_batch((9, 4), 4, device=device)
    wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32", q_len_per_req=2, window_left=5, window_right=1)
    assert (wrapper._window_left, wrapper._window_right, wrapper._causal) == (5, 1, False)
    wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32", q_len_per_req=2, window_left=5)
    assert (wrapper._window_left, wrapper._window_right, wrapper._causal) == (5, 0, True)


def test_scores_may_be_those_of_a_deprecated_forward(device: torch.device) -> None:
    batch = new_batch((6, 9), 4, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32", window_left=1)
    q = queries(2, device=device)
    expected = wanted(batch, q, [1, 1], [Scores(0.2, cap=3.0)] * 2)
    check(wrapper.forward_return_lse(q, batch.cache, logits_soft_cap=3.0, sm_scale=0.2), expected)
    found = wrapper.forward(q, batch.cache, logits_soft_cap=3.0, sm_scale=0.2)
    assert isinstance(found, Tensor)
    check((found, torch.from_numpy(expected[1])), expected)


REFUSED_PLANS = [
    ({"pos_encoding_mode": "ROPE_LLAMA"}, Unsupported, "rotate queries and keys"),
    ({"pos_encoding_mode": "rope"}, BadSetting, "it must be NONE, ROPE_LLAMA or ALIBI"),
    ({"q_data_type": torch.float8_e4m3fn}, Unsupported, "pass them in 16 bits"),
    ({"kv_data_type": "bfloat16"}, Unsupported, "give both one dtype"),
    ({"kv_data_type": torch.uint8}, Unsupported, "no kernel here reads NVFP4 pages"),
    ({"kv_data_type": "nvfp4"}, BadSetting, "'nvfp4' is no dtype"),
    ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 1.0}, Unsupported, "after the cap here"),
    ({"is_causal": True}, Unsupported, "leave it None"),
    ({"q_len_per_req": 0}, BadBatch, "q_len_per_req is 0; it must be from 1 to"),
    ({"q_len_per_req": 4}, BadBatch, "fewer tokens in its KV than q_len_per_req, 4"),
    ({"sm_scale": -1.0}, ValueError, "must be a positive number"),
    ({"sm_scale": 0.0}, BadProblem, "the scale of logits is 0; it must be a positive number"),
    ({"logits_soft_cap": 1e30}, BadProblem, "logits_soft_cap is 1e.30; it must be a positive number from"),
    ({"sm_scale": np.array(0.25)}, BadProblem, "scale is array.0.25.; it must be a number"),
    ({"logits_soft_cap": [30.0]}, BadProblem, "soft_cap is .30.0.; it must be a number"),
    ({"window_left": None}, BadProblem, "window_left is None; it must be a whole number"),
    ({"window_right": "2"}, BadProblem, "window_right is '2'; it must be a whole number"),
    ({"q_len_per_req": None}, BadProblem, "q_len_per_req is None; it must be a whole number"),
    ({"q_len_per_req": 10**400}, BadBatch, r"q_len_per_req is 10+; it must be from 1 to"),
    ({"seq_lens": [6, 3]}, BadTensor, "seq_lens is a list; give a tensor"),
    ({"jit_args": [1]}, TypeError, "unexpected keyword argument 'jit_args'"),
]


@pytest.mark.parametrize(("more", "error", "message"), REFUSED_PLANS)
def test_what_is_not_served_is_refused_by_plan(
    more: dict[str, Any], error: type[Exception], message: str, device: torch.device
) -> None:
    batch = new_batch((6, 3), 4, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32")
    with pytest.raises(error, match=message):
        wrapper.plan(*batch.lists, *SIZES, 4, **more)
    with pytest.raises(WrongState, match=r"call plan.. before run"):
        wrapper.run(queries(2, device=device), batch.cache)


def test_what_is_not_served_is_refused_by_run(device: torch.device) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    batch = new_batch((6, 3), 4, device=device)
    wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32", window_left=5)
    q, cache = queries(2, device=device), batch.cache
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"kv_cache_sf": cache}, Unsupported, "NVFP4"),
        ({"skip_softmax_threshold_scale_factor": 0.1}, Unsupported, "every key counts"),
        ({"window_left": 4}, BadSetting, "planned with 5"),
        ({"out": torch.empty_like(q).half()}, BadTensor, "out is torch.float16"),
        ({"lse": torch.empty(2, device=device), "return_lse": True}, BadTensor, "lse is torch.float32 .2."),
        ({"q_scale": 0.0}, BadProblem, "the scale of logits is 0"),
        ({"out": q.tolist()}, BadTensor, "out is a list; give a tensor"),
        ({"lse": 0}, BadTensor, "lse is a int; give a tensor"),
        ({"sinks": [0.0]}, BadTensor, "sinks is a list; give a tensor"),
        ({"k_scale": "3"}, BadProblem, "a scale of q, K or V is '3'; it must be a number"),
        ({"v_scale": 10**400}, BadProblem, "a scale of q, K or V is infinite"),
        *[({name: q[0, 0]}, BadTensor, f"a scale of shape .{DIM}.") for name in ("q_scale", "k_scale", "v_scale")],
    ]
    for more, error, message in cases:
        with pytest.raises(error, match=message):
            wrapper.run(q, cache, **more)
    with pytest.raises(Unsupported, match=r"args is not served"):
        wrapper.run(q, cache, 1.0)
    bad: list[tuple[Tensor, Tensor | tuple[Tensor, Tensor], str]] = [
        (q[:1], cache, "q is torch.float32"),
        (q.half(), cache, "q is torch.float16"),
        (q, cache[:2], "the KV cache has pages 0 to 1"),
        (q, (cache[:, 0], cache[:2, 1]), "the KV cache has pages 0 to 1"),
        (q, cache.half(), "layer 0: k is torch.float16"),
        (q, cache[:, :, :2], "pages of 2 tokens"),
        (q, cache[0], "a tuple of K and V"),
        (q, (cache[0, 0, 0], cache[0, 0, 0]), "it must have 4 dimensions"),
        (None, cache, "q is a NoneType; give a tensor"),  # type: ignore[list-item]
        (q, None, "the KV cache is a NoneType; give one tensor, or a tuple"),  # type: ignore[list-item]
        (q, (cache[:, 0], None), "a side of the KV cache is a NoneType"),  # type: ignore[list-item]
    ]
    for rows, kv, message in bad:
        with pytest.raises(BadTensor, match=message):
            wrapper.run(rows, kv)
    with (
        pytest.warns(DeprecationWarning, match="name them|give it to plan"),
        pytest.raises(BadBatch, match="planned with 1"),
    ):
        wrapper.run(q, cache, q_len_per_req=2)
    check(wrapper.run(q, cache, return_lse=True), wanted(batch, q, [1, 1], [Scores(DIM**-0.5, window_left=5)] * 2))


def test_lists_that_contradict_each_other_are_refused(device: torch.device) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    starts, pages, last = new_batch((6, 3), 4, device=device).lists
    cases: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], type[Exception], str]] = [
        ((starts + 1, pages, last), {}, BadBatch, "must begin at 0 and never fall"),
        ((starts.flip(0) - 3, pages, last), {}, BadBatch, "must begin at 0 and never fall"),
        ((starts, pages[:2], last), {}, BadTensor, "the 3 entries that indptr ends with"),
        ((starts, pages.float(), last), {}, BadTensor, "int32 or int64 in one dimension"),
        ((starts, pages, last + 4), {}, BadBatch, "last_page_len of sequence 0 is 6"),
        ((starts, pages, last * 0), {}, BadBatch, "last_page_len of sequence 0 is 0"),
        ((starts, pages, last[:1]), {}, BadBatch, "give one for each"),
        ((starts, pages, last), {"seq_lens": ints([6, 4], device)}, BadBatch, "seq_lens are .6, 4."),
        ((starts.float(), pages, last), {}, BadTensor, "integers of one dimension"),
        ((starts.tolist(), pages, last), {}, BadTensor, "boundaries is a list; give a tensor"),  # type: ignore[list-item]
        ((starts, pages.tolist(), last), {}, BadTensor, "page indices is a list; give a tensor"),  # type: ignore[list-item]
        ((starts, pages, None), {}, BadTensor, "last_page_len is a NoneType; give a tensor"),  # type: ignore[list-item]
    ]
    for lists, more, error, message in cases:
        with pytest.raises(error, match=message):
            wrapper.plan(*lists, *SIZES, 4, **more)


def test_sizes_of_narrow_types_count_as_their_values(device: torch.device) -> None:
    """The tables of 200 tokens in pages of np.int8(4) were counted in 8 bits."""
    batch, q = new_batch((200, 3), 4, device=device), queries(2, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    found = list[Tensor]()
    for of in (int, np.int8):
        wrapper.plan(*batch.lists, *map(of, SIZES), of(4), q_data_type="float32")
        out = wrapper.run(q, batch.cache)
        assert isinstance(out, Tensor)
        found.append(out)
    assert torch.equal(*found)
    for sizes, page_size, name in (
        ((None, *SIZES[1:]), 4, "num_q_heads"),
        ((*SIZES[:2], "16"), 4, "head_dim"),
        (SIZES, 4.0, "page_size"),
    ):
        with pytest.raises(BadProblem, match=f"^{name} is .*; it must be a whole number"):
            wrapper.plan(*batch.lists, *sizes, page_size)
    for sizes, page_size in ((SIZES, 10**400), ((*SIZES[:2], 10**400), 4)):
        with pytest.raises(BadProblem, match=r"a size is 10+; use at most 2147483647"):
            wrapper.plan(*batch.lists, *sizes, page_size)


def test_providers_are_chosen_by_name(device: torch.device) -> None:
    with pytest.raises(BadSetting, match="provider is 'fa2'; it must be one of auto, cpu, torch, triton, aiter"):
        flashinfer.use_provider("fa2")
    for backend in ("zz", "Triton", None, ["fa2"]):
        with pytest.raises(
            BadSetting, match=r"backend is .*; it must be one of auto, cpu, torch, triton, aiter, cake, "
        ):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
    cache = new_batch((6, 3), 4, device=device).cache
    for backend in ("fa2", "torch"):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend)
        with pytest.warns(DeprecationWarning, match="name them"):
            plan(wrapper, device, "NONE", -1, None, "float32")
        assert isinstance(wrapper.run(queries(2, device=device), cache), Tensor)


def test_scales_of_many_calls_keep_no_kernels_without_end_and_no_pages(device: torch.device) -> None:
    batch = new_batch((6, 3), 4, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.lists, *SIZES, 4, q_data_type="float32", sm_scale=0.01)
    q, caches = queries(2, device=device), []
    for scale in range(1, 41):
        k, v = (side.clone() for side in batch.cache.unbind(1))
        caches += [weakref.ref(k), weakref.ref(v)]
        found = wrapper.run(q, (k, v), q_scale=float(scale), return_lse=True)
        if scale % 20 == 0:
            check(found, wanted(batch, q, [1, 1], [Scores(0.01 * scale)] * 2))
    assert wrapper._planned is not None
    assert len(wrapper._planned._built) == 32
    del k, v
    assert not any(cache() is not None for cache in caches), "a program's pages are freed when it drops them"


def test_workspaces_are_handed_around_as_engines_do(device: torch.device) -> None:
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    shared = prefill._int_workspace_buffer
    wrapper._int_workspace_buffer = shared
    assert shared.device == workspace(device).device
    batch = new_batch((6, 9), 4, device=device)
    wrapper.begin_forward(*batch.lists, *SIZES, 4, q_data_type="float32", sm_scale=0.3)
    q = queries(2, device=device)
    check(wrapper.run(q, batch.cache, return_lse=True), wanted(batch, q, [1, 1], [Scores(0.3)] * 2))
    wrapper.end_forward()
    check(wrapper.run(q, batch.cache, return_lse=True), wanted(batch, q, [1, 1], [Scores(0.3)] * 2))
    with pytest.raises(BadTensor, match="float_workspace_buffer is a NoneType; give a tensor"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(None)


def test_a_batch_of_nothing_gives_nothing(device: torch.device) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    batch = new_batch((), 4, device=device)
    wrapper.plan(ints([0], device), ints([], device), ints([], device), *SIZES, 4, q_data_type="float32")
    found = wrapper.run(queries(0, device=device), batch.cache, return_lse=True)
    assert isinstance(found, tuple)
    assert [list(each.shape) for each in found] == [[0, 4, 16], [0, 4]]
