"""A walk types every line that a page has for this machine into one shell, and its log names each that failed."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.amd.docs.pages import Block, blocks
from tests.amd.docs.walk import WALKS, Log, Shell, walk
from tests.amd.house.source_tree import ROOT


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    folder = tmp_path / "checkout"
    folder.mkdir()
    shell = Shell(folder)
    yield shell
    shell.close()


def bash(text: str, reason: str = "", *, serves: bool = False) -> Block:
    return Block("docs/page.md", 7, "bash", text, reason, serves=serves)


def walked(shell: Shell, *page: Block) -> tuple[list[str], str]:
    """Returns the lines that failed, and the log."""
    file = io.StringIO()
    log = Log(file)
    walk(page, shell, log)
    return log.failed, file.getvalue()


def test_what_a_line_sets_is_there_for_the_next_block_and_a_line_that_fails_is_named(shell: Shell) -> None:
    failed, log = walked(shell, bash("given=7\nfalse\n"), bash('echo "it is $given"'), Block("p", 1, "python", "1 / 0"))
    assert [line.splitlines()[0] for line in failed] == ["false", "python - <<'END_OF_BLOCK'"]
    assert "FAILED, code 1" in log
    assert "| it is 7" in log
    assert "| ZeroDivisionError" in log


def test_a_block_that_this_machine_cannot_run_is_left_out_with_the_pages_reason(shell: Shell) -> None:
    failed, log = walked(
        shell,
        bash("touch made", "needs a GPU"),
        bash("touch installed", "needs a package registry"),
        bash("DOCKER=no-such-command bash docker/it.sh", "needs Docker"),
    )
    assert "left out, line 7: needs a GPU: touch made" in log
    assert {path.name for path in shell.folder.iterdir()} == {"installed"}
    # A script of docker/ has to say what it lacks, and this one is not there.
    assert failed == ["DOCKER=no-such-command bash docker/it.sh"]


def test_a_server_stays_until_the_end_of_its_page(shell: Shell) -> None:
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    program += "print('listening on http://here', flush=True); time.sleep(600)"
    serving = bash(f'{sys.executable} -c "{program}"', serves=True)
    failed, log = walked(shell, serving, bash("kill -0 $server"))
    assert failed == []
    assert "done, code 0" in log.splitlines()[-2]
    assert shell.run("kill -0 $server 2>/dev/null")[0] != 0
    failed, _ = walked(shell, bash("false", serves=True))
    assert len(failed) == 2, "it never listened, and its code is not 0"


def test_a_shell_has_none_of_this_processs_packages(shell: Shell) -> None:
    code, said = shell.run("echo ${PYTHONPATH:-none} $PATH")
    assert code == 0
    assert said.startswith("none ")
    assert str(Path(sys.prefix) / "bin") not in said.split(" ", 1)[1].strip().split(":")


def test_each_walk_reads_pages_that_have_something_to_run() -> None:
    for pages in WALKS.values():
        assert any(block.language == "bash" for page in pages for block in blocks(ROOT / page))
