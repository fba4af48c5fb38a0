"""The keys and rows that every program of an extend step takes, by the words of the schedule's host twin.

test_paged_extend.py compares the device with the twin.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocm_attn.kernels.attention.cuts import BLOCK_WORDS, SHARE_WORDS, ExtendCut, RowSharing
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from tests.amd.schedule_twins import extend_schedule

KEY_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Step:
    """Sequences, and the sharing of their rows."""

    seqs: tuple[tuple[int, int], ...]  # tokens before the step, new tokens
    sharing: RowSharing

    @property
    def cut(self) -> ExtendCut:
        return replace(ExtendCut(query_tokens=5), sharing=self.sharing)

    def words(self) -> list[int]:
        kv_len, q_len = [prefix + new for prefix, new in self.seqs], [new for _, new in self.seqs]
        return extend_schedule(kv_len, q_len, self.cut, sum(q_len))

    def blocks(self) -> list[list[int]]:
        """Returns the words of each query block that belongs to a sequence."""
        words, most = self.words(), self.cut.max_blocks(sum(new for _, new in self.seqs), len(self.seqs))
        listed = [words[at : at + BLOCK_WORDS] for at in range(0, most * BLOCK_WORDS, BLOCK_WORDS)]
        return [block for block in listed if block[0] >= 0]

    def shares(self) -> list[list[int]]:
        """Returns the words of each program's share."""
        words = self.words()[-self.sharing.programs * SHARE_WORDS :]
        return [words[at : at + SHARE_WORDS] for at in range(0, len(words), SHARE_WORDS)]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draws few sequences and many, short and long, and costs with which everything, something or nothing is shared."""
    seqs = draw(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 23)), min_size=1, max_size=6))
    sharing = RowSharing(
        programs=draw(st.integers(1, 12)),
        rows=draw(st.integers(1, 4)),
        causal=draw(st.booleans()),
        window_left=draw(st.sampled_from([UNLIMITED_WINDOW, 0, 7, 40, 1000])),
        row_keys=draw(st.integers(1, 60)),
        split_keys=draw(st.sampled_from([-99999, 0, 50, 99999])),
        gain=draw(st.integers(0, 4)),
        least_keys=draw(st.integers(1, 60)),
    )
    segments = sharing._replace(segment_len=32)
    kinds = [sharing, segments, segments._replace(shares_first=True)]
    sharing = draw(st.sampled_from(kinds))
    return Step(tuple(seqs), sharing._replace(alike_keys=draw(st.sampled_from([0, 1, 30]))))


# A program's whole row, and the last part of another row.
ALIGNED = Step(((20, 5), (5, 5)), RowSharing(programs=3, row_keys=5, split_keys=-99999, gain=0, least_keys=1))


ALIKE = Step(
    ((600, 5),) * 4,
    RowSharing(programs=17, rows=2, row_keys=40, split_keys=30, gain=0, least_keys=40, alike_keys=10),
)
# Shorter rows have one part less, or only one part.
NEARLY_ALIKE = Step(
    ((600, 5), (390, 5), (170, 5)),
    RowSharing(programs=12, rows=1, row_keys=40, split_keys=200, gain=0, least_keys=40, alike_keys=1),
)

# There are more programs than any row has room for.
ONE_ROW_ALIKE = Step(((0, 2),), RowSharing(programs=5, row_keys=1, split_keys=0, gain=0, least_keys=1, alike_keys=1))


def in_every_step(check: Callable[[Step], None]) -> Callable[[], None]:
    """Makes a test of a check: of random steps, and of these."""
    for step in (ONE_ROW_ALIKE, NEARLY_ALIKE, ALIKE, ALIGNED):
        check = example(step)(check)
    return given(steps())(check)


def taken(step: Step) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """Returns (query block, row of it) -> each program with its start and end in the row's cost, in order."""
    blocks, sharing = step.blocks(), step.sharing
    costs = [block[4] + sharing.row_keys for block in blocks]
    found = defaultdict(list)
    for program, (at, row, done, work, *_) in enumerate(step.shares()):
        while work > 0:
            take = min(work, costs[at] - done)
            found[at, row].append((program, done, done + take))
            work, done = work - take, 0
            at, row = (at, row + 1) if row + 1 < sharing.rows else (at + 1, 0)
    cut_blocks = step.shares()[0][7]
    for at in range(cut_blocks, len(blocks)):
        for row in range(sharing.rows):
            found[at, row].append((-1, 0, costs[at]))
    return found


@in_every_step
def test_every_row_is_taken_once_from_its_first_key_to_its_last(step: Step) -> None:
    blocks, found = step.blocks(), taken(step)
    assert found.keys() == {(at, row) for at in range(len(blocks)) for row in range(step.sharing.rows)}
    for (at, _), parts in found.items():
        ends = [0, *(end for _, _, end in parts)]
        assert [start for _, start, _ in parts] == ends[:-1]
        assert ends[-1] == blocks[at][4] + step.sharing.row_keys


@in_every_step
def test_parts_of_a_row_take_its_key_blocks_in_turn(step: Step) -> None:
    """Key blocks are counted as in extend.py: a part has the blocks that begin in its keys, the last part the rest."""
    blocks, row_keys = step.blocks(), step.sharing.row_keys
    for (at, _), parts in taken(step).items():
        seq, _, tokens, first_kv_index, keys, *_ = blocks[at]
        end_key = first_kv_index + tokens if step.sharing.causal else sum(step.seqs[seq])
        first_key, end_block = end_key - keys, -(-end_key // KEY_BLOCK)
        next_block = first_key // KEY_BLOCK
        for _, start, end in parts:
            assert (first_key + max(start - row_keys, 0)) // KEY_BLOCK == next_block
            is_last = end == keys + row_keys
            next_block = end_block if is_last else (first_key + max(end - row_keys, 0)) // KEY_BLOCK
        assert next_block == end_block


@in_every_step
def test_no_program_leaves_more_than_two_rows_unfinished_and_the_merge_finds_their_parts(step: Step) -> None:
    unfinished = defaultdict(set)
    for (at, row), parts in taken(step).items():
        if len(parts) > 1:
            programs = [program for program, *_ in parts]
            assert programs == list(range(programs[0], programs[-1] + 1))
            for program, start, _ in parts:
                unfinished[program].add(start == 0)
            # The words of the program after the first, which the merge reads.
            words = step.shares()[programs[0] + 1]
            assert words[:2] == [at, row]
            start, share, is_alike = words[4] & 0xFFFFFFFF | words[5] << 32, words[6], words[8] > 0
            assert start // share == programs[0]
            keys = step.blocks()[at][4]
            if is_alike:
                assert programs[0] + -(-keys // share) - 1 == programs[-1]
            else:
                assert (start + keys + step.sharing.row_keys - 1) // share == programs[-1]
    for program, begins in unfinished.items():
        count = sum(1 for parts in taken(step).values() if len(parts) > 1 for other, *_ in parts if other == program)
        assert count == len(begins), "two parts in one place"


def test_rows_that_are_alike_are_cut_into_equal_parts_of_which_the_last_is_shorter() -> None:
    """Eight rows of 645, of which seventeen programs would take 304 each: two parts per row, and one idle program."""
    parts = [[end - start for _, start, end in found] for found in taken(ALIKE).values()]
    assert parts == [[323 + 40, 645 - 323 - 40]] * 8
    assert [work > 0 for _, _, _, work, *_ in ALIKE.shares()] == [True] * 16 + [False]


def test_shorter_rows_have_fewer_parts_of_the_same_size() -> None:
    """For three rows of four parts each: 605 keys, plus 40 that the last part lacks, are four times 162, rounded up."""
    parts = [[end - start for _, start, end in found] for found in taken(NEARLY_ALIKE).values()]
    assert parts == [[162 + 40, 162, 162, 605 - 3 * 162], [162 + 40, 162, 395 - 2 * 162], [162 + 40, 175 - 162]]
    assert [work > 0 for _, _, _, work, *_ in NEARLY_ALIKE.shares()] == [True] * 7 + [False, True, True] + [False] * 2


@pytest.mark.parametrize(
    ("seqs", "change"),
    [
        (ALIKE.seqs, {"alike_keys": 0}),
        # A higher cost of the merge; parts a quarter larger than shares; a longer row; small parts.
        (ALIKE.seqs, {"alike_keys": 11}),
        (ALIKE.seqs, {"programs": 20}),
        (((700, 5), *ALIKE.seqs[1:]), {}),
        (ALIKE.seqs, {"least_keys": 606}),
    ],
    ids=["not of the tiles", "too dear", "too large", "not alike", "too small"],
)
def test_other_rows_have_no_equal_parts(seqs: tuple[tuple[int, int], ...], change: dict[str, Any]) -> None:
    step = Step(seqs, ALIKE.sharing._replace(**change))
    assert all(parts == 0 for *_, parts, _ in step.shares())


def test_a_row_of_little_more_than_the_least_share_is_one_programs() -> None:
    """Two programs of a least share and a merge take longer than the row. The mean load of all programs is no bound."""
    sharing = RowSharing(programs=64, row_keys=256, split_keys=384, gain=2, least_keys=256)
    assert Step(((300, 5),), sharing).shares()[0][7] == 0
    assert Step(((500, 5),), sharing).shares()[0][7] == 1


def test_by_segments_few_rows_are_shared_that_fill_the_last_round() -> None:
    """There are four rows more than programs. Segments of few rows fill programs up, which avoids a round of four rows,
    and a merge of all rows' segments.
    """
    sharing = RowSharing(
        programs=32, rows=2, row_keys=64, split_keys=64, gain=4, least_keys=256, most_keys=2048, segment_len=256
    )
    step = Step(((1450, 90),), sharing)
    assert len(step.blocks()) * sharing.rows == 36
    assert 0 < step.shares()[0][7] < 6
    dear = Step(step.seqs, sharing._replace(split_keys=99999))
    assert dear.shares()[0][7] == 0


def test_rows_that_are_cut_alike_have_as_few_segments_of_a_program_as_there_can_be() -> None:
    """Eight rows of four segments, for 32 programs. A share is a little longer than a segment, so that one of them has
    the ends of two; equal parts have one each.
    """
    sharing = RowSharing(
        programs=32, rows=2, row_keys=8, split_keys=8, gain=4, least_keys=32, most_keys=999, segment_len=32
    )

    def most_segments(step: Step) -> int:
        """The segments of the program that has most. A row's last one ends with its 125 keys."""
        segments: dict[int, int] = defaultdict(int)
        for parts in taken(step).values():
            for program, start, end in parts:
                key = max(end - sharing.row_keys, 0)
                segments[program] += (128 if key == 125 else key) // 32 - max(start - sharing.row_keys, 0) // 32
        return max(segments.values())

    step = Step(((120, 5),) * 4, sharing)
    alike = Step(step.seqs, sharing._replace(alike_keys=1))
    assert (most_segments(step), most_segments(alike)) == (2, 1)
    assert {len(parts) for parts in taken(alike).values()} == {4}
    assert all(parts == 0 for *_, parts, _ in Step(step.seqs, alike.sharing._replace(most_keys=31)).shares())


FIVE_ROWS = Step(
    ((251, 5), (250, 5), (145, 5), (145, 5), (145, 5)),
    RowSharing(programs=4, rows=1, row_keys=1, split_keys=0, gain=4, least_keys=128, most_keys=999, segment_len=128),
)


def test_what_is_shared_leaves_programs_for_the_longest_whole_rows() -> None:
    """Five rows, four programs. The first row's segments are three programs' shares, and the second row is the
    fourth's. Otherwise that row would take as long as a second round, and no row would be shared.
    """
    assert FIVE_ROWS.shares()[0][7] == 1
    assert FIVE_ROWS.shares()[3][3] == 0


def test_where_whole_rows_begin_after_shares_these_are_worth_less() -> None:
    """This is the step above, but the second row no longer begins together with the first one's shares."""
    shares_first = FIVE_ROWS.sharing._replace(shares_first=True)
    assert FIVE_ROWS.shares()[0][7] == 1
    assert Step(FIVE_ROWS.seqs, shares_first).shares()[0][7] == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (RowSharing(programs=5, row_keys=0), "costs something"),
        (RowSharing(programs=5, shares_first=True), "counts with it in any case"),
    ],
)
def test_what_would_leave_rows_out_is_refused(wrong: RowSharing, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        ExtendCut(query_tokens=5, sharing=wrong)
