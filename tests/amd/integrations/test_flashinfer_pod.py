"""Prefill and decode in one call equal FlashInfer's definition; over one cache they are one mixed step."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadBatch, BadTensor, Unsupported, WrongState
from rocm_attn.external import ExternalAttention
from rocm_attn.integrations import flashinfer
from rocm_attn.step.external_step import ExternalStep
from rocm_attn.step.plan import StepPlan
from tests.amd.integrations.batches import (
    DIM,
    KV_HEADS,
    NAN,
    SIZES,
    Batch,
    check,
    check_out,
    indptr,
    ints,
    new_batch,
    queries,
    wanted,
    workspace,
)
from tests.amd.integrations.oracle import Scores, attention

PAGE_SIZE = 4


@pytest.mark.parametrize(("causal", "layout"), [(True, "NHD"), (False, "HND")])
def test_a_prompt_in_two_tensors_and_decode_over_pages(causal: bool, layout: str, device: torch.device) -> None:
    batch = new_batch((9, 1, 17), PAGE_SIZE, layout, device=device)
    random = np.random.default_rng(3)
    k, v = (torch.from_numpy(random.standard_normal((13, KV_HEADS, DIM))).float().to(device) for _ in range(2))
    q_p, q_d = queries(6, device=device, seed=4), queries(3, device=device, seed=5)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace(device), layout)
    assert not wrapper.is_cuda_graph_enabled
    wrapper.plan(*batch.lists, *SIZES, PAGE_SIZE, "NONE", 7, torch.float32, sm_scale=0.3)
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    shown = random.integers(0, 2, (6, 13))
    packed = flashinfer.packbits(torch.from_numpy(shown.ravel()), "little").to(device)
    masks: list[tuple[dict[str, Any], Any]] = [
        ({}, None),
        ({"custom_mask_p": torch.from_numpy(shown).to(device)}, shown.astype(np.float64)),
        ({"packed_custom_mask_p": packed}, shown.astype(np.float64)),
    ]
    for mask, seen in masks:
        more: dict[str, Any] = {"causal_p": causal, "kv_layout_p": layout, "window_left_p": 4, **mask}
        prefill, decode = wrapper.run(q_p, *given, q_d, batch.cache, **more, q_scale=0.5, v_scale=2.0)
        rows, keys, values = (each.cpu().double().numpy() for each in (q_p, k, v))
        expected, _ = attention(rows, keys, values, Scores(DIM**-0.5, causal, window_left=4, shown=seen))
        check_out(prefill, expected)
        check_out(decode, wanted(batch, q_d, [1] * 3, [Scores(0.15, window_left=7)] * 3)[0] * 2)


def joined(batch: Batch, num_prefill: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the lists of the first sequences, and those of the others, as plan() takes them."""
    starts = batch.indptr.tolist()
    middle = starts[num_prefill]
    return (
        ints(starts[: num_prefill + 1], device),
        batch.indices[:middle],
        batch.last_page_len[:num_prefill],
        ints([each - middle for each in starts[num_prefill:]], device),
        batch.indices[middle:],
        batch.last_page_len[num_prefill:],
    )


@pytest.mark.parametrize("causal", [True, False])
def test_prefill_and_decode_over_one_cache_are_one_step(
    causal: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, kinds = ExternalAttention.begin, list[StepKind]()

    def noting(attention: ExternalAttention, step: ExternalStep) -> StepPlan:
        plan = begin(attention, step)
        kinds.extend(kernel.entry.kind for kernel in plan.kernels)
        return plan

    monkeypatch.setattr(ExternalAttention, "begin", noting)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device), "HND")
    assert not wrapper.is_cuda_graph_enabled
    for seed, (kv_lens, q_lens) in enumerate([((9, 12, 1, 30), (4, 12)), ((21, 5, 16, 8, 2), (1, 5))]):
        batch = new_batch(kv_lens, PAGE_SIZE, "HND", device=device, seed=seed)
        assert batch.cache.isnan().any()
        p, p_pages, p_last, d, d_pages, d_last = joined(batch, 2, device)
        num_decode = len(kv_lens) - 2
        of_p = indptr(q_lens, device), p, torch.cat((p_pages, ints([10**6], device))), p_last
        of_d = indptr([1] * num_decode, device), d, d_pages, d_last
        wrapper.plan(*of_p, *of_d, *SIZES, PAGE_SIZE, window_left=9, q_data_type="float32", sm_scale=0.3)
        q = queries(sum(q_lens) + num_decode, device=device, seed=seed)
        q_p, q_d = q[: sum(q_lens)], q[sum(q_lens) :]
        kinds.clear()
        outs, lses = wrapper.run(q_p, batch.cache, q_d, batch.cache, causal_p=causal, return_lse=True, q_scale=1.0)
        # A first plan begins a causal step, and later ones that of the last run.
        assert bool(kinds) == (seed == 0 and not causal)
        whole = [*q_lens, *[1] * num_decode]
        # A token of decode sees all keys of its window either way.
        scores = [Scores(0.3, causal, window_left=9)] * len(whole)
        check((torch.cat(outs), torch.cat(lses)), wanted(batch, q, whole, scores))
        prefill, decode = wrapper.run(q_p, batch.cache, q_d, batch.cache, causal_p=causal)
        assert prefill.equal(outs[0])
        assert decode.equal(outs[1])


def test_wrong_inputs_are_refused(device: torch.device) -> None:
    batch = new_batch((9, 12, 1, 30), PAGE_SIZE, device=device)
    p, p_pages, p_last, d, d_pages, d_last = joined(batch, 2, device)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace(device))
    q_p, q_d = queries(3, device=device), queries(2, device=device)
    cache = batch.cache
    with pytest.raises(BadTensor, match="q_p has 3 tokens, and 0 are planned"):
        wrapper.run(q_p, cache, q_d, cache)
    of_p = indptr([1, 2], device), p, p_pages, p_last
    with pytest.raises(BadBatch, match=r"qo_indptr_d is \[0, 2, 3\]...; decode has one token each"):
        wrapper.plan(*of_p, indptr([2, 1], device), d, d_pages, d_last, *SIZES, PAGE_SIZE)
    of_d = indptr([1, 1], device), d, d_pages, d_last
    more_pages = torch.cat((d_pages, p_pages[:1]))
    for short in (
        (*of_p[:2], p_pages[:-1], p_last, *of_d[:2], more_pages, d_last),
        (*of_p[:3], torch.cat((p_last, d_last[:1])), *of_d[:3], d_last[1:]),
    ):
        with pytest.raises(
            BadBatch, match="qo_indptr_p has 3 entries, kv_indptr_p 3 and ends at 6, last_page_len_p has"
        ):
            wrapper.plan(*short, *SIZES, PAGE_SIZE, q_data_type="float32")
    wrapper.plan(*of_p, *of_d, *SIZES, PAGE_SIZE, q_data_type="float32")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"custom_mask_p": q_p}, "custom_mask_p is not served: the step of both is planned without masks"),
        ({"v_scale": 2.0}, "q_scale, k_scale and v_scale scale decode alone"),
    ]
    for more, message in wrong:
        with pytest.raises(Unsupported, match=message):
            wrapper.run(q_p, cache, q_d, cache, **more)
    with pytest.raises(Unsupported, match="over two caches are not served in one step; give one cache, or use Batch"):
        wrapper.run(q_p, cache, q_d, torch.full_like(cache, NAN))
    with pytest.raises(BadTensor, match="q_p has 2 tokens, and 3 are planned"):
        wrapper.run(q_d, cache, q_d, cache)
    # A refused plan of 2 tokens and 3 decodes: the older one, of 3 and 2, is not run in its place.
    with pytest.raises(BadBatch, match="qo_indptr_d has 4 entries"):
        wrapper.plan(indptr([1, 1], device), *of_p[1:], indptr([1, 1, 1], device), *of_d[1:], *SIZES, PAGE_SIZE)
    with pytest.raises(WrongState, match=r"call plan.. before run"):
        wrapper.run(q_d, cache, q_p, cache)
    single = flashinfer.PODWithPagedKVCacheWrapper(workspace(device))
    k = torch.ones(3, KV_HEADS, DIM, device=device)
    with pytest.raises(WrongState, match=r"call plan.. before run"):
        single.run(q_p, k, k, q_d, cache)
    with pytest.raises(Unsupported, match="custom_mask_d is not served: a decode token sees all of its keys"):
        single.run(q_p, k, k, q_d, cache, custom_mask_d=k)
