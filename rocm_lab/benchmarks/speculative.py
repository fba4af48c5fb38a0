"""The cost of attention in verify and draft steps by mask, compared with unmasked steps and a plain read.

    python -m rocm_lab.benchmarks.speculative --out rocm_lab/benchmarks/results/speculative_h200.json

A verify step has a tree of drafts in each sequence; draft step i of K branches has K new tokens and i * K before them
in the mask. Times are of one layer in a graph, its schedule built in it. lower_bound: a streaming read of K and V.
Exits with 1, after writing the file, if a result is wrong or a case takes longer than allowed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.mask_bits import MAX_MASK_BLOCK
from rocm_attn.kernels.metadata.place_trees import launch_place_trees
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import select
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.prepared import PreparedLayer, bounds_of_step, ints
from rocm_lab.bench.step_data import random_steps
from rocm_lab.benchmarks.script import parser_of, printed, write
from rocm_lab.benchmarks.timing import DEVICE, lower_bound_us, microseconds

# |result - reference| / |reference| in bfloat16.
_MOST_ERROR = 8e-3

LLAMA_3B = Problem(24, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5, custom_mask=True)
LLAMA_8B = replace(LLAMA_3B, num_q_heads=32)
EIGHT_BITS = replace(LLAMA_8B, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.TOKEN)
MLA = Problem(16, 1, 576, torch.bfloat16, 64, v_head_dim=512, scale=192**-0.5, pool=PoolKind.LATENT, custom_mask=True)


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """A layer of a step of num_seqs sequences with q_len new tokens each, the last of kv_len.

    nodes_before: keys before the new ones that the mask covers
    times_plain:  most time allowed, relative to the step without a mask; 0: any
    times_bound:  the same, relative to the lower bound
    """

    name: str
    problem: Problem
    num_seqs: int
    kv_len: int
    q_len: int
    nodes_before: int = 0
    times_plain: float = 0.0
    times_bound: float = 0.0

    @property
    def read_bytes(self) -> int:
        """K and V of all sequences."""
        form = self.problem.page_format
        return self.num_seqs * (self.kv_len // form.page_size) * form.page_bytes


CASES = (
    VerifyCase("verify 64 x 5 after 2500", LLAMA_3B, 64, 2512, 5, times_plain=1.05),
    VerifyCase("verify 64 x 5 after 8k", LLAMA_8B, 64, 8208, 5, times_plain=1.05),
    VerifyCase("verify 64 x 16 after 8k", LLAMA_8B, 64, 8208, 16),
    VerifyCase("draft 64 x 8k, K 4, step 4", LLAMA_8B, 64, 8208, 4, 12, times_bound=1.2),
    VerifyCase("draft 64 x 8k, K 8, step 4", LLAMA_8B, 64, 8224, 8, 24, times_bound=1.2),
    VerifyCase("draft 64 x 8k, K 8, step 1", LLAMA_8B, 64, 8208, 8, 0, times_bound=1.2),
    VerifyCase("draft 4 x 8k, K 8, step 4", LLAMA_8B, 4, 8224, 8, 24),
    VerifyCase("verify 64 x 5 after 8k, scales of tokens", EIGHT_BITS, 64, 8208, 5),
    VerifyCase("verify 64 x 5 after 4k, MLA", MLA, 64, 4160, 5),
)


@dataclass(frozen=True, slots=True)
class Made:
    """A case's tensors: the step with its mask, and the kernels with a mask and without."""

    case: VerifyCase
    masked: PreparedLayer
    plain: PreparedLayer
    parents: Tensor


def made(case: VerifyCase) -> Made:
    """Returns random pages in random order, and random trees."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    problem, num_tokens, nodes = case.problem, case.num_seqs * case.q_len, case.nodes_before + case.q_len
    drawn = torch.randint(1 << 30, (case.num_seqs, nodes), generator=generator, device=DEVICE)
    parents = (drawn % (torch.arange(nodes, device=DEVICE) + 1) - 1).int()
    batch = BatchSpec.of_lengths([(case.q_len, case.kv_len - case.q_len)] * case.num_seqs)
    (data,) = random_steps(problem, batch, 1, DEVICE, seed=0)
    step = replace(
        data.step,
        mask_start=ints([0] * case.num_seqs, DEVICE),
        mask_words=ints([0] * (num_tokens * nodes // MAX_MASK_BLOCK + 1), DEVICE),
        mask_positions=ints([0] * num_tokens, DEVICE),
        mask_indptr=torch.arange(case.num_seqs + 1, device=DEVICE) * (case.q_len * nodes),
    )
    launch_place_trees(parents, case.nodes_before, 0, ALL_KEYS, step)
    chosen = select(problem, detect_target(DEVICE), "triton")

    def prepared(kind: StepKind) -> PreparedLayer:
        bounds = bounds_of_step(batch.kv_len, batch.q_len, kind)
        return PreparedLayer.of(
            chosen.kernel(kind).bound, step, bounds, (data.q, torch.empty_like(data.out)), data.pages
        )

    return Made(case, prepared(StepKind.MASKED), prepared(data.kind), parents)


def time_of(prepared: PreparedLayer) -> float:
    """Returns microseconds of schedule and layer."""

    def run() -> None:
        prepared.build_schedule()
        prepared.attend()

    return microseconds(run)


def error_of(it: Made) -> float:
    """Returns the largest error of the first and the last sequence, against float32."""
    it.masked.build_schedule()
    it.masked.attend()
    case, args = it.case, it.masked.args
    ratio = case.problem.gqa_ratio
    worst = 0.0
    for seq in (0, case.num_seqs - 1):
        k, v = (side.float().flatten(0, 1).repeat_interleave(ratio, 1) for side in _read(it, seq))
        tokens = slice(seq * case.q_len, (seq + 1) * case.q_len)
        logits = torch.einsum("thd,khd->thk", args.q[tokens].float(), k) * case.problem.scale
        weights = logits.masked_fill(~_visible(it, seq)[:, None], float("-inf")).softmax(-1)
        want = torch.einsum("thk,khd->thd", weights, v)
        worst = max(worst, float((args.out[tokens].float() - want).norm() / want.norm()))
    return worst


def _read(it: Made, seq: int) -> tuple[Tensor, Tensor]:
    """Returns K and V of a sequence's pages."""
    k, v = it.masked.args.pages.read(it.masked.step.table[seq, : it.case.kv_len // it.case.problem.page_size].long())
    return k, v


def _visible(it: Made, seq: int) -> Tensor:
    """bool [q_len, kv_len], node by node."""
    case, parents = it.case, it.parents[seq].tolist()
    start = case.kv_len - len(parents)
    visible = torch.zeros(len(parents), case.kv_len, dtype=torch.bool, device=DEVICE)
    visible[:, :start] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, start + node] = True
    return visible[case.nodes_before :]


def row_of(case: VerifyCase) -> dict[str, Any]:
    """Returns times of a case, and the error of its result."""
    it = made(case)
    error, lower_bound = error_of(it), lower_bound_us(case.read_bytes)
    masked, plain = time_of(it.masked), time_of(it.plain)
    torch.cuda.empty_cache()
    return {
        "case": case.name,
        "kernel": it.masked.kernel.describe(),
        "us": masked,
        "plain_us": plain,
        "lower_bound_us": lower_bound,
        "times_plain": masked / plain,
        "times_bound": masked / lower_bound,
        "error": error,
        "too_slow": (case.times_plain and masked / plain > case.times_plain)
        or (case.times_bound and masked / lower_bound > case.times_bound),
    }


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    rows = printed(map(row_of, CASES))
    write(options.out, rows=rows)
    sys.exit(any(row["error"] > _MOST_ERROR or row["too_slow"] for row in rows))


if __name__ == "__main__":
    main()
