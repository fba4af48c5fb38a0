"""Values that jitted attention functions pass to each other: pointers, strides and numbers that belong together.

A launched kernel takes flat parameters and makes these from them (launch.py says why). They leave no trace in machine
code: every field is a value of its own there.
"""

from typing import Any, NamedTuple

# A field is a scalar, a pointer or a block of Triton's, or None if a kernel was launched without it.
Field = Any


class HeadRows(NamedTuple):
    """Rows of q, out or lse: pointer, and strides in elements between tokens and between heads."""

    at: Field
    token: Field
    head: Field


class RowOutputs(NamedTuple):
    """The destinations of a row's results: out, lse or None; partial results of programs, and their maxima and sums.

    out, lse: HeadRows
    sinks:    of the same heads, or None
    """

    out: Field
    lse: Field
    parts: Field
    sums: Field
    sinks: Field = None


class HeadsOfToken(NamedTuple):
    """Query heads, one of each row of a block, and which rows there are; one token, or each row's."""

    token: Field
    head: Field
    is_row: Field


class PagePointers(NamedTuple):
    """K pages or V pages from one KV head on: pointer, and strides in elements between pages, tokens and KV heads."""

    at: Field
    page: Field
    token: Field
    head: Field


class TableLine(NamedTuple):
    """The pages of one sequence in order, int32: pointer, and the number that may be read."""

    at: Field
    width: Field


class KeyValues(NamedTuple):
    """The K and V pages that a query reads, from a KV head on; the sequence's line of the table; the head's scales.

    scale_values: a ScalePointers (coded.py)
    """

    k: PagePointers
    v: PagePointers
    line: TableLine
    scale_values: Field


class KeyRange(NamedTuple):
    """[first, end)."""

    first: Field
    end: Field


class Logits(NamedTuple):
    """Terms that make q . k a base-2 logit (scores.py): qk_scale, tanh_scale; slope: [rows] (base 2), or None."""

    qk_scale: Field
    tanh_scale: Field
    slope: Field


class Softmax(NamedTuple):
    """The softmax state of some keys: acc [rows, columns], maximum [rows] (base 2), total [rows]; float32.

    acc may be a tuple of blocks of columns (key_loop.py).
    """

    acc: Field
    maximum: Field
    total: Field
