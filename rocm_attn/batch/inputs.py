"""DeviceInputs: lengths and token ids that only the device knows yet, for steps launched before the host has read them.

With speculative decoding, the device knows first how many draft tokens were accepted. With overlapped scheduling, it
knows the sampled tokens first. The host then gives upper bounds, and kernels read the values from device tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import whole_number

# Takes the place of a tensor in DeviceInputs: the host has these values. For token ids, there may be none.
ON_HOST = torch.empty(0, dtype=torch.int32, device="cpu")
_MOST_AHEAD = 2**31 - 1


class HostInputs:
    """The host knows everything: a batch's lengths are the lengths.

    device:            None, as there are no tensors of the caller
    kv_len_on_host:    True if a batch's kv_len are lengths, and not bounds
    q_len_on_host:     likewise for q_len
    lengths_on_host:   True if both are
    token_ids_on_host: True if the batch has the token ids, if there are any
    """

    __slots__ = ()
    device: ClassVar[None] = None
    kv_len_on_host: ClassVar[bool] = True
    q_len_on_host: ClassVar[bool] = True
    lengths_on_host: ClassVar[bool] = True
    token_ids_on_host: ClassVar[bool] = True

    def __reduce__(self) -> str:
        return "HOST_INPUTS"  # there is one; a copy, pickled or not, is that one

    def min_q_len(self, num_seqs: int, num_tokens: int, fewest: int) -> int:
        """The fewest new tokens that a sequence can have; `fewest` is the smallest q_len of the batch."""
        return fewest

    def for_lengths(self, q_len: npt.NDArray[np.int32]) -> Inputs:
        """Inputs of the same kind for a step with these new tokens, which the host knows."""
        return self

    def known_kv_len(self, kv_len: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The lengths of a batch that has these."""
        return kv_len

    def select(self, seqs: npt.NDArray[np.int_], tokens: npt.NDArray[np.int_]) -> Inputs:
        """The inputs of a step of these sequences, which have these of the tokens, in this order."""
        return self

    def cut(self, num_seqs: int, num_tokens: int) -> tuple[Inputs, Inputs]:
        """The inputs of a step's first num_seqs sequences, with num_tokens new tokens, and those of the others."""
        return self, self


@dataclass(frozen=True, slots=True, eq=False)
class DeviceInputs:
    """Lengths and token ids that only the device knows, in tensors of the caller. ON_HOST: the batch has the value.

    kv_len:    int32 [num_seqs]  the batch's kv_len are upper bounds of these
    q_len:     int32 [num_seqs]  the batch's q_len are upper bounds of these; the step's tokens are packed by these
    token_ids: int32 [n]         sequence after sequence; n is the sum of the batch's q_len, or in a draft round the
               number of tokens of its first draft step
    ahead:     new tokens that kv_len does not count: the KV length is kv_len + ahead. In a step of W new tokens per
               sequence, ahead=W lets kv_len be the length before the step

    Kernels on the step's stream read the tensors in place, and never write them: they must keep their values until
    these kernels have run, and may change afterwards. A value outside of 0 <= q_len <= kv_len + ahead <= bound is
    clipped and reported: a later step raises DeviceFault. Raises BadTensor.
    """

    kv_len: Tensor = ON_HOST
    q_len: Tensor = ON_HOST
    token_ids: Tensor = ON_HOST
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.ahead.__class__ is not int or not 0 <= self.ahead <= _MOST_AHEAD:
            object.__setattr__(self, "ahead", _checked_ahead(self.ahead))
        if self.ahead and self.kv_len is ON_HOST:
            raise BadTensor(
                f"ahead is {self.ahead}, but kv_len is on the host and already counts all tokens; leave ahead out"
            )
        # Every step of a round makes one of these, so no message is built unless something is wrong.
        device = None
        for name, tensor in (("kv_len", self.kv_len), ("q_len", self.q_len), ("token_ids", self.token_ids)):
            if tensor is ON_HOST:
                continue
            if not isinstance(tensor, Tensor):
                require_tensor(name, tensor)
            if device is None:
                device = tensor.device
            if tensor.device != device:
                self._refuse_devices()
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise BadTensor(
                    f"{name} is a {tensor.dtype} tensor of shape {list(tensor.shape)} and strides "
                    f"{list(tensor.stride())}; it must be a contiguous int32 vector"
                )
        if device is None:
            self._refuse_devices()

    def _refuse_devices(self) -> NoReturn:
        devices = {str(tensor.device) for tensor in self._given().values()}
        raise BadTensor(
            f"the tensors are on {', '.join(sorted(devices)) or 'no device'}; give kv_len, q_len and token_ids on "
            "one device"
        )

    @property
    def device(self) -> torch.device:
        if self.kv_len is not ON_HOST:
            return self.kv_len.device
        return (self.token_ids if self.q_len is ON_HOST else self.q_len).device

    @property
    def kv_len_on_host(self) -> bool:
        return self.kv_len is ON_HOST

    @property
    def q_len_on_host(self) -> bool:
        return self.q_len is ON_HOST

    @property
    def lengths_on_host(self) -> bool:
        return self.kv_len is self.q_len is ON_HOST

    @property
    def token_ids_on_host(self) -> bool:
        return self.token_ids is ON_HOST

    def min_q_len(self, num_seqs: int, num_tokens: int, fewest: int) -> int:
        """See `HostInputs.min_q_len`. Raises BadBatch for tensors whose sizes are not those of the step."""
        for name, tensor, size in (
            ("kv_len", self.kv_len, num_seqs),
            ("q_len", self.q_len, num_seqs),
            ("token_ids", self.token_ids, num_tokens),
        ):
            if tensor is not ON_HOST and len(tensor) != size:
                raise BadBatch(
                    f"{name} has {len(tensor)} elements on the device; a step of {num_seqs} sequences and up to "
                    f"{num_tokens} new tokens needs {size}"
                )
        return fewest if self.q_len is ON_HOST else 0

    def for_lengths(self, q_len: npt.NDArray[np.int32]) -> Inputs:
        """See `HostInputs.for_lengths`. The new tokens are on the device if those of this step are."""
        if self.q_len is ON_HOST:
            return HOST_INPUTS
        return DeviceInputs(q_len=torch.tensor(q_len, device=self.device))

    def known_kv_len(self, kv_len: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """See `HostInputs.known_kv_len`. Waits for the device."""
        if self.kv_len is ON_HOST:
            return kv_len
        known: npt.NDArray[np.int32] = np.minimum(self.kv_len.cpu().numpy() + np.int32(self.ahead), kv_len)
        return known

    def select(self, seqs: npt.NDArray[np.int_], tokens: npt.NDArray[np.int_]) -> Inputs:
        """See `HostInputs.select`. Raises BadBatch if the number of new tokens is on the device."""
        if self.q_len is not ON_HOST:
            raise BadBatch(
                "token ids on the device cannot be packed while q_len is on the device; give q_len on the host"
            )
        places = {"kv_len": seqs, "token_ids": tokens}
        chosen = {
            name: tensor[torch.from_numpy(places[name]).to(tensor.device)] for name, tensor in self._given().items()
        }
        return DeviceInputs(**chosen, ahead=self.ahead)

    def cut(self, num_seqs: int, num_tokens: int) -> tuple[Inputs, Inputs]:
        """See `HostInputs.cut`. Raises BadBatch if the number of new tokens is on the device."""
        if self.q_len is not ON_HOST:
            raise BadBatch(
                "a step whose q_len is on the device cannot be split; run it whole, or give q_len on the host"
            )
        places = (("kv_len", self.kv_len, num_seqs), ("token_ids", self.token_ids, num_tokens))
        given = [(name, tensor, at) for name, tensor, at in places if tensor is not ON_HOST]
        return (
            DeviceInputs(**{name: tensor[:at] for name, tensor, at in given}, ahead=self.ahead),
            DeviceInputs(**{name: tensor[at:] for name, tensor, at in given}, ahead=self.ahead),
        )

    def __reduce__(self) -> tuple[Callable[[dict[str, Tensor], int], DeviceInputs], tuple[dict[str, Tensor], int]]:
        return _device_inputs, (self._given(), self.ahead)  # ON_HOST is known by its identity

    def _given(self) -> dict[str, Tensor]:
        given = {"kv_len": self.kv_len, "q_len": self.q_len, "token_ids": self.token_ids}
        return {name: tensor for name, tensor in given.items() if tensor is not ON_HOST}


def _checked_ahead(ahead: int) -> int:
    tokens = whole_number("ahead", ahead, BadTensor)
    if not 0 <= tokens <= _MOST_AHEAD:
        raise BadTensor(f"ahead is {tokens}; it must be a number of tokens from 0 to {_MOST_AHEAD}")
    return tokens


def _device_inputs(given: dict[str, Tensor], ahead: int) -> DeviceInputs:
    return DeviceInputs(**given, ahead=ahead)


Inputs = HostInputs | DeviceInputs
HOST_INPUTS = HostInputs()
