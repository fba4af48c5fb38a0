"""The error word of a step: one int32 of `counts`, cleared when the step's inputs are published.

Kernels set bits of it and never clear one, so that a launch may run twice. Bits lie below those that slot_layout.py
puts in the word's place when it goes back to the host. Kernels, their torch twins and the host that reads the word back
share these names.
"""

ERROR_WORD = 3  # its place in counts

TOKEN_WITHOUT_PAGE = 1  # a live token's slot lies in page 0: its K and V were dropped
LENGTH_BEYOND_BOUND = 2  # a length that only the device knew lay outside its bounds: cut, or an engine's sequence a pad
SHARED_TOKEN = 8  # a length that only the device knew led to tokens that a row shares with another, and was moved
NOT_FINITE = 16  # an element of a new token's K or V was infinite or NaN: it was stored as zero
WINDOW_WITHOUT_PAGE = 4  # the first key that a live token sees lies in page 0: it is read as zero
SLOT_NOT_IN_TABLE = 32  # a slot that the engine gave for a new token is not the one that its table gives: dropped
ROW_NOT_IN_TABLE = 64  # a row that the engine gave lies outside of its table: the sequence was taken for a pad
BAD_SELECTION = 128  # units given for a token are not in order, each once, or lie outside its keys: those are no key
TOO_FEW_GIVEN = 256  # the step has more tokens or mask cells than were given for it: no slot, position 0, no key seen
PAGE_NOT_IN_POOL = 512  # a page that the engine's table gives does not exist: the sequence was taken for a pad
ROW_TWICE = 1024  # two sequences of the step, each with KV and new tokens, have the same row of the engine's table
BAD_PARENT = 2048  # a new draft's parent is none of its possible ones: it was taken for a draft without a parent
UNSTORED_TOKEN = 4096  # a length that only the device knew left a gap after the stored tokens, and was cut
PAGE_TAKEN = 8192  # a page that a row still names was written by way of another entry of the table
WRONG_STATE = 16384  # a row has no state before a new token: not computed, of another request, or of tokens taken back
WRONG_ENGINE_STATE = 32768  # an engine's slot of a state holds other tokens than the sequence has, or two have it
SPANS_OVERLAP = 65536  # a token lies in two spans of its sequence: it was taken for one of a span that covers both
