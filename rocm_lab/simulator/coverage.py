"""The instructions of gfx942 and gfx950 that the simulator executes, and those that it refuses, as a page:

    python -m rocm_lab.simulator.coverage docs/simulator_instructions.md

All instructions of an arch are those that the assembler in Triton's wheel (LLVM's) knows for it: each mnemonic in the
assembler's own tables is assembled without operands, and the answer tells instructions of the arch from others. Triton
3.9 or newer.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import triton
from triton.backends.amd import compiler

from rocm_lab.simulator.isa.instructions import BUILDERS
from rocm_lab.simulator.launcher import ARCHS

_MNEMONIC = re.compile(rb"(?:buffer|ds|flat|global|s|scratch|tbuffer|v)_[a-z0-9_]+")
_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)$")
_ANSWER = re.compile(r":(\d+):\d+: error: (.*)")
_OF_ANOTHER = "invalid instruction", "instruction not supported", "e64_dpp variant of this instruction is not"
# The assembler writes its answers to the error stream of its process.
_ASSEMBLE = (
    "import sys; from triton.backends.amd import compiler as c; c.assemble_amdgcn(sys.stdin.read(), sys.argv[1], '')"
)
_PAGE = """\
# Instructions that the simulator executes

`python -m rocm_lab.simulator.coverage docs/simulator_instructions.md` writes this page. The instructions of an arch are
those that LLVM's assembler in Triton {version} knows for it. [The simulator](../rocm_lab/simulator/README.md) executes
those that Triton's compiler was seen to emit. A kernel that reaches another one ends with `UnknownInstruction`, which
names it; so does one with an operand or a modifier that the simulator does not know.

| arch | instructions | executed |
|---|---|---|
{totals}
"""


def mnemonics_of(arch: str) -> frozenset[str]:
    """Every mnemonic that the assembler knows for an arch, without the suffix of an encoding."""
    (library,) = Path(compiler.__file__).parent.rglob("libtriton_amd_codegen.so")
    found = sorted({name.decode() for name in _MNEMONIC.findall(library.read_bytes())})
    command, given = [sys.executable, "-c", _ASSEMBLE, arch], "".join(f"{name}\n" for name in found)
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    answers = {int(line): answer for line, answer in _ANSWER.findall(done.stderr)}
    assert len(answers) > len(found) // 2, done.stderr[-500:]
    others = {line for line, answer in answers.items() if answer.startswith(_OF_ANOTHER)}
    return frozenset(_ENCODING.sub("", name) for line, name in enumerate(found, 1) if line not in others)


def page() -> str:
    """The text of the page."""
    known = {arch: mnemonics_of(arch) for arch in ARCHS}
    totals = [f"| {arch} | {len(names)} | {len(names & BUILDERS.keys())} |" for arch, names in known.items()]
    sections = [_PAGE.format(version=triton.__version__, totals="\n".join(totals))]
    every = frozenset().union(*known.values())
    for heading, names in (("Executed", every & BUILDERS.keys()), ("Not executed", every - BUILDERS.keys())):
        sections.append(f"## {heading}\n\n{_table(names, known)}")
    return "\n".join(sections)


def _table(names: Iterable[str], known: dict[str, frozenset[str]]) -> str:
    """A line for each family of instructions; one that a single arch has is marked with it."""
    lines = ["| family | instructions |", "|---|---|"]
    for family, members in groupby(sorted(names, key=_family), _family):
        marked = [f"`{name}`{_alone(name, known)}" for name in sorted(members)]
        lines.append(f"| {family} | {', '.join(marked)} |")
    return "\n".join(lines) + "\n"


def _family(name: str) -> str:
    """The first words of a mnemonic, by which the page is ordered."""
    words = name.split("_")
    return "_".join(words[: 1 if words[0] in ("ds", "scratch", "flat", "tbuffer") else 2])


def _alone(name: str, known: dict[str, frozenset[str]]) -> str:
    archs = [arch for arch, names in known.items() if name in names]
    return f" ({archs[0]})" if len(archs) == 1 else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
