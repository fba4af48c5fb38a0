"""python -m tests.amd.driver --seeds 0:300 [--device cuda] [--guard-off ID]

Prints a line for each finding and a closing count; ends with 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch

from rocm_attn.guards.registry import Guards
from tests.amd.driver.run import Outcome, run_seed


def main() -> int:
    """Run the seeds that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.amd.driver", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:300", help="first:end, or one seed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--guard-off", metavar="ID", help="run without this safeguard")
    parser.add_argument("--stop", action="store_true", help="stop at the first finding")
    options = parser.parse_args()
    first, _, end = options.seeds.partition(":")
    device, guards = torch.device(options.device), None
    if options.guard_off:
        logging.getLogger("rocm_attn").setLevel(logging.ERROR)
        guards = Guards().without(options.guard_off)
    prepare(device)
    started, outcomes = time.monotonic(), []
    for seed in range(int(first), int(end or int(first) + 1)):
        outcome = run_seed(seed, device, guards)
        outcomes.append(outcome)
        if outcome.finding:
            print(f"seed {seed}: {outcome.finding}", flush=True)
            if options.stop:
                break
    print(summary(outcomes, time.monotonic() - started))
    return int(any(outcome.finding for outcome in outcomes))


def prepare(device: torch.device) -> None:
    """Memory that no one has written is NaN: whatever reads it shows."""
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")


def summary(outcomes: list[Outcome], seconds: float) -> str:
    """All seeds in a line."""
    reported: dict[str, int] = {}
    for outcome in outcomes:
        for what, count in (outcome.reported or {}).items():
            reported[what] = reported.get(what, 0) + count
    counted = {
        "findings": sum(bool(outcome.finding) for outcome in outcomes),
        "seeds": len(outcomes),
        "moves": sum(outcome.num_moves for outcome in outcomes),
        "outputs compared": sum(outcome.num_compared for outcome in outcomes),
        "replays": sum(outcome.replays for outcome in outcomes),
        "captures": sum(outcome.captures for outcome in outcomes),
        **reported,
    }
    return f"{', '.join(f'{count} {what}' for what, count in counted.items())}, {seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
