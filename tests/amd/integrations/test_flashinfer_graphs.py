"""Wrappers whose run() is captured: one recording serves every later plan that fits, and others are refused."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadBatch, BadSetting, BadTensor, NeverFits, WrongState
from rocm_attn.integrations import flashinfer
from tests.amd.integrations.batches import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    SIZES,
    Batch,
    check,
    indptr,
    ints,
    new_batch,
    queries,
    wanted,
    workspace,
)
from tests.amd.integrations.oracle import Scores

ROOM, PAGE_SIZE = 24, 4


def buffer(size: int, device: torch.device) -> Tensor:
    return torch.full((size,), -7, dtype=torch.int32, device=device)


class Decode:
    """A captured decode of two layers, each with a cache of its own."""

    def __init__(self, num_seqs: int, device: torch.device) -> None:
        self.device = device
        self.buffers = buffer(num_seqs + 1, device), buffer(ROOM, device), buffer(num_seqs, device)
        self.wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *self.buffers)
        self.caches = [torch.zeros((ROOM, 2, PAGE_SIZE, KV_HEADS, DIM), device=device) for _ in range(2)]
        self.q = torch.zeros((num_seqs, Q_HEADS, DIM), device=device)

    def plan(self, batch: Batch) -> None:
        self.wrapper.plan(*batch.lists, *SIZES, PAGE_SIZE, q_data_type="float32", sm_scale=0.3, window_left=9)

    def run(self) -> list[tuple[Tensor, Tensor]]:
        found = [self.wrapper.run(self.q, cache, return_lse=True) for cache in self.caches]
        return [each for each in found if isinstance(each, tuple)]

    def batches(self, kv_lens: Sequence[int], seed: int) -> list[Batch]:
        """Returns batches with the same lists for both layers, and other KV in each."""
        batches = [new_batch(kv_lens, PAGE_SIZE, device=self.device, seed=seed) for _ in range(2)]
        for layer, batch in enumerate(batches):
            for side in (batch.k, batch.v):
                side[:] = [rows + layer for rows in side]
            self.caches[layer][: len(batch.cache)] = batch.cache.nan_to_num() + layer
        return batches


def test_one_recording_serves_every_plan_that_fits(device: torch.device) -> None:
    decode = Decode(3, device)
    decode.plan(decode.batches((1, 1, 1), seed=0)[0])
    recording, outs = recorder_for(device).record(decode.run)
    for seed, kv_lens in enumerate([(5, 17, 2), (40, 1, 4), (9, 13, 0), (1, 1, 1)]):
        batches = decode.batches(kv_lens, seed)
        decode.plan(batches[0])
        decode.q.copy_(queries(3, device=device, seed=seed))
        recording.replay()
        for batch, out in zip(batches, outs, strict=True):
            check(out, wanted(batch, decode.q, [1] * 3, [Scores(0.3, window_left=9)] * 3))
        for kept, given in zip(decode.buffers, batches[0].lists, strict=True):
            assert kept[: len(given)].equal(given)


def test_what_a_recording_does_not_serve_is_refused(device: torch.device) -> None:
    decode = Decode(3, device)
    with pytest.raises(WrongState, match=r"call plan.. before run"):
        decode.run()
    decode.plan(decode.batches((1, 6, 1), seed=0)[0])
    first = [each[0].clone() for each in decode.run()]
    for kv_lens, error, message in [
        ((1, 2), NeverFits, "number of sequences"),
        ((96, 4, 4), NeverFits, "make a wrapper with larger buffers"),
        ((3, 0, 4), BadBatch, "put sequences without KV last"),
    ]:
        with pytest.raises(error, match=message):
            decode.plan(new_batch(kv_lens, PAGE_SIZE, device=device))
        with pytest.raises(WrongState, match=r"call plan.. before run"):
            decode.run()
    batch = new_batch((1, 6, 1), PAGE_SIZE, device=device)
    with pytest.raises(BadBatch, match="pages of 8 tokens were given after pages of 4"):
        decode.wrapper.plan(batch.indptr, batch.indices, batch.last_page_len, *SIZES, 8, q_data_type="float32")
    with pytest.raises(BadBatch, match="q_len_per_req is 2 after 1"):
        decode.wrapper.plan(*new_batch((2, 6, 2), 4, device=device).lists, *SIZES, 4, q_len_per_req=2)
    decode.plan(decode.batches((1, 6, 1), seed=0)[0])
    (cache, _), sinks = decode.caches, torch.zeros(Q_HEADS, device=device)
    calls: list[Callable[[], object]] = [
        lambda: decode.wrapper.run(decode.q, cache, sinks=sinks),
        lambda: flashinfer.single_decode_with_kv_cache(decode.q[0], cache[:, 0, 0], cache[:, 1, 0]),
    ]
    for call in calls:
        with (
            pytest.raises(WrongState, match=r"before the capture call plan\(\), and run\(\) once"),
            recorder_for(device).capture(),
        ):
            call()
    for out, before in zip(decode.run(), first, strict=True):
        assert out[0].equal(before)


@pytest.mark.parametrize(("first", "most"), [((2, 2, 2), None), ((1, 1, 0), 6)])
def test_a_captured_prefill_serves_any_new_tokens_up_to_the_first_ones_or_to_a_bound(
    first: tuple[int, ...], most: int | None, device: torch.device
) -> None:
    buffers = buffer(4, device), buffer(4, device), buffer(ROOM, device), buffer(3, device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "HND", True, *buffers, max_total_num_rows=most
    )
    cache = torch.zeros((ROOM, 2, KV_HEADS, PAGE_SIZE, DIM), device=device)
    q = torch.zeros((6, Q_HEADS, DIM), device=device)

    def run() -> tuple[Tensor, Tensor]:
        found = wrapper.run(q, cache, return_lse=True)
        assert isinstance(found, tuple)
        return found

    def plan(kv_lens: Sequence[int], q_lens: Sequence[int], seed: int) -> Batch:
        batch = new_batch(kv_lens, PAGE_SIZE, "HND", device=device, seed=seed)
        wrapper.plan(
            indptr(q_lens, device), *batch.lists, *SIZES, PAGE_SIZE, causal=True, sm_scale=0.3, q_data_type="float32"
        )
        cache[: len(batch.cache)] = batch.cache.nan_to_num()
        q.copy_(queries(6, device=device, seed=seed))
        return batch

    plan((2, 2, 2), first, seed=0)
    plan((2, 2, 2), (2, 2, 2), seed=0)
    recording, out = recorder_for(device).record(run)
    for seed, (kv_lens, q_lens) in enumerate([((9, 20, 3), (4, 1, 1)), ((6, 5, 0), (6, 0, 0)), ((7, 1, 5), (1, 1, 1))]):
        batch = plan(kv_lens, q_lens, seed)
        recording.replay()
        count = sum(q_lens)
        expected = wanted(batch, q[:count], q_lens, [Scores(0.3)] * 3)
        check((out[0][:count], out[1][:count]), expected)
        assert (out[0][count:] == 0).all()
        check(wrapper.run(q[:count], cache, return_lse=True), expected)
    with pytest.raises(NeverFits, match="make a wrapper with larger buffers"):
        plan((7, 7, 7), (3, 3, 1), seed=0)
    buffers = buffer(3, device), *buffers[1:]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND", True, *buffers)
    with pytest.raises(NeverFits, match="4 entries do not fit qo_indptr_buf, which has 3; make it larger"):
        plan((2, 2, 2), (2, 2, 2), seed=0)
    with pytest.raises(WrongState, match=r"call plan.. before run"):
        run()


def test_a_bound_of_new_tokens_is_of_captured_batches(device: torch.device) -> None:
    with pytest.raises(BadSetting, match="max_total_num_rows is of captured batches; give it with use_cuda_graph"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), max_total_num_rows=6)
    buffers = buffer(4, device), buffer(4, device), buffer(ROOM, device), buffer(3, device)
    with pytest.raises(BadSetting, match="max_total_num_rows is -1; it must be from 0 to "):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers, max_total_num_rows=-1)


def test_buffers_come_with_the_wrapper(device: torch.device) -> None:
    with pytest.raises(BadTensor, match="give paged_kv_indptr_buffer"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True)
    with pytest.raises(BadTensor, match="give qo_indptr_buf, paged_kv_indptr_buf"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, ints([0], device))


def test_engines_find_the_buffers_by_the_names_of_flashinfers_private_attributes(device: torch.device) -> None:
    decode = Decode(3, device)
    names = "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"
    for name, given in zip(names, decode.buffers, strict=True):
        assert getattr(decode.wrapper, name) is given
    eager = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    assert all(getattr(eager, name) is None for name in ("_qo_indptr_buf", *names))
