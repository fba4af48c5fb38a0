"""Lines of vLLM and SGLang that take FlashInfer's wrappers get the right attention, or a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadBatch, BadSetting
from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer.names import NotServed
from tests.amd.integrations.batches import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    SIZES,
    check,
    check_out,
    indptr,
    ints,
    new_batch,
    queries,
    wanted,
    workspace,
)
from tests.amd.integrations.flashinfer_engines import (
    SglangDecode,
    VllmImpl,
    sglang_fast_prefill_plan,
    vllm_fast_plan_decode,
    vllm_mla_plan_info,
)
from tests.amd.integrations.oracle import Scores

SINKS = np.array([0.5, -1.0, 2.0, 0.0])
PAGE_SIZE, ROOM = 4, 24


@pytest.mark.parametrize("captured", [False, True])
def test_vllm_decodes(captured: bool, device: torch.device) -> None:
    impl = VllmImpl(0.3, 9, None, torch.from_numpy(SINKS).float().to(device))
    buffers = (
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.zeros(ROOM, dtype=torch.int32, device=device),
        torch.zeros(3, dtype=torch.int32, device=device),
    )
    given = buffers if captured else (None, None, None)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device),
        "HND",
        use_cuda_graph=captured,
        paged_kv_indptr_buffer=given[0],
        paged_kv_indices_buffer=given[1],
        paged_kv_last_page_len_buffer=given[2],
        use_tensor_cores=True,
        backend="auto",
    )
    q, out = torch.zeros(3, Q_HEADS, DIM, device=device), torch.zeros(3, Q_HEADS, DIM, device=device)
    cache = torch.zeros(ROOM, 2, KV_HEADS, PAGE_SIZE, DIM, device=device)

    def plan_and_fill(seed: int, kv_lens: tuple[int, ...]) -> object:
        batch = new_batch(kv_lens, PAGE_SIZE, "HND", device=device, seed=seed)
        cache[: len(batch.cache)] = batch.cache.nan_to_num()
        # vLLM writes the page indices into the buffer by a kernel, and plans over that buffer.
        buffers[1][: len(batch.indices)] = batch.indices
        vllm_fast_plan_decode(
            flashinfer,
            wrapper,
            indptr_cpu=batch.indptr.cpu(),
            indices=buffers[1],
            last_page_len_cpu=batch.last_page_len.cpu(),
            seq_lens_cpu=torch.tensor(kv_lens, dtype=torch.int32),
            num_qo_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            page_size=PAGE_SIZE,
            pos_encoding_mode="NONE",
            sm_scale=impl.scale,
            window_left=impl.window_left,
            logits_soft_cap=impl.logits_soft_cap,
            q_data_type=torch.float32,
            kv_data_type=torch.float32,
            o_data_type=torch.float32,
        )
        q.copy_(queries(3, device=device, seed=seed))
        return batch

    plan_and_fill(0, (5, 3, 8))
    impl.decode(wrapper, q, cache, out)  # a step before the capture
    recording = recorder_for(device).record(lambda: impl.decode(wrapper, q, cache, out))[0] if captured else None
    for seed, kv_lens in enumerate([(5, 17, 2), (30, 1, 4)]):
        batch = plan_and_fill(seed, kv_lens)
        if recording is None:
            impl.decode(wrapper, q, cache, out)
        else:
            recording.replay()
        scores = [Scores(0.3, window_left=9, sinks=SINKS)] * 3
        check_out(out, wanted(batch, q, [1] * 3, scores)[0])  # type: ignore[arg-type]
    # A split of -1 asks for nothing, and so not for deterministic kernels.
    geometry = wrapper._geometry
    assert geometry is not None
    assert not geometry.deterministic


@pytest.mark.parametrize("sinks", [True, False])
def test_vllm_prefills(sinks: bool, device: torch.device) -> None:
    values = torch.from_numpy(SINKS).float().to(device)
    impl = VllmImpl(0.3, 9, 20.0 if not sinks else None, values if sinks else None)
    wrapper: flashinfer.BatchPrefillWithPagedKVCacheWrapper
    if sinks:
        wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
            workspace(device),
            "NHD",
            backend="auto",
            q_data_type=torch.float32,
            kv_data_type=torch.float32,
            head_dim_qk=DIM,
            head_dim_vo=DIM,
            window_left=9,
        )
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="auto")
    batch, q_lens = new_batch((6, 21, 3), PAGE_SIZE, device=device), (6, 2, 1)
    wrapper.plan(
        qo_indptr=indptr(q_lens, torch.device("cpu")),
        paged_kv_indptr=batch.indptr.cpu(),
        paged_kv_indices=batch.indices,
        paged_kv_last_page_len=batch.last_page_len.cpu(),
        seq_lens=torch.tensor(batch.kv_lens, dtype=torch.int32),
        num_qo_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        page_size=PAGE_SIZE,
        causal=True,
        sm_scale=impl.scale,
        window_left=impl.window_left,
        logits_soft_cap=impl.logits_soft_cap,
        q_data_type=torch.float32,
        kv_data_type=torch.float32,
        o_data_type=torch.float32,
        fixed_split_size=-1,
        disable_split_kv=False,
    )
    q = queries(9, device=device)
    out = torch.empty_like(q)
    impl.prefill(flashinfer, wrapper, q, batch.cache, out)
    scores = [Scores(0.3, window_left=9, cap=impl.logits_soft_cap or 0.0, sinks=SINKS if sinks else None)] * 3
    expected = wanted(batch, q, q_lens, scores)
    check_out(out, expected[0])
    if sinks:
        check(wrapper.run_return_lse(q, batch.cache, values, 0.3), expected)
        halved = [Scores(0.15, window_left=9, sinks=SINKS)] * 3
        check(wrapper.run(q, batch.cache, values, 0.15, return_lse=True), wanted(batch, q, q_lens, halved))
        with pytest.raises(BadBatch, match=r"run\(\) got 1 arguments after the cache; give the sinks and the scale"):
            wrapper.run(q, batch.cache, values)
        with pytest.raises(BadSetting, match="multiply that scale by them"):
            wrapper.run(q, batch.cache, values, 0.3, q_scale=0.5)


def test_sglang_decodes_in_a_graph(device: torch.device) -> None:
    decode = SglangDecode(
        flashinfer, 3, 100, workspace(device), num_qo_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scaling=0.3
    )
    k, v = (torch.zeros(100, KV_HEADS, DIM, device=device) for _ in range(2))
    q = torch.zeros(3, Q_HEADS, DIM, device=device)
    decode.call_begin_forward(torch.ones(3, dtype=torch.int32), ints([0, 1, 2], device), in_capture=True)
    decode.forward(q, (k, v))
    recording, out = recorder_for(device).record(lambda: decode.forward(q, (k, v)))
    for seed, kv_lens in enumerate([(5, 17, 2), (40, 1, 4), (1, 1, 1)]):
        batch = new_batch(kv_lens, 1, device=device, seed=seed)
        for side, memory in enumerate((k, v)):
            memory[: len(batch.cache)] = batch.cache[:, side, 0]
            memory[len(batch.cache) :] = float("nan")
        decode.call_begin_forward(torch.tensor(kv_lens, dtype=torch.int32), batch.indices, in_capture=False)
        q.copy_(queries(3, device=device, seed=seed))
        recording.replay()
        check_out(out, wanted(batch, q, [1] * 3, [Scores(0.3)] * 3)[0])


def test_what_needs_flashinfers_cuda_module_says_so(device: torch.device) -> None:
    buffers = ints([0, 0], device), ints([0], device), ints([1], device)
    wrapper: Any = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    with pytest.raises(AssertionError, match="fa2 backend only"):
        sglang_fast_prefill_plan(wrapper)
    with pytest.raises(NotServed, match=r"_cached_module is not served: there is no CUDA module; call plan\(\)"):
        _ = wrapper._cached_module
    latent = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    with pytest.raises(NotServed, match=r"BatchMLAPagedAttentionWrapper\._plan_info is not served"):
        vllm_mla_plan_info(SimpleNamespace(wrapper=latent))


def test_a_fast_plan_is_equal_to_a_plan(device: torch.device) -> None:
    batch = new_batch((7, 4, 12), PAGE_SIZE, device=device)
    q = queries(6, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    flashinfer.fast_decode_plan(
        wrapper, *batch.lists, *SIZES, PAGE_SIZE, data_type="float32", sm_scale=0.3, window_left=5, q_len_per_req=2
    )
    expected = wanted(batch, q, [2] * 3, [Scores(0.3, window_left=5)] * 3)
    check(wrapper.run(q, batch.cache, return_lse=True), expected)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(BadBatch, match="got a BatchPrefillWithPagedKVCacheWrapper; give it a BatchDecode"):
        flashinfer.fast_decode_plan(prefill, *batch.lists, *SIZES, PAGE_SIZE)
