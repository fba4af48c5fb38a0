"""python -m tests.amd.random_calls --seeds 0:300 [--device cuda] [--guard-off ID] [--stop] ...

Runs random calls. Prints a line for each finding and a closing count; ends with 1 if there was a finding.
"""

import argparse
import logging
import sys
import time
from collections import Counter

import torch

from rocm_attn.guards.registry import Guards
from tests.amd.random_calls.pairs import run_triples


def main() -> int:
    """Run the seeds that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.amd.random_calls", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0:300", help="first:end, first:end:step, or one seed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--guard-off", metavar="ID", help="run without this safeguard")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after so many")
    parser.add_argument("--stop", action="store_true", help="stop at the first finding")
    options = parser.parse_args()
    first, *rest = map(int, options.seeds.split(":"))
    device, guards = torch.device(options.device), None
    if options.guard_off:
        logging.getLogger("rocm_attn").setLevel(logging.ERROR)
        guards = Guards().without(options.guard_off)
    prepare(device)
    started, counts, num_findings = time.monotonic(), Counter[str](), 0
    for seed in range(first, *(rest or [first + 1])):
        if time.monotonic() - started > options.seconds or (options.stop and num_findings):
            break
        outcome = run_triples(seed, device, guards)
        counts.update({"seeds": 1, **outcome.counts})
        num_findings += len(outcome.findings)
        for finding in outcome.findings:
            print(f"seed {seed}: {finding}", flush=True)
    print(summary(num_findings, counts, time.monotonic() - started))
    return int(num_findings > 0)


def prepare(device: torch.device) -> None:
    """Memory that no one has written is NaN: whatever reads it shows."""
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")


def summary(num_findings: int, counts: Counter[str], seconds: float) -> str:
    """All seeds in a line."""
    counted = ", ".join(f"{count} {what}" for what, count in counts.items())
    return f"{num_findings} findings, {counted}, {seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
