"""Hopper's extend, in Python: the rows and steps of each program, by a twin's schedule, and the keys that rows see."""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rocm_attn.kernels.attention.cuts import BLOCK_WORDS, ExtendCut, RowSharing
from rocm_attn.kernels.attention.extend_schedule import BLOCK_TOKENS, SHARE_CUT
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.hopper import rows
from tests.amd.schedule_twins import extend_schedule

ROW_KEYS, KEY_BLOCK, GQA_RATIO = 64, 32, 2


@dataclass(frozen=True)
class Pointer:
    """An address of a word. A distance may be a constexpr."""

    words: list[int]
    at: Any = 0

    def __add__(self, distance: Any) -> "Pointer":
        return Pointer(self.words, self.at + getattr(distance, "value", distance))


def load(pointer: Pointer, mask: Any = True, other: int = 0) -> Any:
    """Loads a word, or an array of them."""
    if isinstance(pointer.at, np.ndarray):
        return np.where(mask, np.array(pointer.words)[np.where(mask, pointer.at, 0)], other)
    return pointer.words[pointer.at] if mask else other


def where(condition: Any, one: Any, other: Any) -> Any:
    return np.where(condition, one, other) if isinstance(condition, np.ndarray) else one if condition else other


@dataclass(frozen=True)
class Deal:
    """A step of sequences (tokens before it, new tokens), a schedule of it, and the launch that walks it.

    at_once: KV heads whose whole rows come before those of the next ones
    ranges:  the keys that each token sees, if it has a range of its own
    """

    steps: list[tuple[int, int]]
    cut: ExtendCut
    num_tokens: int
    at_once: int
    ranges: tuple[range, ...] = ()

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """kv_len and q_len."""
        return [sum(step) for step in self.steps], [new for _, new in self.steps]

    @cached_property
    def words(self) -> list[int]:
        return extend_schedule(*self.lengths, self.cut, self.num_tokens)

    @property
    def max_blocks(self) -> int:
        return self.cut.max_blocks(self.num_tokens, len(self.steps))

    def rows_with_tokens(self) -> list[tuple[int, int]]:
        has_tokens = [self.words[block * BLOCK_WORDS + BLOCK_TOKENS.value] > 0 for block in range(self.max_blocks)]
        return [(block, row) for block in range(sum(has_tokens)) for row in range(self.cut.sharing.rows)]

    def seen_in(self, block: int) -> list[range]:
        """The keys that each token of a query block sees."""
        seq, first_token, tokens, kv_index = self.words[block * BLOCK_WORDS :][:4]
        if self.ranges:
            return list(self.ranges[first_token : first_token + tokens])
        window, places = self.cut.sharing.window_left, range(kv_index, kv_index + tokens)
        if seq < 0 or not self.cut.sharing.causal:
            return [range(0 if seq < 0 else self.lengths[0][seq])] * tokens
        return [range(0 if window == UNLIMITED_WINDOW else max(place - window, 0), place + 1) for place in places]

    def whole_rows(self) -> list[tuple[int, int]]:
        """The rows that are no share, from the words of their blocks."""
        first = self.words[self.max_blocks * BLOCK_WORDS + int(SHARE_CUT.value)]
        return [(block, row) for block, row in self.rows_with_tokens() if block >= first]


def deal_of(seed: int) -> Deal:
    """Returns a random step. Each fourth has few rows, which many programs may share alike."""
    rng = random.Random(seed)
    is_small = seed % 4 == 0
    most, most_new = (2, 40) if is_small else (6, 400)
    steps = [(rng.randint(0, 300), rng.randint(0, most_new)) for _ in range(rng.randint(1, most))]
    at_once, groups = (1, rng.randint(1, 2)) if is_small else (rng.randint(1, 4), rng.randint(1, 5))
    sharing = RowSharing(
        programs=rng.randint(8, 40) if is_small else rng.randint(1, 13),
        rows=at_once * groups,
        causal=rng.random() < 0.8,
        split_keys=rng.choice([-(1 << 20), -200, 0, 1 << 30]),
        gain=0,
        row_keys=ROW_KEYS,
        least_keys=64,
        segment_len=rng.choice([0, 0, 2 * KEY_BLOCK]),
        alike_keys=1,
    )
    if sharing.causal:
        sharing = sharing._replace(window_left=rng.choice([UNLIMITED_WINDOW, 0, 40, 300]))
    tail, ranges = rng.choice([0, rng.randint(1, 90)]), list[range]()
    if rng.random() < 0.4:
        for cached, new in steps:
            ends = [rng.randint(0, cached + new) for _ in range(new)]
            ranges += [range(rng.randint(0, end) if sharing.window_left >= 0 else 0, end) for end in ends]
        ranges += [range(0)] * tail
    cut = ExtendCut(32, rng.randint(1, 2), sharing)
    return Deal(steps, cut, sum(new for _, new in steps) + tail, at_once, tuple(ranges))


@dataclass(frozen=True)
class Part:
    """A program's part of a row: the row, cost that others take of it before, its steps, whether it ends the row.

    block:    the row's query block
    seen:     the keys that some line of it sees, and those that all do
    of_lines: the keys that each line sees, if the row is the first of its block and begins
    """

    row: tuple[int, int]
    is_whole: bool
    done: int
    steps: range
    ends: bool
    block: rows.Block
    seen: rows.BlockKeys
    of_lines: list[range]


def lines_of(x: Any, block: rows.Block, geometry: Any) -> list[range]:
    line = np.arange(2 * geometry.TOKENS * GQA_RATIO)
    last, before = rows.keys_of_rows(x, line[rows.has_token(line, block, geometry)], block, geometry)
    first = np.maximum(last - before, 0) if geometry.WINDOWED else np.zeros_like(last)
    return list(map(range, first.tolist(), np.maximum(last + 1, 0).tolist()))


def walked(deal: Deal, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Part]]:
    """Yields the parts that each program takes, in order."""
    program = SimpleNamespace(number=0)
    language = SimpleNamespace(
        where=where,
        load=load,
        maximum=np.maximum,
        minimum=np.minimum,
        max=np.max,
        min=np.min,
        arange=lambda first, end, layout: np.arange(first, end),
        DistributedLinearLayout=lambda *bases: bases,
        zeros_like=np.zeros_like,
        cdiv=lambda one, other: -(-one // other),
        program_id=lambda axis: program.number,
        to_tensor=lambda number: number,
    )
    monkeypatch.setattr(rows, "gl", language)
    for name, of_device in list(vars(rows).items()):
        if hasattr(of_device, "fn"):
            monkeypatch.setattr(rows, name, of_device.fn)
    (kv_len, _), words, sharing = deal.lengths, deal.words, deal.cut.sharing
    x: Any = SimpleNamespace(
        words=Pointer(words), max_blocks=deal.max_blocks, num_programs=sharing.programs, kv_len=Pointer(kv_len)
    )
    x.ranges = rows.TokenRanges(*(Pointer([getattr(each, of) for each in deal.ranges]) for of in ("start", "stop")))
    x.cut, x.window_left = words[deal.max_blocks * BLOCK_WORDS + int(SHARE_CUT.value)], sharing.window_left
    geometry: Any = SimpleNamespace(
        KV_HEADS=sharing.rows,
        HEADS_AT_ONCE=deal.at_once,
        ROW_KEYS=ROW_KEYS,
        KEY_BLOCK=KEY_BLOCK,
        SEGMENT_STEPS=sharing.segment_len // KEY_BLOCK,
        TOKENS=deal.cut.query_tokens,
        GQA_RATIO=GQA_RATIO,
        CAUSAL=sharing.causal,
        WINDOWED=sharing.window_left != UNLIMITED_WINDOW,
        RANGED=bool(deal.ranges),
    )
    for program.number in range(sharing.programs):
        parts, todo = [], rows.work_of_program(x, geometry)
        while todo.keys > 0:
            block = rows.block_of(x, todo)
            seen = rows.seen_by_block(x, block, 4, geometry)
            steps = rows.steps_of(block, seen, todo, geometry)
            of_lines = [] if todo.row or todo.done else lines_of(x, block, geometry)
            row, own = (todo.block, todo.row), range(steps.first, steps.end)
            parts.append(Part(row, todo.turn > 0, todo.done, own, steps.ends, block, seen, of_lines))
            todo = rows.next_row(x, todo, steps.take, geometry)
        yield parts


@pytest.mark.parametrize("seed", range(100))
def test_every_step_of_a_row_is_one_programs(seed: int) -> None:
    """Its steps have all keys that a line sees. Keys that all lines see, and each one, are those of the tokens."""
    deal, parts_of = deal_of(seed), defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        of_programs = list(walked(deal, patch))
    for part in (part for parts in of_programs for part in parts):
        parts_of[part.row].append(part)
    assert sorted(parts_of) == deal.rows_with_tokens()
    whole = [[part.row for part in parts if part.is_whole] for parts in of_programs]
    assert sorted(row for each in whole for row in each) == deal.whole_rows()
    assert max(map(len, whole)) <= min(map(len, whole)) + 1
    for parts in parts_of.values():
        parts.sort(key=lambda part: part.done)
        assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[0].done == 0
        seen, expected = parts[0].seen, deal.seen_in(parts[0].row[0])
        starts, ends = ([getattr(keys, of) for keys in expected] for of in ("start", "stop"))
        assert (seen.first, seen.end) == (min(starts), max(ends))
        if seen.end > 0:  # the padded tail sees nothing
            assert (seen.inner_first, seen.inner_end) == (max(starts), min(ends))
        if parts[0].of_lines and seen.end > 0 and (deal.ranges or deal.cut.sharing.causal):
            assert parts[0].of_lines == [keys for keys in expected for _ in range(GQA_RATIO)]
        steps = [step for part in parts for step in part.steps]
        assert steps == [*range(seen.first // KEY_BLOCK, -(-seen.end // KEY_BLOCK))]
        for part in parts[:-1]:
            at_end = part.steps.stop in (seen.first // KEY_BLOCK, -(-seen.end // KEY_BLOCK))
            assert at_end or part.steps.stop * KEY_BLOCK % max(deal.cut.sharing.segment_len, 1) == 0


@pytest.mark.parametrize(("heads", "at_once"), [(12, 4), (16, 4), (12, 3)])
def test_heads_that_come_at_once_have_their_rows_before_the_next_ones(heads: int, at_once: int) -> None:
    """All programs then take about the same, since rows of one group cost what the next one begins with."""
    programs, tokens = 7, 2048
    deal = Deal(
        [(0, tokens)], ExtendCut(64, 1, RowSharing(programs, heads, split_keys=1 << 30, row_keys=64)), tokens, at_once
    )
    with pytest.MonkeyPatch.context() as patch:
        of_programs = list(walked(deal, patch))
    for parts in of_programs:
        groups = [part.row[1] // at_once for part in parts]
        assert groups == sorted(groups)
        assert set(groups) == {*range(heads // at_once)}
    costs = [sum(part.block.keys + ROW_KEYS for part in parts) for parts in of_programs]
    assert max(costs) < 1.01 * min(costs)
