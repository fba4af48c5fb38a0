"""Errors of the kernels against a float64 reference, at the sizes of real models, for the report."""

from dataclasses import replace

import pytest
import torch

from tests.amd.kernels.attention_cases import Case, Tensors, assert_served, build, run_decode, run_extend
from tests.amd.rocm.models import HEADS, Measured
from tests.amd.tolerances import BOUNDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("page_size", [1, 16, 64]),
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str),
    pytest.mark.parametrize("model", HEADS),
]

KV_LEN = (1, 16, 17, 129, 520)
Q_LEN = (1, 16, 3, 70, 33)


def case_of(model: str, dtype: torch.dtype, page_size: int) -> Case:
    """Five sequences with a prefix, without one, and at the borders of pages and tiles."""
    num_q_heads, num_kv_heads, head_dim = HEADS[model]
    return Case(KV_LEN, Q_LEN, (num_q_heads, num_kv_heads), (head_dim, head_dim), page_size, dtype, tail=3)


def report_error(tensors: Tensors, measured: Measured) -> None:
    """Reports the largest error of the outputs and of the log-sum-exp, and the allowed ones."""
    bound = BOUNDS[tensors.case.dtype]
    served = tensors.reference_lse.isfinite()
    measured("largest error", float((tensors.out.double() - tensors.reference).abs().max()))
    measured("allowed", f"{bound.atol} + {bound.rtol} x |reference|")
    measured("largest lse error", float((tensors.lse.double() - tensors.reference_lse)[served].abs().max()))
    measured("allowed of lse", bound.lse_atol)


def test_decode(model: str, dtype: torch.dtype, page_size: int, device: torch.device, measured: Measured) -> None:
    tensors = build(replace(case_of(model, dtype, page_size), q_len=(1,) * len(KV_LEN), tail=0), device)
    run_decode(tensors, num_programs=64)
    report_error(tensors, measured)
    assert_served(tensors)


def test_extend(model: str, dtype: torch.dtype, page_size: int, device: torch.device, measured: Measured) -> None:
    tensors = build(case_of(model, dtype, page_size), device)
    run_extend(tensors)
    report_error(tensors, measured)
    assert_served(tensors)
