"""A long soak on this machine's GPU or CPU, in the form of a result file.

python -m rocm_lab.benchmarks.soak --steps 20000 --seed 11 --out rocm_lab/benchmarks/results/soak_h200.json
python -m rocm_lab.benchmarks.soak --speculative --rounds 10000 --seed 16 \\
    --out rocm_lab/benchmarks/results/draft_soak_h200.json
"""

from __future__ import annotations

import sys

import torch

from rocm_lab.benchmarks.script import parser_of, write
from rocm_lab.soak.soak import Soak
from rocm_lab.soak.world import Scenario


def say_steps(steps: int) -> None:
    """How far it has come."""
    print(f"{steps} steps", file=sys.stderr, flush=True)


def main() -> None:
    """Raises SoakFailed at the first finding; there is no result file then."""
    parser = parser_of(__doc__)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--rounds", type=int, help="as in `rocm-attn soak --rounds`")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--speculative", action="store_true", help="as in `rocm-attn soak --speculative`")
    parser.add_argument("--device", default="cuda", help="cuda (bfloat16, our kernels) or cpu (float32, torch's)")
    options = parser.parse_args()
    scenario, device = Scenario.of_seed(options.seed), torch.device(options.device)
    soak = Soak(
        scenario.speculative() if options.speculative else scenario,
        seed=options.seed,
        device=device,
        provider="torch" if device.type == "cpu" else "triton",
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
    )
    report = (
        soak.run(options.steps, say_steps) if options.rounds is None else soak.run_rounds(options.rounds, say_steps)
    )
    write(options.out, report=report.as_dict())
    print(report)


if __name__ == "__main__":
    main()
