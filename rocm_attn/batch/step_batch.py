"""StepBatch: the sequences of one step, their lengths and token ids, on the host. Padding comes later (padding.py)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import UnionType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.drafts import NO_DRAFTS, AnyDrafts, Drafts
from rocm_attn.batch.inputs import HOST_INPUTS, ON_HOST, DeviceInputs, Inputs
from rocm_attn.batch.mask import NO_MASK, Mask, NoMask, TokenSpans, on_host
from rocm_attn.batch.prefixes import NO_PREFIXES, Prefixes, SharedPrefixes
from rocm_attn.errors import BadBatch
from rocm_attn.machine.settings import require_kind

Int32Array = npt.NDArray[np.int32]
# The types that a batch takes: arrays of any integers, and plain sequences.
Integers = npt.NDArray[np.integer[Any]] | Sequence[int]

_INT32, _ARRAY = np.dtype(np.int32), np.ndarray
# The caller feeds the model, and passes these to say so.
NO_TOKEN_IDS: Int32Array = np.empty(0, np.int32)
# No token ids were passed: a StepRunner refuses the batch, because its forward would read zeros.
FORGOTTEN_TOKEN_IDS: Int32Array = np.empty(0, np.int32)
INT32_MAX = 2**31 - 1
# The most tokens of a sequence, and new tokens of a step: kernels add a few such numbers in 32 bits.
MOST_TOKENS = 2**28


@dataclass(init=False, slots=True, eq=False)
class StepBatch:
    """The sequences of one step, in order. Do not modify it.

    rows:       int32 [num_seqs]    seq -> row of the request table
    kv_len:     int32 [num_seqs]    KV length of the sequence after this step, new tokens included
    q_len:      int32 [num_seqs]    new tokens of the sequence in this step; they are the last ones of its KV
    token_ids:  int32 [num_tokens]  ids of the new tokens, sequence after sequence. In a draft round only those of the
                first draft step: int32 [num_seqs * branches]. NO_TOKEN_IDS: the caller feeds the model itself. If this
                is left out and inputs have no ids either, a StepRunner refuses the batch
    inputs:     values that only the device knows. kv_len and q_len are then upper bounds, and so are num_tokens,
                max_q_len and max_kv_len; pages must be reserved for the bounds
    mask:       the keys that new tokens see, in layers with custom_mask
    prefixes:   which sequences of a decode step share prefix pages, so that these are read once. Not with a mask; the
                host must know the lengths
    drafts:     a draft round, which runs in drafts.steps draft steps (batch/drafts.py). Each sequence has branches *
                steps new tokens. Not with a mask or prefixes; the host must know q_len. draft_batch() makes such a
                batch

    rows, kv_len, q_len and token_ids are copied: the caller's arrays may change afterwards.
    row_bytes:  the bytes of rows
    before, after: the bytes of rows and start, and of rows and kv_len. Comparing bytes takes a tenth of the time of
                comparing arrays
    data:       the bytes of rows, kv_len, q_len and token_ids, concatenated
    num_fed: new tokens that one call of the forward gets: all of them, or those of one draft step
    is_plain: True if the host knows all values, and there is no mask, no shared prefix and no draft round
    decodes: True if it is plain and each sequence has one new token, as in most steps

    Zero sequences, zero lengths and zero new tokens are legal. Raises BadBatch.
    """

    rows: Final[Int32Array]
    kv_len: Final[Int32Array]
    q_len: Final[Int32Array]
    token_ids: Final[Int32Array]
    inputs: Final[Inputs]
    mask: Final[Mask]
    prefixes: Final[Prefixes]
    drafts: Final[AnyDrafts]
    num_seqs: int = field(init=False)
    num_tokens: int = field(init=False)
    num_fed: int = field(init=False)
    max_q_len: int = field(init=False)
    min_q_len: int = field(init=False)
    max_kv_len: int = field(init=False)
    is_plain: bool = field(init=False, repr=False)
    decodes: bool = field(init=False, repr=False)
    row_bytes: bytes = field(init=False, repr=False)
    before: tuple[bytes, bytes] = field(init=False, repr=False)
    after: tuple[bytes, bytes] = field(init=False, repr=False)
    data: bytes = field(init=False, repr=False)

    # Written by hand: setting the fields of a frozen class one by one would cost a tenth of a step's host time.
    def __init__(
        self,
        rows: Integers,
        kv_len: Integers,
        q_len: Integers,
        token_ids: Integers = FORGOTTEN_TOKEN_IDS,
        *,
        inputs: Inputs = HOST_INPUTS,
        mask: Mask = NO_MASK,
        prefixes: Prefixes = NO_PREFIXES,
        drafts: AnyDrafts = NO_DRAFTS,
    ) -> None:
        rows, kv_len, q_len, token_ids = _vectors((rows, kv_len, q_len, token_ids))
        num_seqs = len(rows)
        if not (num_seqs == len(kv_len) == len(q_len)):
            raise BadBatch(
                f"the batch has {num_seqs} rows, {len(kv_len)} kv_len and {len(q_len)} q_len; give one of each per "
                "sequence"
            )
        row_bytes, kv_len_bytes, q_len_bytes = rows.tobytes(), kv_len.tobytes(), q_len.tobytes()
        # The bytes that are checked are the ones that are published, even if the caller changes the arrays.
        data = b"".join((row_bytes, kv_len_bytes, q_len_bytes, token_ids.tobytes()))
        given = np.frombuffer(data, _INT32)
        kv, new = given[num_seqs : 2 * num_seqs], given[2 * num_seqs : 3 * num_seqs]
        fewest, most = (1, 1) if num_seqs and q_len_bytes == _ones(num_seqs) else _extremes(new)
        shortest, longest = _extremes(kv)
        # The extremes decide it for almost every batch.
        if fewest < 0 or (shortest < most and (kv < new).any()):
            _refuse_lengths(kv, new)
        if num_seqs * longest > INT32_MAX and _total(kv) > INT32_MAX:
            raise BadBatch(f"{_total(kv)} KV tokens in one step overflow an int32 indptr; split the batch")
        is_plain = inputs is HOST_INPUTS and mask is NO_MASK and prefixes is NO_PREFIXES and drafts is NO_DRAFTS
        if not is_plain:
            _require("inputs", inputs, Inputs)
            _require("mask", mask, Mask)
            _require("prefixes", prefixes, Prefixes)
            _require("drafts", drafts, AnyDrafts)
        num_tokens = fed = num_seqs * most if fewest == most else _total(new)
        if num_tokens > MOST_TOKENS:
            raise BadBatch(f"{num_tokens} new tokens in one step are more than {MOST_TOKENS}; split the batch")
        if isinstance(drafts, Drafts):
            fed = _fed_at_once(drafts, (fewest, most), num_seqs, (inputs, mask, prefixes))
        if len(token_ids) not in (0, fed):
            raise BadBatch(
                f"the batch has {len(token_ids)} token ids for {fed} new tokens; give one per token, or NO_TOKEN_IDS"
            )
        if inputs is not HOST_INPUTS:  # in most steps there is nothing to check
            fewest = inputs.min_q_len(num_seqs, fed, fewest)
        if not isinstance(mask, NoMask):
            if isinstance(mask, TokenSpans) and not inputs.lengths_on_host:
                raise BadBatch("spans are places in the KV, so they need the lengths on the host; give them there")
            mask.check(kv, new)
        if isinstance(prefixes, SharedPrefixes):
            _check_beside_prefixes(inputs, mask)
            prefixes.check(kv, decodes=num_seqs == 0 or fewest == most == 1)
        self.rows, self.kv_len, self.q_len = given[:num_seqs], kv, new
        # An empty array is kept itself, because FORGOTTEN_TOKEN_IDS is known by its identity.
        self.token_ids = given[3 * num_seqs :] if len(token_ids) else as_int32("token_ids", token_ids)
        self.inputs, self.mask, self.prefixes, self.drafts = inputs, mask, prefixes, drafts
        self.num_seqs, self.num_tokens, self.num_fed = num_seqs, num_tokens, fed
        self.max_q_len = most
        self.min_q_len = fewest
        self.max_kv_len = longest
        self.is_plain, self.decodes = is_plain, is_plain and fewest == most == 1
        self.row_bytes, self.data = row_bytes, data
        self.before, self.after = (row_bytes, (kv - new).tobytes()), (row_bytes, kv_len_bytes)

    @property
    def start(self) -> Int32Array:
        """int32 [num_seqs]: kv_index of each sequence's first new token, kv_len - q_len."""
        return np.frombuffer(self.before[1], _INT32)


def draft_batch(
    rows: Integers,
    prefix_len: Integers,
    drafts: Drafts,
    token_ids: Integers = FORGOTTEN_TOKEN_IDS,
    *,
    inputs: Inputs = HOST_INPUTS,
) -> StepBatch:
    """Returns the batch of a draft round.

    rows:       int32 [num_seqs]  seq -> row of the request table, with pages reserved for prefix_len + drafts.tokens
    prefix_len: int32 [num_seqs]  tokens stored before the drafts; upper bounds if inputs have kv_len
    token_ids:  int32 [num_seqs * branches]  input ids of the first draft step, as in StepBatch
    inputs:     DeviceInputs(kv_len=prefix lengths, ahead=drafts.tokens) if only the device knows the lengths

    Raises BadBatch.
    """
    require_kind("drafts of a round", drafts, Drafts, BadBatch)
    before = as_int32("prefix_len", prefix_len)
    if len(before) and before.item(before.argmax()) > INT32_MAX - drafts.tokens:
        raise BadBatch(f"a prefix of {int(before.max())} tokens with {drafts.tokens} drafts overflows int32")
    q_len = as_many(len(before), drafts.tokens)
    return StepBatch(rows, before + q_len, q_len, token_ids, inputs=inputs, drafts=drafts)


def _fed_at_once(
    drafts: Drafts, extremes: tuple[int, int], num_seqs: int, beside: tuple[Inputs, Mask, Prefixes]
) -> int:
    """Drafts per draft step. extremes: the smallest and the largest q_len. Raises BadBatch for an invalid round."""
    inputs, mask, prefixes = beside
    if num_seqs and extremes != (drafts.tokens, drafts.tokens):
        raise BadBatch(
            f"sequences have {extremes[0]} to {extremes[1]} new tokens; with {drafts.branches} branches and "
            f"{drafts.steps} steps of drafts each must have {drafts.tokens}"
        )
    if mask is not NO_MASK or prefixes is not NO_PREFIXES:
        raise BadBatch("drafts have masks of their own and cannot share prefixes; leave mask and prefixes out")
    if isinstance(inputs, DeviceInputs) and inputs.q_len is not ON_HOST:
        raise BadBatch(
            "q_len cannot come from the device in a round of drafts, because all sequences have the same "
            "number; leave it out"
        )
    return num_seqs * drafts.branches


def _require(name: str, given: object, kinds: UnionType) -> None:
    """Refuses None, which some callers take for nothing, and other strangers. Raises BadBatch."""
    if not isinstance(given, kinds):
        named = " or ".join(kind.__name__ for kind in kinds.__args__[1:])  # the first kind stands for nothing
        raise BadBatch(f"{name} of a batch is {given!r}; give {named}, or leave it out")


def _check_beside_prefixes(inputs: Inputs, mask: Mask) -> None:
    """Refuses inputs and masks that cannot be combined with shared prefixes. Raises BadBatch."""
    if not inputs.lengths_on_host:
        raise BadBatch("shared prefixes need the lengths on the host; give kv_len and q_len on the host")
    if mask is not NO_MASK:
        raise BadBatch("a step cannot have both a mask and shared prefixes; leave one of them out")


def _total(lengths: Int32Array) -> int:
    return int(np.add.reduce(lengths, dtype=np.int64))  # the same as sum(), in two thirds of its time


def _refuse_lengths(kv_len: Int32Array, q_len: Int32Array) -> None:
    seq = int(np.argmax((kv_len < q_len) | (q_len < 0)))
    raise BadBatch(
        f"sequence {seq} has q_len {q_len[seq]} and kv_len {kv_len[seq]}; kv_len counts the new tokens, so 0 <= "
        "q_len <= kv_len"
    )


# Every step of a server makes a batch, so fractions of a microsecond count: argmax takes a quarter of the time of a
# reduction, and comparing bytes a tenth.


def _extremes(values: Int32Array) -> tuple[int, int]:
    """The smallest and the largest value; 0 and 0 if there are none."""
    if not len(values):
        return 0, 0
    return values.item(values.argmin()), values.item(values.argmax())


@lru_cache(maxsize=1024)
def as_many(num_seqs: int, tokens: int) -> Int32Array:
    """int32 [num_seqs]: the q_len of a step in which each sequence has `tokens` new tokens; read-only."""
    array = np.full(num_seqs, tokens, np.int32)
    array.flags.writeable = False
    return array


@lru_cache(maxsize=1024)
def _ones(count: int) -> bytes:
    """The q_len of a decode step as bytes; most steps decode."""
    return np.ones(count, np.int32).tobytes()


def _vectors(given: tuple[Integers, ...]) -> Iterable[Int32Array]:
    """Returns rows, kv_len, q_len and token_ids as int32 vectors. Raises BadBatch."""
    for values in given:
        if type(values) is not _ARRAY or values.dtype is not _INT32 or values.ndim != 1:
            return map(as_int32, ("rows", "kv_len", "q_len", "token_ids"), given)
    return given  # type: ignore[return-value]


def has_repeats(numbers: npt.NDArray[np.integer[Any]]) -> bool:
    """True if a number [n] comes twice. numpy.unique would import numpy.ma, for milliseconds of some step."""
    ordered = np.sort(numbers)
    return bool((ordered[1:] == ordered[:-1]).any())


def as_int32(name: str, values: object) -> Int32Array:
    """Returns values as a contiguous int32 vector, without wrapping a value that does not fit."""
    array = on_host(name, values)
    if array.dtype == _INT32 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.ndim != 1:
        raise BadBatch(f"{name} has shape {array.shape}; it must be a vector")
    if array.size == 0:
        return NO_TOKEN_IDS
    if array.dtype.kind not in "iu":
        raise BadBatch(f"{name} holds {array.dtype}; it must hold integers")
    if int(array.min()) < -INT32_MAX or int(array.max()) > INT32_MAX:
        raise BadBatch(f"{name} holds values outside of int32")
    return np.ascontiguousarray(array, dtype=np.int32)
