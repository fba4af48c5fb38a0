"""Checks of the masks of the merge of rows that programs of deterministic extend have shared."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.attention.cuts import BLOCK_WORDS, SHARE_WORDS
from rocm_attn.kernels.attention.extend_schedule import SHARE_CUT, SHARE_SIZE
from rocm_attn.kernels.attention.segment_parts import launch_merge_of_segments
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles
from rocm_attn.kernels.tuning.tiles import ExtendTiles
from tests.amd.kernels.attention_cases import ALL_SHARED, Case, Tensors, assert_served, build, extend_cut
from tests.amd.mutation.memory import Memory
from tests.amd.schedule_twins import extend_schedule

QUERY_ROWS, SEGMENT_LEN = 32, 32
TILES = HopperTiles(
    ExtendTiles(query_rows=QUERY_ROWS, key_block=16, num_warps=1, num_stages=1),
    overlaps=False,
    registers=0,
    segment_len=SEGMENT_LEN,
    most_segments=4,
)
SLOTS = TILES.segment_slots


class Row(NamedTuple):
    """A query block and a KV head: its tokens and query heads [lines] each, keys that it sees, and its place."""

    seq: int
    token: Tensor
    head: Tensor
    kv_index: Tensor
    first_key: int
    end_key: int
    cost: int
    start: int


class Parts(NamedTuple):
    """The workspace as extend leaves it: accumulators of parts, and their sums."""

    acc: Tensor
    sums: Tensor


def segment_parts(memory: Memory) -> None:
    """Checks rows of many programs, some of which have no segment, and a last block that is not full.

    There are sinks, a window, and heads that fill no block of columns.
    """
    layers: tuple[tuple[int, int, dict[str, Any]], ...] = ((7, 64, {}), (10, 72, {"sinks": True, "window_left": 70}))
    for programs, dim, more in layers:
        case = Case([150], [12], (6, 2), (dim, dim), **more)
        tensors = build(case, torch.device("cpu"))
        cut = extend_cut(tensors, TILES.extend, ALL_SHARED._replace(programs=programs, most_keys=TILES.most_keys))
        words = extend_schedule(case.kv_len, case.q_len, cut, len(tensors.q))
        parts = _parts_of(tensors, words, programs, cut.sharing.row_keys)
        lse = tensors.lse
        if tensors.sinks is not None:
            tensors = replace(tensors, sinks=memory.put(tensors.sinks))
        tensors = replace(tensors, out=memory.put(tensors.out), lse=memory.put(lse))
        workspace = memory.put(torch.cat([part.flatten() for part in parts]))
        args = tensors.args(memory.put(torch.tensor(words, dtype=torch.int32)), workspace)
        launch_merge_of_segments(
            args, cut, extend=TILES.extend, segment_len=TILES.segment_len, slots=TILES.segment_slots
        )
        assert_served(tensors)


def _parts_of(tensors: Tensors, words: list[int], programs: int, row_keys: int) -> Parts:
    """Returns the parts that programs leave of shared rows, and writes the results of the other rows."""
    size, shared = (words[at.value - SHARE_WORDS] for at in (SHARE_SIZE, SHARE_CUT))
    parts = Parts(
        torch.full((programs * SLOTS, QUERY_ROWS, tensors.case.dims[1]), float("nan")),
        torch.full((programs * SLOTS, QUERY_ROWS, 2), float("nan")),
    )
    rows = _rows_of(tensors, words[: len(words) - programs * SHARE_WORDS], row_keys)
    assert shared * tensors.case.heads[1] == len(rows), "every row is shared out"
    for row in rows:
        first, last = row.start // size, (row.start + row.cost - 1) // size
        if first == last:
            tensors.out[row.token, row.head] = tensors.reference[row.token, row.head].to(tensors.out.dtype)
            tensors.lse[row.token, row.head] = tensors.reference_lse[row.token, row.head].to(tensors.lse.dtype)
            continue
        for program in range(first, last + 1):
            segments = _segments(row, program, size, row_keys)
            if program == first:
                _keep(
                    tensors,
                    parts,
                    row,
                    program * SLOTS,
                    range(segments.start * SEGMENT_LEN, segments.stop * SEGMENT_LEN),
                )
                continue
            for slot, segment in enumerate(segments, program * SLOTS + 1):
                _keep(tensors, parts, row, slot, range(segment * SEGMENT_LEN, (segment + 1) * SEGMENT_LEN))
    return parts


def _rows_of(tensors: Tensors, words: list[int], row_keys: int) -> list[Row]:
    """Rows in the order of the schedule."""
    rows, start = [], 0
    for first in range(0, len(words), BLOCK_WORDS):
        seq, token, num_tokens, kv_index, num_keys = words[first : first + 5]
        if seq < 0:
            break
        ratio, window = tensors.gqa_ratio, tensors.scores.visibility.window_left
        line = torch.arange(num_tokens * ratio)
        first_key = max(kv_index - window, 0) if tensors.scores.visibility.windowed else 0
        for kv_head in range(tensors.case.heads[1]):
            of_line = token + line // ratio, kv_head * ratio + line % ratio, kv_index + line // ratio
            rows.append(Row(seq, *of_line, first_key, kv_index + num_tokens, num_keys + row_keys, start))
            start += num_keys + row_keys
    return rows


def _segments(row: Row, program: int, size: int, row_keys: int) -> range:
    """Segments that a program takes of a row: those that end in its share."""
    done, end = max(program * size - row.start, 0), (program + 1) * size - row.start
    before = row.end_key - (row.cost - row_keys)
    first = max((before + max(done - row_keys, 0)) // SEGMENT_LEN, row.first_key // SEGMENT_LEN)
    if end >= row.cost:
        return range(first, math.ceil(row.end_key / SEGMENT_LEN))
    return range(first, (before + max(end - row_keys, 0)) // SEGMENT_LEN)


def _keep(tensors: Tensors, parts: Parts, row: Row, slot: int, keys: range) -> None:
    """Stores the softmax of some keys, in base 2."""
    lines, end = len(row.token), min(keys.stop, row.end_key)
    pages = tensors.table[int(tensors.row_of_seq[row.seq])].long()
    key = torch.arange(keys.start, max(end, keys.start))
    page_size = tensors.case.page_size
    at = pages[key // page_size], key % page_size
    kv_head = int(row.head[0]) // tensors.gqa_ratio
    k, v = (side[at[0], at[1], kv_head].double() for side in (tensors.k_pages, tensors.v_pages))
    scores = tensors.q[row.token, row.head].double() @ k.T * tensors.scores.scale / math.log(2)
    seen = key <= row.kv_index[:, None]
    if tensors.scores.visibility.windowed:
        seen &= key >= row.kv_index[:, None] - tensors.scores.visibility.window_left
    scores = scores.masked_fill(~seen, -math.inf)
    maximum = scores.amax(1) if len(key) else torch.full((lines,), -math.inf, dtype=torch.float64)
    weights = torch.exp2(scores - maximum.clamp_min(-1e30)[:, None])
    # V may be NaN in rows that no line sees.
    parts.acc[slot, :lines] = (weights @ v.where(seen.any(0)[:, None], 0.0)).float()
    parts.sums[slot] = torch.tensor([-math.inf, 0.0])
    parts.sums[slot, :lines] = torch.stack([maximum, weights.sum(1)], 1).float()
