"""The kernels that these tests run: Triton's on a GPU and in its interpreter, torch's elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from rocm_attn.integrations import flashinfer


@pytest.fixture(autouse=True)
def provider(device: torch.device) -> Iterator[str]:
    """Makes this provider serve calls that name no kernels, and yields it."""
    chosen = "triton" if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "torch"
    flashinfer.use_provider(chosen)
    yield chosen
    flashinfer.use_provider("auto")
