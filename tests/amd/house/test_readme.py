"""The README's statements are true."""

import re
from typing import Any

from tests.amd.house.source_tree import ROOT

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
