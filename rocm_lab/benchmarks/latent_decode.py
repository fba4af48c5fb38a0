"""The cost of absorbed latent attention in a decode step, compared with a plain read of the latents and its products.

    python -m rocm_lab.benchmarks.latent_decode --out RESULTS/latent_decode_h200.json [--candidates] [--cases N]

Times are of one layer in a graph, its schedule built in it. floor: a streaming read of the latents; products: their
time at the rate of a large matrix product; limit: the larger of both. Each is timed after a pause; sustained is the
time after half a second of the same work, when the GPU's power limit has lowered the clock, which is reported with it.
With --candidates other tiles are timed too.
Exits with 1, after writing the file, if a result is wrong or a case takes longer than allowed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.select import select
from rocm_attn.providers.split_latents import cut_of_latents
from rocm_attn.providers.tiles import latent_decode_tiles_of_table
from rocm_attn.providers.triton_latent import LatentDecode
from rocm_lab.bench.machine import describe_machine
from rocm_lab.bench.prepared import Prepared, ints, step_kind
from rocm_lab.benchmarks.sparse_decode import floor_us, microseconds

# |result - reference| / |reference| in bfloat16.
_MOST_ERROR = 5e-3
# Part of the names of Hopper's own kernels, next to which the plain ones are timed.
_OF_HOPPER = "triton.hopper_"
_DEVICE = torch.device("cuda", 0)
_MATRIX = 8192
_PAUSE_SECONDS, _LOAD_SECONDS = 1.0, 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """num_seqs sequences of one length with q_len new tokens each; times_allowed: of the limit, 0: any."""

    heads: int
    num_seqs: int
    kv_len: int
    times_allowed: float = 0.0
    q_len: int = 1
    coded: bool = False
    page_size: int = 64

    def __str__(self) -> str:
        kind = " in eight bits" * self.coded + f", {self.q_len} new tokens" * (self.q_len > 1)
        return f"{self.heads} heads, {self.num_seqs} x {self.kv_len}, pages of {self.page_size}{kind}"

    @property
    def problem(self) -> Problem:
        plain = Problem(
            self.heads, 1, 576, torch.bfloat16, self.page_size, v_head_dim=512, scale=192**-0.5, pool=PoolKind.LATENT
        )
        return replace(plain, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.LAYER) if self.coded else plain

    @property
    def latent_bytes(self) -> int:
        return self.num_seqs * self.kv_len * 576 * (1 if self.coded else 2)

    @property
    def operations(self) -> int:
        return self.num_seqs * self.kv_len * self.q_len * self.heads * (576 + 512) * 2


CASES = (
    Case(16, 128, 4096, 1.2),
    Case(16, 32, 4096, 1.5),
    Case(128, 128, 4096, 1.6),
    Case(128, 32, 4096),
    Case(128, 128, 4096, page_size=1),
    Case(128, 64, 1024, q_len=4),
    Case(64, 128, 4096),
    Case(16, 1, 8192),
    Case(16, 128, 4096, page_size=1),
    Case(32, 128, 4096),
    Case(12, 128, 4096),
    Case(16, 128, 4096, q_len=4),
    Case(16, 128, 4096, coded=True),
    Case(128, 128, 4096, coded=True),
)
CANDIDATES = {
    16: (
        *(LatentTiles(16, 32, 4, 3, 2, row_cost=cost, chains=chains) for cost in (1, 2, 4) for chains in (1, 2)),
        LatentTiles(16, 32, 4, 4, 1, chains=2),
        LatentTiles(16, 32, 4, 2, 3, chains=2),
        LatentTiles(16, 32, 8, 3, 2),
        LatentTiles(16, 64, 8, 2, 2),
    ),
    128: (
        LatentTiles(64, 64, 8, 2),
        LatentTiles(64, 64, 8, 1),
        LatentTiles(64, 32, 8, 3),
        LatentTiles(64, 32, 8, 2),
        LatentTiles(64, 64, 8, 2, row_cost=4),
        LatentTiles(32, 32, 8, 3, 2),
        LatentTiles(32, 32, 8, 2, 2),
        LatentTiles(32, 64, 8, 2),
    ),
}


def prepared(case: Case) -> Prepared:
    """Returns random latents in pages in random order, and the kernel that the triton provider binds."""
    generator = torch.Generator(_DEVICE).manual_seed(0)
    problem, num_tokens = case.problem, case.num_seqs * case.q_len
    pages_of_seq = -(-case.kv_len // case.page_size)
    num_pages = case.num_seqs * pages_of_seq + 1
    k = torch.randn(num_pages, case.page_size, 1, 576, generator=generator, device=_DEVICE, dtype=torch.bfloat16)
    q = torch.randn(num_tokens, case.heads, 576, generator=generator, device=_DEVICE, dtype=torch.bfloat16)
    out = torch.empty(num_tokens, case.heads, 512, device=_DEVICE, dtype=torch.bfloat16)
    scale = torch.full((1,), 1 / 64, device=_DEVICE) if case.coded else None
    k = (k * 64).to(torch.float8_e4m3fn) if case.coded else k
    pages = LayerPages(k, k[..., :512], problem.page_format, scale, scale)
    table = (torch.randperm(num_pages - 1, generator=generator, device=_DEVICE) + 1).int().view(case.num_seqs, -1)
    q_len = (case.q_len,) * case.num_seqs
    kind = step_kind(q_len, (case.kv_len,) * case.num_seqs)
    step = StepTensors.of(
        ints([], _DEVICE),
        counts=ints([case.num_seqs, num_tokens, 1, 0], _DEVICE),
        kv_len=ints([case.kv_len] * case.num_seqs, _DEVICE),
        q_len=ints(q_len, _DEVICE),
        q_indptr=ints(range(0, num_tokens + 1, case.q_len), _DEVICE),
        table=table,
        row_of_seq=torch.arange(case.num_seqs, dtype=torch.int32, device=_DEVICE),
    )
    bounds = StepBounds(PaddedShape(kind, case.num_seqs, num_tokens), case.q_len, case.kv_len)
    kernel = select(problem, detect_target(_DEVICE), "triton").kernel(kind).bound
    return Prepared.of(kernel, step, bounds, (q, out), pages)


def with_tiles(made: Prepared, case: Case, tiles: LatentTiles) -> Prepared:
    """Returns the same step by the kernel that is specific to no arch, in these tiles."""
    cut = cut_of_latents(tiles, case.problem, detect_target(_DEVICE), most=case.q_len)
    kernel = LatentDecode(case.problem, scores_of(case.problem), cut, tiles)
    return Prepared.of(kernel, made.step, made.bounds, (made.args.q, made.args.out), made.args.pages)


def time_of(made: Prepared) -> float:
    """Returns microseconds of schedule and layer."""

    def run() -> None:
        made.build_schedule()
        made.attend()

    return microseconds(run)


def sustained(made: Prepared) -> tuple[float, int]:
    """Returns microseconds of schedule and layer after a while of the same work, and the clock in MHz then."""
    end = time.perf_counter() + _LOAD_SECONDS
    us = time_of(made)
    while time.perf_counter() < end:
        us = time_of(made)
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={_DEVICE.index}"]
    return us, int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def error_of(made: Prepared, case: Case) -> float:
    """Returns the largest error of the first and the last sequence, against float32."""
    made.build_schedule()
    made.attend()
    worst = 0.0
    for seq in (0, case.num_seqs - 1):
        k, _ = made.args.pages.read(made.step.table[seq].long())
        rows = k.float().flatten(0, 1)[: case.kv_len, 0]
        tokens = slice(seq * case.q_len, (seq + 1) * case.q_len)
        logits = torch.einsum("thd,kd->thk", made.args.q[tokens].float(), rows) * case.problem.scale
        hidden = torch.ones(case.q_len, case.kv_len, device=_DEVICE).triu(case.kv_len - case.q_len + 1).bool()
        weights = logits.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        want = torch.einsum("thk,kd->thd", weights, rows[:, :512])
        worst = max(worst, float((made.args.out[tokens].float() - want).norm() / want.norm()))
    return worst


def products_us(operations: int) -> float:
    """Returns microseconds of that many operations at the rate of a large product in bfloat16."""
    a, b = (torch.randn(_MATRIX, _MATRIX, device=_DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    return microseconds(product) * operations / (2 * _MATRIX**3)


def rows_of(case: Case, *, candidates: bool) -> Iterator[dict[str, Any]]:
    """Yields times of a case: with the tiles of the table, then with candidates."""
    made = prepared(case)
    error = error_of(made, case)
    torch.cuda.synchronize()
    time.sleep(_PAUSE_SECONDS)
    us, floor, products = time_of(made), floor_us(case.latent_bytes), products_us(case.operations)
    sustained_us, clock_mhz = sustained(made)
    limit = max(floor, products)
    tiles = latent_decode_tiles_of_table(case.problem, detect_target(_DEVICE), case.q_len)
    plain_us = time_of(with_tiles(made, case, tiles)) if _OF_HOPPER in made.kernel.describe() else None
    yield {
        "case": str(case),
        "kernel": made.kernel.describe(),
        "us": us,
        "us_plain": plain_us,
        "floor_us": floor,
        "products_us": products,
        "times_limit": us / limit,
        "times_allowed": case.times_allowed,
        "us_sustained": sustained_us,
        "clock_mhz_sustained": clock_mhz,
        "error": error,
    }
    for tiles in CANDIDATES.get(case.heads, ()) if candidates and not case.coded and case.q_len == 1 else ():
        try:
            other = with_tiles(made, case, tiles)
            yield {"case": str(case), "tiles": asdict(tiles), "us": time_of(other), "error": error_of(other, case)}
        except (RuntimeError, triton.runtime.errors.OutOfResources) as refusal:
            yield {"case": str(case), "tiles": asdict(tiles), "refused": str(refusal)[:100]}


def main() -> None:
    """Measures, prints, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--candidates", action="store_true", help="of the first three cases, other tiles too")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many cases")
    options = parser.parse_args()
    rows = []
    for place, case in enumerate(CASES[: options.cases]):
        for row in rows_of(case, candidates=options.candidates and place < 3):
            rows.append(row)
            print(row, flush=True)
        torch.cuda.empty_cache()
    options.out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if row.get("error", 0.0) > _MOST_ERROR]
    slow = [row for row in rows if row.get("times_allowed") and row["times_limit"] > row["times_allowed"]]
    sys.exit(bool(wrong or slow))


if __name__ == "__main__":
    main()
