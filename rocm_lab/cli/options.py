"""The options of the laboratory's commands, each written once. Imports only the standard library."""

from __future__ import annotations

from rocm_attn.cli.options import option, positive, switch

DUMP = option("dump", metavar="DUMP", help="the file that a flight recorder wrote")
STEP = option("--step", type=int, metavar="N", help="number of the step (the last one)")
STEPS = option("--steps", type=positive, default=2000, metavar="N", help="steps to run (2000)")
ROUNDS = option(
    "--rounds",
    type=positive,
    metavar="N",
    help="run until so many steps have drafted or verified, in place of --steps; mostly for --speculative",
)
SHAPES = option(
    "--shapes",
    metavar="SEQSxCACHED+NEW,...",
    help="steps of interest, with k for 1024, as 64x4k,1x6144+2048 (decode, chunks of prompts, and drafts)",
)
SECONDS = option(
    "--seconds", type=positive, default=600, metavar="S", help="after which no other candidate is begun (600)"
)
OUTPUT = option(
    "--output", metavar="FILE", help="where rows are kept (what ROCM_ATTN_TUNING names, or the cache's tuning.json)"
)
JOBS = option("--jobs", type=positive, metavar="N", help="processes that compile (all cores but one)")
DRY_RUN = switch("--dry-run", "list the candidates, and try none; needs no GPU")
