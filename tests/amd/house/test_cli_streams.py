"""The command line with a shell's unusual streams, and interrupted at bad moments: a sentence, an exit code."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, INTERRUPTED, READER_GONE, main
from tests.amd.house.source_tree import ROOT
from tests.amd.house.test_cli_families import PROMPT, with_tokenizer
from tests.amd.runner.families import family_model
from tests.amd.runner.hf_models import save
from tests.amd.simulator.test_wait_files import LOADED, USED, assembly_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory that `rocm-attn generate --model` serves."""
    return with_tokenizer(save(family_model("qwen3", eos_token_id=None), tmp_path_factory.mktemp("model")))


def in_a_shell(redirected: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs rocm-attn with its streams redirected by a shell. Its output is read as UTF-8."""
    command = f'"$0" -m rocm_attn.cli "$@" {redirected}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def generate(model: Path, *more: str) -> list[str]:
    return [
        *("generate", "--model", str(model), "--raw", "--device", "cpu", "--provider", "torch"),
        *("--max-new-tokens", "2", "--no-graphs", *more),
    ]


@pytest.mark.nightly  # each run imports torch
@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full"])
def test_without_a_stderr_progress_goes_nowhere_and_the_json_is_whole(redirected: str, model: Path) -> None:
    done = in_a_shell(redirected, *generate(model, "--json", PROMPT))
    assert done.returncode == DONE
    assert json.loads(done.stdout)["results"][0]["prompt"] == PROMPT
    assert done.stderr == ""


def test_a_folder_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["guards"]) == BAD_INPUT
    assert "the current folder was deleted" in capsys.readouterr().err


def test_a_closed_stderr_is_open_to_libraries_and_to_processes_that_a_command_begins() -> None:
    in_a_process = "subprocess.run([sys.executable, '-c', 'import faulthandler; faulthandler.enable()'], check=True)"
    begun = "import os, subprocess, sys; from rocm_attn.cli import main; main(['guards'])"
    said = f"{begun}; {in_a_process}; print(os.readlink('/proc/self/fd/2'))"
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" 2>&-', sys.executable, said],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (DONE, [os.devnull])


@pytest.mark.parametrize(
    "command",
    [("--help",), *(pytest.param(one, marks=pytest.mark.nightly) for one in (("guards",), ("env", "--json")))],
)
def test_a_full_stdout_is_a_sentence(command: tuple[str, ...]) -> None:
    done = in_a_shell(">/dev/full", *command)
    assert done.returncode == FAILED
    assert done.stderr.splitlines()[-1] == "rocm-attn: stdout cannot be written (No space left on device)"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_full_stdout_is_a_sentence_after_a_job_that_failed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes the results at its exit otherwise, and ends with code 120."""
    file = tmp_path / "unwaited.s"
    file.write_text(assembly_text(LOADED, USED))
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    done = in_a_shell(">/dev/full", "waits", str(file))
    said = "rocm-attn: stdout cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (FAILED, said)


@pytest.mark.parametrize("redirected", [">&-"])
def test_a_closed_stdout_is_refused_before_anything_is_done(redirected: str) -> None:
    done = in_a_shell(redirected, "generate", "--model", "nowhere", PROMPT)
    assert (done.returncode, done.stderr) == (
        FAILED,
        "rocm-attn: stdout is closed, and results go there; redirect it to a file or to /dev/null\n",
    )


def test_with_everything_closed_the_exit_code_says_it() -> None:
    assert in_a_shell(">&- 2>&- <&-", "guards").returncode == FAILED


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "traffic", "--requests", "9999"]], ids=str)
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    done = in_a_shell("| head -c 0; exit ${PIPESTATUS[0]}", *arguments)
    assert (done.returncode, done.stderr) == (READER_GONE, "")


def test_what_an_ascii_stdout_cannot_write_comes_out_as_escapes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(generate(model, "w5 é東", "w7")) == DONE
    assert written.getvalue().splitlines()[0] == rb">>> w5 \xe9\u6771"


AT_IMPORT = """
import importlib.abc, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background starts with SIG_IGN
class Interrupted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
from rocm_attn.cli import main
sys.exit(main(sys.argv[1:]))
"""
HELD = AT_IMPORT.replace("raise_signal(signal.SIGINT)", 'raise_signal(signal.SIGINT); print("held", file=sys.stderr)')


@pytest.mark.parametrize(
    ("program", "command", "held"),
    [(AT_IMPORT, ["env"], ""), (HELD, ["explain", "config.json", "--arch", "gfx942"], "held\n")],
    ids=["of a command that runs", "of a command's module"],
)
def test_an_interrupt_of_an_import_is_a_sentence(program: str, command: list[str], held: str) -> None:
    """It waits until a command's module is loaded: some libraries of torch abort the process otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", f"{held}rocm-attn: interrupted\n")
