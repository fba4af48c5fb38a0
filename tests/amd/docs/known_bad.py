"""The tables of known-bad releases, generated from the table: python -m tests.amd.docs.known_bad writes it."""

from collections.abc import Iterator

from rocm_attn.machine.known_bad import COMPONENTS, FEATURES, KnownBad, known_bad
from rocm_lab.page_parts import with_part
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "known_bad.md"

_TITLES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "atom": "ATOM",
    "aiter": "AITER",
    "rocm": "ROCm",
    "triton": "Triton",
}


_COLUMNS = ("thread", "bad", "with", "what happens", "what helps", "how the versions are known")


def _cells(row: KnownBad) -> Iterator[str]:
    place, _, number = row.thread.partition("#")
    yield f"[{row.thread}](https://github.com/{place}/issues/{number})"
    releases = (f"{_TITLES[component]} {span}" for component, span in row.releases.items())
    yield ", ".join(releases).replace(" and before ", ", before ")
    heads = f"{' or '.join(map(str, row.heads))} query heads a rank" if row.heads else ""
    needed = [f"`{name}={value}`" for name, value in row.environment.items()]
    models = " or ".join(row.models)
    yield ", ".join(filter(None, (" or ".join(row.archs), models, heads, *map(FEATURES.get, row.features), *needed)))
    yield f'{row.effect}: "{row.symptom}"'
    yield row.remedy or ("a later release" if row.is_fixed else "")
    yield f"seen: {row.seen}; {row.end}"


def page() -> str:
    """Returns the text of docs/known_bad.md."""
    sections = []
    for component in COMPONENTS:
        rows = sorted((row for row in known_bad() if row.about == component), key=lambda row: row.thread.lower())
        if rows:
            lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row)) + " |" for row in rows]
            sections.append("\n".join([f"## {_TITLES[component]}", "", *lines, ""]))
    return with_part(PAGE.read_text(), "releases", "\n".join(sections))


if __name__ == "__main__":
    PAGE.write_text(page())
