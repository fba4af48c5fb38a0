"""Moves of tokens as functions of tensors: parts in one memory, in a launch's form."""

from collections.abc import Callable

import torch
from torch import Tensor

from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens

Move = Callable[[AlikePages, MovedTokens], None]

# Two parts of five pages of four tokens; three separate heads of five words, so that neither fills a block.
PARTS, PAGES, PAGE_SIZE, HEADS, WORDS = 2, 5, 4, 3, 5


def of_moves(move: Move, begin: int, first: int, end: int, until: int) -> Callable[..., None]:
    """Returns a move as a function of (words, rows, pages [parts, pages, page_size, 1, heads, words])."""

    def of_tensors(words: Tensor, rows: Tensor, pages: Tensor) -> None:
        count = -(-end // PAGE_SIZE) - begin // PAGE_SIZE
        move(AlikePages.of(list(pages.unbind())), MovedTokens(words, rows, begin, first, end, until, count))

    return of_tensors


def moved_words(begin: int, first: int, end: int, until: int) -> Tensor:
    """Returns pages in an order of their own, then the starts of the parts' rows."""
    count = -(-end // PAGE_SIZE) - begin // PAGE_SIZE
    return torch.tensor([3, 1, 4, 2][:count] + [part * (end - first) * HEADS * WORDS for part in range(PARTS)])


def moved_rows(first: int, end: int) -> Tensor:
    """Returns rows of all parts, one after another."""
    return torch.arange(PARTS * (end - first) * HEADS * WORDS, dtype=torch.int32)


def moved_pages() -> Tensor:
    """Returns pages with gaps between heads."""
    room = torch.full((PARTS, PAGES, PAGE_SIZE, 1, HEADS, WORDS + 3), 7, dtype=torch.int32)
    return room[..., :WORDS].copy_(
        1000 + torch.arange(PARTS * PAGES * PAGE_SIZE * HEADS * WORDS).view(PARTS, PAGES, PAGE_SIZE, 1, HEADS, WORDS)
    )
