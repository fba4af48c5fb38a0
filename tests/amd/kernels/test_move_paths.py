"""Moves of accepted paths inside pages, against copies made one by one; sentinels surround every row."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.cache.moved_rows import AlikePages, page_words
from rocm_attn.kernels.cache.page_rows import empty_vectorised_pages, key_rows, value_rows
from rocm_attn.kernels.refs.speculative import move_paths
from rocm_attn.kernels.speculative.move_paths import launch_move_paths
from rocm_attn.kernels.speculative.paths import AcceptedPaths

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


def vectorised_keys(pages: int, page_size: int) -> list[Tensor]:
    k, _ = _vectorised(pages, page_size)
    return [page_words(key_rows(k))]


def vectorised_values(pages: int, page_size: int) -> list[Tensor]:
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
    "vectorised K": (vectorised_keys, (4, 8)),
    "vectorised V": (vectorised_values, (4, 8)),
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
