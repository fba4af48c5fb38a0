"""The units with the largest scores of each token: exact, equal scores in order of their units, in ascending order.

A line is the scores of one token and set. Scores become int32 keys of the same order, so that a search over keys finds
the top-th largest exactly: it divides a range of keys and counts those from each part on, until only the wanted number
is left, or the range is one key, of which the first units are taken.

Short lines are searched by one program each, in registers. A long line is first cut down, in three launches:

  1. maxima: unit u belongs to group u % groups; the groups' maxima are taken side by side.
  2. bound:  the top-th largest maximum, found once per line, since as many units reach it.
  3. filter: units that reach the bound are the line's candidates; each part of the line lists its own in order, with
             their keys, and their number.

The last launch searches the candidates. With random scores they are few; if scores are all equal they are the whole
line, which then takes longer and gives the same answer. A program never reads or writes past a line, whatever
the line holds.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import NO_UNIT, Indexing, LastUnit, SelectedKeys, SparseTokens
from rocm_attn.kernels.sparse.cuts import TopKCut
from rocm_attn.kernels.sparse.places import candidate_units, visible_tokens

# Keys: of no candidate, which is never chosen; the least one of a score; of a unit that is always chosen.
_NO_KEY = tl.constexpr(-(2**31))
_LEAST_KEY = tl.constexpr(-(2**31) + 1)
_FORCED_KEY = tl.constexpr(2**31 - 1)
_NO_UNIT = tl.constexpr(NO_UNIT)
_MANY = tl.constexpr(2**31 - 1)
# Maxima that a program takes at a time: rows of groups, and groups.
_MAXIMA_ROWS, _MAXIMA_GROUPS = 8, 256
# Groups of a warp. With 32, 64 lines of 64k take 10.7 us instead of 7.2 (H200).
_MAXIMA_OF_WARP = 64
# Units that a program filters at a time, and its warps. With 2,048 and 16 top-k of 64 lines of 64k takes 61 us instead
# of 42 (H200).
_FILTER_UNITS, _FILTER_WARPS = 512, 4
# Three counts of units are summed in one word of 64 bits.
_COUNT_BITS = tl.constexpr(20)
_COUNT_MASK = tl.constexpr((1 << 20) - 1)
# Slots of a selection that are filled at a time.
_FILL = 1024


class TopKGeometry(NamedTuple):
    """The values that the search is compiled for.

    cut:          how lines are cut
    TOP, WIDTH:   units that are chosen, slots of a selection
    FIRST, LAST:  forced candidates at both ends
    SETS:         lines of a token
    UNIT_TOKENS:  tokens of a unit
    LAST_SCORED:  whether a unit that a token sees a part of is a candidate
    LAST_ADDED:   whether it is added to the chosen ones
    PARTS:        parts of a line, and padding to a power of two
    """

    cut: TopKCut
    TOP: int
    WIDTH: int
    FIRST: int
    LAST: int
    SETS: int
    UNIT_TOKENS: int
    LAST_SCORED: bool
    LAST_ADDED: bool
    PARTS: int


class TokenScores(NamedTuple):
    """One token's candidates in one set: their scores and their number."""

    scores: Any
    num_units: Any


class Listed(NamedTuple):
    """The filtered candidates of a line: keys and units in pairs, in ascending order of units, for each part from its
    first slot on; the number of candidates in each part, of parts, and of all candidates."""

    pairs: Any
    counts: Any
    num_parts: Any
    total: Any


class ScoreThreshold(NamedTuple):
    """The end of a search: keys above low are chosen, and the first most_ties of those that equal it."""

    low: Any
    most_ties: Any


@triton.jit
def _keys(line, unit, G: tl.constexpr):
    """The keys of units of a line; NO_KEY if a unit is no candidate, or its score NaN."""
    is_unit = unit < line.num_units
    score = tl.load(line.scores + unit, mask=is_unit, other=0.0)
    # -0 is as large as 0.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NO_KEY)
    if G.FIRST + G.LAST > 0:
        key = tl.where((unit < G.FIRST) | (unit >= line.num_units - G.LAST), _FORCED_KEY, key)
    return tl.where(is_unit, key, _NO_KEY)


@triton.jit
def _visible(position_of_token, num_tokens, first_token, G: tl.constexpr):
    """The number of tokens that the token of this program's line sees."""
    token = first_token + tl.program_id(0) // G.SETS
    return visible_tokens(position_of_token, num_tokens, token, True)


@triton.jit
def _line(scores, visible, G: tl.constexpr):
    """This program's line."""
    stride: tl.constexpr = G.cut.stride
    num_units = candidate_units(visible, G.UNIT_TOKENS, G.LAST_SCORED)
    return TokenScores(scores + tl.program_id(0).to(tl.int64) * stride, num_units)


@triton.jit
def _span(low, largest):
    """The number of keys from low to the largest one, both included. It fits uint32: NO_KEY is not among them."""
    return (tl.maximum(largest, low) - low).to(tl.uint32, bitcast=True) + 1


@triton.jit
def _middle(low, span):
    """The first key of the upper half of a range."""
    return low + (span // 2).to(tl.int32, bitcast=True)


@triton.jit
def _found(low, num_low, num_above, TOP: tl.constexpr):
    """The chosen keys: all from low on if that is not too many, else the range is one key."""
    return ScoreThreshold(low, tl.where(num_low > TOP, TOP - num_above, _MANY))


@triton.jit
def _search(keys, TOP: tl.constexpr, ENOUGH: tl.constexpr):
    """Searches keys in registers, until at most ENOUGH of them, and at least TOP, are left.

    num_low keys are at least low; num_above are above the range [low, low + span), and are fewer than TOP.
    """
    num_low = tl.sum((keys > _NO_KEY).to(tl.int32), 0)
    # Scores lie near each other, and far from the least of all keys.
    smallest = tl.min(tl.where(keys > _NO_KEY, keys, _FORCED_KEY), 0)
    low = tl.where(num_low > ENOUGH, smallest, _LEAST_KEY)
    span = _span(low, tl.max(keys, 0))
    num_above = tl.zeros_like(num_low)
    while (num_low > ENOUGH) & (span > 1):
        # In four parts, which may be empty at the end of a short range. A turn waits for its sum: one for all counts.
        step = (span - 1) // 4 + 1
        second = low + step.to(tl.int32, bitcast=True)
        third = second + step.to(tl.int32, bitcast=True)
        fourth = third + step.to(tl.int32, bitcast=True)
        counts = (keys >= second).to(tl.int64)
        counts += (keys >= third).to(tl.int64) << _COUNT_BITS
        counts += (keys >= fourth).to(tl.int64) << 2 * _COUNT_BITS
        counts = tl.sum(counts, 0)
        num_second = (counts & _COUNT_MASK).to(tl.int32)
        num_third = ((counts >> _COUNT_BITS) & _COUNT_MASK).to(tl.int32)
        num_fourth = (counts >> 2 * _COUNT_BITS).to(tl.int32)
        num_second = tl.where(step < span, num_second, num_above)
        num_third = tl.where(2 * step < span, num_third, num_above)
        num_fourth = tl.where(3 * step < span, num_fourth, num_above)
        # The last part from whose first key on there are enough.
        part = (num_second >= TOP).to(tl.uint32) + (num_third >= TOP).to(tl.uint32) + (num_fourth >= TOP).to(tl.uint32)
        after = tl.where(part == 0, num_second, tl.where(part == 1, num_third, num_fourth))
        from_here = tl.where(part == 1, num_second, tl.where(part == 2, num_third, num_fourth))
        num_above = tl.where(part == 3, num_above, after)
        num_low = tl.where(part == 0, num_low, from_here)
        low += (part * step).to(tl.int32, bitcast=True)
        span = tl.minimum(step, span - part * step)
    return _found(low, num_low, num_above, TOP)


@triton.jit(do_not_specialize=["first_token"])
def _maxima_kernel(
    scores,
    maxima,
    position_of_token,
    num_tokens,
    first_token,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    GROUPS: tl.constexpr = G.cut.groups
    line = _line(scores, _visible(position_of_token, num_tokens, first_token, G), G)
    group = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    best = tl.full([ROWS, COLUMNS], _NO_KEY, tl.int32)
    for first in range(0, line.num_units, ROWS * GROUPS):
        best = tl.maximum(best, _keys(line, first + row[:, None] * GROUPS + group[None, :], G))
    tl.store(maxima + tl.program_id(0).to(tl.int64) * GROUPS + group, tl.max(best, 0))


@triton.jit
def _bound_kernel(maxima, bounds, G: tl.constexpr):
    GROUPS: tl.constexpr = G.cut.groups
    line_number = tl.program_id(0).to(tl.int64)
    of_groups = tl.load(maxima + line_number * GROUPS + tl.arange(0, GROUPS))
    # TOP maxima reach this key, so at least as many units do. A few more than wanted are no harm.
    tl.store(bounds + line_number, _search(of_groups, G.TOP, G.TOP + G.TOP // 8).low)


@triton.jit(do_not_specialize=["first_token"])
def _filter_kernel(
    scores,
    bounds,
    counts,
    candidates,
    position_of_token,
    num_tokens,
    first_token,
    G: tl.constexpr,
    UNITS: tl.constexpr,
):
    PART: tl.constexpr = G.cut.part_units
    line_number = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    line = _line(scores, _visible(position_of_token, num_tokens, first_token, G), G)
    if part * PART < line.num_units:
        bound = tl.load(bounds + line_number)
        pairs = candidates.to(tl.pointer_type(tl.int64)) + (line_number * G.cut.parts + part) * PART
        num_kept = tl.zeros_like(bound)
        next_unit = part * PART + tl.arange(0, UNITS)
        next_key = _keys(line, next_unit, G)
        for _ in tl.static_range(PART // UNITS):
            unit, key = next_unit, next_key
            # Loads travel one iteration ahead; those of the last one read no unit, or the next part's.
            next_unit = unit + UNITS
            next_key = _keys(line, next_unit, G)
            keep = key >= bound
            kept = num_kept + tl.cumsum(keep.to(tl.int32), 0)
            # A unit is never negative: its word is the lower half unchanged.
            tl.store(pairs + (kept - 1), (key.to(tl.int64) << 32) | unit, mask=keep)
            num_kept = tl.max(kept, 0)
        tl.store(counts + line_number * G.cut.parts + part, num_kept)


@triton.jit
def _listed(listed, place, G: tl.constexpr):
    """Keys and units of a line's candidates, in ascending order of their units."""
    # The slot of a place is in the last part that begins at it or before. A place past the last one reads the last.
    at = tl.maximum(tl.minimum(place, listed.total - 1), 0)
    slot = at
    begin = tl.zeros_like(listed.total)
    for part in range(listed.num_parts):
        slot = tl.where(at >= begin, part * G.cut.part_units + (at - begin), slot)
        begin += tl.load(listed.counts + part)
    pair = tl.load(listed.pairs + slot)
    # An entry without a key is not chosen.
    return tl.where(place < listed.total, (pair >> 32).to(tl.int32), _NO_KEY), pair.to(tl.int32)


@triton.jit
def _write(key, unit, found, written, ties, selected):
    """Adds the chosen ones of a block to a selection. Returns how many are written, and how many ties were met."""
    tie = key == found.low
    above = key > found.low
    # Both are counted at once, in halves of a word: a block has fewer than 2^15 units.
    both = above.to(tl.int32) + (tie.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    ties_before = ties + (before >> 16)
    taken = written - tl.minimum(ties, found.most_ties)
    slot = taken + (before & 0xFFFF) + tl.minimum(ties_before, found.most_ties)
    tl.store(selected + slot, unit, mask=above | (tie & (ties_before < found.most_ties)))
    total = tl.sum(both, 0)
    ties += total >> 16
    return taken + (total & 0xFFFF) + tl.minimum(ties, found.most_ties), ties


@triton.jit
def _search_listed(listed, G: tl.constexpr):
    """Does the same as `_search`, over more candidates than a program holds: they are read again for every count."""
    TOP: tl.constexpr = G.TOP
    BLOCK: tl.constexpr = G.cut.block_units
    lane = tl.arange(0, BLOCK)
    low = tl.full([], _FORCED_KEY, tl.int32)
    largest = tl.full([], _LEAST_KEY, tl.int32)
    for first in range(0, listed.total, BLOCK):
        key, _ = _listed(listed, first + lane, G)
        low = tl.minimum(low, tl.min(tl.where(key > _NO_KEY, key, _FORCED_KEY), 0))
        largest = tl.maximum(largest, tl.max(key, 0))
    span = _span(low, largest)
    num_low = listed.total
    num_above = tl.zeros_like(num_low)
    while (num_low > TOP) & (span > 1):
        middle = _middle(low, span)
        num_middle = tl.zeros_like(num_low)
        for first in range(0, listed.total, BLOCK):
            key, _ = _listed(listed, first + lane, G)
            num_middle += tl.sum((key >= middle).to(tl.int32), 0)
        upper = num_middle >= TOP
        low = tl.where(upper, middle, low)
        num_low = tl.where(upper, num_middle, num_low)
        num_above = tl.where(upper, num_above, num_middle)
        span = tl.where(upper, span - span // 2, span // 2)
    return _found(low, num_low, num_above, TOP)


@triton.jit
def _choose_listed(listed, selected, G: tl.constexpr):
    """Chooses among filtered candidates, and writes them. Returns their number."""
    BLOCK: tl.constexpr = G.cut.block_units
    lane = tl.arange(0, BLOCK)
    written = tl.zeros_like(listed.total)
    ties = tl.zeros_like(listed.total)
    # Candidates that fit the program are listed once.
    key, unit = _listed(listed, lane, G)
    if listed.total <= BLOCK:
        low, most_ties = _search(key, G.TOP, G.TOP)
    else:
        low, most_ties = _search_listed(listed, G)
    written, ties = _write(key, unit, ScoreThreshold(low, most_ties), written, ties, selected)
    for first in range(BLOCK, listed.total, BLOCK):
        key, unit = _listed(listed, first + lane, G)
        written, ties = _write(key, unit, ScoreThreshold(low, most_ties), written, ties, selected)
    return written


@triton.jit(do_not_specialize=["first_token"])
def _choose_kernel(
    scores,
    counts,
    candidates,
    selected,
    selected_counts,
    position_of_token,
    num_tokens,
    first_token,
    G: tl.constexpr,
    FILL: tl.constexpr,
):
    line_number = tl.program_id(0).to(tl.int64)
    visible = _visible(position_of_token, num_tokens, first_token, G)
    line = _line(scores, visible, G)
    out = first_token.to(tl.int64) * G.SETS + line_number
    selected += out * G.WIDTH
    if G.PARTS == 0:
        unit = tl.arange(0, G.cut.block_units)
        key = _keys(line, unit, G)
        found = _search(key, G.TOP, G.TOP)
        nothing = tl.zeros_like(line.num_units)
        written, _ = _write(key, unit, found, nothing, nothing, selected)
    else:
        PART: tl.constexpr = G.cut.part_units
        pairs = candidates.to(tl.pointer_type(tl.int64)) + line_number * (G.cut.parts * PART)
        counts += line_number * G.cut.parts
        num_parts = tl.cdiv(line.num_units, PART)
        part = tl.arange(0, G.PARTS)
        total = tl.sum(tl.load(counts + part, mask=part < num_parts, other=0), 0)
        written = _choose_listed(Listed(pairs, counts, num_parts, total), selected, G)
    # The rest of the line, with the unit that is added to the chosen ones: the last one that the token sees.
    added = 0
    if G.LAST_ADDED:
        added = (visible % G.UNIT_TOKENS > 0).to(tl.int32)
    tl.store(selected_counts + out, written + added)
    for first in range(0, G.WIDTH, FILL):
        slot = first + tl.arange(0, FILL)
        value = tl.where(slot < written + added, visible // G.UNIT_TOKENS, _NO_UNIT)
        tl.store(selected + slot, value, mask=(slot >= written) & (slot < G.WIDTH))


def launch_top_k(
    scores: Tensor,
    scratch: Tensor,
    tokens: SparseTokens,
    selection: SelectedKeys,
    *,
    indexing: Indexing,
    cut: TopKCut,
    first_token: int = 0,
) -> None:
    """Selects the units with the largest scores of the candidates of some tokens.

    scores:      float32 [n, sets, cut.stride]; those of units that are no candidates are not read
    scratch:     int32, n * sets * (cut.line_words - cut.stride) words or more; content is undefined
    tokens:      the step's
    selection:   of the step's tokens; lines of tokens [first_token, first_token + n) are written, whole
    """
    num_tokens, sets, _ = scores.shape
    tokens.check()
    selection.check(len(tokens.row_of_token))
    assert scores.dtype == torch.float32
    assert scores.is_contiguous()
    assert scores.shape == (num_tokens, indexing.sets, cut.stride)
    assert first_token + num_tokens <= len(tokens.row_of_token)
    assert (selection.sets, selection.width) == (sets, indexing.width), "the selection is another indexer's"
    lines, geometry = num_tokens * sets, _geometry(indexing, cut)
    maxima, bounds, counts, candidates = _scratch(scratch, lines, cut)
    of_tokens = tokens.position_of_token, tokens.num_tokens, first_token
    if cut.parts:
        columns = min(_MAXIMA_GROUPS, cut.groups)
        options = {"ROWS": _MAXIMA_ROWS, "COLUMNS": columns, "num_warps": max(columns // _MAXIMA_OF_WARP, 1)}
        launch(_maxima_kernel, (lines, cut.groups // columns), scores, maxima, *of_tokens, G=geometry, **options)
        launch(_bound_kernel, (lines,), maxima, bounds, G=geometry, num_warps=_warps(cut.groups))
        options = {"UNITS": min(_FILTER_UNITS, cut.part_units), "num_warps": _FILTER_WARPS}
        lists = counts, candidates
        launch(_filter_kernel, (lines, cut.parts), scores, bounds, *lists, *of_tokens, G=geometry, **options)
    launch(
        _choose_kernel,
        (lines,),
        scores,
        counts,
        candidates,
        selection.units,
        selection.counts,
        *of_tokens,
        G=geometry,
        FILL=min(_FILL, triton.next_power_of_2(indexing.width)),
        num_warps=_warps(cut.block_units),
    )


def _geometry(indexing: Indexing, cut: TopKCut) -> TopKGeometry:
    return TopKGeometry(
        cut=cut,
        TOP=indexing.top,
        WIDTH=indexing.width,
        FIRST=indexing.first,
        LAST=indexing.last,
        SETS=indexing.sets,
        UNIT_TOKENS=indexing.unit_tokens,
        LAST_SCORED=indexing.last_unit is LastUnit.SCORED,
        LAST_ADDED=indexing.last_unit is LastUnit.ADDED,
        PARTS=triton.next_power_of_2(cut.parts) if cut.parts else 0,
    )


def _warps(elements: int) -> int:
    """Warps of a program that holds these elements. Threads hold few: they and their masks stay in registers."""
    return min(max(elements // 256, 1), 16)


def _scratch(scratch: Tensor, lines: int, cut: TopKCut) -> list[Tensor]:
    """Maxima, bounds, counts and candidates of `lines` lines; the last begin at 16 bytes, pairs of a unit and a key."""
    assert scratch.dtype == torch.int32
    assert scratch.is_contiguous()
    assert scratch.numel() >= lines * (cut.line_words - cut.stride)
    lengths = lines * 2 * cut.slots, lines * cut.groups, lines * bool(cut.parts), lines * cut.parts
    candidates, maxima, bounds, counts = scratch[: sum(lengths)].split(lengths)
    return [maxima, bounds, counts, candidates]
