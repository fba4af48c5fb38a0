"""The kernels that these tests run: Triton's on a GPU and in its interpreter, torch's elsewhere."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.external import ExternalAttention
from rocm_attn.integrations import flashinfer
from rocm_attn.providers import select
from rocm_attn.step.external_step import ExternalStep
from rocm_attn.step.plan import StepPlan


@pytest.fixture(autouse=True)
def provider(device: torch.device) -> Iterator[str]:
    """Makes this provider serve calls that name no kernels, and yields it."""
    chosen = "triton" if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "torch"
    flashinfer.use_provider(chosen)
    yield chosen
    flashinfer.use_provider("auto")


@pytest.fixture
def kinds(provider: str, monkeypatch: pytest.MonkeyPatch) -> list[StepKind]:
    """Gives the provider kernels of their own for verify steps, and returns the kinds of kernels that steps begin with.

    AITER's do not serve pages whose tails an engine keeps, so others stand for them.
    """
    own = [
        replace(row, kind=StepKind.VERIFY, name=f"{row.name}[verify]")
        for row in select.ENTRIES[provider]
        if row.kind is StepKind.MIXED
    ]
    monkeypatch.setattr(select, "ENTRIES", {**select.ENTRIES, provider: (*select.ENTRIES[provider], *own)})
    begin, found = ExternalAttention.begin, list[StepKind]()

    def noting(attention: ExternalAttention, step: ExternalStep) -> StepPlan:
        plan = begin(attention, step)
        found.extend({kernel.entry.kind for kernel in plan.kernels})
        return plan

    monkeypatch.setattr(ExternalAttention, "begin", noting)
    return found


@pytest.fixture
def inference_mode() -> Iterator[None]:
    """Runs tests in inference mode, in which vLLM allocates and runs."""
    with torch.inference_mode():
        yield
