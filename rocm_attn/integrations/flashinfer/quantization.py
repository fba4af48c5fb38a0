"""Packing of masks. Names and arguments are FlashInfer's."""

import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadSetting, BadTensor
from rocm_attn.integrations.flashinfer.lengths import on_host

__all__ = ["packbits", "segment_packbits"]


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """Returns bits as bytes, uint8 [ceil(n / 8)]: not 0 is 1, and the last byte is filled with zeros.

    x:        [n]
    bitorder: big: an octet's first element is the byte's highest bit; little: the lowest, which masks of plans need
    Raises BadTensor, BadSetting.
    """
    return segment_packbits(x, torch.tensor([0, x.numel()]), bitorder)[0]


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Packs each segment from a byte of its own on. Returns uint8 [bytes] and int32 [S + 1], each segment's first byte.

    x: [n]; indptr: int [S + 1], each segment's first element, and n; bitorder: as in packbits
    Waits for indptr if it is on a device. Raises BadTensor, BadBatch, BadSetting.
    """
    if bitorder not in ("big", "little"):
        raise BadSetting(f"bitorder is {bitorder!r}; it must be big or little")
    if x.dim() != 1:
        raise BadTensor(f"x is {list(x.shape)}; it must have one dimension")
    first = torch.from_numpy(on_host(indptr)[0])
    if not len(first) or first[0] != 0 or first[-1] != len(x) or (first.diff() < 0).any():
        raise BadBatch(f"indptr is {first[:9].tolist()}...; it must begin at 0, never fall, and end at {len(x)}")
    byte = torch.zeros_like(first)
    byte[1:] = ((first.diff() + 7) // 8).cumsum(0)
    # Each segment's elements move by the unused bits of the bytes before it.
    moved, count = (each.to(x.device) for each in ((byte * 8 - first)[:-1], first.diff()))
    place = torch.arange(len(x), device=x.device) + moved.repeat_interleave(count, output_size=len(x))
    bits = torch.zeros(int(byte[-1]) * 8, dtype=torch.uint8, device=x.device)
    bits[place] = (x != 0).to(torch.uint8)
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    shifts = shifts if bitorder == "little" else 7 - shifts
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8), byte.to(indptr.device, torch.int32)
