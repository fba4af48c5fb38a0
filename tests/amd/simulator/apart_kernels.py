"""Kernels whose programs are apart, and some with a planted race between them (test_programs_apart.py)."""

import triton
import triton.language as tl


@triton.jit
def _rows_kernel(source, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    row_of_out = 0 if FAULT == "program forgotten" else row
    limit = WIDTH + 1 if FAULT == "mask off by one" else WIDTH
    step = WIDTH - 4 if FAULT == "stride too small" else WIDTH
    if FAULT == "stride unknown":
        step = stride
    values = tl.load(source + row * WIDTH + column, mask=column < WIDTH, other=0)
    tl.store(out + row_of_out * step + column, values, mask=column < limit)


@triton.jit
def _heads_kernel(out, out_token, out_head, HEADS: tl.constexpr, DIM: tl.constexpr):
    token, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    tl.store(out + token * out_token + head * out_head + tl.arange(0, DIM), tl.program_id(0))


@triton.jit
def _shift_kernel(values, DISTANCE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(values + at, tl.load(values + at + DISTANCE) + 1)


@triton.jit
def _looping_kernel(out, rounds, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = out + tl.program_id(0) * 16 * BLOCK + tl.arange(0, BLOCK)
    for each in range(min(rounds, 16)):
        tl.store(at, each)
        at += STEP


@triton.jit
def _indirect_kernel(table, out, BLOCK: tl.constexpr, THROUGH: tl.constexpr):
    page = tl.program_id(0)
    if THROUGH == "address":
        page = tl.load(table + page)
    if THROUGH != "condition" or tl.load(table + page) > 0:
        tl.store(out + page * BLOCK + tl.arange(0, BLOCK), tl.program_id(0))


@triton.jit
def _sum_kernel(source, out, BLOCK: tl.constexpr, SAME: tl.constexpr, ATOMIC: tl.constexpr):
    row = tl.program_id(0)
    column = 0 if SAME else tl.program_id(1)
    values = tl.load(source + (row * 8 + column) * BLOCK + tl.arange(0, BLOCK))
    if ATOMIC:
        tl.atomic_add(out + row, tl.sum(values))
    elif tl.program_id(1) < 3:
        tl.store(out + row, tl.sum(values))


@triton.jit
def _counted_kernel(counter, out):
    tl.atomic_add(counter, 1)
    tl.store(out, tl.program_id(0))


@triton.jit
def _striding_kernel(out, n, BLOCK: tl.constexpr):
    for block in range(tl.program_id(0), n, tl.num_programs(0)):
        tl.store(out + block * BLOCK + tl.arange(0, BLOCK), tl.program_id(0))


@triton.jit
def _flag_kernel(out, n, SECOND: tl.constexpr):
    if tl.program_id(0) < n:
        tl.store(out, 1)
    else:
        tl.store(out, SECOND)
