"""StepMask: which keys each new token of a step sees, where causality does not say it.

Cell (t, j) of sequence i, its t-th new token and the key at kv_index j, is bit c % 8 of byte c // 8 (the lowest bit
first), where c = mask_indptr[i] + t * kv_len[i] + j and mask_indptr[i] = q_len[0] * kv_len[0] + ... up to sequence i.
Layers whose problem has custom_mask see by it; others see what they always do. In a layer with a window a token sees
the keys that its mask shows, from kv_index position - window_left on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor

# What a launch copies is counted in 32 bits, with room for its last stride.
_MOST_BYTES = 1 << 30


class NoMask:
    """A step whose tokens see what their layers' problems say."""

    __slots__ = ()
    device: ClassVar[None] = None

    def __reduce__(self) -> str:
        return "NO_MASK"  # there is one; a copy, pickled or not, is that one


@dataclass(frozen=True, slots=True, eq=False)
class StepMask:
    """Tensors of the caller on the runtime's device.

    bits:      uint8 [bytes]       the cells, at least as many as q_len * kv_len of all sequences come to; with lengths
                                   on the device by those, and room for the batch's bounds
    positions: int32 [num_tokens]  what Step.positions shall hold: in a tree a token's position is its depth, not its
                                   place in the KV; kv_positions() where it is the place. Windows are counted back from
                                   them, or from kv_len - q_len where they are less: what lies before the window of
                                   that place was given up. ALiBi counts places

    They are read where they lie, by a kernel on the stream of the step: they must hold their values until it has run,
    and may change afterwards. Raises BadTensor.
    """

    bits: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        for name, tensor, dtype in (("bits", self.bits, torch.uint8), ("positions", self.positions, torch.int32)):
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise BadTensor(
                    f"{name} of a mask is a {tensor.dtype} tensor of shape {list(tensor.shape)} and strides "
                    f"{list(tensor.stride())}; it must be a contiguous vector of {dtype}"
                )
        if self.bits.device != self.positions.device:
            raise BadTensor(
                f"the bits of a mask are on {self.bits.device} and its positions on {self.positions.device}; "
                "give both on one device"
            )

    @property
    def device(self) -> torch.device:
        """Of both tensors."""
        return self.bits.device

    def check(self, num_bytes: int, num_tokens: int) -> None:
        """Refuse a mask that is too short for a step of so many bytes of cells and new tokens. Raises BadBatch."""
        if num_bytes > _MOST_BYTES:
            raise BadBatch(
                f"the mask of the step takes {num_bytes} bytes, at most {_MOST_BYTES} serve; split the batch"
            )
        if len(self.bits) < num_bytes:
            raise BadBatch(
                f"the mask has {len(self.bits)} bytes; the sum of q_len * kv_len bits of this step takes {num_bytes}"
            )
        if len(self.positions) != num_tokens:
            raise BadBatch(f"the mask has {len(self.positions)} positions for {num_tokens} new tokens; give one each")


Mask = NoMask | StepMask
NO_MASK = NoMask()


def mask_bytes(kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32]) -> int:
    """Bytes that the cells of sequences with these lengths take together."""
    return -(-int(np.dot(kv_len.astype(np.int64), q_len.astype(np.int64))) // 8)


def kv_positions(kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """int32 [num_tokens]: each new token's place in its sequence's KV."""
    ends = np.cumsum(q_len)
    first = np.repeat(kv_len - ends, q_len)
    return torch.from_numpy((first + np.arange(int(q_len.sum()))).astype(np.int32)).to(device)


def random_mask(kv_len: npt.NDArray[np.int32], q_len: npt.NDArray[np.int32], generator: torch.Generator) -> StepMask:
    """Every second cell or so, for probes and tests; on the generator's device, with positions by place."""
    device = generator.device
    bits = torch.randint(256, (mask_bytes(kv_len, q_len),), generator=generator, device=device, dtype=torch.uint8)
    return StepMask(bits, kv_positions(kv_len, q_len, device))
