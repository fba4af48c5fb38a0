"""Time of one layer over layouts and steps of real models, compared with FlashAttention-3 if one is given.

    python -m rocm_lab.benchmarks.named_shapes --out rocm_lab/benchmarks/results/named_shapes_h200.json [--fa3 LIBRARY]

Steps of few query blocks, verification of drafts, decodes with new prompts, large chunks, and decodes over pages of
several sizes. Kernels are chosen, compared and timed as in rocm_lab/benchmarks/random_shapes.py. Exits with 1, after
writing the file, if a result is wrong.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch

from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_lab.benchmarks.random_shapes import FlashAttention3, ceilings, check_all, microseconds, own_run
from rocm_lab.benchmarks.script import parser_of, write
from rocm_lab.benchmarks.shape_sweep import Shape, Work

PAGE_SIZE = 16
# Query heads, KV heads and head_dim.
LAYOUTS = {
    "12/4 x 64": (12, 4, 64),
    "24/4 x 128": (24, 4, 128),
    "40/4 x 128": (40, 4, 128),
    "16/1 x 128": (16, 1, 128),
    "32/32 x 96": (32, 32, 96),
    "32/8 x 80": (32, 8, 80),
    "64/8 x 192": (64, 8, 192),
}
LARGE = {"32/8 x 128": (32, 8, 128), "64/8 x 128": (64, 8, 128)}


def _ragged() -> tuple[tuple[int, ...], tuple[int, ...]]:
    chooser = random.Random(5)
    q_len = [chooser.choice((17, 64, 130, 300, 600)) for _ in range(12)]
    return tuple(new + chooser.randrange(100, 6000) for new in q_len), tuple(q_len)


# The work of a step, and the kv_len and q_len of its sequences.
STEPS = {
    "one chunk of 777 after 5,001": (Work.EXTEND, ((5778,), (777,))),
    "12 ragged chunks": (Work.EXTEND, _ragged()),
    "64 x 5 after 2,500": (Work.VERIFY, ((2505,) * 64, (5,) * 64)),
    "31 decodes and 2 x 700": (Work.MIXED, ((4096,) * 31 + (3000,) * 2, (1,) * 31 + (700,) * 2)),
}
LARGE_STEPS = {
    "one chunk of 2,048": (Work.EXTEND, ((2048,), (2048,))),
    "one chunk of 2,048 after 6,144": (Work.EXTEND, ((8192,), (2048,))),
    "one chunk of 2,048 after 30,720": (Work.EXTEND, ((32768,), (2048,))),
    "8 chunks of 512 after 4,096": (Work.EXTEND, ((4608,) * 8, (512,) * 8)),
}
DECODED = {"64/8 x 128": (64, 8, 128), "8/1 x 128": (8, 1, 128), "64/8 x 192": (64, 8, 192)}
DECODE_PAGES = 8, 16, 32
DECODE_STEPS = {"64 decodes of 4,096": ((4096,) * 64, (1,) * 64), "16 decodes of 4,096": ((4096,) * 16, (1,) * 16)}


def named_shapes() -> list[tuple[str, str, Shape]]:
    """Step, layout, and the shape of both."""
    extends = [
        (step, layout, Shape(*heads, PAGE_SIZE, UNLIMITED_WINDOW, work, *lengths))
        for layouts, steps in ((LAYOUTS, STEPS), (LARGE, LARGE_STEPS))
        for step, (work, lengths) in steps.items()
        for layout, heads in layouts.items()
    ]
    decodes = [
        (f"{step}, pages of {page_size}", layout, Shape(*heads, page_size, UNLIMITED_WINDOW, Work.DECODE, *lengths))
        for step, lengths in DECODE_STEPS.items()
        for page_size in DECODE_PAGES
        for layout, heads in DECODED.items()
    ]
    return [*extends, *decodes]


def main() -> None:
    """Measures all of them."""
    parser = parser_of(__doc__)
    parser.add_argument("--fa3", default="", help="a shared library of FlashAttention-3, as vLLM ships it")
    parser.add_argument("--processes", type=int, default=15)
    args = parser.parse_args()
    named = named_shapes()
    errors = check_all([shape for _, _, shape in named], args.processes, time.monotonic() + 3600)
    peer = FlashAttention3(args.fa3) if args.fa3 else None
    limits = ceilings()
    rows: list[dict[str, Any]] = []
    for step, layout, shape in named:
        error = errors[shape]
        row: dict[str, Any] = {"step": step, "layout": layout, "error": error}
        if not isinstance(error, str):
            row["us"] = round(microseconds(shape, own_run), 1)
            row["limit_us"] = round(shape.limit_us(**limits), 1)
            row["peer_us"] = None if peer is None else round(microseconds(shape, peer.run_of(shape)), 1)
        print(row, flush=True)
        rows.append(row)
        torch.cuda.empty_cache()
    write(args.out, ceilings=limits, rows=rows)
    sys.exit(any(isinstance(row["error"], str) for row in rows))


if __name__ == "__main__":
    main()
