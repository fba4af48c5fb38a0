"""StateWatch: checks that an engine's recurrent state slots hold the state after the tokens that a step continues.

A state depends on all tokens that were folded into it, but does not show which those were. So each slot has a header,
int32 [3]: a 64-bit hash of its tokens, and their number. The hash up to each token is stored per KV slot too, so a
sequence's block table gives the header that a step must find. Request ids are not needed: two requests with the same
tokens may share a state, as with a prefix cache.

A hash is the sum over tokens of 64 mixed bits of id and position, modulo 2^64, so a step adds only its own tokens. The
hash of no tokens is not 0. So a header of zeros is never right; a slot that the engine has cleared gets the header of
no tokens, which is right where a sequence begins.

Nothing here waits for the device, and no size depends on a value there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, Unsupported
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, WRONG_ENGINE_STATE
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.settings import WATCH_STATES

# int32 words of a header: low and high half of the hash, number of tokens.
HEADER_WORDS = 3
# The multipliers of SplitMix64 (Steele, Lea, Flood 2014), and its increment, as int64.
_MIX = tuple(each - (1 << 64) if each >> 63 else each for each in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_NO_TOKENS = _INCREMENT
ALL_NEW = -1


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots of states that a step's S sequences use, as the engine names them; slot 0 is no sequence's.

    W: the most slots that a sequence writes
    read:    int [S], the state before the first new token; not looked at if layers do not read it
    is_read: bool [S], whether layers read it; they must if the sequence goes on. If it begins, they may read one that
             the engine has cleared for it
    written: int [S, W]
    folded:  int [S, W], new tokens that are in the state written; 0, or more than there are: nothing is written;
             ALL_NEW: all of them
    """

    read: Tensor
    is_read: Tensor
    written: Tensor
    folded: Tensor


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A step's sequences and the hashes of their tokens.

    live:         bool [S]; whether there is such a sequence, with new tokens
    start, q_len: int64 [S], tokens before the step, and new ones
    first:        int64 [S], the place of the first new token
    before:       int64 [S], the hash of the tokens before the step
    after:        int64 [T], the hash of a sequence's tokens up to each new one
    counts:       of the step, whose error word is set
    """

    live: Tensor
    start: Tensor
    q_len: Tensor
    first: Tensor
    before: Tensor
    after: Tensor
    counts: Tensor


class StateWatch:
    """The hashes of the tokens of one KV cache group. num_slots: tokens that its pages have room for"""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._hashes = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def begin(self, step: StepTensors, page_size: int, token_ids: Tensor) -> StepTokens:
        """Hashes a step's new tokens, and keeps the hashes at the slots of their KV.

        step:      filled
        token_ids: int [T or more]
        Raises BadTensor.
        """
        num_tokens, num_seqs, hashes = len(step.slot_of_token), len(step.kv_len), self._hashes
        if len(token_ids) < num_tokens:
            raise BadTensor(f"there are {len(token_ids)} token ids for a step padded to {num_tokens} tokens")
        end, q_len, first = step.kv_len.long(), step.q_len.long(), step.q_indptr[:num_seqs].long()
        start = end - q_len
        live = (torch.arange(num_seqs, device=end.device) < step.counts[0]) & (q_len > 0) & (start >= 0)
        is_token = torch.arange(num_tokens, device=end.device) < step.counts[1]
        own = torch.where(is_token, _mixed(token_ids[:num_tokens], step.position_of_token), 0)
        sums = torch.cat([own.new_zeros(1), own.cumsum(0)])
        last = (start - 1).clamp(min=0)
        column = (last // page_size).clamp(max=step.table.shape[1] - 1)
        page = step.table[step.row_of_seq.long(), column].long()
        place = (page * page_size + last % page_size).clamp(0, len(hashes) - 1)
        before = torch.where(start > 0, hashes[place], _NO_TOKENS)
        seq = step.seq_of_token.long()
        after = sums[1:] + (before - sums[first.clamp(max=num_tokens)])[seq]
        slot = step.slot_of_token.long().clamp(0, len(hashes) - 1)
        hashes[slot] = torch.where(is_token, after, hashes[slot])
        return StepTokens(live, start, q_len, first, before, after, step.counts)

    def check(self, tokens: StepTokens, headers: Tensor, slots: StateSlots) -> None:
        """Sets WRONG_ENGINE_STATE if a sequence has a wrong slot, and writes the headers of the slots that it writes.

        A sequence that goes on from a wrong state leaves none that is right: what comes from it is reported too.

        headers: int32 [slots, HEADER_WORDS], any stride of slots; that of slot 0 is never right
        slots:   those of all sequences, for layers with one set of slots
        """
        live, q_len, num_slots = tokens.live, tokens.q_len, len(headers)
        goes_on = live & (tokens.start > 0)
        read, written = slots.read.long(), slots.written.long()
        found = headers[read.clamp(0, num_slots - 1)]
        reads = live & slots.is_read
        wrong = reads & ((found != _header(tokens.before, tokens.start)).any(1) | ~_exists(read, num_slots))
        wrong |= goes_on & ~reads
        folded = torch.where(slots.folded == ALL_NEW, q_len[:, None], slots.folded.long())
        used = live[:, None] & (folded > 0) & (folded <= q_len[:, None])
        wrong |= (used & ~_exists(written, num_slots)).any(1)
        seq = torch.arange(len(live), device=live.device)[:, None]
        taken = torch.cat([torch.where(reads, read, 0)[:, None], torch.where(used, written, 0)], 1)
        cells = (taken * len(live) + seq).flatten().sort().values
        slot = cells // len(live)
        shared = (slot[1:] == slot[:-1]) & (slot[1:] > 0) & (cells[1:] != cells[:-1])
        place = (tokens.first[:, None] + folded - 1).clamp(0, len(tokens.after) - 1)
        new = _header(tokens.after[place], tokens.start[:, None] + folded)
        is_right = (used & ~wrong[:, None])[..., None]
        target = torch.where(used & _exists(written, num_slots), written, 0)
        headers[target.flatten()] = torch.where(is_right, new, 0).flatten(0, 1)
        headers[0] = 0
        fault = (wrong.any() | shared.any()).int() * WRONG_ENGINE_STATE
        tokens.counts[ERROR_WORD : ERROR_WORD + 1].bitwise_or_(fault)


def cleared_headers(num_slots: int, device: torch.device) -> Tensor:
    """Returns headers of states without tokens, int32 [num_slots, HEADER_WORDS]; that of slot 0 is never right."""
    headers = _header(torch.tensor(_NO_TOKENS), torch.tensor(0)).repeat(num_slots, 1)
    headers[0] = 0
    return headers.to(device)


def refused(why: str) -> Unsupported:
    """Returns the refusal of what is not followed."""
    return Unsupported(f"{WATCH_STATES} is 1 and {why}; unset it, or run without that")


def require_followed(engine: str, used: Mapping[str, bool]) -> None:
    """Raises Unsupported if an engine uses an option whose states are not followed. used: by the option's words"""
    for words, is_used in used.items():
        if is_used:
            raise refused(f"{engine} runs with {words}")


def first_rows(rows: Tensor, num: int) -> Tensor:
    """The first rows, and rows of zeros if there are fewer."""
    missing = max(0, num - len(rows))
    return torch.cat([rows[:num], rows.new_zeros(missing, *rows.shape[1:])])


def _mixed(token_ids: Tensor, positions: Tensor) -> Tensor:
    """64 bits of each id and position. Shifts are of signed numbers, which mixes as well."""
    bits = (token_ids.long() << 32 | positions.long()) * _MIX[0] + _INCREMENT
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        bits = (bits ^ (bits >> shift)) * factor
    return bits ^ (bits >> 31)


def _header(hashes: Tensor, counts: Tensor) -> Tensor:
    """Headers, int32 [..., HEADER_WORDS]."""
    return torch.stack([hashes, hashes >> 32, counts], -1).int()


def _exists(slots: Tensor, num_slots: int) -> Tensor:
    return (slots > 0) & (slots < num_slots)
