"""The ledger of AITER's releases: its page, its data, and how its script reads sources. No clone of AITER is needed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_attn.machine.aiter_releases import releases
from rocm_attn.providers.aiter.library import ENTRY_POINTS, AiterFunction
from rocm_lab.ledger import page
from rocm_lab.ledger.checkout import SourceTree, clone_named
from rocm_lab.ledger.regressions import regressions
from rocm_lab.ledger.sources import declared, functions, pins, recorded
from tests.amd.aiter.signatures import E4048607, V0_1_15, Release

# The shape of AITER's score function of an indexer before and after the change that vllm#46856 reports: a kernel whose
# product is taken in "ieee", and its wrapper, which allocates the scores.
KERNEL = """
@triton.jit
def _scores_kernel(q_ptr, k_ptr, logits_ptr, stride_logits_s, BLOCK: tl.constexpr):
    q = tl.load(q_ptr + tl.arange(0, BLOCK))
    for start in range(0, 4):
        scores = tl.dot(q, tl.load(k_ptr + start), input_precision="ieee")
        tl.store(logits_ptr + start * stride_logits_s, scores)
    scores = tl.dot(q, tl.load(k_ptr), input_precision="ieee")
    tl.store(logits_ptr, scores)
"""
WRAPPER = """
def scores(q, k, clean_logits=True):
    seq_len, seq_len_kv = q.shape[0], k.shape[0]
    logits = torch.full((seq_len, seq_len_kv), fill_value=-float("inf"), dtype=torch.float32, device=q.device)
    _scores_kernel[(seq_len,)](q, k, logits, logits.stride(0), BLOCK=128)
    return logits


def other(q):
    return torch.empty(q.shape)
"""
LOST = KERNEL.replace(', input_precision="ieee"', "")
ALIGNED = WRAPPER.replace("(seq_len, seq_len_kv)", "(seq_len, (seq_len_kv + 255) // 256 * 256)").replace(
    "device=q.device)", "device=q.device)[:, :seq_len_kv]"
)
FLAT_KERNEL, FLAT = "aiter/ops/triton/_triton_kernels/scores.py", "aiter/ops/triton/scores.py"
NEW_KERNEL, NEW = "aiter/ops/triton/_triton_kernels/attention/scores.py", "aiter/ops/triton/attention/scores.py"


class Repository:
    """A git repository with a tag for each release."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._git("init", "--quiet")

    def tag(self, name: str, files: Mapping[str, str]) -> SourceTree:
        """Returns the sources of a new release, which has these files and no others."""
        if any(self.root.glob("aiter")):
            self._git("rm", "-r", "--quiet", "aiter")
        for path, text in files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)
        self._git("add", "--all")
        self._git(
            "-c", "user.name=a", "-c", "user.email=a@invalid", "commit", "--quiet", "--allow-empty", "--message", name
        )
        self._git("tag", name)
        return SourceTree(self.root, name)

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", "-C", str(self.root), *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def found_in(repository: Repository, *contents: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Returns rule, function, first release and end of each regression among releases with these files."""
    trees = {f"v{index}": repository.tag(f"v{index}", files) for index, files in enumerate(contents)}
    return [(each.rule, each.function, each.since, each.until) for each in regressions(trees)]


def test_both_faults_of_vllm_46856_are_found_though_the_files_moved(repository: Repository) -> None:
    before, after = {FLAT_KERNEL: KERNEL, FLAT: WRAPPER}, {NEW_KERNEL: LOST, NEW: ALIGNED}
    assert found_in(repository, before, after) == [
        ("precision", "_scores_kernel", "v1", ""),
        ("rows", "scores", "v1", ""),
    ]


def test_each_fault_is_found_alone_and_its_end_too(repository: Repository) -> None:
    right = {NEW_KERNEL: KERNEL, NEW: WRAPPER}
    imprecise, cut = {**right, NEW_KERNEL: LOST}, {**right, NEW: ALIGNED}
    assert found_in(repository, right, imprecise, imprecise, right, cut) == [
        ("precision", "_scores_kernel", "v1", "v3"),
        ("rows", "scores", "v4", ""),
    ]


def test_one_product_of_two_that_loses_its_precision_is_found(repository: Repository) -> None:
    half = KERNEL.replace(', input_precision="ieee"', "", 1)
    assert [each[0] for each in found_in(repository, {NEW_KERNEL: KERNEL}, {NEW_KERNEL: half})] == ["precision"]


def test_other_changes_are_not_reported(repository: Repository) -> None:
    longer = WRAPPER.replace("(seq_len, seq_len_kv)", "(seq_len, seq_len_kv + 1)")
    fewer = KERNEL.replace(
        '    scores = tl.dot(q, tl.load(k_ptr), input_precision="ieee")\n    tl.store', "    tl.store"
    )
    assert fewer != KERNEL
    contents = {NEW_KERNEL: KERNEL, NEW: WRAPPER}
    assert found_in(repository, contents, {NEW_KERNEL: fewer, NEW: longer}, {NEW_KERNEL: fewer}) == []


STARS = "from .ops.first import *\nfrom .ops.second import *\nfrom .ops.third import one\n"


def test_a_function_is_read_where_it_is_imported_from(repository: Repository) -> None:
    files = {
        "aiter/__init__.py": STARS,
        "aiter/ops/first.py": "def attend(q, k=None):\n    pass\n\n\ndef scores(q):\n    pass\n",
        "aiter/ops/second.py": "def attend(q, v, out=None):\n    pass\n",
        "aiter/ops/third.py": "def attend(nothing):\n    pass\n",
    }
    tree = repository.tag("v1", files)
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


@pytest.mark.parametrize(("name", "by_hand"), [("v0.1.15", V0_1_15), ("0.1.21.dev46", E4048607)])
def test_signatures_by_script_are_those_that_the_stand_ins_were_written_from(name: str, by_hand: Release) -> None:
    for function in functions():
        parameters = by_hand.signature(function.name).parameters.values()
        want = " ".join(each.name + "=" * (each.default is not each.empty) for each in parameters)
        assert recorded().at(function.name, name).parameters == want, function.name


def test_the_data_has_both_faults_of_vllm_46856() -> None:
    found = {(each.rule, each.function): each.since for each in recorded().regressions}
    assert found["precision", "_fp8_mqa_logits_kernel"] == found["rows", "fp8_mqa_logits"] == "v0.1.15"


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
