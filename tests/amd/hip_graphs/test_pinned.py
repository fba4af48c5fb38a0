import pytest
import torch

from rocm_attn.hip_graphs.errors import KeyTaken, StaleRecording
from rocm_attn.hip_graphs.pinned import PinnedTensors


class Owner:
    """Owns one buffer and may replace it."""

    def __init__(self, size: int) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int32)


def pinned_owner(size: int = 8) -> tuple[PinnedTensors, Owner]:
    owner = Owner(size)
    pinned = PinnedTensors()
    pinned.pin_all(lambda: {"lengths": owner.buffer})
    return pinned, owner


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
    pinned, owner = pinned_owner()
    owner.buffer.resize_(1 << 20)
    with pytest.raises(StaleRecording, match="lengths"):
        pinned.check()


def test_pinning_the_same_memory_twice_is_harmless_and_other_memory_is_refused() -> None:
    pinned, owner = pinned_owner()
    pinned.pin_all(lambda: {"lengths": owner.buffer})
    with pytest.raises(KeyTaken, match=r"lengths is pinned as .* release\(\)"):
        pinned.pin_all(lambda: {"lengths": torch.zeros(8, dtype=torch.int32)})
    pinned.check()


def test_release_forgets_the_pins_and_starts_another_epoch() -> None:
    pinned, owner = pinned_owner()
    before = pinned.epoch
    owner.buffer = torch.zeros(16, dtype=torch.int32)
    pinned.release()
    assert pinned.epoch == before + 1
    pinned.pin_all(lambda: {"lengths": owner.buffer})
    pinned.check()
