"""The list of guards: each has a proof, a line in the documentation and a switch for debugging only."""

import ast
import dataclasses
import json
import logging
import re
from typing import Any

import pytest
import torch

from rocm_attn.cli import BAD_INPUT, DONE, main
from rocm_attn.errors import BadSetting, RocmAttnError
from rocm_attn.guards.registry import GUARDS, Guard, Guards, guards_from_settings
from rocm_attn.machine.settings import DEBUG, DISABLE_GUARDS, WATCH_STATES, Settings, read_settings, settings
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.echo import NoEcho
from rocm_attn.step.options import RuntimeOptions
from rocm_lab.faults.wrong_twins import WRONG_TWINS
from rocm_serve.engine import Engine
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.docs.guards import PAGE, page
from tests.amd.forked import run_python
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.tiny_model import tiny_model
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

each_guard = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.id)


def test_every_safeguard_is_registered_once() -> None:
    ids = [guard.id for guard in GUARDS]
    assert len(set(ids)) == len(ids)
    places = [guard.place for guard in GUARDS]
    assert sorted(places) == sorted(places_in(Guards()))


def places_in(part: Any) -> list[tuple[str, ...]]:
    """Returns the places of all guards of a part: its fields, or those of its own parts."""
    places: list[tuple[str, ...]] = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        is_part = type(value).__name__.endswith("Guards")
        places += [(field.name, *place) for place in places_in(value)] if is_part else [(field.name,)]
    return places


@each_guard
def test_every_safeguard_has_a_test_that_runs_without_it(guard: Guard) -> None:
    file, _, name = guard.test.partition("::")
    source = (ROOT / file).read_text()
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    body = ast.get_source_segment(source, function) or ""
    assert f'without("{guard.id}")' in body
    assert "ALL_ON" in body


@each_guard
def test_a_safeguard_is_switched_off_alone(guard: Guard) -> None:
    assert Guards().off == ()
    guards = Guards().without(guard.id)
    assert guards.off == (guard.id,)
    assert guard.value_in(guards) is WRONG_TWINS[guard.id]
    assert Guards().without(*[other.id for other in GUARDS]).off == tuple(other.id for other in GUARDS)


@each_guard
def test_a_runtime_is_built_with_any_safeguard_off_and_says_so(
    guard: Guard, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rocm_attn"):
        serving = World.one_layer(device, Guards().without(guard.id), graphs=False)
    assert serving.runtime.guards.off == (guard.id,)
    assert f"safeguards are switched off: {guard.id}" in caplog.text


def test_compiling_ahead_on_a_device_that_runs_nothing_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    guards = Guards()
    guards = dataclasses.replace(guards, publishing=dataclasses.replace(guards.publishing, new_echo_check=NoEcho))
    with caplog.at_level(logging.WARNING, logger="rocm_attn"):
        guards.warn()
    assert (guards.off, caplog.text) == ((), "")


def test_the_documentation_lists_the_safeguards_as_they_are() -> None:
    text = PAGE.read_text()
    assert text == page(), "python -m tests.amd.docs.guards writes it anew"
    _, *measured = text.split("<!-- without a safeguard on ")
    # Each table of the random tester has a row per guard, and ends in a part without guards.
    tables = [re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) for table in measured]
    assert [ids for ids in tables if ids] == [[guard.id for guard in GUARDS]] * 2


def test_every_id_that_the_documentation_names_exists() -> None:
    ids = {guard.id for guard in GUARDS}
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text()
        for named in re.findall(rf"{DISABLE_GUARDS}=([\w,]+)", text):
            assert set(named.split(",")) <= ids | {"id"}, path.name


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Settings()),
        ({DEBUG: "", DISABLE_GUARDS: ""}, Settings()),
        ({DEBUG: "0"}, Settings()),
        ({DEBUG: " 1 "}, Settings(debug=True)),
        ({DEBUG: "1", DISABLE_GUARDS: "pads"}, Settings(True, ("pads",))),
        ({DEBUG: "1", DISABLE_GUARDS: " pads, capacity,"}, Settings(True, ("pads", "capacity"))),
    ],
)
def test_the_environment_is_read_into_a_value(environment: dict[str, str], expected: Settings) -> None:
    assert read_settings(environment) == expected
    assert set(guards_from_settings(expected).off) == set(expected.disable_guards)


@pytest.mark.parametrize("switch", [DEBUG, WATCH_STATES])
@pytest.mark.parametrize("value", ["yes", "2", "true", "-1"])
def test_a_switch_that_is_neither_0_nor_1_is_refused(value: str, switch: str) -> None:
    with pytest.raises(BadSetting, match=f"{switch} is '{value}'; it must be 0 or 1"):
        read_settings({switch: value})


@pytest.mark.parametrize("debug", [{}, {DEBUG: "0"}])
def test_safeguards_stay_on_without_the_debug_flag(debug: dict[str, str]) -> None:
    with pytest.raises(BadSetting, match=f"set {DEBUG}=1 too"):
        read_settings({DISABLE_GUARDS: "pads", **debug})


def test_an_unknown_safeguard_is_named_with_the_known_ones() -> None:
    with pytest.raises(BadSetting, match=r"no safeguard has the id 'padding'; the ids are pads, store_drops, "):
        guards_from_settings(read_settings({DEBUG: "1", DISABLE_GUARDS: "pads,padding"}))
    with pytest.raises(BadSetting, match="chosen is a dict; it must be of type Settings"):
        guards_from_settings({DEBUG: "1"})  # type: ignore[arg-type]


def test_a_runtime_takes_its_safeguards_from_the_environment(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off() -> tuple[str, ...]:
        runtime = build_runtime(
            [small_problem()],
            RuntimeOptions(num_pages=4, max_num_seqs=2, max_kv_len=8, provider="torch"),
            device=device,
        )
        return runtime.guards.off

    monkeypatch.setenv(DEBUG, "1")
    monkeypatch.setenv(DISABLE_GUARDS, "pads,row_zero")
    assert off() == ("pads", "row_zero")
    # Read once: a process does not change its guards later.
    monkeypatch.delenv(DISABLE_GUARDS)
    assert off() == ("pads", "row_zero")


def test_the_engines_report_names_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without a guard gives other text, or reports why it gives none: the switch takes effect there."""
    loaded = tiny_model()
    requests = [Request(tuple(range(1, 6 + seq)), 12) for seq in range(5)]

    def generated() -> tuple[tuple[str, ...], object]:
        settings.cache_clear()
        engine = Engine(loaded, EngineOptions(page_size=4, max_batch_size=8, chunk=16, graphs=False, max_kv_len=64))
        off = engine.report().guards_off
        try:
            return off, [completion.token_ids for completion in engine.generate(requests)]
        except RocmAttnError as reported:
            return off, str(reported)

    off, tokens = generated()
    assert isinstance(tokens, list)
    assert off == ()
    monkeypatch.setenv(DEBUG, "1")
    monkeypatch.setenv(DISABLE_GUARDS, "full_refresh")
    off, other_tokens = generated()
    assert off == ("full_refresh",)
    assert other_tokens != tokens


def test_the_command_prints_a_list_of_objects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DEBUG, "1")
    monkeypatch.setenv(DISABLE_GUARDS, "capacity")
    assert main(["guards", "--json"]) == DONE
    listed = json.loads(capsys.readouterr().out)
    assert [set(guard) for guard in listed] == [{"id", "prevents", "report", "on", "test"}] * len(GUARDS)
    assert [guard["id"] for guard in listed if not guard["on"]] == ["capacity"]


def test_the_command_refuses_a_wrong_environment_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DISABLE_GUARDS, "capacity")
    assert main(["guards"]) == BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_help_of_the_command_needs_no_torch() -> None:
    code = (
        "import sys\nfrom rocm_attn.cli import main\n"
        "try:\n    main(['guards', '--help'])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    assert run_python("-c", code).startswith("usage: rocm-attn guards")
