"""The mixed load for some minutes with two drains: python -m tests.amd.server.load --minutes 30

It prints the counts of the requests' results as JSON (rocm_lab/benchmarks/results/mixed_load_cpu.json is one), and
exits with 1 if an answer was wrong or lost, if pages leaked, or if memory grew.
"""

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

from rocm_lab.bench.machine import describe_machine
from tests.amd.server.load.mixed import MOST_GROWTH, MixedLoad
from tests.amd.server.load.model_folder import write_model

# Parts of the time. After each the server becomes idle, or is drained. The last server serves for most of the time, and
# its memory is compared from its first part on.
PARTS, DRAINS = 10, (1, 3)


async def run(options: argparse.Namespace, folder: Path) -> bool:
    """Runs the load. True if all was right, none was lost, and no server's memory grew."""
    flags = shlex.split(options.serve)
    load = MixedLoad(
        folder, *flags, at_a_time=options.clients, seed=options.seed, port=options.port, max_tokens=options.tokens
    )
    begun = time.monotonic()
    async with load.running():
        for part in range(1, PARTS + 1):
            while time.monotonic() < begun + 60 * options.minutes * part / PARTS:
                await load.until(load.num_sent + options.clients)
            if part in DRAINS:
                await load.drain()
            else:
                await load.settle()
            sys.stderr.write(f"{time.monotonic() - begun:.0f} s: {dict(load.tally.kinds)}\n")
    tally = load.tally
    print(
        json.dumps(
            {
                "machine": describe_machine(),
                "clients": options.clients,
                "tokens": options.tokens,
                "serve": flags,
                "seconds": round(time.monotonic() - begun),
                "requests": dict(tally.kinds),
                "wrong": tally.wrong[:20],
                "lost": tally.lost[:20],
                "pages_at_quiet_moments": tally.pages,
                "grown_mib": round(tally.grown / 2**20, 1),
                "resident_mib": [[round(each / 2**20, 1) for each in server] for server in tally.resident],
            },
            indent=1,
        )
    )
    return tally.is_right and tally.grown < MOST_GROWTH


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=12, help="most new tokens of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="of the server (a free one)")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="more flags of `rocm-attn serve`, in one argument")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 0 if asyncio.run(run(options, write_model(Path(folder)))) else 1


if __name__ == "__main__":
    sys.exit(main())
