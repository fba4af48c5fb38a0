"""The recorders of tests."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.hip_graphs.recorder import GraphRecorder


@dataclass(frozen=True)
class Lab:
    """A recorder and the device that it records."""

    recorder: GraphRecorder
    device: torch.device


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors hold the same bit patterns, NaNs and signed zeros included."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
