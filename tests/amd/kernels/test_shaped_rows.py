"""Rows of logits with more requests than a plain pick: kernels and twins against the definition in float64."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.refs import sampling as refs
from rocm_attn.kernels.sampling.cut_rows import launch_cut_rows
from rocm_attn.kernels.sampling.likeliest import launch_likeliest
from rocm_attn.kernels.sampling.parameter_columns import IN_PROMPT, NONE
from rocm_attn.kernels.sampling.shape_rows import launch_shape_rows
from tests.amd.tolerances import assert_logprobs_close, assert_shaped_close

Launch = Callable[..., None]
Float64Array = npt.NDArray[np.float64]

shapes = pytest.mark.parametrize("shape", [launch_shape_rows, refs.shape_rows], ids=["kernel", "twin"])
cuts = pytest.mark.parametrize("cut", [launch_cut_rows, refs.cut_rows], ids=["kernel", "twin"])
finds = pytest.mark.parametrize("find", [launch_likeliest, refs.likeliest], ids=["kernel", "twin"])
vocabs = pytest.mark.parametrize("vocab", [33, pytest.param(2048, marks=pytest.mark.nightly), 4100])
dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly), torch.float32]
)
NAN, INF = float("nan"), float("inf")


def bits(number: float) -> int:
    """Returns the int32 with the bits of a float32."""
    return int(np.array(number, np.float32).view(np.int32))


def asked_of(
    row: int,
    counts: int = NONE,
    mask: int = NONE,
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0),
    top_k: int = 0,
    depth: float = -INF,
) -> list[int]:
    """Returns a row of request_options.py. penalties: repetition, presence, frequency"""
    return [row, counts, mask, *map(bits, penalties), top_k, bits(depth)]


def amid(values: Tensor, poison: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns a room with poison around, and the values in the middle of it."""
    room = torch.full((values.numel() + 128,), poison, dtype=values.dtype, device=device)
    middle = room[64:-64].view(values.shape)
    middle.copy_(values)
    return room, middle


def assert_around_is_poison(room: Tensor, poison: float) -> None:
    around = torch.cat([room[:64], room[-64:]])
    assert bool((around.isnan() if math.isnan(poison) else around == poison).all())


def shaped_by_definition(
    x: Float64Array, count: npt.NDArray[np.int64], penalties: Sequence[float], allowed: npt.NDArray[np.bool_]
) -> Float64Array:
    repetition, presence, frequency = (float(np.float32(penalty)) for penalty in penalties)
    times = count & (IN_PROMPT - 1)
    x = np.where(count > 0, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - presence * (times > 0) - frequency * times
    return np.where(allowed, x, -np.inf)


@pytest.mark.fast
@shapes
@dtypes
@vocabs
def test_rows_are_shaped_by_their_own_counts_and_masks(
    shape: Launch, dtype: torch.dtype, vocab: int, kernel_device: torch.device
) -> None:
    """Rows are in another order than the logits, with both, one, or none. A row without requests is not read."""
    random = torch.Generator().manual_seed(vocab)
    wide = torch.randn(5, vocab + 3, generator=random).mul(8).to(dtype).to(kernel_device)
    logits = wide[:, :vocab]
    logits[3] = NAN
    times = torch.randint(0, 4, (3, vocab), generator=random) * (torch.rand(3, vocab, generator=random) < 0.2)
    counts = (times + IN_PROMPT * (torch.rand(3, vocab, generator=random) < 0.2)).int()
    words = vocab // 32 + 1
    masks = torch.randint(-(2**31), 2**31, (2, words), generator=random).int()
    allowed = [(int(masks[at, token // 32]) >> (token % 32)) & 1 == 1 for at in range(2) for token in range(vocab)]
    penalties = [(1.3, 0.5, 0.25), (0.7, -1.5, 2.0), (1.0, 0.0, 0.0), (2.0, 1.0, 0.0)]
    requested = torch.tensor(
        [
            asked_of(4, 2, 1, penalties[0]),
            asked_of(0, 0, NONE, penalties[1]),
            asked_of(2, NONE, 0, penalties[2]),
            asked_of(1, NONE, NONE, penalties[3]),
        ],
        dtype=torch.int32,
        device=kernel_device,
    )
    counts_room, here = amid(counts, 77, kernel_device)
    masks_room, bits_here = amid(masks, -1, kernel_device)
    room, shaped = amid(torch.zeros(4, vocab), NAN, kernel_device)
    before = logits.clone()
    shape(logits, requested, here, bits_here, shaped)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert_around_is_poison(room, NAN)
    assert_around_is_poison(counts_room, 77)
    assert_around_is_poison(masks_room, -1)
    may_be = np.array(allowed).reshape(2, vocab)
    everything, nothing = np.ones(vocab, np.bool_), np.zeros(vocab, np.int64)
    exact = [
        shaped_by_definition(logits[row].double().cpu().numpy(), count, penalty, mask)
        for row, count, penalty, mask in zip(
            (4, 0, 2, 1),
            (counts[2].long().numpy(), counts[0].long().numpy(), nothing, nothing),
            penalties,
            (may_be[1], everything, may_be[0], everything),
            strict=True,
        )
    ]
    assert_shaped_close(shaped.cpu(), torch.from_numpy(np.stack(exact)))


@pytest.mark.fast
@cuts
@vocabs
def test_only_the_likeliest_are_kept_and_of_equal_ones_the_first(
    cut: Launch, vocab: int, kernel_device: torch.device
) -> None:
    """Many logits are equal. A row without requests is unchanged, and so is one that keeps all logits."""
    values = torch.randn(6, vocab, generator=torch.Generator().manual_seed(5)).mul(4).round()
    values[:, ::5] = -INF
    wanted = [(0, -INF), (7, -INF), (0, -2.0), (11, -1.5), (1, 0.0), (vocab, -1e30)]
    requested = torch.tensor(
        [asked_of(9, 9, 9, top_k=k, depth=depth) for k, depth in wanted], device=kernel_device
    ).int()
    room, shaped = amid(values, NAN, kernel_device)
    cut(requested, shaped)
    assert_around_is_poison(room, NAN)
    for row, before, (top_k, depth) in zip(shaped.cpu().numpy(), values.numpy(), wanted, strict=True):
        order = np.argsort(-before, kind="stable")
        kept = np.zeros(vocab, np.bool_)
        kept[order[: top_k or vocab]] = True
        kept &= before >= before.max() + np.float32(depth)
        np.testing.assert_array_equal(row, np.where(kept, before, -np.inf))


@pytest.mark.fast
@finds
@dtypes
@vocabs
def test_logprobs_of_the_picked_and_of_the_likeliest_tokens_are_those_of_float64(
    find: Launch, dtype: torch.dtype, vocab: int, kernel_device: torch.device
) -> None:
    """Among equal logits the first ones count. Rows without requests are not read, and nothing more is written."""
    random = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=random).mul(6).mul(4).round().div(4).to(dtype)
    logits[0, ::3] = -INF
    logits[1] = 2.5
    logits[3] = NAN
    nums, width, unwritten = {4: 20, 0: 5, 1: 3, 2: 0}, 20, -77
    picked = torch.randint(0, vocab, (5,), generator=random).int()
    picked[0] = 1
    requested = torch.tensor(list(nums.items()), dtype=torch.int32, device=kernel_device)
    room, found = amid(torch.full((4, 1 + 2 * width), unwritten, dtype=torch.int32), unwritten, kernel_device)
    find(logits.to(kernel_device), requested, picked.to(kernel_device), found)
    assert_around_is_poison(room, unwritten)
    for (row, num), words in zip(nums.items(), found.cpu(), strict=True):
        exact = logits[row].double().log_softmax(-1)
        assert_logprobs_close(words[:1].view(torch.float32), exact[picked[row]][None])
        ids, values = words[1 : 1 + 2 * num : 2].tolist(), words[2 : 2 + 2 * num : 2].contiguous().view(torch.float32)
        order = np.argsort(-logits[row].double().numpy(), kind="stable")[:num]
        assert sorted(ids) == sorted(order.tolist())
        assert_logprobs_close(values, exact[torch.tensor(ids, dtype=torch.long)])
        assert bool((words[1 + 2 * num :] == unwritten).all())


@finds
def test_of_a_row_that_no_token_can_be_picked_from_anything_is_reported_and_nothing_else_written(
    find: Launch, kernel_device: torch.device
) -> None:
    rows = [[1, NAN, 3], [1, INF, 3], [-INF, -INF, -INF]]
    requested = torch.tensor([[0, 2], [1, 2], [2, 2]], dtype=torch.int32, device=kernel_device)
    room, found = amid(torch.zeros(3, 5, dtype=torch.int32), -77, kernel_device)
    picked = torch.zeros(3, dtype=torch.int32, device=kernel_device)
    find(torch.tensor(rows, device=kernel_device), requested, picked, found)
    assert_around_is_poison(room, -77)


def test_more_likeliest_tokens_than_there_are_tokens_are_all_of_them(kernel_device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device)
    requested = torch.tensor([[0, 20]], dtype=torch.int32, device=kernel_device)
    for find in (launch_likeliest, refs.likeliest):
        found = torch.full((1, 41), -77, dtype=torch.int32, device=kernel_device)
        find(logits, requested, torch.zeros(1, dtype=torch.int32, device=kernel_device), found)
        assert sorted(found[0, 1:7:2].tolist()) == [0, 1, 2]
        assert bool((found[0, 7:] == -77).all())
