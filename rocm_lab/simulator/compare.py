"""Simulate scripts at two commits of a repository, and write what changed as a comment; the action runs this:

    python -m rocm_lab.simulator.compare --base COMMIT --output comment.md kernels/check_softmax.py ...

Each script launches Triton kernels on tensors of the CPU, and asserts what it expects. The work tree that this runs in
is the head; the base is checked out into a folder of its own. Exit code 1 if a script does not pass at the head.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

# By which the action finds the comment that it has to replace.
MARK = "<!-- rocm-attn simulate -->"

# Heading of a column -> the figure of a kernel.
_FIGURES = {
    "vector registers": "vgprs",
    "scalar registers": "sgprs",
    "LDS bytes": "lds_bytes",
    "waves a SIMD": "waves_per_simd",
    "spills": "vgpr_spills",
    "code bytes": "code_bytes",
}


@dataclass(frozen=True, slots=True)
class _Variant:
    """A kernel in a run of a script; number: among those of its name there."""

    script: str
    arch: str
    kernel: str
    number: int


def main(arguments: Sequence[str]) -> int:
    """Writes the comment; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--output", required=True, type=Path, help="file for the comment")
    parser.add_argument("scripts", nargs="+", metavar="FILE", help="paths from the root of the repository")
    options = parser.parse_args(arguments)
    root = Path(_git("rev-parse", "--show-toplevel"))
    try:
        base = _git("rev-parse", "--short=10", f"{options.base}^{{commit}}")
    except subprocess.CalledProcessError:
        parser.error(f"the commit {options.base} is not in this checkout; fetch it (on GitHub, with fetch-depth 0)")
    head = {script: _simulated(root, script) for script in options.scripts}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        _git("worktree", "add", "--quiet", "--detach", str(tree), base)
        try:
            before = {each: _simulated(tree, each) for each in options.scripts if (tree / each).is_file()}
        finally:
            _git("worktree", "remove", "--force", str(tree))
    options.output.write_text(comment(base, before, head))
    return 0 if all(run["passed"] for runs in head.values() for run in runs) else 1


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _simulated(root: Path, script: str) -> list[dict[str, Any]]:
    """The runs of a script in a checkout, whose own modules it imports."""
    path = filter(None, [str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", "from rocm_attn.cli import main; raise SystemExit(main())", "simulate", "--json"]
    done = subprocess.run([*command, script], cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.startswith("{"):
        return [{"arch": "none", "passed": False, "error": f"exit code {done.returncode}", "kernels": []}]
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return runs


def comment(
    base: str, before: Mapping[str, Sequence[Mapping[str, Any]]], after: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str:
    """The comment's text. before, after: script -> its runs, as `rocm-attn simulate --json` prints them"""
    lines = [MARK, f"### Kernels as AMD machine code, compared with {base}", ""]
    failures = [
        f"- `{script}` on {run['arch']}: {sentence}"
        for script, runs in after.items()
        for run in runs
        for sentence in _failures(run)
    ]
    lines += (
        ["**Failed:**", "", *failures, ""] if failures else ["Every script passed: no access outside of an array.", ""]
    )
    old, new = _variants(before), _variants(after)
    checks = sorted({name for kernel in new.values() for name in kernel["checks"]})
    heading = ["kernel", "arch", *_FIGURES, "clocks of the loop", "instructions executed", *checks]
    rows = [_row(variant, old.get(variant), kernel, checks) for variant, kernel in new.items()]
    lines += [f"| {' | '.join(heading)} |", "|" + "---|" * len(heading), *rows]
    gone = [f"`{each.kernel}` on {each.arch}" for each in old if each not in new]
    if gone:
        lines += ["", f"No longer launched: {', '.join(gone)}."]
    return "\n".join(lines) + "\n"


def _failures(run: Mapping[str, Any]) -> list[str]:
    """A sentence for each reason that a run did not pass for."""
    if run["passed"]:
        return []
    faults = [f"`{kernel['kernel']}`: {fault}" for kernel in run["kernels"] for fault in kernel["faults"]]
    return [*filter(None, [run["error"]]), *faults] or ["no kernel was launched"]


def _variants(runs_of: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[_Variant, Mapping[str, Any]]:
    return {
        _Variant(script, run["arch"], name, number): kernel
        for script, runs in runs_of.items()
        for run in runs
        for name, kernels in groupby(sorted(run["kernels"], key=_name), _name)
        for number, kernel in enumerate(kernels)
    }


def _name(kernel: Mapping[str, Any]) -> str:
    return str(kernel["kernel"])


def _row(variant: _Variant, old: Mapping[str, Any] | None, new: Mapping[str, Any], checks: Sequence[str]) -> str:
    """A line of the table; a figure that changed has its old value before it."""

    def cells(kernel: Mapping[str, Any]) -> list[str]:
        figures = [kernel["figures"][name] for name in _FIGURES.values()]
        # A base may be of a release that counted no clocks.
        clocks = kernel.get("loop_clocks")
        numbers = [*map(str, figures), "none" if clocks is None else f"{clocks:.0f}", str(kernel["instructions"])]
        return [*numbers, *(kernel["checks"].get(name, "") for name in checks)]

    was, now = cells(old) if old else ["new"] * len(cells(new)), cells(new)
    shown = [b if a in (b, "new") else f"{a} → **{b}**" for a, b in zip(was, now, strict=True)]
    return f"| `{variant.kernel}`{'' if old else ' (new)'} | {variant.arch} | {' | '.join(shown)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
