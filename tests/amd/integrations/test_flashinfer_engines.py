"""Lines of vLLM and SGLang that take FlashInfer's wrappers get the right attention, or a reason."""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadBatch
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
from tests.amd.integrations.oracle import Scores


def vllm_fast_plan_decode(
    flashinfer: ModuleType,
    self: Any,  # decode wrapper
    indptr_cpu: Tensor,
    indices: Tensor,
    last_page_len_cpu: Tensor,
    seq_lens_cpu: Tensor,
    *,
    fixed_split_size: int = -1,
    disable_split_kv: bool = False,
    **more: Any,
) -> None:
    """vllm/v1/attention/backends/flashinfer.py:2676, fast_plan_decode."""
    if not self.is_cuda_graph_enabled or getattr(self, "vllm_first_call", True):
        self.plan(
            indptr=indptr_cpu,
            indices=indices,
            last_page_len=last_page_len_cpu,
            non_blocking=True,
            block_tables=None,
            seq_lens=seq_lens_cpu,
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            data_type=None,
            rope_scale=None,
            rope_theta=None,
            **more,
        )
        self.vllm_first_call = False
        return
    assert self.is_cuda_graph_enabled, "Should be cudagraph only here"
    more.pop("o_data_type")
    flashinfer.decode.fast_decode_plan(
        self,
        indptr=indptr_cpu,
        indices=indices,
        last_page_len=last_page_len_cpu,
        data_type=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        **more,
    )


class VllmImpl:
    """The state of vllm/v1/attention/backends/flashinfer.py:1842, FlashInferImpl, that wrappers meet."""

    def __init__(self, scale: float, window_left: int, logits_soft_cap: float | None, sinks: Tensor | None) -> None:
        self.scale, self.window_left, self.logits_soft_cap, self.sinks = scale, window_left, logits_soft_cap, sinks

    def decode(self, decode_wrapper: Any, query: Tensor, kv_cache: Any, output: Tensor) -> None:
        """Lines 2404 to 2461 of its forward."""
        assert decode_wrapper is not None
        assert decode_wrapper._window_left == self.window_left
        assert decode_wrapper._logits_soft_cap == (self.logits_soft_cap or 0.0)
        assert decode_wrapper._sm_scale == self.scale
        decode_wrapper.run(
            query,
            kv_cache,
            q_scale=1.0,
            k_scale=1.0,
            v_scale=1.0,
            out=output,
            kv_cache_sf=None,
            sinks=self.sinks,
        )

    def prefill(self, flashinfer: ModuleType, prefill_wrapper: Any, query: Tensor, kv_cache: Any, out: Tensor) -> None:
        """Lines 2220 to 2273 of its forward."""
        assert isinstance(prefill_wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
        assert prefill_wrapper._window_left == self.window_left
        assert prefill_wrapper._logits_soft_cap == (self.logits_soft_cap or 0.0)
        assert prefill_wrapper._sm_scale == self.scale
        assert prefill_wrapper._causal
        if isinstance(prefill_wrapper, flashinfer.BatchAttentionWithAttentionSinkWrapper):
            assert self.sinks is not None
            prefill_wrapper.run(query, kv_cache, self.sinks, self.scale * 1.0 * 1.0, v_scale=1.0, out=out)
        else:
            prefill_wrapper.run(query, kv_cache, q_scale=1.0, k_scale=1.0, v_scale=1.0, out=out, kv_cache_sf=None)


class SglangDecode:
    """sglang/srt/layers/attention/flashinfer_backend.py: decode steps in a graph, with pages of one token.

    Lines 1142 (_create_decode_wrappers), 1766 (call_begin_forward), 846 (the planner in a capture), 1566 (forward).
    """

    def __init__(self, flashinfer: ModuleType, bs: int, room: int, workspace: Tensor, **model: Any) -> None:
        device, self._flashinfer, self._model = workspace.device, flashinfer, model
        self.kv_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=device)
        self.cuda_graph_kv_indices = torch.zeros(room, dtype=torch.int32, device=device)
        self.kv_last_page_len = torch.ones(bs, dtype=torch.int32, device=device)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            backend="auto",
            use_cuda_graph=True,
            use_tensor_cores=False,
            paged_kv_indptr_buffer=self.kv_indptr[: bs + 1],
            paged_kv_indices_buffer=self.cuda_graph_kv_indices,
            paged_kv_last_page_len_buffer=self.kv_last_page_len[:bs],
        )

    def call_begin_forward(self, seq_lens_cpu: Tensor, slots: Tensor, *, in_capture: bool) -> None:
        wrapper, bs = self.wrapper, len(seq_lens_cpu)
        kv_indptr = self.kv_indptr
        kv_indptr[1 : bs + 1] = torch.cumsum(seq_lens_cpu.to(kv_indptr.device), dim=0)
        kv_indptr = kv_indptr[: bs + 1]
        assert wrapper.is_cuda_graph_enabled
        kv_indices = wrapper._paged_kv_indices_buf
        kv_indices[: len(slots)] = slots
        global_override_indptr_cpu = torch.empty_like(kv_indptr, device="cpu")
        global_override_indptr_cpu[0] = 0
        global_override_indptr_cpu[1 : bs + 1] = torch.cumsum(seq_lens_cpu, dim=0)
        wrapper_uses_fast_decode_plan = (
            hasattr(wrapper.begin_forward, "func") and wrapper.begin_forward.func == self._flashinfer.fast_decode_plan
        )
        assert wrapper_uses_fast_decode_plan == (not in_capture)
        more = {"global_override_indptr_cpu": global_override_indptr_cpu} if wrapper_uses_fast_decode_plan else {}
        wrapper.begin_forward(
            kv_indptr,
            kv_indices,
            self.kv_last_page_len[:bs],
            self._model["num_qo_heads"],
            self._model["num_kv_heads"],
            self._model["head_dim"],
            1,
            data_type=torch.float32,
            q_data_type=torch.float32,
            non_blocking=True,
            fixed_split_size=None,
            disable_split_kv=False,
            **more,
        )
        if in_capture:
            wrapper.begin_forward = partial(self._flashinfer.fast_decode_plan, wrapper)

    def forward(self, q: Tensor, kv_cache: Any) -> Tensor:
        out: Tensor = self.wrapper.forward(
            q.contiguous(), kv_cache, sm_scale=self._model["scaling"], logits_soft_cap=0.0, k_scale=1.0, v_scale=1.0
        )
        return out


def sglang_fast_prefill_plan(self: Any) -> None:
    """flashinfer_backend.py:225: the start of fast_prefill_plan, which needs FlashInfer's CUDA module."""
    assert self.is_cuda_graph_enabled, "fast_prefill_plan is cuda-graph only"
    assert getattr(self, "_backend", None) == "fa2", "fast_prefill_plan supports the fa2 backend only"
    self._plan_info = self._cached_module.plan()


def vllm_mla_plan_info(self: Any) -> list[int]:
    """mla/flashinfer_mla_sparse_sm90.py:377, which reads the plan of FlashInfer's CUDA module."""
    return [int(x) for x in self.wrapper._plan_info]


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
        check(wrapper.run_return_lse(q, batch.cache, values, 0.1, q_scale=0.5, k_scale=6.0), expected)
        with pytest.raises(BadBatch, match=r"run\(\) got 1 arguments after the cache; give the sinks and the scale"):
            wrapper.run(q, batch.cache, values)


def test_a_decode_wrapper_has_the_scale_of_its_plan_and_takes_others_with_sinks(device: torch.device) -> None:
    values = torch.from_numpy(SINKS).float().to(device)
    batch = new_batch((6, 21, 3), PAGE_SIZE, device=device)
    buffers = indptr((1, 1, 1), device), torch.zeros(16, dtype=torch.int32, device=device), ints((1, 1, 1), device)
    named = dict(zip(flashinfer.BatchDecodeWithPagedKVCacheWrapper.BUFFERS, buffers, strict=True))
    wrapper = flashinfer.BatchDecodeWithAttentionSinkWrapper(
        workspace(device), head_dim_qk=DIM, head_dim_vo=DIM, window_left=9, use_cuda_graph=True, **named
    )
    assert wrapper.use_tensor_cores
    assert wrapper.is_cuda_graph_enabled
    sizes: dict[str, Any] = {"window_left": 9, "sm_scale": 0.6, "q_data_type": torch.float32}
    wrapper.plan(*batch.lists, Q_HEADS, KV_HEADS, DIM, PAGE_SIZE, **sizes)
    q = queries(3, device=device)
    expected = wanted(batch, q, (1, 1, 1), [Scores(0.3, window_left=9, sinks=SINKS)] * 3)
    check(wrapper.run_return_lse(q, batch.cache, values, 0.3), expected)
    check(wrapper.run(q, batch.cache, values, 0.1, q_scale=0.5, k_scale=6.0, return_lse=True), expected)


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
