"""Copies of values between host and device that do not wait."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The values on the device, once earlier launches have run. The host array is copied at once."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned copy until it was read


def coming(tensor: Tensor) -> Tensor:
    """The tensor's values in host memory, once earlier launches have run."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
