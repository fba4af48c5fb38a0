"""The cost of absorbed latent attention in a decode step, compared with a plain read of the latents and its products.

    python -m rocm_lab.benchmarks.latent_decode --out RESULTS/latent_decode_h200.json

Times are of one layer in a graph, its schedule built in it. lower_bound: a streaming read of the latents; products:
their time at the rate of a large matrix product; limit: the larger of both. Each is timed after a pause; sustained is
the time after half a second of the same work, when the GPU's power limit has lowered the clock, which is reported with
it. Exits with 1, after writing the file, if a result is wrong or a case takes longer than allowed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from rocm_attn.machine.target import detect_target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.split_latents import cut_of_latents
from rocm_attn.providers.tiles import latent_decode_tiles_of_table
from rocm_attn.providers.triton_latent import LatentDecode
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.judge import ExpectedOutput
from rocm_lab.bench.prepared import PreparedLayer
from rocm_lab.bench.step_data import StepData, random_steps
from rocm_lab.benchmarks.script import parser_of, printed, write
from rocm_lab.benchmarks.timing import DEVICE, lower_bound_us, microseconds

# |result - reference| / |reference| in bfloat16.
_MOST_ERROR = 5e-3
# Part of the names of Hopper's own kernels, next to which the plain ones are timed.
_OF_HOPPER = "triton.hopper_"
_MATRIX = 8192
_PAUSE_SECONDS, _LOAD_SECONDS = 1.0, 0.5


@dataclass(frozen=True, slots=True)
class LatentCase:
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
    LatentCase(16, 128, 4096, 1.2),
    LatentCase(16, 32, 4096, 1.5),
    LatentCase(128, 128, 4096, 1.6),
    LatentCase(128, 32, 4096),
    LatentCase(128, 128, 4096, page_size=1),
    LatentCase(128, 64, 1024, q_len=4),
    LatentCase(64, 128, 4096),
    LatentCase(16, 1, 8192),
    LatentCase(16, 128, 4096, page_size=1),
    LatentCase(32, 128, 4096),
    LatentCase(12, 128, 4096),
    LatentCase(16, 128, 4096, q_len=4),
    LatentCase(16, 128, 4096, coded=True),
    LatentCase(128, 128, 4096, coded=True),
)


def data_of(case: LatentCase) -> StepData:
    """Returns random latents in pages in random order."""
    batch = BatchSpec.of_lengths([(case.q_len, case.kv_len - case.q_len)] * case.num_seqs)
    (data,) = random_steps(case.problem, batch, 1, DEVICE, seed=0)
    return data


def by_plain_kernel(data: StepData, case: LatentCase) -> PreparedLayer:
    """Returns the step by the kernel that is specific to no arch."""
    target = detect_target(DEVICE)
    tiles = latent_decode_tiles_of_table(case.problem, target, case.q_len)
    cut = cut_of_latents(tiles, case.problem, target, most=case.q_len)
    kernel = LatentDecode(case.problem, scores_of(case.problem), cut, tiles)
    return PreparedLayer.of(kernel, data.step, data.bounds, (data.q, data.out), data.pages)


def time_of(made: PreparedLayer) -> float:
    """Returns microseconds of schedule and layer."""

    def run() -> None:
        made.build_schedule()
        made.attend()

    return microseconds(run)


def sustained(made: PreparedLayer) -> tuple[float, int]:
    """Returns microseconds of schedule and layer after a while of the same work, and the clock in MHz then."""
    end = time.perf_counter() + _LOAD_SECONDS
    us = time_of(made)
    while time.perf_counter() < end:
        us = time_of(made)
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={DEVICE.index}"]
    return us, int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def error_of(made: PreparedLayer, data: StepData) -> float:
    """Returns the error of the output, relative to the reference; infinite if it is wrong."""
    made.attend()
    verdict = ExpectedOutput.of(data).judge(data.out)
    return verdict.error if verdict.is_right else float("inf")


def products_us(operations: int) -> float:
    """Returns microseconds of that many operations at the rate of a large product in bfloat16."""
    a, b = (torch.randn(_MATRIX, _MATRIX, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)

    return microseconds(product) * operations / (2 * _MATRIX**3)


def row_of(case: LatentCase) -> dict[str, Any]:
    """Returns times of a case."""
    data = data_of(case)
    _, made = OwnProvider("triton").prepared(data)
    error = error_of(made, data)
    torch.cuda.synchronize()
    time.sleep(_PAUSE_SECONDS)
    us, lower_bound, products = time_of(made), lower_bound_us(case.latent_bytes), products_us(case.operations)
    sustained_us, clock_mhz = sustained(made)
    limit = max(lower_bound, products)
    plain_us = time_of(by_plain_kernel(data, case)) if _OF_HOPPER in made.kernel.describe() else None
    torch.cuda.empty_cache()
    return {
        "case": str(case),
        "kernel": made.kernel.describe(),
        "us": us,
        "us_plain": plain_us,
        "lower_bound_us": lower_bound,
        "products_us": products,
        "times_limit": us / limit,
        "times_allowed": case.times_allowed,
        "us_sustained": sustained_us,
        "clock_mhz_sustained": clock_mhz,
        "error": error,
    }


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    rows = printed(map(row_of, CASES))
    write(options.out, rows=rows)
    sys.exit(any(row["error"] > _MOST_ERROR or 0 < row["times_allowed"] < row["times_limit"] for row in rows))


if __name__ == "__main__":
    main()
