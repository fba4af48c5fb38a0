"""A page's code meets what its reader has installed, and nothing else of this environment."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.amd.docs.reader import Reader, asked_for, installed_by, reader_with


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
