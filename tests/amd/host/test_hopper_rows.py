"""Hopper's extend deals each whole row to one program: its index arithmetic, run as Python over a twin's schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.kernels.attention.cuts import BLOCK_WORDS, ExtendCut, RowSharing
from rocm_attn.kernels.attention.extend_schedule import BLOCK_KEYS, BLOCK_TOKENS, SHARE_CUT
from rocm_attn.kernels.hopper import rows
from tests.amd.schedule_twins import extend_schedule


@dataclass(frozen=True)
class Pointer:
    """An address of a word. A distance may be a constexpr."""

    words: list[int]
    at: int = 0

    def __add__(self, distance: Any) -> "Pointer":
        return Pointer(self.words, self.at + int(getattr(distance, "value", distance)))


@dataclass(frozen=True)
class Deal:
    """A schedule, and the rows of the launch that walks it: blocks that are listed or padded, heads of each."""

    words: list[int]
    max_blocks: int
    programs: int
    heads: int
    at_once: int

    @property
    def cut(self) -> int:
        return self.words[self.max_blocks * BLOCK_WORDS + int(SHARE_CUT.value)]

    def whole_rows(self) -> list[tuple[int, int]]:
        """The rows that are no share, from the words of their blocks."""
        has_tokens = [self.words[block * BLOCK_WORDS + BLOCK_TOKENS.value] > 0 for block in range(self.max_blocks)]
        return [(block, row) for block in range(self.cut, sum(has_tokens)) for row in range(self.heads)]


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    steps = draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 300)), min_size=1, max_size=6))
    q_len = [new for new, _ in steps]
    at_once, groups = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    heads, num_tokens = at_once * groups, sum(q_len) + draw(st.integers(0, 90))
    programs, split_keys = draw(st.integers(1, 13)), draw(st.sampled_from([-(1 << 20), -200, 0, 1 << 30]))
    sharing = RowSharing(programs, heads, split_keys=split_keys, gain=0, row_keys=64, least_keys=64)
    cut = ExtendCut(32, draw(st.integers(1, 2)), sharing)
    words = extend_schedule([new + cached for new, cached in steps], q_len, cut, num_tokens)
    assert len(words) == cut.words(num_tokens, len(steps))
    return Deal(words, cut.max_blocks(num_tokens, len(steps)), programs, heads, at_once)


def dealt(deal: Deal, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Yields the whole rows of each program."""
    program = SimpleNamespace(number=0)
    language = SimpleNamespace(
        where=lambda condition, one, other: one if condition else other,
        maximum=max,
        minimum=min,
        load=lambda pointer: pointer.words[pointer.at],
        program_id=lambda axis: program.number,
        to_tensor=lambda number: number,
    )
    monkeypatch.setattr(rows, "gl", language)
    monkeypatch.setattr(rows, "_place_of", rows._place_of.fn)
    x = SimpleNamespace(words=Pointer(deal.words), max_blocks=deal.max_blocks, num_programs=deal.programs, cut=deal.cut)
    geometry = SimpleNamespace(KV_HEADS=deal.heads, HEADS_AT_ONCE=deal.at_once, ROW_KEYS=64)
    for program.number in range(deal.programs):
        of_program = []
        for turn in count():
            work = rows._whole_row.fn(x, turn, geometry)
            if work.keys == 0:
                break
            assert work.keys == deal.words[work.block * BLOCK_WORDS + BLOCK_KEYS.value] + 64
            of_program.append((work.block, work.row))
        yield of_program


@given(deals())
def test_every_whole_row_is_one_programs(deal: Deal) -> None:
    with pytest.MonkeyPatch.context() as patch:
        of_programs = list(dealt(deal, patch))
    assert sorted(row for each in of_programs for row in each) == deal.whole_rows()
    assert {len(each) for each in of_programs} <= {len(deal.whole_rows()) // deal.programs + more for more in (0, 1)}


@pytest.mark.parametrize(("heads", "at_once"), [(12, 4), (16, 4), (12, 3)])
def test_heads_that_come_at_once_have_their_rows_before_the_next_ones(heads: int, at_once: int) -> None:
    """All programs then take about the same, since rows of one group cost what the next one begins with."""
    programs, tokens = 7, 2048
    sharing = RowSharing(programs, heads, split_keys=1 << 30, row_keys=64)
    words = extend_schedule([tokens], [tokens], ExtendCut(64, 1, sharing), tokens)
    with pytest.MonkeyPatch.context() as patch:
        of_programs = list(dealt(Deal(words, tokens // 64 + 2, programs, heads, at_once), patch))
    for each in of_programs:
        groups = [row // at_once for _, row in each]
        assert groups == sorted(groups)
        assert set(groups) == {*range(heads // at_once)}
    costs = [sum(words[block * BLOCK_WORDS + BLOCK_KEYS.value] + 64 for block, _ in each) for each in of_programs]
    assert max(costs) < 1.01 * min(costs)
