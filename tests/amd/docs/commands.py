"""The shell blocks of the pages: their commands as argparse and the file system see them, and how to run them."""

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import rocm_attn as ra
from tests.amd.docs.pages import Block, blocks, pages
from tests.amd.docs.reader import Reader, environment
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.test_config import LLAMA31

SHELL = ("bash", "console", "sh", "shell")
_SPLIT = re.compile(r"(?<![<>&])(?:&&|\|\|?|;|&)(?!>)")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a shell block: variables that it sets, its words, and the file that takes its output, or ""."""

    variables: dict[str, str]
    words: tuple[str, ...]
    output: str = ""

    @property
    def is_ours(self) -> bool:
        """True if it is `rocm-attn ...`, whatever variables it sets."""
        return self.words[:1] == ("rocm-attn",)


def shell_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page) if block.language in SHELL]


def script(block: Block) -> str:
    """Returns the typed text of a block: a console block without its prompts and outputs."""
    if block.language != "console":
        return block.text
    return "\n".join(line[2:] for line in block.text.splitlines() if line.startswith("$ "))


def commands_of(text: str) -> list[Command]:
    """Returns a script's commands in order, pipes and lists split. Raises ValueError at open quotes."""
    found = []
    for line in lines(text):
        for part in _parts(line):
            variables: dict[str, str] = {}
            words = shlex.split(part, comments=True)
            while words and (given := re.fullmatch(r"(\w+)=(.*)", words[0], re.DOTALL)):
                variables[given[1]] = given[2]
                words.pop(0)
            output = ""
            if ">" in words:
                at = words.index(">")
                output, words = words[at + 1], words[:at] + words[at + 2 :]
            if words:
                found.append(Command(variables, tuple(words), output))
    return found


def lines(text: str) -> list[str]:
    """Returns a script's lines, each with its continuation lines, after a backslash or within quotes."""
    found, open_line = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        open_line += line
        try:
            shlex.split(open_line, comments=True)
        except ValueError:
            open_line += "\n"
        else:
            found.append(open_line)
            open_line = ""
    if open_line:
        raise ValueError(f"quotes are open in {open_line!r}")
    return found


def _parts(line: str) -> list[str]:
    """Returns a line's commands. Separators within quotes do not separate."""
    quoted = re.compile(r"'[^']*'|\"[^\"]*\"|(?<!\S)#.*|\$\([^)]*\)")
    hidden = quoted.sub(lambda found: "_" * len(found[0]), line)
    cuts = [0, *(end for cut in _SPLIT.finditer(hidden) for end in cut.span()), len(line)]
    comment = next((found.start() for found in quoted.finditer(line) if found[0].startswith("#")), len(line))
    return [line[start : min(end, comment)] for start, end in zip(cuts[::2], cuts[1::2], strict=True)]


def files_of(command: Command) -> list[str]:
    """Returns the files and modules of this repository that it starts, as paths from the root."""
    words = command.words
    if words[0] in ("bash", "python") and len(words) > 1 and "/" in words[1]:
        return [words[1]]
    if words[:2] == ("python", "-m") and words[2].partition(".")[0] in ("tests", "rocm_lab", "rocm_attn", "rocm_serve"):
        place = words[2].replace(".", "/")
        return [place + "/__main__.py" if (ROOT / place).is_dir() else place + ".py"]
    return []


def scratch(folder: Path) -> None:
    """Writes files that pages mention to a folder: a config of Llama 3.1 8B, alone and as a model's, and prompts."""
    config = json.dumps(LLAMA31)
    model = folder / "Llama-3.1-8B-Instruct"
    model.mkdir()
    (model / "config.json").write_text(config)
    (folder / "config.json").write_text(config)
    (folder / "prompts.txt").write_text("What is the capital of France?\nCount to five.\n")


def typed(block: Block) -> list[tuple[str, str]]:
    """Returns the lines typed in a console block, each with the output that the page shows."""
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            found[-1] = found[-1][0], f"{found[-1][1]}{line}\n"
    return found


def shows(said: str, output: str) -> bool:
    """True if an output is the one on a page. `...` stands for any text, and on a line of its own for any lines."""
    pattern = re.escape(said.strip()).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def record_steps(path: Path) -> None:
    """Writes a flight record as a failing step does: a prompt's step and two decode steps, three sequences each."""
    layer = ra.Problem(4, 2, 32, torch.float32, v_head_dim=32, page_size=16, scale=32**-0.5)
    runtime = ra.build_runtime([layer], ra.RuntimeOptions(num_pages=32, max_num_seqs=4, max_kv_len=128), device="cpu")

    def forward(step: ra.Part) -> torch.Tensor:
        q = torch.ones(len(step.token_ids), 4, 32)
        out = torch.empty_like(q)
        step.layers.store_and_attend(0, q, q[:, :2], q[:, 2:], out)
        return out[step.last_token_of_seq]

    flight = ra.checks.FlightRecorder(runtime, path)
    runner = ra.StepRunner(runtime, forward, ra.recorder_for(runtime.device), flight=flight)
    rows = np.array([runtime.table.admit() for _ in range(3)], np.int32)
    lengths = np.zeros(3, np.int32)
    for new in ([5, 3, 8], [1, 1, 1], [1, 1, 1]):
        lengths = lengths + np.array(new, np.int32)
        runtime.table.reserve_all(rows, lengths)
        runner.run(ra.StepBatch(rows, kv_len=lengths, q_len=new, token_ids=[1] * sum(new)))
    flight.dump("a fault")


def run(line: str, reader: Reader) -> tuple[int, str]:
    """Runs a line or a whole script in this folder and returns the exit code and the output, errors included.

    It has what the reader has installed. `rocm-attn ...` alone runs in the reader's process, which may have imported
    torch; everything else runs in bash. Neither reads from the terminal.
    """
    found = commands_of(line)
    if len(found) == 1 and found[0].is_ours and not found[0].variables:
        return _run_here(found[0], reader)
    path = f"{reader.python.parent}{os.pathsep}{os.environ['PATH']}"
    finished = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", line],
        env={**environment(), "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stdout


def _run_here(command: Command, reader: Reader) -> tuple[int, str]:
    program = f"from rocm_attn.cli import main\nraise SystemExit(main({list(command.words[1:])}))"
    code, output = reader.run(program, name="command", folder=Path.cwd())
    if command.output:
        Path(command.output).write_text(output)
        return code, ""
    return code, output
