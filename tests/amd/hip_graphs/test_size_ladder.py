import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.hip_graphs.errors import BadLadder, SizeExceeded
from rocm_attn.hip_graphs.size_ladder import SizeLadder, default_ladder

ladders = st.sets(st.integers(1, 2000), min_size=1, max_size=40).map(lambda sizes: SizeLadder(tuple(sorted(sizes))))


@given(ladders, st.integers(0, 2000))
def test_fit_is_the_smallest_size_that_holds_n(ladder: SizeLadder, n: int) -> None:
    large_enough = [size for size in ladder if size >= n]
    if large_enough:
        assert ladder.fit(n) == min(large_enough)
    else:
        with pytest.raises(SizeExceeded, match=f"{n} is larger than the largest recorded size {ladder.largest}"):
            ladder.fit(n)


@given(st.integers(1, 5000), st.integers(1, 16))
def test_default_sizes_are_aligned_and_reach_the_largest_and_no_further(largest: int, alignment: int) -> None:
    ladder = default_ladder(largest, alignment)
    assert all(size % alignment == 0 for size in ladder)
    assert largest <= ladder.largest < largest + alignment
    assert all(ladder.fit(n) >= n for n in range(largest + 1))


@given(st.integers(1, 5000))
def test_default_steps_grow_with_the_size_and_padding_stays_bounded(largest: int) -> None:
    ladder = default_ladder(largest)
    steps = [high - low for low, high in zip(ladder.sizes, ladder.sizes[1:], strict=False)]
    assert steps[:-1] == sorted(steps[:-1])
    assert all(ladder.fit(n) - n <= max(7, n // 16) for n in range(1, largest + 1))


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1), (1, 2.0), (True, 2)])
def test_sizes_that_make_no_ladder_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(BadLadder):
        SizeLadder(sizes)


@pytest.mark.parametrize(
    ("largest", "alignment"), [(0, 1), (8, 0), (-1, 4), (math.inf, 1), (8.0, 1), (None, 1), (8, math.nan), (True, 1)]
)
def test_a_default_ladder_of_nothing_is_refused(largest: Any, alignment: Any) -> None:
    """The ladder up to infinity had no end."""
    with pytest.raises(BadLadder, match="at least 1"):
        default_ladder(largest, alignment)


def test_no_work_fits_the_smallest_size_and_negative_work_is_refused() -> None:
    ladder = SizeLadder((4, 8))
    assert ladder.fit(0) == 4
    with pytest.raises(SizeExceeded, match="size -1 is not possible"):
        ladder.fit(-1)
