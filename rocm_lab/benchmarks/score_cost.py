"""The cost of sinks and of a soft cap: one layer of attention with and without them, in turn.

    python -m rocm_lab.benchmarks.score_cost --out rocm_lab/benchmarks/results/score_cost_h200.json

Exits with 1, after writing the file, if one cost more than allowed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import torch

from rocm_attn.problem import Problem
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_lab.benchmarks.timing import layer, medians_in_turn

TIMES_ALLOWED = 1.03

GPT_OSS = Problem(64, 8, 64, torch.bfloat16, 16, v_head_dim=64, scale=64**-0.5)
GEMMA_2 = Problem(32, 16, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)


@dataclass(frozen=True, slots=True)
class ScoreCase:
    """A layer without the feature, and with it."""

    name: str
    batch: str
    plain: Problem
    featured: Problem


CASES = tuple(
    ScoreCase(f"{step}, {feature}", batch, plain, featured)
    for step, batch in (("decode 64 x 4k", "64d4k"), ("extend 1 x 2048 + 6144", "1x2048+6144"))
    for feature, plain, featured in (
        ("gpt-oss-120b, sinks", GPT_OSS, replace(GPT_OSS, has_sinks=True)),
        ("Gemma-2-27B, soft cap", GEMMA_2, replace(GEMMA_2, logits_soft_cap=50.0)),
    )
)


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    rows = printed(map(_row, CASES))
    write(options.out, times_allowed=TIMES_ALLOWED, rows=rows)
    sys.exit(any(row["times"] > TIMES_ALLOWED for row in rows))


def _row(case: ScoreCase) -> Row:
    plain, featured = medians_in_turn([layer(problem, case.batch) for problem in (case.plain, case.featured)])
    return {"case": case.name, "plain_us": plain, "us": featured, "times": featured / plain}


if __name__ == "__main__":
    main()
