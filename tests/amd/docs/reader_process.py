"""The process of reader.py: runs the programs that its standard input brings, with what the reader has installed.

It runs as a script and imports nothing that the reader may lack.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import sys
import traceback


def run_program(text: str, name: str) -> tuple[int, str]:
    """Returns the exit code and the output of a Python program, errors included."""
    output = io.StringIO()
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(compile(text, name, "exec", dont_inherit=True), {"__name__": "__main__"})
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            return (end.code if isinstance(end.code, int) else int(end.code is not None)), output.getvalue()
        except Exception:
            traceback.print_exc()
            return 1, output.getvalue()
    return 0, output.getvalue()


def main() -> None:
    """Answers each line of standard input, a JSON list of program, name and folder, with a line of code and output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a program's own processes print is no answer
    sys.path.pop(0)  # the folder of this file
    for line in sys.stdin:
        text, name, folder = json.loads(line)
        os.chdir(folder)
        print(json.dumps(run_program(text, name)), file=answers, flush=True)


if __name__ == "__main__":
    main()
