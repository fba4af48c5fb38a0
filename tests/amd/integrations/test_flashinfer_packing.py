"""packbits and segment_packbits give FlashInfer's bytes; test_flashinfer_prefill.py has plans that read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadSetting, BadTensor
from rocm_attn.integrations import flashinfer
from tests.amd.integrations.batches import indptr, ints


# NumPy's packbits is what FlashInfer's docstring refers to.
@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 257])
def test_bytes_are_those_of_numpy(count: int, bitorder: str, device: torch.device) -> None:
    x = np.random.default_rng(count).integers(0, 2, count)
    expected = np.packbits(x, bitorder="big" if bitorder == "big" else "little")
    found = flashinfer.packbits(torch.from_numpy(x * 3).to(device), bitorder)
    assert found.dtype == torch.uint8
    assert found.tolist() == expected.tolist()


def test_each_segment_begins_a_byte(device: torch.device) -> None:
    # The example of FlashInfer's docstring.
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool, device=device)
    packed, first = flashinfer.segment_packbits(x, torch.tensor([0, 4, 7, 11], device=device), bitorder="big")
    assert list(map(bin, packed.tolist())) == ["0b10110000", "0b100000", "0b11010000"]
    assert first.tolist() == [0, 1, 2, 3]
    random = np.random.default_rng(0)
    lens = [0, 17, 8, 0, 1, 40]
    bits = [random.integers(0, 2, count) for count in lens]
    packed, first = flashinfer.segment_packbits(
        torch.from_numpy(np.concatenate(bits)).to(device), indptr(lens, device), "little"
    )
    assert packed.tolist() == np.concatenate([np.packbits(each, bitorder="little") for each in bits]).tolist()
    assert first.tolist() == [0, 0, 3, 4, 4, 5, 10]


def test_wrong_inputs_are_refused(device: torch.device) -> None:
    x = torch.ones(9, device=device)
    with pytest.raises(BadSetting, match="bitorder is 'bit'; it must be big or little"):
        flashinfer.packbits(x, "bit")
    with pytest.raises(BadTensor, match=r"x is \[3, 3\]; it must have one dimension"):
        flashinfer.packbits(x.view(3, 3))
    wrong: list[Tensor] = [ints(each, device) for each in ([0, 8], [1, 9], [0, 5, 4, 9], [])]
    for boundaries in wrong:
        with pytest.raises(BadBatch, match="must begin at 0, never fall, and end at 9"):
            flashinfer.segment_packbits(x, boundaries)
