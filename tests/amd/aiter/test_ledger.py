"""The ledger of AITER's releases: its page, its data, and how its script reads sources. No clone of AITER is needed."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_attn.machine.aiter_releases import releases
from rocm_attn.providers.aiter.library import ENTRY_POINTS, AiterFunction
from rocm_lab.ledger import page
from rocm_lab.ledger.checkout import SourceTree, clone_named
from rocm_lab.ledger.sources import declared, functions, pins, recorded

STARS = "from .ops.first import *\nfrom .ops.second import *\nfrom .ops.third import one\n"


def test_a_function_is_read_where_it_is_imported_from(tmp_path: Path) -> None:
    files = {
        "aiter/__init__.py": STARS,
        "aiter/ops/first.py": "def attend(q, k=None):\n    pass\n\n\ndef scores(q):\n    pass\n",
        "aiter/ops/second.py": "def attend(q, v, out=None):\n    pass\n",
        "aiter/ops/third.py": "def attend(nothing):\n    pass\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    named = ("-c", "user.name=a", "-c", "user.email=a@invalid")
    for command in (("init", "--quiet"), ("add", "--all"), (*named, "commit", "--quiet", "--message", "v1")):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    tree = SourceTree(tmp_path, "HEAD")
    found = declared(AiterFunction("attend", ("aiter",)), "v1", tree)
    assert (found.file, found.parameters) == ("aiter/ops/second.py", "q v out="), "the last star counts"
    elsewhere = declared(AiterFunction("scores", ("aiter.ops.new", "aiter.ops.first")), "v1", tree)
    assert elsewhere.file == "aiter/ops/first.py", "places are tried in order"
    assert declared(AiterFunction("attend", ("aiter.ops.new",)), "v1", tree).file == ""


def test_a_clone_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AITER_SOURCE", raising=False)
    with pytest.raises(ValueError, match="AITER_SOURCE is not set; set it to the folder of a clone"):
        clone_named()


def test_the_page_is_current() -> None:
    assert page.PAGE.read_text() == page.page(), "run python -m rocm_lab.ledger.page"


def test_the_data_has_every_release_that_was_read_and_every_function_that_is_called() -> None:
    sources = recorded()
    assert list(sources.dates) == [each.name for each in releases() if each.was_read]
    assert {each.name for each in sources.declared} == {function.name for function in functions()}
    assert all(pin.evidence for pin in pins())
    assert set(sources.commits) == {pin.aiter for pin in pins() if not pin.aiter.startswith("v")}


def test_a_kernel_does_not_agree_with_a_release_that_lacks_a_parameter_or_the_function() -> None:
    sources, kernel = recorded(), "aiter.unified_attention[vectorised]"
    newest = list(sources.dates)[-1]
    assert page.agreeing(sources, kernel)[-1] == newest
    assert "v0.1.15" not in page.agreeing(sources, kernel), "it takes no shuffled_kv_cache"
    gone = replace(sources.at("unified_attention", newest), since=newest, file="", parameters="")
    without = replace(sources, declared=(*sources.declared, gone))
    assert newest not in page.agreeing(without, kernel)
    assert page.agreeing(without, "aiter.pa_decode_gluon")[-1] == newest
    assert set(ENTRY_POINTS) > {kernel}


def test_a_run_is_told_from_the_table_of_runs() -> None:
    lines = [
        "| v0.1.20-0-gfc2e5d57fb | 2026-08-18 | 3.9.0 | gfx942 | mla_decode_fwd | 3 | 0.0078 | 3 right | 2026-11-20 |",
        "| v0.1.20-46-ge4048607a5 | 2026-08-22 | 3.9.0 | gfx950 | pa_decode_gluon (eight bits) | 7 | 0.0036 | 5 right; "
        "a, b: wrong: too large | 2026-11-21 |",
    ]
    first, second = page.runs("\n".join(lines))
    assert (first.release, first.where, first.kernel, first.cases) == ("v0.1.20", "gfx942", "mla_decode_fwd", 3)
    assert (second.release, second.kernel) == ("0.1.21.dev46", "pa_decode_gluon (eight bits)")
    assert "5 of 7 on gfx950" in page._ran([second])
