"""The processes of reader.py: each runs the programs of a reader, with what that reader has installed.

It runs as a script and imports torch, which all readers have, and nothing that one may lack.
"""

import contextlib
import importlib
import io
import json
import linecache
import multiprocessing
import os
import signal
import sys
import sysconfig
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


def read(venv: str, packages: str, environment: dict[str, str]) -> None:
    """Becomes a process of this virtual environment.

    Answers each line of its pipe `programs`, a JSON list of program, name and folder, with a line of code and output.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [packages if path == sysconfig.get_path("purelib") else path for path in sys.path]
    sys.prefix = sys.exec_prefix = venv
    sys.executable = f"{venv}/bin/python"
    multiprocessing.set_executable(sys.executable)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (open until the end)
    with open(f"{venv}/programs") as programs, open(f"{venv}/answers", "w") as answers:
        for line in programs:
            text, name, folder = json.loads(line)
            os.chdir(folder)
            print(json.dumps(run_program(text, name)), file=answers, flush=True)


def main() -> None:
    """Forks a reader for each line of standard input, a JSON list of the arguments of read()."""
    os.dup2(2, 1)  # what a program's own processes print is no answer
    sys.path.pop(0)  # the folder of this file
    importlib.import_module("torch")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            read(*json.loads(line))
            return


if __name__ == "__main__":
    main()
