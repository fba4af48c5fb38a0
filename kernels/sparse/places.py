"""What a token sees, as kernels of sparse attention derive it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def visible_tokens(position_of_token, num_tokens, token, live):
    """How many tokens of its sequence each token sees; 0 of no sequence. token: int32; live: which are looked up"""
    live = live & (token < tl.load(num_tokens))
    return tl.load(position_of_token + token, mask=live, other=-1) + 1


@triton.jit
def candidate_units(visible, UNIT_TOKENS: tl.constexpr, LAST_SCORED: tl.constexpr):
    """How many units a token chooses among; LAST_SCORED: a unit that it sees a part of is one of them."""
    return tl.cdiv(visible, UNIT_TOKENS) if LAST_SCORED else visible // UNIT_TOKENS
