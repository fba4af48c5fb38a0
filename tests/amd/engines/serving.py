"""Helpers for the tests of both engines: prompts, checks of answers, and the places of environments."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.amd.engines.models import VOCABULARY

ROOT = Path(__file__).parents[3]
VENVS = "ENGINE_VENVS"
# Steps that may begin after a faulty one before it is reported.
MOST_STEPS_LATER = 2

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


def engine_folder(engine: str) -> Path:
    """Returns the folder that has an engine's environment, or skips the test with a message that says what to do."""
    folder = os.environ.get(VENVS, "")
    if not folder or not python_of(Path(folder), engine).is_file():
        pytest.skip(
            f"NOT RUN: {engine} has no environment in {VENVS}={folder!r}; run bash scripts/engine_venv.sh {engine}"
        )
    return Path(folder)


def python_of(folder: Path, engine: str) -> Path:
    """Returns the interpreter of an engine's environment."""
    return folder / engine / "bin" / "python"


def python_path(plugin: Path) -> tuple[Path, Path]:
    """Returns the path entries of this checkout's metadata and of the checkout itself.

    If several metadata have one name, the first counts, and an editable install leaves some in the checkout.
    """
    return plugin, ROOT


def environment_without_settings() -> dict[str, str]:
    """Returns this process's environment without variables of this project and of Triton."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ROCM_ATTN_", "TRITON_"))}


def write_metadata(plugin: Path, entry_points: str) -> None:
    """Writes the metadata that an installation of this checkout has into an empty folder on an engine's path."""
    metadata = plugin / "rocm_attn-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rocm-attn\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)
