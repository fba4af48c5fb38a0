"""Makes the next round of drafts out of the last one, if the device has all that it takes.

A round feeds each sequence its last token and the W - 1 drafts after it; then a token was picked after each of them.

    taken    = 1 + the number of drafts, from the first one on, that were picked themselves
    text    += the first `taken` picks
    kv_len   = max(min(kv_len + taken, limit), W)
    token 0  = the text's last token
    drafts   = the tokens that followed the last tokens when they occurred before, over and over past the text's end

Among the places that follow the text's last two tokens, the one is taken where most of the two tokens before those
match too, the last one of equals. If there is none, the drafts are the last token again.

The inputs of the finished step are overwritten: it can run again at once, without input from the host. A length
beyond its limit is cut, so it stays within the pages that the host has reserved, and sets a bit of the step's error
word. That word is reported with the rest, and not cleared: the next publication reports it once more.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch, only_launches, repeated_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.speculative.arguments import EMITTED_WORDS, SpeculativeStep
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_BLOCK = 1024
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_BEYOND_BOUND = tl.constexpr(error_word.LENGTH_BEYOND_BOUND)
_EMITTED_WORDS = tl.constexpr(EMITTED_WORDS)


@triton.jit
def _tokens_at(text, picked, place, known, mask):
    """Tokens of a text, which has room for them, of which the first `known` are stored and the others only picked."""
    stored = tl.load(text + place, mask=mask, other=-1)
    return tl.where(place < known, stored, tl.load(picked + tl.maximum(place - known, 0), mask=mask, other=-1))


@at_any_alignment
@triton.jit(do_not_specialize=["text_row", "width"])
def _next_step_kernel(
    picked,
    counts,
    row_of_seq,
    kv_len,
    token_ids,
    texts,
    limit,
    emitted,
    text_row,
    width,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    ids = token_ids + seq * width
    picks = picked + seq * width
    pick = tl.load(picks + lane, mask=lane < width, other=-1)
    draft = tl.load(ids + lane + 1, mask=lane + 1 < width, other=-1)
    wrong = (draft != pick) | (lane + 1 >= width)
    taken = tl.min(tl.where(wrong & (lane < width), lane, WIDTH), 0) + 1
    length = tl.load(kv_len + seq)
    # Whatever the length is by now, writes stay within the text's row.
    known = tl.minimum(tl.maximum(length - width + 1, 1), text_row - width)
    num_tokens = known + taken
    text = texts + tl.load(row_of_seq + seq).to(tl.int64) * text_row
    last = tl.load(picks + taken - 1)
    last_but_1 = _tokens_at(text, picks, num_tokens - 2, known, num_tokens >= 2)
    last_but_2 = _tokens_at(text, picks, num_tokens - 3, known, num_tokens >= 3)
    last_but_3 = _tokens_at(text, picks, num_tokens - 4, known, num_tokens >= 4)
    most_same = 0
    found = 0
    begin = (num_tokens - 1) // BLOCK * BLOCK
    while (begin >= 0) & (most_same < 4):
        place = begin + tl.arange(0, BLOCK)
        inside = (place >= 2) & (place < num_tokens)
        same = inside & (_tokens_at(text, picks, place - 1, known, inside) == last)
        same = same & (_tokens_at(text, picks, place - 2, known, same) == last_but_1)
        third = same & (place >= 3)
        third = third & (_tokens_at(text, picks, place - 3, known, third) == last_but_2)
        fourth = third & (place >= 4)
        fourth = fourth & (_tokens_at(text, picks, place - 4, known, fourth) == last_but_3)
        num_same = 2 * same.to(tl.int32) + third.to(tl.int32) + fourth.to(tl.int32)
        most_here = tl.max(num_same, 0)
        here = tl.max(tl.where(num_same == most_here, place, 0), 0)
        found = tl.where(most_here > most_same, here, found)
        most_same = tl.maximum(most_here, most_same)
        begin -= BLOCK
    # Past the end the copied tokens come again; without a place, the last token.
    place = tl.where(most_same > 0, found, num_tokens - 1)
    place += lane % (num_tokens - place)
    draft = _tokens_at(text, picks, place, known, lane + 1 < width)
    beyond = length + taken > tl.load(limit + seq)
    error = tl.load(counts + _ERROR_WORD) | tl.where(beyond, _BEYOND_BOUND, 0)
    # Every thread must have read the words that are written now.
    tl.debug_barrier()
    tl.store(text + known + lane, pick, mask=lane < taken)
    tl.store(ids, last)
    tl.store(ids + lane + 1, draft, mask=lane + 1 < width)
    tl.store(kv_len + seq, tl.maximum(tl.minimum(length + taken, tl.load(limit + seq)), width))
    tl.atomic_or(counts + _ERROR_WORD, _BEYOND_BOUND, mask=beyond, sem="relaxed")
    tl.store(emitted + _EMITTED_WORDS * seq, taken)
    tl.store(emitted + _EMITTED_WORDS * seq + 1, most_same)
    tl.store(emitted + _EMITTED_WORDS * seq + 2, error)


_variant = repeated_launches(_next_step_kernel)


@only_launches
def launch_next_step(picked: Tensor, given: SpeculativeStep, width: int) -> None:
    """Writes the next round over the last one, and reports the last one's outcome.

    picked:   int32 [num_seqs * width or more], the token that was picked after each token of the round
    width:    new tokens of each sequence, W, at least 1
    """
    num_seqs = given.limit.shape[0]
    assert given.texts.is_contiguous()
    assert given.texts.shape[1] > width
    assert given.token_ids.shape[0] >= num_seqs * width
    launch: RepeatedLaunch = _variant(next_power_of_2(width))
    launch(
        given.counts.device,
        (num_seqs, 1, 1),
        picked,
        *given,
        given.texts.shape[1],
        width,
        next_power_of_2(width),
        _BLOCK,
        num_warps=4,
    )
