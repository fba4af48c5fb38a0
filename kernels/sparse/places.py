"""The keys that a token sees, as kernels of sparse attention derive them."""

import triton
import triton.language as tl


@triton.jit
def visible_tokens(position_of_token, num_tokens, token, live):
    """The tokens of its sequence that each token sees; 0 without a sequence. token: int32; live: which are looked up"""
    live = live & (token < tl.load(num_tokens))
    return tl.load(position_of_token + token, mask=live, other=-1) + 1


@triton.jit
def candidate_units(visible, UNIT_TOKENS: tl.constexpr, LAST_SCORED: tl.constexpr):
    """The number of units that a token chooses from; LAST_SCORED: including a unit that it sees a part of."""
    return tl.cdiv(visible, UNIT_TOKENS) if LAST_SCORED else visible // UNIT_TOKENS
