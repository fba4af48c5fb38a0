"""Spans of keys for each new token, by FlashInfer's name, against its definition of their mask, cell by cell."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadSetting, BadTensor, Unsupported, WrongState
from rocm_attn.integrations import flashinfer
from tests.amd.integrations.batches import DIM, SIZES, Batch, check, indptr, new_batch, queries, wanted, workspace
from tests.amd.integrations.oracle import Array, Scores

LENS, NEW = (9, 21, 4), (6, 5, 4)
# First and last key of the spans, in turn for the new tokens of each sequence; one begins before the new tokens, one
# does not have its own token, and one token has none.
SPANS = (((2, 5),) * 4 + ((-1, -1),) * 2, ((14, 20),) * 5, ((0, 0), (0, 3), (2, 3), (-1, -1)))
DTYPES: dict[str, Any] = {
    "q_data_type": torch.float32,
    "kv_data_type": torch.float32,
    "head_dim_qk": DIM,
    "head_dim_vo": DIM,
}


def planned(device: torch.device, **more: Any) -> tuple[Any, Batch]:
    batch = new_batch(LENS, 4, device=device)
    wrapper = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(workspace(device), **DTYPES)
    wrapper.plan(indptr(NEW, device), *batch.lists, *SIZES, 4, sm_scale=0.3, **more)
    return wrapper, batch


def ranges(device: torch.device, spans: Sequence[Sequence[tuple[int, int]]] = SPANS) -> Tensor:
    return torch.tensor([span for of_seq in spans for span in of_seq], dtype=torch.int32, device=device)


def cells(seq: int, causal_left: int, range_left: int) -> Array:
    """Returns [new, kv_len]: 1 where a token sees a key, by FlashInfer's words."""
    shown = np.zeros((NEW[seq], LENS[seq]))
    for token, (start, end) in enumerate(SPANS[seq]):
        place = LENS[seq] - NEW[seq] + token
        for key in range(LENS[seq]):
            causal = key <= place and (causal_left < 0 or place - key <= causal_left)
            in_range = start <= key <= end and (range_left <= 0 or place - key < range_left)
            shown[token, key] = causal or in_range
    return shown


@pytest.mark.parametrize(("causal_left", "range_left"), [(-1, -1), (2, -1), (0, 0), (1, 2), (-1, 1)])
def test_a_token_sees_what_comes_before_and_its_span(causal_left: int, range_left: int, device: torch.device) -> None:
    wrapper, batch = planned(device)
    q = queries(sum(NEW), device=device)
    scores = [replace(Scores(0.3), shown=cells(seq, causal_left, range_left)) for seq in range(len(LENS))]
    found = wrapper.run(q, batch.cache, ranges(device), causal_left, range_left, return_lse=True)
    check(found, wanted(batch, q, NEW, scores))
    check(
        wrapper.forward_return_lse(q, batch.cache, ranges(device), causal_left, range_left),
        wanted(batch, q, NEW, scores),
    )


def test_each_run_has_spans_of_its_own(device: torch.device) -> None:
    """The pages are the plan's, whatever the caller writes to its list after it."""
    wrapper, batch = planned(device)
    batch.indices.fill_(10**6)
    q, none = queries(sum(NEW), device=device), ranges(device).fill_(-1)
    with_spans = wanted(batch, q, NEW, [replace(Scores(0.3), shown=cells(seq, -1, -1)) for seq in range(len(LENS))])
    without = wanted(batch, q, NEW, [Scores(0.3)] * len(LENS))
    for given, expected in ((none, without), (ranges(device), with_spans), (none, without)):
        check(wrapper.run(q, batch.cache, given, return_lse=True), expected)


def test_what_run_determines_is_refused_by_plan(device: torch.device) -> None:
    for more in ({"causal": True}, {"window_left": 3}, {"custom_mask": ranges(device)}, {"logits_soft_cap": 2.0}):
        with pytest.raises(BadSetting, match=f"plan\\(\\) got {next(iter(more))}; run\\(\\) takes the spans"):
            planned(device, **more)
    with pytest.raises(BadSetting, match=r"q_data_type is torch.float16, and the wrapper was made with torch.float32"):
        planned(device, q_data_type="float16")


def test_other_ranges_graphs_and_a_run_before_a_plan_are_refused(device: torch.device) -> None:
    wrapper, batch = planned(device)
    q = queries(sum(NEW), device=device)
    for wrong in (ranges(device).long(), ranges(device)[1:], ranges(device).T.contiguous().T):
        with pytest.raises(BadTensor, match=r"they must be int32 \[15, 2\], contiguous"):
            wrapper.run(q, batch.cache, wrong)
    with pytest.raises(TypeError):
        wrapper.plan()
    with pytest.raises(WrongState, match="call plan"):
        wrapper.run(q, batch.cache, ranges(device))
    kind = flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper
    with pytest.raises(WrongState, match="call plan"):
        kind(workspace(device), **DTYPES).run(q, batch.cache, ranges(device))
    with pytest.raises(Unsupported, match="use_cuda_graph is not served with spans of each run"):
        kind(workspace(device), use_cuda_graph=True)
    with pytest.raises(BadSetting, match="takes NONE alone"):
        kind(workspace(device), pos_encoding_mode="ALIBI")
