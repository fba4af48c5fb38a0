"""Lengths and token ids that a caller gives on the device. Without Triton, since twins and callers import them too."""

from typing import NamedTuple

from torch import Tensor


class GivenInputs(NamedTuple):
    """The values that replace a published step's inputs; int32, read only.

    kv_len, q_len: [num_seqs], on the device, or in the ring slot if the host knows them
    token_ids:     [n], sequence after sequence by q_len; n is 0 without ids, otherwise the sum of the bounds of q_len
    first_writable: [num_seqs], in the slot; the first token that a step may store, no more than the bound of kv_len
    stored:        [num_seqs], in the slot; tokens that are stored before the step, or more of them
    ahead:         tokens that kv_len leaves out; negative if it has more than the step
    """

    kv_len: Tensor
    q_len: Tensor
    token_ids: Tensor
    first_writable: Tensor
    stored: Tensor
    ahead: int = 0
