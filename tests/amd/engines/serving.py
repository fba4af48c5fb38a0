"""Helpers for the tests of both engines: prompts, checks of answers, and the places of environments."""

import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.amd.engines.models import VOCABULARY

ROOT = Path(__file__).parents[3]
VENVS = "ENGINE_VENVS"
# Steps that may begin after a faulty one before it is reported.
MOST_STEPS_LATER = 2

NO_SETTINGS: Mapping[str, str] = {}

# rocm-lab's stand-ins for safeguards that are switched off.
_LABORATORY = """[rocm_attn.wrong_twins]
lab = rocm_lab.faults.wrong_twins:WRONG_TWINS
"""

# Tokens of each prompt of each round.
Rounds = list[list[list[int]]]


# Lengths around page sizes of up to 32 and a window of 24; then around pages of 64, for choices of 32 keys among more.
LENGTHS = (1, 5, 9, 16, 23, 24, 25, 31, 32, 33, 40, 70, 100)
LONG_LENGTHS = (1, 5, 31, 32, 33, 63, 64, 65, 100, 128, 130, 170, 200)


def prompts(lengths: Sequence[int] = LENGTHS, num_shared: int = 40) -> list[list[int]]:
    """Returns 16 prompts that are served at once, three of them with a common prefix."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY) for _ in range(count)]

    shared = tokens(num_shared)
    return [*map(tokens, lengths), shared + tokens(3), shared + tokens(20), shared]


def assert_equal_tokens(ours: Sequence[Rounds], stock: Rounds) -> None:
    """Checks that all requests have the tokens of the engine's own backend, and that these are not all alike."""
    assert len({tuple(tokens) for tokens in stock[0]}) > len(stock[0]) // 2
    for rounds in ours:
        assert rounds == stock


def kept_answers(folder: Path, requested: object, answer: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the answers of an engine's own backends to a request, and keeps them for the next time.

    requested: JSON, everything that answers depend on
    """
    words = json.dumps(requested, sort_keys=True)
    kept = folder / "answers" / f"{hashlib.sha256(words.encode()).hexdigest()}.json"
    if not kept.is_file():
        answers = answer()
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(answers))
    found: list[dict[str, Any]] = json.loads(kept.read_text())
    return found


class EngineVenv:
    """An engine's virtual environment, and a folder for files made once; a test without an environment is skipped.

    plugin: an empty folder, which receives the metadata that an installation of this checkout has
    """

    ENGINE: ClassVar[str]
    ENTRY_POINTS: ClassVar[str]

    def __init__(self, plugin: Path) -> None:
        self.folder, self.plugin = Path(os.environ.get(VENVS, "")), plugin
        if VENVS not in os.environ or not self.python.is_file():
            pytest.skip(
                f"NOT RUN: {self.ENGINE} has no environment in {VENVS}={os.environ.get(VENVS, '')!r}; "
                f"run bash scripts/engine_venv.sh {self.ENGINE}"
            )
        metadata = plugin / "rocm_attn-0.1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rocm-attn\nVersion: 0.1.0\n")
        (metadata / "entry_points.txt").write_text(self.ENTRY_POINTS + _LABORATORY)

    @property
    def python(self) -> Path:
        return self.folder / self.ENGINE / "bin" / "python"

    def python_path(self, release: str | None = None) -> str:
        """Returns the paths of this checkout's metadata, of the checkout, and before them of another release.

        That release's Python runs with the environment's other packages. If several metadata have one name, the first
        counts, and an editable install leaves some in the checkout.
        """
        paths = [self.plugin, ROOT]
        if release is not None:
            tree = self.folder / self.ENGINE / f"python-{release}"
            assert (tree / self.ENGINE).is_dir(), f"{tree} is missing: remove {tree.parent} and make it anew"
            paths.insert(0, tree)
        return os.pathsep.join(map(str, paths))

    def environment(self) -> dict[str, str]:
        """Returns the variables of the engine's processes on a CPU, which find our plug-in.

        They have none of this process's variables of this project and of Triton.
        """
        others = {name: value for name, value in os.environ.items() if not name.startswith(("ROCM_ATTN_", "TRITON_"))}
        return {**others, "PYTHONPATH": self.python_path(), "HF_HUB_OFFLINE": "1"}

    def call(self, module: str, requested: Any, scratch: Path, settings: Mapping[str, str]) -> tuple[Any, str]:
        """Returns what a module of ours answers in the environment, and all that it has logged."""
        request, out = scratch / "request.json", scratch / "answers.json"
        request.write_text(json.dumps(requested))
        environment = {**self.environment(), **settings}
        command = [str(self.python), "-m", module, str(request), str(out)]
        with (scratch / "log").open("w+") as log:
            done = subprocess.run(command, cwd=scratch, env=environment, stdout=log, stderr=log, check=False)
            log.seek(0)
            said = log.read()
        assert done.returncode == 0, said[-6000:]
        return json.loads(out.read_text()), said
