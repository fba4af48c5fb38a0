"""The long soak on this machine's GPU, in the form of a result file.

python -m benchmarks.soak --steps 20000 --seed 11 --out benchmarks/results/soak.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from rocm_attn.bench.machine import describe_machine
from rocm_attn.soak.soak import Soak
from rocm_attn.soak.world import Scenario


def main() -> None:
    """Raises SoakFailed at the first finding; there is no result file then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    options = parser.parse_args()
    scenario = Scenario.of_seed(options.seed)
    device = torch.device("cuda")
    soak = Soak(scenario, seed=options.seed, device=device, provider="triton", dtype=torch.bfloat16)
    report = soak.run(options.steps)
    options.out.write_text(json.dumps({"machine": describe_machine(), "report": report.as_dict()}, indent=1))
    print(report)


if __name__ == "__main__":
    main()
