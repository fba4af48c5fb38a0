"""A host record: a page of K and V in host memory, with a key and a checksum that prove that it is still that page.

It is int64 words: a head of 16, and then the bytes of the page in every layer. The head has the key of the page's
tokens and of all before them, the identity of the pages' owner (model, formats, scales), and a checksum of the page.

The checksum is made on the device, of the page in the pool: on the way out where it was stored, and on the way in where
it has arrived. So it is not one of the bytes that were copied, and shows a copy that read pages with other strides, or
before they were written. It is the sum over i, modulo 2**64, of

    mix(word i + (i + 1) * 0x9E3779B97F4A7C15)

mix() is the finaliser of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA
2014; its constants are Stafford's variant 13). It is one-to-one, so a change of a single word always changes the sum;
other changes leave it unchanged in one of 2**64 cases.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Words of a head: a key and an identity of 32 bytes each, the checksum, and unused ones.
HEAD_WORDS = 16
NAME_WORDS = 4
CHECKSUM = 2 * NAME_WORDS

# These are signed words, which torch multiplies modulo 2**64.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, slots=True)
class HostGuards:
    """The safeguards of pages that come back from host memory.

    is_unchanged: checksums of the pages that have arrived, those of their records -> bool [n]; both int64 [n]
    is_wanted:    names in the heads of records, wanted names -> bool [n]; both int64 [n, 8], key and identity
    """

    is_unchanged: Callable[[Tensor, Tensor], Tensor] = torch.eq
    is_wanted: Callable[[Tensor, Tensor], Tensor] = lambda found, wanted: (found == wanted).all(1)


def checksums(words: Tensor) -> Tensor:
    """int64 [n]: the checksum of each line. words: int64 [n, words of a page]"""
    place = torch.arange(1, words.shape[1] + 1, device=words.device)
    return _mix(words + place * _STEP).sum(1)


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser. Writes over its argument."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        words ^= _shifted(words, shift)
        words *= factor
    words ^= _shifted(words, 31)
    return words


def _shifted(words: Tensor, shift: int) -> Tensor:
    """The words shifted right, as words without a sign: torch shifts copies of the sign in."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)
