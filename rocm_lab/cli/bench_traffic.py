"""`rocm-attn bench traffic`: a made-up trace of requests, as a file."""

import argparse
import sys

from rocm_lab.bench.traffic import Traffic


def run(options: argparse.Namespace) -> None:
    """Prints the trace, one line per request."""
    traffic = Traffic(
        options.requests, options.rate, options.prompt, options.output, options.spread, options.shared_prefix
    )
    for request in traffic.requests(options.seed):
        sys.stdout.write(request.line())
