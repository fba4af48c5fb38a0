"""A process of tests ends at once if they have passed, and otherwise as Python and pytest end it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amd.house.source_tree import ROOT

CONFTEST = """
from tests.amd.ending import note_end

import atexit

class Freed:
    def __del__(self, say=print):
        say("it was freed")

kept = Freed()
atexit.register(print, "an exit function was called")

def pytest_sessionfinish(session):
    note_end(session)

def pytest_unconfigure(config):
    assert config.rootpath.name != "raises", "an error after the session"
"""


PASSING, FAILING = "def test_it():\n    pass\n", "def test_it():\n    assert False\n"


@pytest.mark.parametrize(
    ("folder", "tests", "code"),
    [
        ("passes", PASSING, pytest.ExitCode.OK),
        ("fails", FAILING, pytest.ExitCode.TESTS_FAILED),
        ("raises", PASSING, pytest.ExitCode.TESTS_FAILED),
    ],
)
def test_exit_functions_are_called_and_the_exit_code_stays_while_only_a_passed_run_frees_nothing(
    folder: str, tests: str, code: pytest.ExitCode, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "conftest.py").write_text(CONFTEST)
    (tmp_path / folder / "test_it.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"],
        cwd=tmp_path / folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "an exit function was called" in done.stdout
    assert ("it was freed" in done.stdout) == (code != pytest.ExitCode.OK)
