"""Moves of accepted paths inside pages, and of tokens between pages and rows; every row is surrounded by sentinels."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens, page_words, word_dtype
from rocm_attn.kernels.cache.page_rows import PageRows, empty_vectorised_pages, key_rows, value_rows
from rocm_attn.kernels.refs import cache as twins
from rocm_attn.kernels.refs.speculative import move_paths
from rocm_attn.kernels.speculative.move_paths import launch_move_paths
from rocm_attn.kernels.speculative.paths import AcceptedPaths
from tests.amd.vectorised import vectorised_keys, vectorised_values

both = pytest.mark.parametrize("move", [launch_move_paths, move_paths], ids=["kernel", "twin"])

Words = Callable[[int, int], list[Tensor]]


def counted(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Returns a tensor of distinct elements, as far as the dtype has them."""
    numbers = torch.arange(torch.Size(shape).numel()) * 7919 % 2**31
    return numbers.to(torch.int32).to(dtype).view(shape)


def linear(pages: int, page_size: int) -> list[Tensor]:
    """Returns K of three layers, in memory with gaps."""
    sides = [counted(pages, page_size + 1, 3, 5 + 2)[:, :page_size, :, :5] for _ in range(3)]
    return [page_words(key_rows(side)) for side in sides]


def wide(pages: int, page_size: int) -> list[Tensor]:
    """Returns rows with more words than a program moves."""
    return [page_words(key_rows(counted(pages, page_size, 2, 150, dtype=torch.int64))) for _ in range(2)]


def one_byte(pages: int, page_size: int) -> list[Tensor]:
    return [page_words(value_rows(counted(pages, page_size, 1, 7, dtype=torch.uint8)))]


def scale_values(pages: int, page_size: int) -> list[Tensor]:
    return [counted(pages, 3, page_size).transpose(1, 2)[:, :, None, None]]


def key_vectors(pages: int, page_size: int) -> list[Tensor]:
    k, _ = _vectorised(pages, page_size)
    return [page_words(key_rows(k))]


def value_vectors(pages: int, page_size: int) -> list[Tensor]:
    _, v = _vectorised(pages, page_size)
    return [page_words(value_rows(v))]


def _vectorised(pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    sides = empty_vectorised_pages(pages, page_size, 2, (8, 12), 4, dtype=torch.int32, device=torch.device("cpu"))
    return tuple(side.copy_(counted(*side.shape)) for side in sides)  # type: ignore[return-value]


LAYOUTS: dict[str, tuple[Words, tuple[int, ...]]] = {
    "linear": (linear, (1, 2, 3, 16)),
    "wide": (wide, (4,)),
    "one byte": (one_byte, (2,)),
    "factors": (scale_values, (4,)),
    "vectorised K": (key_vectors, (4, 8)),
    "vectorised V": (value_vectors, (4, 8)),
}

# Older tokens, and nodes of the accepted path without its first one; the first three touch every place of a page.
STEPS = [(5, [2, 3, 7]), (0, [1, 4, 6, 9]), (11, [5]), (3, []), (8, [1, 2, 3]), (6, [4, 5, 6, 7, 8, 9])]


@dataclass(frozen=True)
class Moved:
    paths: AcceptedPaths
    sides: list[Tensor]
    wanted: list[Tensor]


def memory_of(side: Tensor) -> Tensor:
    """Returns the whole memory of a view."""
    return torch.empty(0, dtype=side.dtype, device=side.device).set_(side.untyped_storage())


def on(device: torch.device, side: Tensor) -> Tensor:
    """Returns the same view of a copy of the memory."""
    return memory_of(side).to(device, copy=True).as_strided(side.shape, side.stride(), side.storage_offset())


def case(words: Words, page_size: int, device: torch.device) -> Moved:
    """Returns pages of a few sequences in a shuffled table, and their contents after moves made one by one."""
    width = -(-24 // page_size)
    num_pages = len(STEPS) * width + 1
    table = torch.zeros(len(STEPS) + 1, width + 2, dtype=torch.int32)
    table[1:, :width] = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)).view(-1, width)
    rows = torch.randperm(len(STEPS), generator=torch.Generator().manual_seed(1)).int() + 1
    path = torch.full((len(STEPS), 10), -1, dtype=torch.int32)
    for line, (_, nodes) in zip(path, STEPS, strict=True):
        line[: len(nodes) + 1] = torch.tensor([0, *nodes])
    counts = torch.tensor([len(nodes) for _, nodes in STEPS], dtype=torch.int32)
    older = torch.tensor([before for before, _ in STEPS], dtype=torch.int32)
    sides = words(num_pages, page_size)
    wanted = []
    for side in sides:
        want = on(torch.device("cpu"), side)
        tokens = want.shape[2]
        for row, (before, nodes) in zip(rows.tolist(), STEPS, strict=True):
            held = [_place(table[row], before + node, page_size, tokens) for node in nodes]
            values = [want[at].clone() for at in held]
            for place, value in enumerate(values, 1):
                want[_place(table[row], before + place, page_size, tokens)] = value
        wanted.append(want)
    return Moved(
        AcceptedPaths(
            path.to(device),
            counts.to(device),
            (older + 1 + counts).to(device),
            rows.to(device),
            table.to(device)[:, : width + 1],
            0,
        ),
        sides,
        wanted,
    )


def _place(line: Tensor, kv_index: int, page_size: int, tokens: int) -> tuple[int, int, int]:
    offset = kv_index % page_size
    return int(line[kv_index // page_size]), offset // tokens, offset % tokens


@pytest.mark.fast
@both
@pytest.mark.parametrize(("words", "page_size"), [(words, size) for words, sizes in LAYOUTS.values() for size in sizes])
def test_rows_of_a_path_move_to_its_places_and_nothing_else_changes(
    move: Callable[..., None], words: Words, page_size: int, kernel_device: torch.device
) -> None:
    it = case(words, page_size, kernel_device)
    sides = [on(kernel_device, side) for side in it.sides]
    move(AlikePages.of(sides), it.paths)
    for side, want in zip(sides, it.wanted, strict=True):
        assert torch.equal(side.cpu(), want)
        assert torch.equal(memory_of(side).cpu(), memory_of(want)), "what lies between rows has changed"


@both
def test_a_path_that_lies_in_place_moves_nothing(move: Callable[..., None], kernel_device: torch.device) -> None:
    it = case(linear, 2, kernel_device)
    count = torch.full_like(it.paths.num_accepted, 3)
    chain = torch.arange(10, dtype=torch.int32, device=kernel_device).expand(len(STEPS), 10).contiguous()
    sides = [on(kernel_device, side) for side in it.sides]
    held = [side.clone() for side in sides]
    move(AlikePages.of(sides), it.paths._replace(path=chain, num_accepted=count, kv_len=count + 4))
    assert all(torch.equal(side, was) for side, was in zip(sides, held, strict=True))


@pytest.mark.fast
@both
@pytest.mark.parametrize("no_page", [0, -1])
def test_places_without_a_page_are_left_alone(
    move: Callable[..., None], no_page: int, kernel_device: torch.device
) -> None:
    """A row of the table has freed a page, and lengths exceed a row's end."""
    it = case(linear, 2, kernel_device)
    sides = [on(kernel_device, side) for side in it.sides]
    table = torch.full_like(it.paths.table, no_page)
    held = [side.clone() for side in sides]
    move(AlikePages.of(sides), it.paths._replace(table=table, no_page=no_page))
    move(AlikePages.of(sides), it.paths._replace(kv_len=it.paths.kv_len + 1000))
    assert all(torch.equal(side, was) for side, was in zip(sides, held, strict=True))


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


ROW_LAYOUTS = ("rows", "codes", "odd", "heads first", "factors", "vectorised keys", "vectorised values")
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
@pytest.mark.parametrize("layout", ROW_LAYOUTS)
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


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
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
