"""The command line, `rocm-attn COMMAND`; parser.py lists the commands, and a module here has the name of each.

Exit codes: 0 done, 1 the job failed, 2 wrong usage or bad input, 130 interrupted, 141 the reader of stdout went away.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from rocm_attn.cli.parser import build_parser
from rocm_attn.errors import BadModel, BadProblem, BadRequest, BadSetting, RocmAttnError

DONE, FAILED, BAD_INPUT, INTERRUPTED, READER_GONE = 0, 1, 2, 130, 141
_BAD_INPUT_ERRORS = (BadModel, BadProblem, BadRequest, BadSetting)

# What the extra [cli] brings, beyond what the package always has.
_CLI_LIBRARIES = {"gguf", "jinja2", "safetensors", "tokenizers"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Wrong usage ends in argparse's SystemExit(2)."""
    options = build_parser().parse_args(arguments)
    try:
        # Only now: torch takes a second to import, and --help should not wait for it.
        command = importlib.import_module(f"rocm_attn.cli.{options.command.replace('-', '_')}")
        command.run(options)
        sys.stdout.flush()
    except RocmAttnError as error:
        print(f"rocm-attn: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, _BAD_INPUT_ERRORS) else FAILED
    except ModuleNotFoundError as missing:
        if missing.name not in _CLI_LIBRARIES:
            raise
        print(f"rocm-attn: {missing.name} is not installed; run: pip install 'rocm-attn[cli]'", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rocm-attn: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it a place where that works.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return DONE
