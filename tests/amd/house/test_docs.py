"""Claims of the README and the pages: links, files, names, stages, ids that safeguards cite. Their code runs."""

import ast
import re
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.guards.registry import GUARDS
from tests.amd.docs.pages import DOCS, LIST, blocks, menu, pages
from tests.amd.docs.reader import asked_for, reader_of
from tests.amd.docs.served import ADDRESS, against_a_server
from tests.amd.house.source_tree import ROOT

_TOP = r"rocm_attn|rocm_serve|rocm_lab|kernels|hip_graphs|tests|scripts|docs|docker|\.ci"
FILE = rf"`((?:{_TOP})/[\w./-]+?\.?\w+)(?:::(\w+))?`"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", pages(), ids=name_of)


def prose(page: Path) -> str:
    """Returns a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    """Returns the targets of a text's links, except other sites."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]


def sections(page: Path) -> dict[str, str]:
    """Returns the anchor of each heading, as on GitHub, and the text up to the next heading of its level or above."""
    text, found = prose(page), {"": prose(page)}
    for heading in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE):
        rest = text[heading.end() :]
        end = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
        anchor = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
        found[anchor] = rest[: end.start()] if end else rest
    return found


def names_in(file: Path) -> set[str]:
    """Returns the functions, classes and constants at the top of a Python file."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(prose(page)):
        place, _, anchor = link.partition("#")
        target = (page.parent / place) if place else page
        assert target.exists(), link
        assert not anchor or anchor in sections(target), link


@each_page
def test_files_that_a_page_names_exist_and_have_the_names(page: Path) -> None:
    for path, name in re.findall(FILE, prose(page)):
        assert (ROOT / path).exists(), path
        assert not name or name in names_in(ROOT / path), f"{path}::{name}"


def test_every_page_is_in_the_list_once_and_the_readme_leads_to_it() -> None:
    listed = [path for rows in menu().values() for _, path in rows]
    assert len(listed) == len(set(listed))
    assert {path for path in listed if path.startswith("docs/")} == {name_of(page) for page in DOCS.glob("*.md")} - {
        name_of(LIST)
    }
    assert name_of(LIST) in links(prose(ROOT / "README.md"))


def test_every_file_in_the_picture_of_the_architecture_exists() -> None:
    labels = re.findall(r'class="file"[^>]*>([^<]+)<', (DOCS / "architecture.svg").read_text())
    files = [file for label in labels for file in label.split()]
    assert len(files) > 10
    assert [file for file in files if not (ROOT / "rocm_attn" / file).exists()] == []


def test_every_id_that_a_safeguard_cites_is_explained_on_their_page() -> None:
    listed = re.findall(r"^\| ([HG]?\d+) \| \S", prose(DOCS / "guards.md"), re.MULTILINE)
    assert not [name for name, times in Counter(listed).items() if times > 1]
    cited = {name for guard in GUARDS for name in re.findall(r"\b(?:[HG]|seed )\d+\b", guard.report)}
    assert cited
    assert {name.removeprefix("seed ") for name in cited} <= set(listed)
    assert {f"H{number}" for number in range(1, 38)} <= set(listed)


def test_the_page_on_faults_explains_every_bit_of_the_error_word() -> None:
    bits = names_in(ROOT / "kernels/metadata/error_word.py") - {"ERROR_WORD"}
    explained = re.findall(r"^\| `([A-Z_]+)` \| \S", sections(DOCS / "faults.md")["the-error-word"], re.MULTILINE)
    assert Counter(explained) == Counter(bits)


# A name that anyone could register first on an index would be installed. Extras of the project may ask for each other.
NAMED_TO_PIP = re.compile(
    r"pip3? (?:install|download|wheel)\b[^\n`#]*?(?<![\w./-])rocm[-_]attn(?![\w./]|-\d)|(?<![\w./-])rocm[-_]attn\[",
    re.IGNORECASE,
)
FOLDERS = (
    ".ci",
    ".github",
    "rocm_lab",
    "rocm_serve",
    "docker",
    "docs",
    "hip_graphs",
    "kernels",
    "rocm_attn",
    "scripts",
    "tests",
)


def texts_of_the_tree() -> dict[str, str]:
    """Returns every text that people read or a script runs, by its path."""
    found = {}
    for path in (*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))):
        if path.is_file():
            with suppress(UnicodeDecodeError):
                found[path.relative_to(ROOT).as_posix()] = path.read_text()
    return found


@each_page
def test_an_installation_of_the_engine_installs_the_library_too(page: Path) -> None:
    commands = re.findall(
        r"pip\s+install\s([^`#\n]*rocm.serve[^`#\n]*)", page.read_text().replace("install\n", "install ")
    )
    assert [each for each in commands if not re.search(r"(^|\s)\.\s|rocm_attn-", each)] == []


def test_nobody_is_reported_to_install_a_name_that_is_on_no_index() -> None:
    texts = texts_of_the_tree()
    assert {"README.md", "docs/vllm.md", "docker/Dockerfile", "scripts/demo.sh", ".ci/run"} <= set(texts)
    itself = {"pyproject.toml", Path(__file__).relative_to(ROOT).as_posix()}
    said = {
        place: found for place, text in texts.items() if place not in itself and (found := NAMED_TO_PIP.findall(text))
    }
    assert said == {}


def program_of(page: Path) -> str:
    """Returns a page's blocks as one program: a class may continue in the next block."""
    return "\n".join(block.text for block in blocks(page) if block.language == "python")


def pages_with_code() -> list[Path]:
    """Returns pages with Python code, those for readers of one environment after each other."""
    return sorted((page for page in pages() if program_of(page)), key=lambda page: sorted(asked_for(page.read_text())))


@pytest.mark.parametrize("page", pages_with_code(), ids=name_of)
def test_the_code_of_a_page_runs_with_what_the_page_says_to_install(page: Path, tmp_path: Path) -> None:
    """The page asserts its promises itself.

    A tiny model stands for any other, and a server of it for the page's server.
    """
    text = program_of(page)
    with against_a_server(text) if ADDRESS in text else nullcontext(text) as program:
        code, output = reader_of(page).run(program, name=name_of(page), folder=tmp_path)
    assert code == 0, output


README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    """Returns the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs() -> None:
    (example,) = code_blocks("python")
    namespace: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), namespace)
    assert namespace["out"].isfinite().all()
    assert namespace["out"].abs().sum() > 0


def test_every_folder_of_tests_belongs_to_a_stage() -> None:
    script = (ROOT / "scripts" / "test.sh").read_text()
    stages = {name for names in re.findall(r"tests/amd/(?:\{([\w,]+)\}|\w+)", script) for name in names.split(",")}
    stages |= set(re.findall(r"tests/amd/(\w+)", script))
    with_tests = {path.parent.name for path in (ROOT / "tests" / "amd").glob("*/test_*.py")}
    assert with_tests
    assert with_tests <= stages
