"""Walks the pages that a new user reads, in order, in a new checkout and a new shell, and writes a log with times:

    python -m tests.amd.docs.walk author author.log

The shell has the variables of a new login and no package of this process. Every line of the pages' shell blocks is
typed into it, and every Python block is run by its `python`. A server is ended at the end of its page. Blocks that need
what this machine lacks (Docker, a GPU, a cluster) are left out, and the log has the page's reason; scripts of docker/
are run all the same, since they have to say what they lack. The walker has a config.json and a file of prompts, as the
pages ask for, and chooses a torch where they say so. Exit code 1 if a line failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from tests.amd.docs.commands import SHELL, lines, scratch, script
from tests.amd.docs.pages import Block, blocks
from tests.amd.house.source_tree import ROOT

WALKS = {
    "author": ("README.md", "docs/quick_start.md"),
    "operator": ("docs/install.md", "docs/server.md", "docs/deployment.md"),
    "ci": ("docs/deployment.md", "docker/README.md", "docs/rocm.md", "docs/testing.md"),
}
# Reasons for which a test leaves a block out, and a walk does not.
WALKED = ("needs a package registry", "it makes an environment of its own")
# The exit code of scripts that have said what they lack, and of a doctor that has found a problem.
LACKS, FOUND = 2, 1
_LISTENS = "listening on http://"
_END = "end of the line:"
_LAST_LINES = 12


class Shell:
    """A bash that stays, so that what a line sets is there for the next one."""

    def __init__(self, folder: Path) -> None:
        kept = ("PATH", "LANG", "TERM", "TMPDIR", "OMP_NUM_THREADS", "SSL_CERT_FILE")
        given = {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
        own = str(Path(sys.prefix) / "bin")
        given["PATH"] = os.pathsep.join(part for part in given["PATH"].split(os.pathsep) if part != own)
        self.folder = folder
        self._bash = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env={**given, "HOME": str(folder.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, line: str) -> tuple[int, str]:
        """Types a line, which may go over several. Returns its exit code and its output, errors included."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{{ {line}\n}} </dev/null; code=$?; echo; echo '{_END}' $code\n")
        self._bash.stdin.flush()
        said = ""
        for read in self._bash.stdout:
            if read.startswith(_END):
                return int(read.removeprefix(_END)), said
            said += read
        return self._bash.wait(), said

    def serve(self, line: str) -> tuple[int, str]:
        """Starts a server and waits until it listens or has ended. Returns 0 if it listens, and its output."""
        self.run(f": >server.log; {line.strip()} >>server.log 2>&1 & server=$!")
        while self.run("kill -0 $server")[0] == 0:
            if _LISTENS in (said := (self.folder / "server.log").read_text()):
                return 0, said
            time.sleep(0.2)
        return 1, (self.folder / "server.log").read_text()

    def end_server(self) -> tuple[int, str]:
        """Ends the server, and returns its exit code and output."""
        code, _ = self.run("kill -TERM $server; wait $server")
        return code, (self.folder / "server.log").read_text()

    def close(self) -> None:
        """Ends the shell."""
        self._bash.communicate()


class Log:
    """A log that is read while it is written. failed: lines that failed"""

    def __init__(self, file: TextIO) -> None:
        self._file, self._began = file, time.monotonic()
        self.failed: list[str] = []

    def note(self, line: str) -> None:
        """Writes a line, after the seconds since the walk began."""
        print(f"{time.monotonic() - self._began:7.1f}  {line}", file=self._file, flush=True)

    def result(self, typed: str, done: tuple[int, str], began: float, allowed: Sequence[int] = (0,)) -> None:
        """Writes what was typed, how it ended, and its last lines."""
        code, output = done
        verdict = "done" if code in allowed else "FAILED"
        first, *others = typed.strip().splitlines()
        more = f" (and {len(others)} lines)" if others else ""
        self.note(f"{verdict}, code {code}, {time.monotonic() - began:.1f} s: {first}{more}")
        for line in output.strip().splitlines()[-_LAST_LINES:]:
            print(f"         | {line}", file=self._file, flush=True)
        if code not in allowed:
            self.failed.append(typed)


def walk(page: Iterable[Block], shell: Shell, log: Log, torch: str = "") -> None:
    """Walks the blocks of a page. torch: what pip installs in an environment once it is made; "": nothing"""
    serving = False
    for block in page:
        for kind, text in _steps(block):
            began = time.monotonic()
            if kind == "left out":
                log.note(f"left out, line {block.line}: {block.reason}: {text.strip()}")
            elif kind == "serves":
                log.result(text, shell.serve(text), began)
                serving = True
            else:
                log.result(text, shell.run(text), began, (LACKS,) if kind == "lacks" else _allowed(text))
                if torch and text.rstrip().endswith("/bin/activate"):
                    began = time.monotonic()
                    log.result(f"pip install {torch}", shell.run(f"pip install '{torch}'"), began)
    if serving:
        log.result("SIGTERM to the server", shell.end_server(), time.monotonic())


def _steps(block: Block) -> Iterator[tuple[str, str]]:
    """Yields how a line of a block is walked, and the line."""
    if block.language == "python" and not block.reason:
        yield "typed", f"python - <<'END_OF_BLOCK'\n{block.text}\nEND_OF_BLOCK"
    elif block.language in SHELL:
        for line in lines(script(block)):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if block.serves:
                yield "serves", line
            elif not block.reason or block.reason.startswith(WALKED):
                yield "typed", line
            elif "Docker" in block.reason and re.search(r"(^|\s)bash docker/", line):
                yield "lacks", line
            else:
                yield "left out", line


def _allowed(line: str) -> tuple[int, ...]:
    return (0, FOUND) if "rocm-attn doctor" in line else (0,)


def main(arguments: Sequence[str]) -> int:
    """Walks as the named user. Returns 1 if a line failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.amd.docs.walk", description=__doc__.partition("\n")[0])
    parser.add_argument("user", choices=WALKS)
    parser.add_argument("log", type=Path, help="the file that the log is written to")
    parser.add_argument("--torch", default="torch==2.13.0", help="the torch that this user chooses (torch==2.13.0)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as home, options.log.open("w") as file:
        checkout, log = Path(home) / "rocm_attn", Log(file)
        subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
        scratch(checkout)
        shell = Shell(checkout)
        for page in WALKS[options.user]:
            log.note(f"== {page}")
            walk(blocks(ROOT / page), shell, log, options.torch)
        shell.close()
        log.note(f"the end; {len(log.failed)} lines failed")
    return 1 if log.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
