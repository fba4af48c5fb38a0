"""BatchAttention by FlashInfer's name: decodes and prompts of one batch equal FlashInfer's definition."""

from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.errors import BadBatch, BadSetting, Unsupported
from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer.lengths import BatchLengths
from tests.amd.integrations.batches import SIZES, check, indptr, ints, new_batch, queries, wanted
from tests.amd.integrations.oracle import Scores

LENS, NEW = (7, 30, 16, 1), (3, 1, 16, 1)
HEADS, KV_HEADS, DIM = SIZES


def planned(device: torch.device, layout: str = "NHD", page_size: int = 4, **more: Any) -> tuple[Any, Any]:
    batch = new_batch(LENS, page_size, layout, device=device)
    wrapper = flashinfer.BatchAttention(layout, str(device))
    dtypes: dict[str, Any] = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    lists = indptr(NEW, device), batch.indptr, batch.indices, ints(LENS, device)
    wrapper.plan(*lists, HEADS, KV_HEADS, DIM, DIM, page_size, **{**dtypes, **more})
    return wrapper, batch


@pytest.mark.fast
@pytest.mark.parametrize(("layout", "page_size"), [("NHD", 4), ("HND", 5), ("NHD", 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_decodes_and_prompts_of_a_batch_are_attended_at_once(
    causal: bool, layout: str, page_size: int, device: torch.device
) -> None:
    wrapper, batch = planned(device, layout, page_size, causal=causal, sm_scale=0.3)
    q = queries(sum(NEW), device=device)
    expected = wanted(batch, q, NEW, [Scores(0.3, causal=causal)] * len(LENS))
    check(wrapper.run(q, batch.cache), expected)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    wrapper.prewarm_paged_kv_stride_variant()
    found = wrapper.run(q, (batch.cache[:, 0], batch.cache[:, 1]), out, lse)
    assert found[0] is out
    assert found[1] is lse
    check(found, expected)


def test_a_cap_is_the_plans(device: torch.device) -> None:
    wrapper, batch = planned(device, causal=True, logits_soft_cap=3.0)
    q = queries(sum(NEW), device=device)
    expected = wanted(batch, q, NEW, [Scores(DIM**-0.5, cap=3.0)] * len(LENS))
    check(wrapper.run(q, batch.cache), expected)
    check(wrapper.run(q, batch.cache, logits_soft_cap=3.0), expected)
    with pytest.raises(BadSetting, match=r"logits_soft_cap is 5.0, planned with 3.0"):
        wrapper.run(q, batch.cache, logits_soft_cap=5.0)


def test_scales_multiply_keys_and_values(device: torch.device) -> None:
    wrapper, batch = planned(device, causal=True, sm_scale=0.2)
    q = queries(sum(NEW), device=device)
    out, lse = wanted(batch, q, NEW, [Scores(0.3)] * len(LENS))
    check(wrapper.run(q, batch.cache, k_scale=1.5, v_scale=2.0), (2 * out, lse))


def test_what_is_not_served_is_refused(device: torch.device) -> None:
    wrapper, batch = planned(device)
    q = queries(sum(NEW), device=device)
    with pytest.raises(Unsupported, match="profiler_buffer is not served"):
        wrapper.run(q, batch.cache, profiler_buffer=q)
    with pytest.raises(Unsupported, match="use_profiler is not served"):
        planned(device, use_profiler=True)
    with pytest.raises(BadSetting, match="it must be 'independent'"):
        wrapper.prewarm_paged_kv_stride_variant("equal")
    few = indptr(NEW, device), batch.indptr, batch.indices, ints((7, 40, 16, 1), device)
    with pytest.raises(BadBatch, match="pages of 4 tokens for all of its tokens"):
        wrapper.plan(*few, HEADS, KV_HEADS, DIM, DIM, 4, q_data_type=torch.float32, kv_data_type=torch.float32)
    few = indptr((1,), device), ints((-1, 1), device), batch.indices, ints((7,), device)
    with pytest.raises(BadBatch, match=r"indptr of the KV is \[-1\]...; it must begin at 0 and never fall"):
        wrapper.plan(*few, HEADS, KV_HEADS, DIM, DIM, 4, q_data_type=torch.float32, kv_data_type=torch.float32)


def test_lengths_that_kernels_cannot_add_up_in_32_bits_are_refused() -> None:
    one_token, first_page = np.array([0, 1]), np.array([0])
    assert BatchLengths(one_token, first_page, np.array([2**28])).max_kv_len == 2**28
    with pytest.raises(BadBatch, match="lengths must be 0 to 268435456"):
        BatchLengths(one_token, first_page, np.array([2**28 + 1]))
