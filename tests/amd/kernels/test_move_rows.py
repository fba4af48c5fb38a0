"""Tokens between pages and rows: the kernels and their torch twins, over every layout, surrounded by poison."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens, page_words, word_dtype
from rocm_attn.kernels.cache.page_rows import PageRows, key_rows, value_rows
from rocm_attn.kernels.refs import cache as twins
from tests.amd.vectorised import vectorised_keys, vectorised_values

NUM_PAGES, PAGE_SIZE, HEADS = 9, 8, 3


def elements(dim: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Returns random linear pages."""
    shape = NUM_PAGES, PAGE_SIZE, HEADS, dim
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def in_words(raw: Tensor, rows_of: Callable[[Tensor], PageRows]) -> Tensor:
    words = raw.view(word_dtype(raw)) if raw.stride(-1) == 1 and raw.dim() == 4 else raw.view(torch.int16)
    return page_words(rows_of(words))


def sides(layout: str, device: torch.device) -> list[Tensor]:
    """Returns three parts of a layout, as words."""
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(3):
        if layout == "heads first":  # as in engines, with a gap after each page
            room = elements(40, torch.bfloat16, random).transpose(1, 2).contiguous().to(device)
            made.append(in_words(room.transpose(1, 2)[..., :24], key_rows))
        elif layout == "factors":
            made.append(torch.randn(NUM_PAGES, HEADS, PAGE_SIZE, generator=random).to(device).view(torch.int32))
            made[-1] = made[-1].transpose(1, 2)[:, :, None, None]
        elif layout == "vectorised keys":
            made.append(in_words(vectorised_keys(elements(24, torch.bfloat16, random), 8).to(device), key_rows))
        elif layout == "vectorised values":
            made.append(in_words(vectorised_values(elements(24, torch.bfloat16, random), 8).to(device), value_rows))
        else:
            dim, dtype = {"codes": (24, torch.uint8), "odd": (5, torch.uint8), "rows": (24, torch.bfloat16)}[layout]
            made.append(in_words(elements(dim, dtype, random).to(device), key_rows))
    return made


LAYOUTS = ("rows", "codes", "odd", "heads first", "factors", "vectorised keys", "vectorised values")
RANGES = [(0, 0, 19), (8, 11, 24), (16, 16, 17), (0, 7, 8)]


def moved_tokens(pages: AlikePages, begin: int, first: int, end: int, rows: Tensor) -> MovedTokens:
    count = -(-end // PAGE_SIZE) - begin // PAGE_SIZE
    ids = torch.randperm(NUM_PAGES - 1, generator=torch.Generator().manual_seed(end))[:count] + 1
    each = (end - first) * pages.row_words
    places = torch.arange(len(pages.sides)) * (each + 4) + 8
    return MovedTokens(torch.cat([ids, places]).to(rows.device), rows, begin, first, end, end, count)


def room(pages: AlikePages, tokens: int) -> Tensor:
    """Returns rows with poison between and around the parts."""
    side = pages.sides[0]
    count = 16 + len(pages.sides) * (tokens * pages.row_words + 4)
    return torch.full((count,), 77, dtype=side.dtype, device=side.device)


@pytest.mark.fast
@pytest.mark.parametrize("span", RANGES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernels_move_what_their_twins_move(
    layout: str, span: tuple[int, int, int], kernel_device: torch.device
) -> None:
    begin, first, end = span
    pages = AlikePages.of(sides(layout, kernel_device))
    found, wanted = room(pages, end - first), room(pages, end - first)
    launch_export_rows(pages, moved_tokens(pages, begin, first, end, found))
    twins.export_rows(pages, moved_tokens(pages, begin, first, end, wanted))
    assert torch.equal(found, wanted)
    # The receiver's pages may begin after the first row, and the rest of the last page may be cleared.
    for later, until in ((0, end), (PAGE_SIZE, end), (0, -(-end // PAGE_SIZE) * PAGE_SIZE)):
        if begin + later >= end:
            continue
        targets = [AlikePages.of([torch.full_like(side, 55) for side in pages.sides]) for _ in range(2)]
        moved = moved_tokens(pages, begin, first, end, found)
        moved = moved._replace(
            words=moved.words[later // PAGE_SIZE :],
            begin=begin + later,
            until=until,
            num_pages=moved.num_pages - later // PAGE_SIZE,
        )
        launch_import_rows(targets[0], moved)
        twins.import_rows(targets[1], moved._replace(rows=wanted))
        for one, other in zip(targets[0].sides, targets[1].sides, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_hold_tokens_in_order_and_come_back_in_their_places(layout: str, device: torch.device) -> None:
    """The test indexes tokens by itself, one by one."""
    pages = AlikePages.of(sides(layout, device))
    begin, first, end = 8, 11, 29
    moved = moved_tokens(pages, begin, first, end, room(pages, end - first))
    twins.export_rows(pages, moved)
    places = moved.words[moved.num_pages :].tolist()
    for part, side in enumerate(pages.sides):
        rows = moved.rows[places[part] :][: (end - first) * pages.row_words].view(end - first, -1)
        for token in range(first, end):
            page = int(moved.words[token // PAGE_SIZE - 1])
            offset, group = token % PAGE_SIZE, side.shape[2]
            assert torch.equal(rows[token - first], side[page, offset // group, offset % group].flatten())
    target = AlikePages.of([torch.full_like(side, 55) for side in pages.sides])
    twins.import_rows(target, moved)
    for side, copy in zip(pages.sides, target.sides, strict=True):
        listed = moved.words[: moved.num_pages]
        tokens = [each[listed].flatten(1, 2).flatten(0, 1) for each in (side, copy)]
        assert torch.equal(tokens[1][: end - begin][first - begin :], tokens[0][: end - begin][first - begin :])
        assert not tokens[1][: first - begin].any()
        assert (tokens[1][end - begin :] == 55).all()
        others = torch.ones(NUM_PAGES, dtype=torch.bool, device=device)
        others[listed] = False
        assert (copy[others] == 55).all()
    twins.import_rows(target, moved._replace(until=32))
    for copy in target.sides:
        assert not copy[moved.words[moved.num_pages - 1]].flatten(0, 1)[end % PAGE_SIZE :].any()


def test_words_are_as_large_as_rows_strides_and_addresses_allow() -> None:
    raw = torch.zeros(4, 8, 2, 24, dtype=torch.bfloat16)
    assert word_dtype(raw) == torch.int64
    assert word_dtype(raw[..., :22]) == torch.int32
    assert word_dtype(raw[..., 1:24]) == torch.int16
    assert word_dtype(torch.zeros(4, 8, 2, 5, dtype=torch.uint8)) == torch.uint8
    assert in_words(raw, key_rows).shape == (4, 8, 1, 1, 12)
