"""The soak finds nothing in a correct runtime, and finds every planted fault."""

import json
import math
import os
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.cli import DONE, FAILED, INTERRUPTED, main
from rocm_attn.errors import BadSetting, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import attention, metadata
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.kept_pages import KeptIds, KeptPages
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.providers.torch_ref import TorchExtend, TorchMasked
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.layers import StepLayers
from rocm_lab.soak.scenario import LONG_KV_LEN, STEPS, Ladders, Scenario
from rocm_lab.soak.soak import MAX_HOST_GROWTH_BYTES, Soak, SoakFailed, host_bytes_in_use

# Few sizes: faults are found in few steps, so captures would take most of the time.
SMALL = replace(Scenario(), ladders=(Ladders((4, 10), (16, 40)),))
ALMOST_ALL_EAGER = replace(SMALL, ladders=(Ladders((1,), (1,)),))
CPU = torch.device("cpu")


def soak_of(scenario: Scenario, **options: Any) -> Soak:
    """Returns a soak of seed 0 in float32 on the CPU, but for these options."""
    return Soak(scenario, **{"seed": 0, "device": CPU, "provider": "torch", "dtype": torch.float32, **options})


def found(scenario: Scenario, steps: int = 200, **options: Any) -> SoakFailed:
    """Returns the failure that ends the soak of a runtime with a fault."""
    with pytest.raises(SoakFailed) as failed:
        soak_of(scenario, **options).run(steps)
    return failed.value


def wrap(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, change: Callable[..., Any]) -> None:
    """Replaces owner.name by a function that gets the original first."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


class Fuse:
    """True once: in the first call at or after a step, whatever the runtime does in addition to the soak's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self._steps_left: int | None = step

        def play(original: Callable[..., object], *args: Any) -> object:
            if self._steps_left is not None:
                self._steps_left -= 1
            return original(*args)

        wrap(monkeypatch, Soak, "_play", play)

    def __call__(self) -> bool:
        if self._steps_left is None or self._steps_left > 0:
            return False
        self._steps_left = None
        return True


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_the_steps_before_an_interrupt_are_reported(
    by: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A night of steps under `timeout 8h` ended without a word."""
    ends = Fuse(monkeypatch, 4)

    def play(original: Callable[..., object], *args: Any) -> object:
        if ends():
            os.kill(os.getpid(), by)
        return original(*args)

    wrap(monkeypatch, Soak, "_play", play)
    assert main(["soak", "--steps", "2000", "--device", "cpu", "--provider", "torch", "--json"]) == INTERRUPTED
    said = capsys.readouterr()
    assert json.loads(said.out)["report"]["steps"] == 4
    assert "rocm-attn: interrupted" in said.err


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sound_runtime_soaks_without_a_finding(seed: int, device: torch.device) -> None:
    scenario = replace(Scenario.of_seed(seed), reopen_every=100)
    report = soak_of(scenario, seed=seed, device=device, provider="auto").run(300)
    assert report.steps == 300
    assert report.reopens == 3
    assert all(report.actions.values()), report.actions
    assert sum(report.actions[step] for step in STEPS) == sum(report.ways.values()) == 300
    assert 0 < report.captures < report.replays < 300, "graphs and eager steps both have to occur"
    for kind in ("tree", "share", "draft"):
        assert all(report.ways[f"{kind} {way}"] > 0 for way in ("captured", "replayed", "eager")), report.ways
    assert report.refused > 0
    assert 0 < report.worst_error <= 1


@pytest.mark.nightly
def test_recurrent_states_soak_without_a_finding(device: torch.device) -> None:
    report = soak_of(Scenario.of_seed(0).with_states(), device=device, provider="auto").run(300)
    assert report.actions["begin"] > 1, "each of them at a checkpoint"
    assert report.actions["verify"] > 5
    assert 0 < report.captures < report.replays
    assert 0 < report.worst_error <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scenario", [SMALL, SMALL.with_states()], ids=["attention", "states"])
def test_narrow_types_stay_within_their_bounds(dtype: torch.dtype, scenario: Scenario, device: torch.device) -> None:
    report = soak_of(scenario, seed=2, device=device, provider="auto", dtype=dtype).run(60)
    assert 0.01 < report.worst_error <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 3])
def test_a_sound_deterministic_runtime_gives_the_bits_of_each_request_alone(seed: int, device: torch.device) -> None:
    scenario = replace(Scenario.of_seed(seed, LONG_KV_LEN).in_order(), alone_every=2)
    report = soak_of(scenario, seed=seed, device=device, provider="auto").run(70)
    assert report.deterministic
    assert report.served_alone > 20
    assert 0 < report.captures < report.replays
    assert f"deterministic: {report.served_alone} sequences bitwise equal to runs alone" in str(report)


@pytest.mark.nightly
def test_cuts_that_follow_from_the_batch_show_in_bits_alone() -> None:
    scenario, guards = Scenario.of_seed(0, LONG_KV_LEN).in_order(), Guards().without("cut_points")
    failed = found(replace(scenario, alone_every=1), 70, guards=guards)
    assert "differs bitwise from the same request run alone, by up to" in failed.finding.what
    unseen = soak_of(replace(scenario, alone_every=1000), guards=guards).run(70)
    assert unseen.worst_error < 1, "the oracle's bounds allow it"


def test_a_seed_gives_the_same_calls_each_time_and_another_seed_others() -> None:
    def calls_of(seed: int) -> list[str]:
        soak = soak_of(ALMOST_ALL_EAGER, seed=seed)
        soak.run(15)
        return soak._scene.log

    first = calls_of(3)
    assert calls_of(3) == first
    assert calls_of(4) != first


@pytest.mark.parametrize("size", [40, 4_000, 4_000_000], ids=["small objects", "blocks", "mapped blocks"])
def test_memory_counts_until_it_is_freed(size: int) -> None:
    """Allocators keep much of it for later."""
    allocated = 40_000_000
    before = host_bytes_in_use()
    held = [bytes(size) for _ in range(allocated // size)]
    assert host_bytes_in_use() - before >= allocated
    del held[: -len(held) // 20]  # the last ones lie above the others
    assert host_bytes_in_use() - before < 0.75 * allocated


# Each plants a mistake.


def accepted_drafts_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionRuntime, "move_accepted", lambda *_: None)


def a_table_update_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Fuse(monkeypatch, 25)

    def table_update(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not lost():
            original(*args, **kwargs)

    wrap(monkeypatch, metadata, "table_update", table_update)


def a_log_sum_exp_has_another_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def paged_decode(original: Callable[..., None], args: AttendArgs, **kwargs: Any) -> None:
        original(args, **kwargs)
        assert args.lse is not None
        args.lse.mul_(1 / math.log(2))

    wrap(monkeypatch, attention, "paged_decode", paged_decode)


def a_tree_is_seen_as_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchMasked, "attend", lambda kernel, *args: TorchExtend(kernel.problem).attend(*args))


def an_output_is_not_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = Fuse(monkeypatch, 30)

    def store_and_attend(original: Callable[..., None], *args: Any) -> None:
        *inputs, out, lse = args
        original(*inputs, torch.empty_like(out) if skipped() else out, lse)

    wrap(monkeypatch, StepLayers, "store_and_attend", store_and_attend)


def the_last_token_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(original: Callable[..., None], step: StepTensors, **kwargs: Any) -> None:
        original(step, **kwargs)
        step.last_token_of_seq.sub_(1).clamp_(min=0)

    wrap(monkeypatch, metadata, "fill", fill)


def a_forward_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(original: Callable[..., None], step: StepTensors, **kwargs: Any) -> None:
        assert step.counts[0].item() >= 0
        original(step, **kwargs)

    wrap(monkeypatch, metadata, "fill", fill)


def shared_pages_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVPool, "copy_pages", lambda *_: None)


def a_buffer_moves_under_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_addresses(original: Callable[..., None], runner: StepRunner) -> None:
        table = runner._runtime.table.space(Space.FULL)
        table.entries = table.entries.clone()
        original(runner)

    wrap(monkeypatch, StepRunner, "check_addresses", check_addresses)


def the_last_step_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(original: Callable[..., None], soak: Soak) -> None:
        counts = soak._scene.runtime.gate._publisher._lines[0].counts
        assert counts is not None
        counts[3] = 1
        original(soak)

    wrap(monkeypatch, Soak, "_close", close)


def kept_pages_are_handed_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(original: Callable[..., KeptIds], kept: KeptPages, *args: Any) -> KeptIds:
        ids = original(kept, *args)
        for table in kept._rows.spaces:
            np.subtract.at(table._holders, kept.pages(ids, table.space), 1)
        return ids

    wrap(monkeypatch, KeptPages, "keep_all", keep)
    monkeypatch.setattr(Soak, "_audit", lambda *_: None)  # it would find the fault first


def pages_are_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = Fuse(monkeypatch, 12)

    def free(original: Callable[..., None], table: RequestTable, row: int) -> None:
        if not table.is_admitted(row) or not forgotten():
            original(table, row)

    wrap(monkeypatch, RequestTable, "free", free)


def memory_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def reopen(original: Callable[..., None], *args: Any) -> None:
        kept.append(torch.zeros(MAX_HOST_GROWTH_BYTES // 8, dtype=torch.uint8))
        original(*args)

    wrap(monkeypatch, StepRunner, "reopen", reopen)


VALUES = "is off by|is not finite|holds something else"
DRAFTS = replace(ALMOST_ALL_EAGER, weights={"admit": 3, "draft": 6, "decode": 2, "extend": 1, "free": 0.5})
TREES = replace(SMALL, weights={"admit": 3, "tree": 6, "decode": 2, "extend": 1}, most_nodes=9)
# A step that shares prefixes merges by LSE, and may meet pages that were given away.
APART = ALMOST_ALL_EAGER.without("share")
PLANTED = [
    pytest.param(accepted_drafts_stay_where_they_are, TREES, VALUES, marks=pytest.mark.nightly),
    pytest.param(
        a_table_update_is_lost_once,
        ALMOST_ALL_EAGER,
        f"{VALUES}|the device's table|had no page of its own",
        marks=pytest.mark.nightly,
    ),
    pytest.param(a_log_sum_exp_has_another_base, APART, "the LSE of token"),
    *(
        pytest.param(
            a_tree_is_seen_as_a_chain,
            scenario.without("mask", "spans"),
            "a verify step: layer 0: .* is off by",
            marks=pytest.mark.nightly,
        )
        for scenario in (SMALL, ALMOST_ALL_EAGER)
    ),
    pytest.param(
        an_output_is_not_written_once,
        ALMOST_ALL_EAGER,
        "is not finite|a padded token's output",
        marks=pytest.mark.nightly,
    ),
    pytest.param(the_last_token_is_another, ALMOST_ALL_EAGER, "last tokens"),
    pytest.param(a_forward_cannot_be_captured, SMALL, "graphs were switched off"),
    pytest.param(shared_pages_are_not_copied, ALMOST_ALL_EAGER, VALUES),
    pytest.param(
        a_buffer_moves_under_a_graph,
        SMALL,
        f"after step {SMALL.audit_every}: GraphStale: table was int32",
        marks=pytest.mark.nightly,
    ),
    pytest.param(the_last_step_goes_wrong, ALMOST_ALL_EAGER, "a new token had no page of its own"),
    pytest.param(kept_pages_are_handed_out_again, SMALL.without("share"), VALUES, marks=pytest.mark.nightly),
    pytest.param(pages_are_never_given_back, APART.without("fork", "begin"), "pages are held by no row"),
    pytest.param(memory_is_not_given_back, replace(ALMOST_ALL_EAGER, reopen_every=4), "memory grew by"),
]


@pytest.mark.parametrize(("plant", "scenario", "sign"), PLANTED)
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], scenario: Scenario, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert re.search(sign, str(found(scenario, 20 if plant is the_last_step_goes_wrong else 200)))


@pytest.mark.parametrize(
    ("guard", "scenario", "sign"),
    [
        ("pads", SMALL.without("empty"), "a padded token's|reached the forward|last tokens"),
        ("draft_lengths", DRAFTS, "branch .* of draft step .* is off by"),
        # The other layers attend.
        ("state_lineage", ALMOST_ALL_EAGER.with_states(), "layer [234]: .* (is off by|is not finite)"),
        pytest.param("store_drops", SMALL, "page 0 of layer 0", marks=pytest.mark.nightly),
    ],
)
def test_a_safeguard_that_is_off_is_found(guard: str, scenario: Scenario, sign: str) -> None:
    assert re.search(sign, str(found(scenario, guards=Guards().without(guard))))


def test_an_exception_is_a_finding_with_its_step_and_what_led_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    raises = Fuse(monkeypatch, 17)

    def publish(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if raises():
            raise ZeroDivisionError("planted")
        original(*args, **kwargs)

    wrap(monkeypatch, metadata, "publish", publish)
    failed = found(ALMOST_ALL_EAGER)
    assert failed.finding.step == 17
    assert failed.finding.where == "step 17"
    assert "ZeroDivisionError: ['planted']" in failed.finding.what
    assert failed.finding.history


def test_scenarios_that_cannot_be_played_are_refused() -> None:
    with pytest.raises(BadSetting, match="raise num_pages"):
        Scenario(num_pages=5)
    with pytest.raises(BadSetting, match="no step has a weight"):
        Scenario(weights={"admit": 1})


def test_a_soak_runs_once() -> None:
    soak = soak_of(ALMOST_ALL_EAGER)
    assert soak.run(2).steps == 2
    with pytest.raises(WrongState, match="has already run 2 steps"):
        soak.run(2)


def test_the_command_prints_a_line_or_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["soak", "--steps", "2", "--seed", "3", "--device", "cpu"]
    assert main(arguments) == DONE
    assert capsys.readouterr().out.startswith("2 steps of seed 3 without a mismatch: ")
    assert main([*arguments, "--json"]) == DONE
    report = json.loads(capsys.readouterr().out)["report"]
    assert (report["steps"], report["seed"]) == (2, 3)
    assert report["steps_per_second"] > 0
    assert not report["deterministic"]


def test_the_command_mostly_drafts_and_verifies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--speculative", "--steps", "4", "--device", "cpu", "--json"]) == DONE
    actions = json.loads(capsys.readouterr().out)["report"]["actions"]
    assert sum(actions[kind] for kind in ("draft", "verify", "tree")) >= 2


def test_the_command_soaks_recurrent_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--recurrent", "--steps", "2", "--device", "cpu"]) == DONE
    assert capsys.readouterr().out.startswith("2 steps of seed 0 without a mismatch: ")


@pytest.mark.nightly
def test_the_command_soaks_deterministic_mode_and_says_how_to_find_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["soak", "--steps", "100", "--seed", "0", "--device", "cpu", "--json", "--deterministic"]
    assert main(arguments) == DONE
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["deterministic"]
    assert report["served_alone"] > 0
    monkeypatch.setattr("rocm_attn.selection.build.guards_from_settings", lambda: Guards().without("cut_points"))
    assert main(arguments) == FAILED
    said = json.loads(capsys.readouterr().out)
    assert said["again"].endswith(
        f"--steps {said['finding']['step']} --seed 0 --device cpu --provider auto --dtype float32 --deterministic"
    )


@pytest.mark.nightly
def test_the_command_it_prints_finds_the_same_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KVPool, "copy_pages", lambda *_: None)
    assert main(["soak", "--steps", "500", "--device", "cpu", "--json"]) == FAILED
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert said["again"] in printed.err
    assert f"rocm-attn: {said['finding']['where']}: {said['finding']['what']}" in printed.err
    program, *again = shlex.split(said["again"])
    assert program == "rocm-attn"
    assert main([*again, "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["finding"] == said["finding"]
