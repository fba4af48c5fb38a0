"""Attention over latent pages by FlashInfer's names equals FlashInfer's definition."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadBatch, BadProblem, BadTensor, NeverFits, Unsupported, WrongState
from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer.latent_batch import needed
from tests.amd.integrations.batches import check, indptr, ints, workspace
from tests.amd.integrations.oracle import Array, Scores, attention

HEADS, CKV, KPE, PAGE_SIZE, ROOM = 4, 32, 16, 4, 24
SIZES: dict[str, Any] = {
    "num_heads": HEADS,
    "head_dim_ckv": CKV,
    "head_dim_kpe": KPE,
    "page_size": PAGE_SIZE,
    "sm_scale": 0.2,
    "q_data_type": torch.float32,
    "kv_data_type": torch.float32,
}


class Latents:
    """Sequences of these lengths in latent pages, and queries of their last tokens."""

    def __init__(self, kv_lens: Sequence[int], q_lens: Sequence[int], device: torch.device, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.kv_lens, self.q_lens, self.device = kv_lens, q_lens, device
        pages = [-(-kv_len // PAGE_SIZE) for kv_len in kv_lens]
        self.pages = random.permutation(ROOM)[: sum(pages)].tolist()
        self.firsts = [0, *itertools.accumulate(pages)]
        rows = random.standard_normal((ROOM, PAGE_SIZE, CKV + KPE))
        self.cache = torch.from_numpy(rows).float().to(device)
        self.q = torch.from_numpy(random.standard_normal((sum(q_lens), HEADS, CKV + KPE))).float().to(device)
        self.metadata = flashinfer.MLAPlanMetadata.csr(
            indptr(q_lens, device), indptr(pages, device), ints(self.pages, device), ints(kv_lens, device)
        )

    def dense(self) -> flashinfer.MLAPlanMetadata:
        table = torch.full((len(self.kv_lens), 9), -1, dtype=torch.int32)
        for seq, (first, last) in enumerate(itertools.pairwise(self.firsts)):
            table[seq, : last - first] = torch.tensor(self.pages[first:last], dtype=torch.int32)
        lengths = indptr(self.q_lens, self.device), table.to(self.device), ints(self.kv_lens, self.device)
        return flashinfer.MLAPlanMetadata.dense(*lengths)

    def wanted(self, causal: bool, sinks: Array | None = None) -> tuple[Array, Array]:
        q, rows = (each.cpu().double().numpy() for each in (self.q, self.cache))
        outs = []
        for seq, of_seq in enumerate(np.split(q, list(itertools.accumulate(self.q_lens))[:-1])):
            pages = self.pages[self.firsts[seq] : self.firsts[seq + 1]]
            k = rows[pages].reshape(-1, 1, CKV + KPE)[: self.kv_lens[seq]]
            outs.append(attention(of_seq, k, k[..., :CKV], Scores(0.2, causal=causal, sinks=sinks)))
        return np.concatenate([out for out, _ in outs]), np.concatenate([lse for _, lse in outs])


def new_wrapper(device: torch.device) -> flashinfer.BatchMLAPagedAttentionWrapper:
    return flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))


@pytest.mark.parametrize(("q_lens", "causal"), [((1, 1, 1), False), ((2, 5, 1), True), ((2, 5, 3), False)])
def test_latents_are_read_in_one_tensor_or_in_two(q_lens: tuple[int, ...], causal: bool, device: torch.device) -> None:
    latents = Latents((3, 17, 8), q_lens, device)
    wrapper, expected = new_wrapper(device), latents.wanted(causal)
    wrapper.plan(metadata=latents.metadata, causal=causal, **SIZES)
    needed(latents.metadata.kv_indices).fill_(10**6)  # by then a caller may write those of its next step
    ckv, kpe = latents.cache.split((CKV, KPE), -1)  # type: ignore[no-untyped-call]
    q = latents.q[..., :CKV], latents.q[..., CKV:]
    check(wrapper.run(query=latents.q, kv_cache=latents.cache, return_lse=True), expected)
    check(wrapper.run(query=q, kv_cache=(ckv, kpe), return_lse=True), expected)
    assert wrapper._over_copies is None, "parts of one row are read where they lie"
    apart = ckv.contiguous(), kpe.contiguous()
    check(wrapper.run(*q, *apart, return_lse=True), expected)
    wrapper.plan(metadata=latents.dense(), causal=causal, **SIZES)
    check(wrapper.run(*q, *apart, return_lse=True), expected)
    out, lse = wrapper.run(query=latents.q, kv_cache=latents.cache, return_lse=True, return_lse_base_on_e=True)
    check((out, lse / np.log(2)), expected)


def test_tensors_of_the_plan_may_come_by_position(device: torch.device) -> None:
    latents = Latents((3, 17), (1, 2), device)
    wrapper, of = new_wrapper(device), latents.metadata
    given = of.qo_indptr, of.kv_indptr, of.kv_indices, of.kv_len_arr, HEADS, CKV, KPE, PAGE_SIZE, True, 0.2
    wrapper.plan(*given, torch.float32, torch.float32)
    check(wrapper.run(query=latents.q, kv_cache=latents.cache, return_lse=True), latents.wanted(True))
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    found = wrapper.run(
        query=latents.q,
        kv_cache=latents.cache,
        sinks=torch.from_numpy(sinks).float().to(device),
        return_lse=True,
    )
    check(found, latents.wanted(True, sinks))


@pytest.mark.parametrize("is_apart", [False, True])
def test_one_recording_serves_every_plan_that_fits(is_apart: bool, device: torch.device) -> None:
    def buffer(size: int) -> Tensor:
        return torch.full((size,), -7, dtype=torch.int32, device=device)

    buffers = buffer(4), buffer(4), buffer(ROOM), buffer(3)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), True, *buffers)
    first = Latents((0, 0, 0), (1, 1, 1), device)
    cache, q = first.cache, first.q
    parts = cache[..., :CKV].contiguous(), cache[..., CKV:].contiguous()

    def run() -> tuple[Tensor, Tensor]:
        found = wrapper.run(query=q, kv_cache=parts if is_apart else cache, return_lse=True)
        assert isinstance(found, tuple)
        return found

    wrapper.plan(metadata=first.metadata, causal=False, **SIZES)
    run()
    recording, out = recorder_for(device).record(run)
    for seed, kv_lens in enumerate([(5, 30, 1), (9, 2, 0)]):
        latents = Latents(kv_lens, (1, 1, 1), device, seed)
        cache.copy_(latents.cache)
        q.copy_(latents.q)
        for part, its in zip(parts, latents.cache.split((CKV, KPE), -1), strict=True):  # type: ignore[no-untyped-call]
            part.copy_(its)
        wrapper.plan(metadata=latents.metadata, causal=False, **SIZES)
        recording.replay()
        check(out, latents.wanted(False))
    with pytest.raises(BadBatch, match="first planned with one new token per sequence"):
        wrapper.plan(metadata=Latents((5, 3, 1), (2, 1, 0), device).metadata, causal=False, **SIZES)
    with pytest.raises(NeverFits, match="number of sequences"):
        wrapper.plan(metadata=Latents((5, 3), (1, 1), device).metadata, causal=False, **SIZES)
    with pytest.raises(Unsupported, match="give lists of pages"):
        wrapper.plan(metadata=latents.dense(), causal=False, **SIZES)


def test_boundaries_after_the_last_sequence_are_not_looked_at(device: torch.device) -> None:
    latents = Latents((3, 17), (1, 2), device)
    wrapper, of = new_wrapper(device), latents.metadata
    longer = torch.cat([needed(of.kv_indptr), ints([999, 1], device)])
    wrapper.plan(of.qo_indptr, longer, of.kv_indices, of.kv_len_arr, causal=True, **SIZES)
    check(wrapper.run(query=latents.q, kv_cache=latents.cache, return_lse=True), latents.wanted(True))


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_cache_without_pages_gives_what_seeing_nothing_gives(is_apart: bool, device: torch.device) -> None:
    latents = Latents((0, 0), (1, 2), device)
    wrapper = new_wrapper(device)
    wrapper.plan(metadata=latents.metadata, causal=True, **SIZES)
    cache = latents.cache[:0]
    parts = cache[..., :CKV].clone(), cache[..., CKV:].clone()
    for sinks in (None, np.array([0.5, -1.0, 2.0, 0.0])):
        of_call = None if sinks is None else torch.from_numpy(sinks).float().to(device)
        found = wrapper.run(query=latents.q, kv_cache=parts if is_apart else cache, sinks=of_call, return_lse=True)
        check(found, latents.wanted(True, sinks))


def test_what_is_not_served_is_refused(device: torch.device) -> None:
    latents = Latents((3, 17), (1, 2), device)
    wrapper = new_wrapper(device)
    with pytest.raises(WrongState, match="nothing is planned"):
        wrapper.run(query=latents.q, kv_cache=latents.cache)
    plans: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"kv_data_type": torch.float8_e4m3fn}, Unsupported, "give both one dtype"),
        ({"skip_softmax": True}, Unsupported, "every key counts"),
        ({"num_heads": None}, BadBatch, "needs num_heads"),
        ({"qo_indptr": latents.metadata.qo_indptr}, BadBatch, "give one of them"),
        ({"metadata": None}, BadBatch, "the plan lacks tensors"),
        ({"page_size": 2}, BadBatch, "does not give the pages of 2 tokens"),
        ({"page_size": 0}, BadProblem, "with pages of 0 tokens; each must be at least 1"),
    ]
    for more, error, message in plans:
        with pytest.raises(error, match=message):
            wrapper.plan(**{"metadata": latents.metadata, "causal": True, **SIZES, **more})
    wrapper.plan(metadata=latents.metadata, causal=True, **SIZES)
    of_run: dict[str, Any] = {"query": latents.q, "kv_cache": latents.cache}
    runs: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"ckv_scale": 1.0}, Unsupported, "keep them in 16 bits"),
        ({"q_nope": latents.q}, BadTensor, "query is not given once: give it whole, or else both of its parts"),
        ({"kv_cache": None}, BadTensor, "kv_cache is not given once"),
        ({"kv_cache": None, "ckv_cache": latents.cache[..., :CKV]}, BadTensor, "kv_cache is not given once"),
        ({"kv_cache": latents.cache[..., :40]}, BadTensor, "a latent cache is torch.float32"),
        ({"kv_cache": latents.cache[0]}, BadTensor, "it must be .pages, page_size, dim."),
        ({"kv_cache": latents.cache[:2]}, BadTensor, "the KV cache has pages 0 to 1"),
        (
            {"kv_cache": (latents.cache[:2, :, :CKV].clone(), latents.cache[:2, :, CKV:].clone())},
            BadTensor,
            "the caches have .2, 2.",
        ),
    ]
    for more, error, message in runs:
        with pytest.raises(error, match=message):
            wrapper.run(**{**of_run, **more})
    check(wrapper.run(**of_run, return_lse=True), latents.wanted(True))
