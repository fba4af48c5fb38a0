"""StepBatch: one step as the runner sees it. Real sequences only; padding is nobody's business here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rocm_attn.errors import BadBatch
from rocm_attn.step_inputs import HOST_INPUTS, Inputs
from rocm_attn.step_mask import NO_MASK, Mask, StepMask, mask_bytes

Int32Array = npt.NDArray[np.int32]

_INT32 = np.dtype(np.int32)
_STRIDES = (4,)
NO_TOKEN_IDS: Int32Array = np.empty(0, np.int32)
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The sequences of one step, in order.

    rows:       int32 [num_seqs]    seq -> row of the request table
    kv_len:     int32 [num_seqs]    tokens in the sequence's KV after this step, the new ones included
    q_len:      int32 [num_seqs]    new tokens of this step, at the end of the KV
    token_ids:  int32 [num_tokens]  ids of the new tokens, sequence after sequence; empty: the caller feeds the model
    inputs:     what the device alone knows: kv_len and q_len are then upper bounds, and with them num_tokens,
                max_q_len and max_kv_len; pages are reserved for the bounds
    mask:       what the new tokens see in layers whose problem has custom_mask

    Zero sequences, zero lengths and zero new tokens are legal. Raises BadBatch.
    """

    rows: Int32Array
    kv_len: Int32Array
    q_len: Int32Array
    token_ids: Int32Array = field(default_factory=lambda: NO_TOKEN_IDS)
    inputs: Inputs = field(default=HOST_INPUTS, kw_only=True)
    mask: Mask = field(default=NO_MASK, kw_only=True)
    num_tokens: int = field(init=False)
    max_q_len: int = field(init=False)
    min_q_len: int = field(init=False)
    max_kv_len: int = field(init=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not (
            _is_int32(self.rows) and _is_int32(self.kv_len) and _is_int32(self.q_len) and _is_int32(self.token_ids)
        ):
            for name in ("rows", "kv_len", "q_len", "token_ids"):
                put(self, name, _as_int32(name, getattr(self, name)))
        num_seqs = len(self.rows)
        if not (num_seqs == len(self.kv_len) == len(self.q_len)):
            raise BadBatch(
                f"{num_seqs} rows, {len(self.kv_len)} kv_len and {len(self.q_len)} q_len: each sequence has one of each"
            )
        fewest, most = _extremes_of_q_len(self.q_len)
        shortest, longest = _extremes(self.kv_len)
        # The extremes settle it for almost every batch.
        if fewest < 0 or (shortest < most and (self.kv_len < self.q_len).any()):
            self._refuse_lengths()
        if num_seqs * longest > INT32_MAX and self.total_kv_len > INT32_MAX:
            raise BadBatch(f"{self.total_kv_len} KV tokens in one step overflow an int32 indptr; split the batch")
        num_tokens = num_seqs * most if fewest == most else int(self.q_len.sum(dtype=np.int64))
        if len(self.token_ids) not in (0, num_tokens):
            raise BadBatch(f"{len(self.token_ids)} token ids for {num_tokens} new tokens; pass one each, or none")
        if self.inputs is not HOST_INPUTS:  # on most steps there is nothing to ask
            fewest = self.inputs.min_q_len(num_seqs, num_tokens, fewest)
        put(self, "max_q_len", most)
        put(self, "min_q_len", fewest)
        put(self, "max_kv_len", longest)
        put(self, "num_tokens", num_tokens)
        if isinstance(self.mask, StepMask):
            self.mask.check(mask_bytes(self.kv_len, self.q_len), num_tokens)

    def _refuse_lengths(self) -> None:
        seq = int(np.argmax((self.kv_len < self.q_len) | (self.q_len < 0)))
        raise BadBatch(
            f"sequence {seq} has q_len {self.q_len[seq]} and kv_len {self.kv_len[seq]}: "
            "new tokens are counted in kv_len, so 0 <= q_len <= kv_len"
        )

    @property
    def total_kv_len(self) -> int:
        """KV tokens of all sequences."""
        return int(self.kv_len.sum(dtype=np.int64))

    @property
    def num_seqs(self) -> int:
        return len(self.rows)


# Every step of a server makes a batch, so what follows counts fractions of a microsecond: argmax takes a quarter of the
# time of a reduction, and comparing bytes a tenth.


def _extremes(values: Int32Array) -> tuple[int, int]:
    """The smallest and the largest value; 0 and 0 of none."""
    if not len(values):
        return 0, 0
    return values.item(values.argmin()), values.item(values.argmax())


def _extremes_of_q_len(q_len: Int32Array) -> tuple[int, int]:
    """As _extremes; of a decode step, which most steps are, all are 1."""
    if len(q_len) and q_len.tobytes() == _ones(len(q_len)):
        return 1, 1
    return _extremes(q_len)


@lru_cache(maxsize=1024)
def _ones(count: int) -> bytes:
    return np.ones(count, np.int32).tobytes()


def _is_int32(values: object) -> bool:
    """Whether values are what a batch keeps: a contiguous int32 vector."""
    return type(values) is np.ndarray and values.dtype is _INT32 and values.strides == _STRIDES


def _as_int32(name: str, values: object) -> Int32Array:
    """values as a contiguous int32 vector, without wrapping a value that does not fit."""
    array = np.asarray(values)
    if array.dtype == np.int32 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1:
        raise BadBatch(f"{name} has shape {array.shape}; it must be a vector")
    if array.size == 0:
        return NO_TOKEN_IDS
    if array.dtype.kind not in "iu":
        raise BadBatch(f"{name} holds {array.dtype}; it must hold integers")
    if int(array.min()) < -INT32_MAX or int(array.max()) > INT32_MAX:
        raise BadBatch(f"{name} holds values beyond int32")
    return np.ascontiguousarray(array, dtype=np.int32)
