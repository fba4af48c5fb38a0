"""The page of known-bad releases, generated from the table: python -m tests.amd.docs.known_bad writes it."""

from __future__ import annotations

from collections.abc import Iterator

from rocm_attn.machine.known_bad import COMPONENTS, FEATURES, KnownBad, known_bad
from rocm_attn.machine.releases import ReleaseRange
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

_HEAD = """# Known-bad releases

These faults were reported in public by people who serve on an MI300 (gfx942) or an MI350 (gfx950). [The
doctor](debugging.md#it-does-not-start) names those of the installed releases, and `rocm-attn explain CONFIG.json --arch
gfx942 --engine vllm@0.33` those of an engine with a model. `python -m tests.amd.docs.known_bad` writes this page from
`rocm_attn/machine/known_bad.json`; a test holds that it is current. Nothing here was tried by this project: a row says
what its thread says, as of September 2026, and a quote is a line of the thread.

*Bad* begins with the first release that the thread shows to be bad; earlier ones may be bad too. A range without an end
has no known fix: a later release may be good. A range may end late, where a fix is known to be merged and its first
release is not. *With* lists what must come together. The doctor knows no model and no option of an engine, so it lists
a row that needs one without a warning.
"""

_COLUMNS = ("thread", "bad", "with", "what happens", "what helps", "how the versions are known")


def _cells(row: KnownBad) -> Iterator[str]:
    place, _, number = row.thread.partition("#")
    yield f"[{row.thread}](https://github.com/{place}/issues/{number})"
    yield ", ".join(f"{_TITLES[component]} {_span(span)}" for component, span in row.releases.items())
    heads = f"{' or '.join(map(str, row.heads))} query heads a rank" if row.heads else ""
    needed = [f"`{name}={value}`" for name, value in row.environment.items()]
    models = " or ".join(row.models)
    yield ", ".join(filter(None, (" or ".join(row.archs), models, heads, *map(FEATURES.get, row.features), *needed)))
    yield f'{row.effect}: "{row.symptom}"'
    yield row.remedy or ("a later release" if row.is_fixed else "")
    yield f"seen: {row.seen}; {row.end}"


def _span(span: ReleaseRange) -> str:
    return str(span).replace(" and before ", ", before ")


def page() -> str:
    """Returns the text of docs/known_bad.md."""
    sections = []
    for component in COMPONENTS:
        rows = sorted((row for row in known_bad() if row.about == component), key=lambda row: row.thread.lower())
        if rows:
            lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row)) + " |" for row in rows]
            sections.append("\n".join([f"## {_TITLES[component]}", "", *lines, ""]))
    return "\n".join([_HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page())
