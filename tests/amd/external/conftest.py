"""The kernels that these tests run: Triton's on a GPU and in its interpreter, torch's elsewhere."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def provider(device: torch.device) -> str:
    """Returns the provider that engines ask for."""
    return "triton" if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else "torch"
