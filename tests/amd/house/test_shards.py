"""Cases that are left to the night, and its shards: each test is in one, and one that has passed runs no more."""

import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.amd.fast import cover, leave_to_the_night, of_shard
from tests.amd.house.source_tree import ROOT

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b")


def function(name: str) -> str:
    """Returns a function of scripts/test.sh."""
    script = (ROOT / "scripts" / "test.sh").read_text()
    found = re.search(rf"^{name}\(\) \{{.*?^\}}", script, re.MULTILINE | re.DOTALL)
    assert found
    return found.group()


def item_of(name: str, group: str | None) -> Mock:
    item = Mock(spec=pytest.Function, nodeid=f"tests/test_it.py::test_it[{name}]")
    item.get_closest_marker.return_value = pytest.mark.xdist_group(group).mark if group else None
    return item


def test_each_case_is_in_one_shard_and_a_group_in_the_same_one() -> None:
    items = [item_of(str(number), "a group" if number < 9 else None) for number in range(60)]
    shards = [of_shard(items, f"{number}/4") for number in (1, 2, 3, 4)]
    assert sorted(id(item) for shard in shards for item in shard) == sorted(map(id, items))
    assert all(len(shard) > 3 for shard in shards)
    assert sum(items[0] in shard and items[8] in shard for shard in shards) == 1


def test_two_stages_that_no_shard_can_part_are_not_in_the_same_one() -> None:
    def stages_of(shard: str) -> list[str]:
        stages = "host-long random-long load-long walk-long soak-long"
        loop = "for each in $all_stages; do is_anothers $each || echo $each; done"
        done = subprocess.run(
            [
                "bash",
                "-c",
                f'{function("is_anothers")}\nall_stages="{stages}"\n{loop}',
            ],
            env={**os.environ, "SHARD": shard},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    shards = [stages_of(f"{number}/5") for number in (1, 2, 3, 4, 5)]
    alone = ("random-long", "load-long", "walk-long", "soak-long")
    assert shards == [["host-long", stage] for stage in alone] + [["host-long"]]


@pytest.mark.parametrize("shard", ["6/5", "0/5", "1/0", "2", "a/b", "1/5/5"])
def test_a_shard_that_there_is_not_is_no_pass(shard: str) -> None:
    done = subprocess.run(
        ["bash", "scripts/test.sh", "lint"],
        cwd=ROOT,
        env={**os.environ, "SHARD": shard, "NO_VENV": "1"},
        capture_output=True,
        text=True,
    )
    said = f"SHARD is '{shard}'; give the number of a part and the number of parts, such as 2/5\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_a_shard_that_passed_is_not_run_again_at_its_commit(tmp_path: Path) -> None:
    for name, text in {
        ".ci/nightly": (ROOT / ".ci" / "nightly").read_text(),
        ".gitignore": ".venv-test\n",
        "scripts/test.sh": "echo $SHARD >>.venv-test/ran\necho passed >.venv-test/summary\n"
        "[ $SHARD != 2/3 ] || [ -e .venv-test/mended ]\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".venv-test").mkdir()
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*GIT, *command], cwd=tmp_path, check=True)
    results = str(tmp_path / ".venv-test" / "results")
    environment = {**os.environ, "AITER_SOURCE": "", "NIGHT_SHARDS": "3", "NIGHT_RESULTS": results}

    def night(**more: str) -> tuple[int, list[str]]:
        ran = tmp_path / ".venv-test" / "ran"
        ran.write_text("")
        done = subprocess.run(
            ["bash", ".ci/nightly"], cwd=tmp_path, env=environment | more, stdout=subprocess.DEVNULL, check=False
        )
        return done.returncode, ran.read_text().split()

    assert night() == (1, ["1/3", "2/3", "3/3"])
    assert night() == (1, ["2/3"])
    (tmp_path / ".venv-test" / "mended").touch()
    assert night() == (0, ["2/3"])
    assert night() == (0, [])
    assert night(AITER_SOURCE="aiter") == (0, ["1/3", "2/3", "3/3"]), "it has another stage"
    for none in ("0", "08", "all"):
        assert night(NIGHT_SHARDS=none) == (2, [])
    (tmp_path / ".gitignore").write_text(".venv-test\n*.txt\n")
    shutil.rmtree(tmp_path / ".venv-test" / "results")
    assert night()[1] == night()[1] == ["1/3", "2/3", "3/3"], "the files are not the commit's"
    (tmp_path / "scripts" / "test.sh").write_text((tmp_path / "scripts" / "test.sh").read_text() + "\n")
    subprocess.run([*GIT, "commit", "-qam", "second"], cwd=tmp_path, check=True)
    assert night() == (0, ["1/3", "2/3", "3/3"])


def test_a_walk_with_a_failed_line_fails_its_stage_and_its_log_is_printed(tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$4 FAILED" >"$4"; echo "the end" >>"$4"; [ "$3" != operator ]\n')
    (tmp_path / "python").chmod(0o755)

    def walked(*users: str) -> tuple[int, str]:
        program = f"{function('walk_pages')}\nVENV=. verdicts=verdicts\nset -e\nwalk_pages {' '.join(users)}"
        path = f"{tmp_path}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", program], cwd=tmp_path, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True
        )
        return done.returncode, done.stdout

    assert walked("author", "ci") == (0, "walk as author: the end\nwalk as ci: the end\n")
    code, said = walked("author", "operator", "ci")
    assert code == 1
    log = ["./walk-operator FAILED", "the end"]
    assert said.splitlines() == ["walk as author: the end", *log, "walk as operator: the end", "walk as ci: the end"]
    assert (tmp_path / "verdicts").read_text().count("walk as") == 5


def test_a_verdict_is_a_line_of_its_own_after_output_whose_last_line_does_not_end(tmp_path: Path) -> None:
    for name, output in {"one": "whole\n", "two": "no end", "three": ""}.items():
        (tmp_path / f"output-{name}").write_text(output)
        (tmp_path / f"stage-{name}").write_text(f"{name} passed\n")
    program = f"{function('print_ended')}\nVENV=.\nprint_ended one two three four"
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "whole\none passed\nno end\ntwo passed\nthree passed\n"


KINDS, SIZES, GRAPHS = ("dense", "latent", "sparse"), (1, 5, 16, 64), (False, True)


def test_each_value_of_each_parameter_stays_in_few_cases() -> None:
    cases = [(values, values) for values in product(KINDS, SIZES, GRAPHS)]
    chosen = cover(cases)
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(KINDS), set(SIZES), set(GRAPHS)]
    assert len(chosen) == len(SIZES)


class Collected:
    """A plugin that keeps the items that pytest has collected."""

    items: list[pytest.Function]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = [item for item in session.items if isinstance(item, pytest.Function)]


@pytest.mark.nightly  # it collects all of the guards' tests
def test_every_run_has_each_safeguard_of_replayed_steps_with_a_real_provider() -> None:
    """A guard's test with graphs of torch's kernels must have such a case in every run, not only other combinations."""
    collected = Collected()
    plugins = ["benchmark", "schemathesis", "xdist", "cacheprovider", "faulthandler"]
    options = [option for plugin in plugins for option in ("-p", f"no:{plugin}")]
    guards = Path(__file__).parents[1] / "guards"
    assert pytest.main(["--collect-only", "--capture=no", *options, str(guards)], [collected]) == pytest.ExitCode.OK
    night: dict[str, list[bool]] = {}
    for item in collected.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if params.get("graphs") is True and params.get("provider") == "torch":
            is_nights = item.get_closest_marker("nightly") is not None
            night.setdefault(item.nodeid.partition("[")[0], []).append(is_nights)
    assert len(night) > 30
    assert [test for test, cases in night.items() if all(cases)] == []


def case_of(values: tuple[str, ...], *marks: pytest.MarkDecorator) -> Mock:
    """Returns a case as pytest has collected it, with its own marks first."""
    item = Mock(spec=pytest.Function, nodeid=f"tests/test_it.py::test_it[{'-'.join(values)}]")
    if values:
        item.callspec = Mock(params=dict(zip(("first", "second"), values, strict=True)))
    else:
        del item.callspec
    own = [mark.mark for mark in (*marks, pytest.mark.parametrize("first", values[:1]))]  # a fixture has the second
    item.iter_markers.side_effect = lambda name: [mark for mark in own if mark.name == name]
    item.get_closest_marker.side_effect = lambda name: next((mark for mark in own if mark.name == name), None)
    return item


def left(*marks: pytest.MarkDecorator) -> list[bool]:
    """Returns for each pair of two values whether it is left to the night."""
    items = [case_of(values, *marks) for values in product("ab", "cd")]
    leave_to_the_night(items)
    return [item.add_marker.called for item in items]


def test_other_combinations_are_left_to_the_night_where_the_mark_says_so() -> None:
    assert left(pytest.mark.fast) == [False, True, True, False]
    assert left() == [False] * 4


def test_a_case_that_is_the_nights_stands_for_no_value() -> None:
    items = [case_of(values, pytest.mark.fast) for values in (("a", "d"), ("b", "c"), ("b", "d"))]
    leave_to_the_night([case_of(("a", "c"), pytest.mark.fast, pytest.mark.nightly), *items])
    assert [item.add_marker.called for item in items] == [False, False, True]


def test_under_the_interpreter_two_cases_are_left_where_the_mark_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    items = [case_of((value, "x"), pytest.mark.fast) for value in "abcd"]
    leave_to_the_night(items)
    assert [item.add_marker.called for item in items].count(False) == 2


@pytest.mark.parametrize("interpreted", [False, True])
def test_every_run_has_as_many_cases_as_their_mark_says(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    fast = pytest.mark.fast
    assert left(fast(2)) == [False, True, True, False]
    assert left(fast(2, interpreted=1)) == [False, True, True, interpreted]
    assert left(fast(interpreted=0)) == [interpreted, True, True, interpreted]
    assert left(fast(1), fast(interpreted=0)) == [interpreted, True, True, True]
