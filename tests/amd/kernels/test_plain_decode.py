"""The kernel to read first computes what the fast one does."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.attention.plain_decode import launch_plain_decode
from tests.amd.kernels.attention_cases import UNTOUCHED, Case, assert_served, build, run_decode
from tests.amd.tolerances import assert_attention_close, assert_lse_close

# An empty sequence, one key, a page and a key block more or less, and several new tokens, which are not served.
RAGGED = Case(kv_len=[33, 0, 1, 16, 70, 15, 40], q_len=[1, 1, 1, 1, 1, 1, 3], dims=(32, 32))
DECODES = replace(RAGGED, kv_len=RAGGED.kv_len[:-1], q_len=RAGGED.q_len[:-1])
CASES = {
    "mha": replace(DECODES, heads=(2, 2)),
    "gqa_3": replace(DECODES, heads=(6, 2), page_size=5),
    "mqa_20": replace(DECODES, heads=(20, 1), page_size=1),
    "dims": replace(DECODES, dims=(80, 48), page_size=3, spread=True),
    "window": replace(DECODES, window_left=20, dims=(40, 24)),
}


@pytest.mark.fast(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_plain_kernel_equals_the_reference_and_the_fast_one(
    case: Case, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    plain, fast = (build(replace(case, dtype=dtype), kernel_device) for _ in range(2))
    launch_plain_decode(plain.args(), scores=plain.scores)
    run_decode(fast)
    assert_served(plain)
    assert_attention_close(plain.out, fast.out.double(), dtype)
    assert_lse_close(plain.lse, fast.lse.double(), dtype)


def test_tokens_of_other_sequences_stay_unchanged(kernel_device: torch.device) -> None:
    tensors = build(RAGGED, kernel_device)
    launch_plain_decode(tensors.args(), scores=tensors.scores)
    assert (tensors.out[-3:] == UNTOUCHED).all()
    assert (tensors.lse[-3:] == UNTOUCHED).all()
