from __future__ import annotations

import pytest
import torch

from rocm_attn.hip_graphs.errors import KeyTaken, StaleRecording
from rocm_attn.hip_graphs.pinned import Fingerprint, PinnedTensors


class Owner:
    """Owns one buffer and may take another one."""

    def __init__(self, size: int) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int32)


def pinned_owner(size: int = 8) -> tuple[PinnedTensors, Owner]:
    owner = Owner(size)
    pinned = PinnedTensors()
    pinned.pin_all(lambda: {"lengths": owner.buffer})
    return pinned, owner


def test_check_passes_while_nothing_moves_whatever_the_values_do() -> None:
    pinned, owner = pinned_owner()
    owner.buffer.fill_(7)
    pinned.check()


def test_check_names_a_tensor_that_its_owner_reallocated_with_what_it_was_and_is() -> None:
    pinned, owner = pinned_owner(8)
    old = owner.buffer
    owner.buffer = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(StaleRecording) as raised:
        pinned.check()
    message = str(raised.value)
    assert "lengths was int32[8]" in message
    assert "is int32[16]" in message
    assert f"{old.data_ptr():#x}" in message
    assert f"{owner.buffer.data_ptr():#x}" in message


def test_check_names_a_tensor_that_its_owner_has_no_longer() -> None:
    tensors = {"lengths": torch.zeros(8), "rows": torch.zeros(8)}
    pinned = PinnedTensors()
    pinned.pin_all(lambda: tensors)
    del tensors["rows"]
    with pytest.raises(StaleRecording, match=r"rows was float32\[8\] .* and is gone now"):
        pinned.check()


def test_an_owner_is_asked_once_for_all_of_its_tensors() -> None:
    asked = []
    tensors = {str(number): torch.zeros(1) for number in range(50)}

    def current() -> dict[str, torch.Tensor]:
        asked.append(1)
        return tensors

    pinned = PinnedTensors()
    pinned.pin_all(current)
    pinned.check()
    assert len(asked) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor[1:],
        lambda tensor: tensor.view(2, 4),
        lambda tensor: tensor.view(torch.float32),
        lambda tensor: tensor[::2],
    ],
    ids=["address", "shape", "dtype", "stride"],
)
def test_check_sees_every_part_of_a_fingerprint(change) -> None:  # type: ignore[no-untyped-def]
    pinned, owner = pinned_owner()
    owner.buffer = change(owner.buffer)
    with pytest.raises(StaleRecording, match="lengths"):
        pinned.check()


def test_check_sees_a_tensor_object_that_was_resized_in_place() -> None:
    pinned = PinnedTensors()
    buffer = torch.zeros(8)
    pinned.pin("buffer", buffer)
    buffer.resize_(1 << 20)
    with pytest.raises(StaleRecording, match="buffer"):
        pinned.check()


def test_pinning_the_same_memory_twice_is_harmless_and_other_memory_is_refused() -> None:
    pinned, owner = pinned_owner()
    pinned.pin_all(lambda: {"lengths": owner.buffer})
    with pytest.raises(KeyTaken, match=r"lengths is pinned as .* release\(\)"):
        pinned.pin("lengths", torch.zeros(8, dtype=torch.int32))
    pinned.check()


def test_release_forgets_the_pins_and_starts_another_epoch() -> None:
    pinned, owner = pinned_owner()
    before = pinned.epoch
    owner.buffer = torch.zeros(16, dtype=torch.int32)
    pinned.release()
    assert pinned.epoch == before + 1
    assert "lengths" not in pinned
    pinned.pin_all(lambda: {"lengths": owner.buffer})
    pinned.check()


def test_bump_changes_the_epoch_and_keeps_the_pins() -> None:
    pinned, _ = pinned_owner()
    assert pinned.bump() == pinned.epoch == 1
    assert list(pinned.fingerprints) == ["lengths"]


def test_sharing_memory_is_found_by_address_range() -> None:
    pool = torch.zeros(16)
    pinned = PinnedTensors()
    pinned.pin("low", pool[:8])
    pinned.pin("high", pool[8:])
    pinned.pin("odd rows", pool.view(8, 2)[1::2])
    assert pinned.sharing_memory_with(pool[7:8]) == ("low", "odd rows")
    assert pinned.sharing_memory_with(pool[8:9]) == ("high", "odd rows")
    assert pinned.sharing_memory_with(pool[14:14]) == ()
    assert pinned.sharing_memory_with(torch.zeros(16)) == ()


def test_a_fingerprint_spans_its_strided_elements() -> None:
    base = torch.zeros(10, 6, dtype=torch.int16)
    start, stop = Fingerprint.of(base[2:5, 1:3]).span
    assert (start - base.data_ptr(), stop - base.data_ptr()) == ((2 * 6 + 1) * 2, (4 * 6 + 3) * 2)
