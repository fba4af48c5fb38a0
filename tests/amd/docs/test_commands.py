"""Every command of the pages is run, or its page gives the reason why not; in both cases the command must exist."""

import argparse
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rocm_attn.cli.parser import build_parser
from tests.amd.docs.commands import (
    commands_of,
    files_of,
    lines,
    record_steps,
    run,
    scratch,
    script,
    shell_blocks,
    shows,
    typed,
)
from tests.amd.docs.pages import Block, pages
from tests.amd.docs.reader import Reader, asked_for, installed_by, reader_of, reader_with
from tests.amd.docs.served import against_a_server, served_until_reported
from tests.amd.house.source_tree import ROOT

BLOCKS = shell_blocks()
PARSER = build_parser()


def each(chosen: list[Block]) -> pytest.MarkDecorator:
    """Returns a test for each of these blocks; nightly ones are marked so. Readers of one environment come together."""
    night = pytest.mark.nightly
    ordered = sorted(chosen, key=lambda block: sorted(asked_for((ROOT / block.page).read_text())))
    return pytest.mark.parametrize(
        "block", [pytest.param(block, marks=night if block.at_night else (), id=str(block)) for block in ordered]
    )


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch(tmp_path)
    monkeypatch.chdir(tmp_path)


@each([block for block in BLOCKS if block.language == "bash" and not (block.reason or block.server or block.serves)])
def test_a_block_runs(block: Block) -> None:
    runs(block, script(block))


def runs(block: Block, text: str) -> None:
    """Runs the text of a block as its reader.

    Our commands run line by line in the reader's process. Lines of other blocks may need variables set by earlier
    ones, so such a block runs whole.
    """
    ours = all(command.is_ours and not command.variables for command in commands_of(text))
    for line in lines(text) if ours else [text]:
        if found := commands_of(line):
            code, output = run(line, reader_of(ROOT / block.page))
            # The doctor's exit code depends on the machine.
            allowed = (0, 1) if found[0].words[:2] == ("rocm-attn", "doctor") else (0,)
            assert code in allowed, f"{line}\n{output}"


@each([block for block in BLOCKS if block.server])
def test_a_block_that_speaks_to_a_server_runs(block: Block) -> None:
    with against_a_server(block.text) as text:
        runs(block, text)


@pytest.mark.nightly  # each loads SmolLM2
@each([block for block in BLOCKS if block.serves])
def test_a_block_that_serves_does_so_until_it_is_reported_to_end(block: Block) -> None:
    (command,) = commands_of(block.text)
    assert command.is_ours
    code, output = served_until_reported(command.words[1:], reader_of(ROOT / block.page))
    assert code == 0, output
    assert "listening on" in output


@each([block for block in BLOCKS if not block.reason and block.language == "console"])
def test_a_console_shows_what_is_printed(block: Block) -> None:
    if "last_steps.json" in block.text:
        record_steps(Path("last_steps.json"))
    for line, said in typed(block):
        _, output = run(line, reader_of(ROOT / block.page))
        assert shows(said, output), f"{line}\n{output}"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_command_is_one_that_there_is(block: Block) -> None:
    """Checks that `rocm-attn ...` parses, and that scripts and modules of this repository exist."""
    found = commands_of(script(block))
    assert found
    for command in found:
        if command.is_ours:
            PARSER.parse_args(command.words[1:])
        for file in files_of(command):
            assert (ROOT / file).exists(), file


def flags_of(words: list[str]) -> set[str]:
    """Returns the flags of the command that the words begin with. Raises KeyError for an unknown command."""
    parser, name = PARSER, iter(words)
    while below := [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]:
        word = next(name, None)
        if word is None:
            return set()
        parser = below[0].choices[word]
    return set(parser._option_string_actions)


def test_a_command_within_a_sentence_has_the_flags_that_it_is_given() -> None:
    found = [(page, words) for page in pages() for words in re.findall(r"`rocm-attn ([^`]+)`", page.read_text())]
    assert len(found) > 20
    for page, words in found:
        name, *others = words.split()
        if name.isupper() or name == "..." or name.endswith(":"):  # a placeholder for any command, or its output
            continue
        flags = {word for word in others if word.startswith("--")}
        assert flags <= flags_of([name, *others]), f"{page.name}: rocm-attn {words}"
    assert "--suite" in flags_of(["bench", "kernels"])
    with pytest.raises(KeyError):
        flags_of(["bench", "no-such-command"])


@pytest.fixture
def library_alone() -> Reader:
    return reader_with(asked_for("A page that installs nothing further."))


def test_what_a_page_installs_is_read_from_blocks_and_from_sentences() -> None:
    page = "\n".join(
        (
            "```bash",
            "pip install . './rocm_serve[server,otel]'   # the engine",
            "pip install torch --index-url https://example.org/whl",
            "```",
            "It needs `pip install",
            "--no-deps 'openai>=1.60'`, and no pip install of others.",
        )
    )
    assert asked_for(page) == {"rocm-attn", "rocm-serve[server,otel]", "torch", "openai>=1.60"}
    assert asked_for("") == {"rocm-attn"}


def test_an_extra_brings_its_packages_and_theirs_and_no_other_extra_does() -> None:
    plain, server = installed_by({"rocm-attn", "rocm-serve"}), installed_by({"rocm-attn", "rocm-serve[server]"})
    assert {"torch", "numpy", "tokenizers"} <= plain < server
    assert {"fastapi", "starlette", "uvicorn"} <= server - plain  # Starlette is FastAPI's
    assert not {"pytest", "openai", "rocm-lab", "matplotlib"} & server


@pytest.mark.parametrize("hidden", ["openai", "rocm_serve", "pytest"])
def test_code_that_imports_what_its_page_does_not_install_fails(
    hidden: str, library_alone: Reader, tmp_path: Path
) -> None:
    assert find_spec(hidden), "this environment has it"
    code, output = library_alone.run(f"import rocm_attn\nimport {hidden}", name="page.md", folder=tmp_path)
    assert code == 1
    assert f'File "page.md", line 2, in <module>\n    import {hidden}\nModuleNotFoundError' in output


def test_a_command_of_a_package_that_its_page_does_not_install_is_refused(
    library_alone: Reader, tmp_path: Path
) -> None:
    program = "from rocm_attn.cli import main\nraise SystemExit(main(['soak']))"
    code, output = library_alone.run(program, name="command", folder=tmp_path)
    assert code == 2
    assert output.endswith("run in a checkout of rocm_attn: pip install . ./rocm_serve ./rocm_lab\n")


def test_a_program_sees_nothing_of_the_one_before(library_alone: Reader, tmp_path: Path) -> None:
    assert library_alone.run("answer = 42\nprint(answer)", name="one", folder=tmp_path) == (0, "42\n")
    code, output = library_alone.run("print(answer)", name="two", folder=tmp_path)
    assert code == 1
    assert "NameError" in output
