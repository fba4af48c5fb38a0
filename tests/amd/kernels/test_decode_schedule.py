"""The decode schedule: its parts cover every row once, the merge finds them, and the device writes the same words."""

import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule, number_of_program
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.kernels.attention_cases import GARBAGE, queries_of
from tests.amd.schedule_twins import decode_schedule, visible_blocks

TILES = DecodeTiles(key_block=16, num_warps=1, num_stages=1, programs_per_cu=1)

Row = tuple[int, int]  # seq, row of KV heads


@dataclass(frozen=True)
class Batch:
    """The arguments of a schedule."""

    kv_len: list[int]
    q_len: list[int]
    num_kv_heads: int
    num_programs: int
    tiles: DecodeTiles
    window_left: int = -1

    @cached_property
    def cut(self) -> DecodeCut:
        return DecodeCut.of(
            self.tiles,
            num_kv_heads=self.num_kv_heads,
            programs=self.num_programs,
            window_left=self.window_left,
            has_slots=self.is_free,
        )

    @property
    def is_free(self) -> bool:
        """True if rows cost only their key blocks, like those of segments, whose merge writes their zeros."""
        return self.tiles.row_cost + self.tiles.row_end == 0

    @cached_property
    def words(self) -> list[int]:
        """The schedule's words, computed once: hundreds of programs read them."""
        return decode_schedule(self.kv_len, self.q_len, self.cut)

    def blocks_of(self, seq: int) -> int:
        return len(visible_blocks(self.kv_len[seq], self.cut))

    def decoded_rows(self) -> set[Row]:
        rows = range(self.tiles.rows_per_seq(self.num_kv_heads))
        return {(seq, row) for seq, new in enumerate(self.q_len) if new == 1 for row in rows}


# A row without keys costs only its end.
AT_THE_END = replace(TILES, row_cost=0, row_end=2)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draws lengths from 0 to far apart, some sequences of another kind, and the extreme numbers of programs."""
    longest = draw(st.sampled_from([3, 40, 300, 5000]))
    lengths = st.just(longest) if draw(st.booleans()) else st.integers(0, longest)
    seqs = draw(st.lists(st.tuples(lengths, st.sampled_from([1, 1, 1, 0, 2])), max_size=20))
    row_cost, row_end = draw(st.integers(0, 4)), draw(st.integers(0, 2))
    head_blocks, beside, whole = draw(st.integers(1, 2)), draw(st.booleans()), draw(st.integers(0, 3))
    tiles = replace(TILES, row_cost=row_cost, row_end=row_end, head_blocks=head_blocks, side_by_side=beside)
    tiles = replace(tiles, whole_blocks=whole)
    return Batch(
        [length for length, _ in seqs],
        [new for _, new in seqs],
        draw(st.integers(1, 5)),
        draw(st.integers(1, 600)),
        tiles,
        draw(st.sampled_from([-1, -1, 0, 1, 15, 16, 17, 200])),
    )


def walk(batch: Batch, program: int) -> list[tuple[Row, int, int]]:
    """Returns decode's visits for a program's words: rows and their key blocks [first, end); (row, 0, 0) for zeros."""
    words = batch.words
    seq, row, done, work = words[8 * program : 8 * program + 4]
    rows_per_seq, row_cost = batch.tiles.rows_per_seq(batch.num_kv_heads), batch.tiles.row_cost
    row_end = batch.tiles.row_end
    visits = []
    while work > 0:
        length = words[8 * batch.num_programs + 3 * seq + 2]
        num_blocks = len(visible_blocks(max(length, 0), batch.cut))
        cost = 0 if length < 0 else num_blocks + row_cost + row_end
        take = min(work, cost - done)
        first, end = max(done - row_cost, 0), min(done + take - row_cost, num_blocks)
        if end > first:
            visits.append(((seq, row), first, end))
        if length == 0 and done == 0:
            visits.append(((seq, row), 0, 0))
        work, done = work - take, 0
        if batch.cut.axes > 1:
            seq += 1
            continue
        row = rows_per_seq if length < 0 else row + 1
        if row == rows_per_seq:
            seq, row = seq + 1, 0
    return visits


@settings(max_examples=150)
@given(batches())
@example(Batch([0], [1], 1, 7, AT_THE_END))
@example(Batch([0, 0], [1, 1], 1, 7, AT_THE_END))
def test_every_key_block_of_every_row_is_visited_once_and_in_order(batch: Batch) -> None:
    visited: dict[Row, list[range]] = defaultdict(list)
    for program in range(batch.num_programs):
        for row, first, end in walk(batch, program):
            visited[row].append(range(first, end))
    rows = batch.decoded_rows()
    if batch.is_free:
        rows = {(seq, row) for seq, row in rows if batch.blocks_of(seq) > 0}
    assert {row for row in visited if not batch.is_free or batch.blocks_of(row[0])} == rows
    for (seq, _), parts in visited.items():
        assert [block for part in parts for block in part] == list(range(batch.blocks_of(seq)))
        is_once = len(parts) == 1 or batch.blocks_of(seq) > 0
        assert is_once or batch.is_free, "the zeros of an empty sequence are written once"


@settings(max_examples=150)
@given(batches())
def test_a_program_leaves_at_most_one_row_begun_before_it_and_one_that_goes_on(batch: Batch) -> None:
    for program in range(batch.num_programs):
        parts = [(first, end, batch.blocks_of(seq)) for (seq, _), first, end in walk(batch, program)]
        unfinished = Counter(first == 0 for first, end, num_blocks in parts if end - first < num_blocks)
        assert unfinished[True] <= 1
        assert unfinished[False] <= 1


@settings(max_examples=150)
@given(batches())
def test_the_merge_finds_the_programs_of_every_row_that_is_shared(batch: Batch) -> None:
    """The merge finds them by row, and by the boundaries between programs: the two rules of merge.py."""
    words, row_cost = batch.words, batch.tiles.row_cost
    programs_of: dict[Row, list[int]] = defaultdict(list)
    for program in range(batch.num_programs):
        for row, first, end in walk(batch, program):
            if end > first:
                programs_of[row].append(program)
    share, pad = words[4], words[7]

    def holders(program: int, offset: int, num_blocks: int) -> list[int]:
        """The programs with a row's keys, which begin `offset` after the start of a program."""
        return [program + before for before in range(offset // share, (offset + num_blocks - 1) // share + 1)]

    for (seq, row_of_seq), programs in programs_of.items():
        of_axis = batch.num_programs // batch.cut.axes
        apart = batch.blocks_of(seq) + row_cost + batch.tiles.row_end + pad if batch.cut.axes == 1 else of_axis * share
        program, offset, _ = words[8 * batch.num_programs + 3 * seq :][:3]
        assert holders(program, offset + row_of_seq * apart + row_cost, batch.blocks_of(seq)) == programs

    found: dict[Row, list[int]] = {}
    for boundary in range(batch.num_programs - 1):
        seq, row_of_seq, done, work, _, _, length, _ = words[8 * (boundary + 1) : 8 * (boundary + 2)]
        programs = holders(boundary, share - done + row_cost, len(visible_blocks(length, batch.cut)))
        if work > 0 and done > row_cost and len(programs) > 1 and programs[0] == boundary:
            assert (seq, row_of_seq) not in found, "two boundaries would merge the same row"
            found[seq, row_of_seq] = programs
    assert found == {row: programs for row, programs in programs_of.items() if len(programs) > 1}


@settings(max_examples=60)
@given(batches())
def test_no_program_has_more_work_than_another_but_for_the_last_ones(batch: Batch) -> None:
    all_work = batch.words[3 : 8 * batch.num_programs : 8]
    share, pad, of_axis = batch.words[4], batch.words[7], batch.num_programs // batch.cut.axes
    assert max(all_work) <= share
    assert not any(all_work[batch.cut.axes * of_axis :])
    for axis in range(batch.cut.axes if pad == 0 else 0):
        work = all_work[axis * of_axis : (axis + 1) * of_axis]
        used = -(-sum(work) // share)
        assert all(amount == share for amount in work[: max(used - 1, 0)])
        assert all(amount == 0 for amount in work[used:])


def device_words(batch: Batch, device: torch.device) -> list[int]:
    """Returns the words as the kernel writes them, with meaningless ones set to 0: those of the host twin."""
    size = batch.cut.words(len(batch.kv_len))
    schedule = torch.full((size + 3,), GARBAGE, dtype=torch.int32, device=device)
    launch_decode_schedule(queries_of(batch.kv_len, batch.q_len, sum(batch.q_len), device), schedule, batch.cut)
    words: list[int] = schedule.tolist()
    assert words[size:] == [GARBAGE] * 3
    for first in range(0, 8 * batch.num_programs, 8):
        if words[first + 3] == 0:
            words[first : first + 3] = [0, 0, 0]
            words[first + 5 : first + 8] = [0, 0, 0]
    if batch.cut.merge_group:
        # The kernel does not write the words that align the counters.
        end, first_counter = 8 * batch.num_programs + 3 * len(batch.kv_len), batch.cut.first_counter(len(batch.kv_len))
        assert words[end:first_counter] == [GARBAGE] * (first_counter - end)
        words[end:first_counter] = [0] * (first_counter - end)
    assert words[:size] == batch.words
    return words[:size]


@pytest.mark.fast
@pytest.mark.parametrize("window_left", [-1, 0, 40])
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    ("num_seqs", "longest", "num_programs", "num_kv_heads"),
    [(1, 5000, 7, 1), (1, 5000, 60, 8), (5, 3, 9, 2), (20, 300, 13, 5), (600, 100, 3, 1), (4096, 9000, 3, 8)],
)
def test_the_device_writes_the_words_of_the_host_twin(
    num_seqs: int,
    longest: int,
    num_programs: int,
    num_kv_heads: int,
    side_by_side: bool,
    window_left: int,
    kernel_device: torch.device,
) -> None:
    draw = random.Random(num_seqs + num_programs)
    kv_len = [draw.randrange(longest + 1) for _ in range(num_seqs)]
    q_len = [draw.choice([1, 1, 1, 0, 7]) for _ in range(num_seqs)]
    q_len[0] = 1
    tiles = replace(TILES, side_by_side=side_by_side)
    batch = Batch(kv_len, q_len, num_kv_heads, num_programs, tiles, window_left)
    device_words(batch, kernel_device)


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("last", [1 << 25, (1 << 25) - 16])
def test_positions_of_a_step_may_exceed_32_bits(last: int, side_by_side: bool, kernel_device: torch.device) -> None:
    """The last sequence's length decides whether rows are alike. Sums in 32 bits gave programs no work."""
    kv_len = [1 << 25] * 63 + [last]
    batch = Batch(kv_len, [1] * 64, 16, 304, replace(TILES, side_by_side=side_by_side))
    assert sum(map(batch.blocks_of, range(64))) * 16 > 2**31 - 32
    device_words(batch, kernel_device)


@pytest.mark.fast(2)
@pytest.mark.parametrize("num_programs", [1, 6, 13])
@pytest.mark.parametrize("num_seqs", [1, 2, 5, 600])
def test_the_device_sets_every_counter_of_decode_that_merges_within_its_launch(
    num_seqs: int, num_programs: int, kernel_device: torch.device
) -> None:
    """This includes an odd number of sequences, which is no whole number of 16-byte units."""
    draw = random.Random(num_seqs + num_programs)
    kv_len = [draw.randrange(301) for _ in range(num_seqs)]
    batch = Batch(kv_len, [1] * num_seqs, 2, num_programs, replace(TILES, merge_group=8))
    words = device_words(batch, kernel_device)
    assert words[batch.cut.first_counter(num_seqs) :] == [0, 0] * num_programs


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("num_seqs", "kv_len", "num_programs", "rows", "pad"),
    # Shares of a row's cost, which is its blocks plus 2: halves, padded halves, whole rows, two rows each; none.
    [
        (2, 1024, 33, 0.5, 0),
        pytest.param(2, 1008, 33, 0.5, 1, marks=pytest.mark.nightly),
        (4, 256, 33, 1, 0),
        (8, 1024, 33, 2, 0),
        (1, 256, 264, 0, 0),
    ],
)
def test_rows_that_are_alike_are_cut_alike(
    num_seqs: int, kv_len: int, num_programs: int, rows: float, pad: int, kernel_device: torch.device
) -> None:
    """A program has `rows` rows; 0 if no such share is close."""
    batch = Batch([kv_len] * num_seqs, [1] * num_seqs, 8, num_programs, TILES)
    words = device_words(batch, kernel_device)
    cost = batch.blocks_of(0) + TILES.row_cost
    assert words[7] == pad
    if rows:
        assert words[4] == math.ceil(rows * cost)
        visits = [walk(batch, program) for program in range(num_programs)]
        assert max(map(len, visits)) == math.ceil(rows), "no program has an end of a row and the beginning of another"
    else:
        assert words[4] == -(-8 * cost // num_programs)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("kv_len", "blocks"), [(4096, {64}), (4080, {64, 63}), (4100, {65, 62})])
def test_equal_parts_have_as_many_blocks_where_the_start_of_a_row_costs_nothing(
    kv_len: int, blocks: set[int], kernel_device: torch.device
) -> None:
    """The end of a row then has no positions of its own: padding after rows is negative."""
    tiles = replace(TILES, row_cost=0, row_end=2, heads_per_row=2)
    batch = Batch([kv_len] * 2, [1] * 2, 8, 33, tiles)
    words = device_words(batch, kernel_device)
    assert words[7] == 4 * max(blocks) - batch.blocks_of(0) - 2
    visits = [walk(batch, program) for program in range(33)]
    assert {end - first for visit in visits for _, first, end in visit} == blocks
    assert sum(map(len, visits)) == 2 * 4 * 4
    assert max(map(len, visits)) == 1


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(("longest", "num_parts"), [(32, 1), (33, 3)])
def test_rows_of_few_blocks_have_a_program_each(
    longest: int, num_parts: int, side_by_side: bool, kernel_device: torch.device
) -> None:
    """Blocks have 16 keys. The longest row decides, since programs have equal shares."""
    tiles = replace(TILES, row_cost=1, row_end=1, side_by_side=side_by_side, whole_blocks=2)
    batch = Batch([20, longest, 0], [1] * 3, 4, 64, tiles)
    device_words(batch, kernel_device)
    visits = Counter(row for program in range(64) for row, _, _ in walk(batch, program))
    assert {visits[1, row] for row in range(4)} == {num_parts}


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("kv_len", "num_programs", "is_beside"),
    # Four rows per sequence: equal parts, and padded ones; different rows, with idle programs and without; too few
    # programs for a sequence's rows.
    [
        ([4096] * 2, 33, True),
        ([4080] * 2, 33, True),
        ([4096] * 7 + [90], 132, True),
        ([100, 0, 4096, 7, 513, 4000], 67, True),
        ([4096] * 8, 8, True),
        ([4096, 5, 90], 3, False),
    ],
    ids=str,
)
def test_programs_beside_each_other_have_the_same_keys_of_a_sequences_rows(
    kv_len: list[int], num_programs: int, is_beside: bool, kernel_device: torch.device
) -> None:
    tiles = replace(TILES, row_cost=0, row_end=2, heads_per_row=2, side_by_side=True)
    batch = Batch(kv_len, [1] * len(kv_len), 8, num_programs, tiles)
    device_words(batch, kernel_device)
    assert (batch.cut.axes == 4) == is_beside
    of_row = num_programs // 4
    for first in range(of_row if is_beside else 0):
        # The programs with ids 4 * first to 4 * first + 3, as in number_of_program.
        beside = [walk(batch, row * of_row + first) for row in range(4)]
        for row, visits in enumerate(beside):
            assert visits == [((seq, row), start, end) for (seq, _), start, end in beside[0]]


@triton.jit  # type: ignore[untyped-decorator]
def _numbers_of_programs(out, num_programs, R: tl.constexpr):  # type: ignore[no-untyped-def]
    launched = tl.program_id(0)
    tl.store(out + launched, number_of_program(launched, num_programs, R))


@pytest.mark.parametrize("num_programs", [4, 19, 20])
def test_programs_that_are_launched_after_each_other_have_the_same_place_on_each_axis(
    num_programs: int, kernel_device: torch.device
) -> None:
    cut = DecodeCut.of(TILES, num_kv_heads=4, programs=num_programs, window_left=-1)
    out = torch.full((num_programs,), -1, dtype=torch.int32, device=kernel_device)
    _numbers_of_programs[(num_programs,)](out, num_programs, R=cut.row_cut(TILES, 1))
    of_row = num_programs // 4
    beside = [row * of_row + first for first in range(of_row) for row in range(4)]
    assert out.tolist() == beside + list(range(4 * of_row, num_programs))


@pytest.mark.parametrize(
    ("rows", "programs", "axes"), [(8, 264, 8), (16, 264, 16), (20, 264, 1), (8, 7, 1), (12, 130, 1)]
)
def test_programs_work_side_by_side_on_few_rows_if_few_are_left_without_work(
    rows: int, programs: int, axes: int
) -> None:
    tiles = replace(TILES, side_by_side=True)
    assert DecodeCut.of(tiles, num_kv_heads=rows, programs=programs, window_left=-1).axes == axes


@pytest.mark.parametrize("num_programs", [1, 2, 3, 7])
@pytest.mark.parametrize("num_seqs", [1, 2])
def test_some_program_has_each_row_of_a_batch_without_keys(
    num_seqs: int, num_programs: int, kernel_device: torch.device
) -> None:
    """Seven programs are more than all rows' ends cost."""
    batch = Batch([0] * num_seqs, [1] * num_seqs, 1, num_programs, AT_THE_END)
    device_words(batch, kernel_device)
    visits = [visit for program in range(num_programs) for visit in walk(batch, program)]
    assert visits == [((seq, 0), 0, 0) for seq in range(num_seqs)]


@pytest.mark.parametrize("q_len", [[], [0, 0, 0], [5, 0, 2]])
def test_a_batch_without_decodes_gives_no_program_work(q_len: list[int], kernel_device: torch.device) -> None:
    batch = Batch([9] * len(q_len), q_len, 2, 4, TILES)
    words = device_words(batch, kernel_device)
    assert words[3:32:8] == [0, 0, 0, 0]
