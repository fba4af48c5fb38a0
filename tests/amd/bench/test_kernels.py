"""A race: wrong results are not timed, energy is counted, and a run records everything needed to repeat it."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from rocm_attn.cli import BAD_INPUT, DONE, INTERRUPTED, main
from rocm_attn.cli import FAILED as EXIT_FAILED
from rocm_attn.machine.target import known_target
from rocm_attn.providers.select import select
from rocm_attn.step.layers import StepLayers
from rocm_lab.bench import contestants as registry
from rocm_lab.bench import energy, result_file
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.ceilings import Ceilings
from rocm_lab.bench.choices import LAYERS, SUITES
from rocm_lab.bench.clocks import in_turn
from rocm_lab.bench.contestant import Contestant, LayerLaunch, NotServed
from rocm_lab.bench.contestants import OwnProvider, contestants
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.host_time import HostOptions, host_rows
from rocm_lab.bench.kernels import FAILED, NOT_SERVED, OK, WRONG, ContestantResult, KernelOptions, Race
from rocm_lab.bench.layers import NAMED
from rocm_lab.bench.machine import cache_bytes
from rocm_lab.bench.peers.torch_sdpa import TorchSdpa
from rocm_lab.bench.result_file import lines_of, read_result
from rocm_lab.bench.step_data import StepData, random_steps
from rocm_lab.bench.suites import SuiteCase, suite
from rocm_lab.cli import bench_kernels
from tests.amd.bench.layers import CPU, LAYER, one_step

Capture = pytest.CaptureFixture[str]
NO_METER = EnergyMeter(lambda: float("nan"), "", "none here")
CEILINGS = Ceilings(1e10, 2e10, 1e12)
SMALL = ("--heads", "4/2", "--head-dim", "16", "--dtype", "float32", "--rounds", "3", "--round-us", "1")


@dataclass(frozen=True)
class Spoilt:
    """A contestant that is right in its first launches, and wrong from then on."""

    launches_right: int

    def prepare(self, data: StepData) -> LayerLaunch:
        launch, count = OwnProvider("torch").prepare(data), [0]

        def run() -> None:
            launch.run()
            count[0] += 1
            if count[0] > self.launches_right:
                data.out[-1] += 1

        return LayerLaunch(run, launch.out, "spoilt")


class Raises:
    """A library that fails when it is called."""

    def prepare(self, data: StepData) -> LayerLaunch:
        return LayerLaunch(Mock(side_effect=RuntimeError("no kernel image\nmore of it")), lambda: data.out, "raises")


class Refuses:
    """A library that does not serve."""

    def prepare(self, data: StepData) -> LayerLaunch:
        raise NotServed("it is not installed")


def race(
    of: dict[str, Contestant],
    *,
    batch: str = "3d40",
    ceilings: Ceilings = CEILINGS,
    meter: EnergyMeter = NO_METER,
    energy_s: float = 0.0,
) -> list[ContestantResult]:
    """Races the contestants on a small case."""
    options = KernelOptions(rounds=4, round_us=1.0, energy_s=energy_s)
    (rows,) = Race(of, CPU, ceilings, options, meter).rows([SuiteCase(LAYER, BatchSpec.parse(batch))])
    return rows


@pytest.mark.parametrize("launches_right", [0, 1, 2, 4, 6])
def test_no_time_is_given_for_a_wrong_result(launches_right: int) -> None:
    """This also holds for a result that is right while it is judged and wrong while it is timed."""
    right, wrong = race({"torch": OwnProvider("torch"), "spoilt": Spoilt(launches_right)})
    assert right.status == OK
    assert len(right.samples.us) == 4
    assert wrong.status == WRONG
    assert not wrong.samples.us
    assert "us" not in wrong.as_json()
    assert "times the tolerance" in wrong.reason
    assert "spoilt" in lines_of([right, wrong])[2]
    assert " us (" not in lines_of([right, wrong])[2]


def test_who_raises_or_is_not_there_is_named_and_the_others_are_timed() -> None:
    raises, refuses, right = race({"raises": Raises(), "refuses": Refuses(), "torch": OwnProvider("torch")})
    assert (raises.status, raises.reason) == (FAILED, "it raised RuntimeError: no kernel image")
    assert (refuses.status, refuses.reason) == (NOT_SERVED, "it is not installed")
    assert right.status == OK
    assert raises.is_bad
    assert not refuses.is_bad


def test_the_share_is_the_floor_by_the_median() -> None:
    (row,) = race({"torch": OwnProvider("torch")})
    assert row.lower_bound_us == row.work.lower_bound_us(bytes_per_s=2e10, flops_per_s=1e12)
    assert row.share == row.lower_bound_us / row.us
    assert min(row.samples.us) <= row.us <= max(row.samples.us)


def test_what_is_faster_than_the_device_can_be_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose launches do nothing leaves the right result of the previous launch in place."""
    monkeypatch.setattr(Race, "_is_past_cache", lambda race, work, sets: True)
    (row,) = race({"torch": OwnProvider("torch")}, ceilings=Ceilings(1.0, 1.0, 1.0))
    assert row.status == WRONG
    assert not row.samples.us
    assert "times the speed" in row.reason


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (
            RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it"),
            EXIT_FAILED,
            "the device failed at 4/2 x 16: 2d50, and the cases from there on",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            EXIT_FAILED,
            "memory ran out at 4/2 x 16: 2d50, and the cases from there on",
        ),
        (MemoryError(), EXIT_FAILED, "memory ran out at 4/2 x 16: 2d50, and the cases from there on"),
        (KeyboardInterrupt(), INTERRUPTED, "rocm-attn: interrupted"),
    ],
    ids=["a fault", "memory of torch", "memory of Python", "an interrupt"],
)
def test_what_was_measured_before_the_device_failed_is_written(
    error: BaseException, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    of_case = Race._of_case

    def failing(race: Race, case: SuiteCase) -> list[ContestantResult]:
        if case.batch == BatchSpec.parse("2d50"):
            raise error
        return of_case(race, case)

    monkeypatch.setattr(Race, "_of_case", failing)
    batches = ("--batch", "3d40", "--batch", "2d50", "--batch", "1d9")
    assert run_kernels(*batches, *SMALL, "--out", str(tmp_path / "run.json")) == code
    assert says in capsys.readouterr().err
    assert {row["batch"] for row in read_result(tmp_path / "run.json").rows} == {"3d40"}


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ((), INTERRUPTED, "rocm-attn: interrupted"),
        (("--max-seconds", "1e-12"), EXIT_FAILED, "no case was begun, and nothing is written; give more seconds"),
    ],
)
def test_a_run_without_a_result_leaves_the_file_of_an_earlier_one(
    more: Sequence[str], code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Ctrl-C in the first case put a file without rows in its place."""
    monkeypatch.setattr(Race, "_of_case", lambda race, case: _press_ctrl_c())
    out = tmp_path / "run.json"
    out.write_text("earlier")
    assert run_kernels("--batch", "3d40", *SMALL, "--out", str(out), "--json", *more) == code
    printed = capsys.readouterr()
    assert says in printed.err
    assert (out.read_text(), printed.out) == ("earlier", "")


def _press_ctrl_c() -> None:
    raise KeyboardInterrupt


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("interrupt", [_press_ctrl_c, _terminate])
def test_what_was_measured_of_the_host_before_an_interrupt_is_written(
    interrupt: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    row = {"case": "a step", "batch": "1d1", "provider": "torch", "us": 1.0, "status": OK}

    def interrupted(*_: object) -> Iterator[dict[str, Any]]:
        yield row
        interrupt()

    monkeypatch.setattr(bench_kernels, "host_rows", interrupted)
    out = tmp_path / "run.json"
    assert main(["bench", "kernels", "--device", "cpu", "--suite", "host", "--out", str(out)]) == INTERRUPTED
    assert json.loads(out.read_text())["rows"] == [row]


@pytest.mark.parametrize("suite", [["--batch", "3d40"], ["--suite", "host"]], ids=str)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    suite: list[str], tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "no folder" / "run.json"
    assert main(["bench", "kernels", "--device", "cpu", *suite, "--out", str(out)]) == BAD_INPUT
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err == f"rocm-attn: --out {out} cannot be written: {out.parent} is not a folder; create it\n"


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_samples_that_a_full_disk_does_not_take_are_printed(
    as_json: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(place: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))

    monkeypatch.setattr(result_file, "whole_file", full)
    assert run_kernels("--batch", "1d9", *SMALL, "--out", str(tmp_path / "run.json"), *as_json) == BAD_INPUT
    streams = capsys.readouterr()
    row, *_ = json.loads(streams.out[streams.out.index("{") :])["rows"]
    assert row["samples_us"]
    assert "run.json cannot be written (No space left on device)" in streams.err


def test_energy_is_divided_by_launches_and_tokens() -> None:
    counter = iter([10.0, 70.0])
    meter = EnergyMeter(lambda: next(counter), "test")
    (row,) = race({"torch": OwnProvider("torch")}, meter=meter, energy_s=1e-9)
    # At least one launch, of three tokens.
    assert 0 < row.joules_a_token <= 60 / 3
    (row,) = race({"torch": OwnProvider("torch")})
    assert "joules_a_token" not in row.as_json()


def test_kernels_take_turns() -> None:
    order: list[str] = []

    @dataclass(frozen=True)
    class Noted:
        name: str

        def microseconds(self) -> float:
            order.append(self.name)
            return float(len(order))

        def run(self, seconds: float) -> int:
            return 1

    clock = iter(range(100, 200))
    samples = in_turn([Noted("a"), Noted("b")], 3, lambda: float(next(clock)))
    assert [sampled.us for sampled in samples] == [(1.0, 3.0, 5.0), (2.0, 4.0, 6.0)]
    assert [sampled.mhz for sampled in samples] == [(100.0, 102.0, 104.0), (101.0, 103.0, 105.0)]
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize("batch", ["3d40", "2x7", "2x7+30"])
def test_sdpa_gives_the_same(batch: str) -> None:
    (row,) = race({"sdpa": TorchSdpa()}, batch=batch)
    assert row.status == OK, row.reason


def test_a_library_that_is_not_here_says_so() -> None:
    names = tuple(name for name in registry.PEERS if name != "sdpa")
    assert {row.status for row in race(dict(contestants(names, "")))} == {NOT_SERVED}


def test_every_other_library_refuses_masks_in_the_same_words() -> None:
    data = one_step("3d40", replace(LAYER, custom_mask=True))
    for library in contestants(registry.PEERS, "").values():
        with pytest.raises(NotServed, match=r"^it is measured without custom masks$"):
            library.prepare(data)


def test_the_names_on_the_command_line_are_those_that_there_are() -> None:
    assert tuple(NAMED) == LAYERS
    assert all(suite(name) for name in SUITES)
    assert len(suite("all")) == sum(len(suite(name)) for name in SUITES)


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950"])
def test_every_case_of_a_suite_is_served_by_our_kernels(name: str, arch: str) -> None:
    for problem in dict.fromkeys(case.problem for case in suite(name)):
        for deterministic in (False, True):
            select(problem, known_target(arch), "triton", deterministic=deterministic)


def run_kernels(*arguments: str) -> int:
    return main(["bench", "kernels", "--device", "cpu", *arguments])


def test_a_run_is_written_with_all_that_it_takes_to_repeat_it(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run.json"
    (tmp_path / "trace.jsonl").write_text('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1}')
    batches = ("--batch", "3d40", "--batch", f"@{tmp_path}/trace.jsonl")
    assert run_kernels(*batches, *SMALL, "--out", str(out)) == DONE
    printed = capsys.readouterr().out
    assert "4/2 x 16: 3d40" in printed
    kept = read_result(out)
    assert kept.kind == "kernels"
    assert {"device", "commit", "torch", "date", "runtime"} <= kept.machine.keys()
    assert kept.rest["schema"] == "rocm_attn.bench/1"
    assert {"command", "ceilings", "options", "arch", "energy"} <= kept.rest.keys()
    assert [(row["batch"], row["provider"], row["status"]) for row in kept.rows] == [
        ("3d40", "torch", OK),
        ("3d40", "sdpa", OK),
        ("1d5", "torch", OK),
        ("1d5", "sdpa", OK),
    ]
    assert all(len(row["samples_us"]) == 3 for row in kept.rows if row["status"] == OK)


def test_a_wrong_result_ends_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(registry._PEERS, "sdpa", lambda library: Spoilt(0))
    assert run_kernels("--batch", "3d40", *SMALL, "--json") == EXIT_FAILED
    streams = capsys.readouterr()
    found: dict[str, Any] = json.loads(streams.out)
    statuses = {row["provider"]: row["status"] for row in found["rows"]}
    assert statuses == {"torch": OK, "sdpa": WRONG}
    assert "sdpa on 4/2 x 16: 3d40" in streams.err
    assert "wrong results were not timed" in streams.err


def test_layers_come_from_a_config_and_flags(tmp_path: Path, capsys: Capture) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2, "head_dim": 16}))
    flags = ("--dtype", "float32", "--rounds", "1", "--round-us", "1", "--providers", "torch", "--page-sizes", "8,16")
    scores = ("--window", "20", "--soft-cap", "3", "--sinks", "--kv-encodings", "as-q,e4m3fn/token")
    assert run_kernels("--batch", "2d40", "--config", str(tmp_path), *flags, *scores, "--json") == DONE
    rows = json.loads(capsys.readouterr().out)["rows"]
    layers = [row["layer"] for row in rows]
    assert [(layer["page_size"], layer["kv_encoding"], layer["kv_scales"]) for layer in layers] == [
        (8, "like_q", "none"),
        (8, "e4m3fn", "token"),
        (16, "like_q", "none"),
        (16, "e4m3fn", "token"),
    ]
    assert {(layer["window_left"], layer["logits_soft_cap"], layer["has_sinks"]) for layer in layers} == {
        (19, 3.0, True)
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give --batch, as in --batch 64d4k, or --suite"),
        (["--batch", "64d4q"], "character 1"),
        (["--batch", "@missing.json"], "missing.json cannot be read"),
        (["--suite", "host", "--suite", "decode"], "--suite host is measured alone"),
        (["--batch", "4d4", "--suite", "decode"], "--suite has its own layers"),
        (
            ["--suite", "decode", "--window", "99", "--sinks", "--page-sizes", "32", "--dtype", "float16"],
            "--suite has its own layers and batches; leave out --dtype, --page-sizes, --window, --sinks",
        ),
        (["--suite", "host", "--kv-encodings", "e4m3fn"], "host is measured alone; leave out --kv-encodings"),
        (["--batch", "4d4", "--providers", "fa4"], "provider 'fa4' is not known"),
        (["--batch", "4d4", "--kv-encodings", "int4"], "encoding 'int4' is not known"),
        (["--batch", "4d4", "--heads", "3/2"], "heads"),
        (("--batch", "1d1", "--layer", "llama-8b", "--tp", "8"), "--tp divides the heads of --config"),
        (("--suite", "decode", "--tp", "8"), "--tp divides the heads of --config"),
        (("--batch", "1d1", "--v-head-dim", "64"), "--head-dim and --v-head-dim are those of --heads"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: Sequence[str], complaint: str, capsys: Capture) -> None:
    assert run_kernels(*arguments) == BAD_INPUT
    assert complaint in capsys.readouterr().err


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_lab.bench.host_time._WARM_UP", 1)
    monkeypatch.setattr("rocm_lab.bench.host_time._STEPS_OF_A_SAMPLE", 1)


@pytest.mark.usefixtures("few_steps")
def test_the_hosts_time_is_given_of_eager_steps_and_graphs() -> None:
    rows = list(host_rows(("torch",), torch.device("cpu"), HostOptions(num_layers=2, num_seqs=(3,), rounds=2)))
    assert [(row["status"], row["batch"], len(row["samples_us"])) for row in rows] == [("ok", "3d64", 2)] * 2
    assert [row["case"].rpartition(", ")[2] for row in rows] == ["host time of a layer", "host time of a step"]
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.usefixtures("few_steps")
def test_the_hosts_time_is_not_given_of_a_wrong_step(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    attend = StepLayers.store_and_attend

    def to_nothing(layers: StepLayers, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        attend(layers, layer, q, k, v, torch.empty_like(out))

    monkeypatch.setattr(StepLayers, "store_and_attend", to_nothing)
    monkeypatch.setattr("rocm_lab.cli.bench_kernels.HostOptions", lambda **_: HostOptions(1, (1,), 1))
    assert main(["bench", "kernels", "--suite", "host", "--device", "cpu", "--json"]) == EXIT_FAILED
    printed = capsys.readouterr()
    assert [row["status"] for row in json.loads(printed.out)["rows"]] == ["wrong"] * 2
    assert "its output is off by up to" in printed.err


def test_nothing_that_serves_is_a_failure(capsys: Capture) -> None:
    assert run_kernels("--batch", "3d40", *SMALL, "--providers", "fa3") == EXIT_FAILED
    assert "no provider serves any of the cases: fa3:" in capsys.readouterr().err


def test_the_seed_decides_the_data() -> None:
    first, second, other = (random_steps(LAYER, BatchSpec.parse("3d40"), 1, CPU, seed)[0].q for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_pages_are_past_the_infinity_cache_of_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names its L2 of 4 MiB alone."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=4 << 20))
    for hip, expected in ((None, 4 << 20), ("7.2", 256 << 20)):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert cache_bytes(torch.device("cuda")) == expected


# Two GPUs; the first one on the bus is the second card.
BUSY, OTHER = "0000:c1:00.0", "0000:26:00.0"


def test_amd_smi_counts_the_gpu_at_the_address_of_torchs_and_not_the_one_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {BUSY: 4e6, OTHER: 1e6}
    smi = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: [OTHER, BUSY],
        amdsmi_get_gpu_device_bdf=str.upper,
        amdsmi_get_energy_count=lambda handle: {"energy_accumulator": counts[handle], "counter_resolution": 2.0},
        amdsmi_get_clock_info=lambda handle, kind: {"clk": 2100},
        AmdSmiClkType=SimpleNamespace(GFX=0),
    )
    monkeypatch.setitem(sys.modules, "amdsmi", cast("ModuleType", smi))
    # The address that torch reports for its first device if HIP_VISIBLE_DEVICES hides the other one.
    address = energy._pci_address(SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0))
    meter = energy._amd(address)
    assert (address, meter.joules(), meter.mhz()) == (BUSY, 8.0, 2100.0)
    with pytest.raises(energy._NoCounter, match=r"and not 0000:07:00\.0"):
        energy._amd("0000:07:00.0")


def test_a_counter_that_fails_costs_the_counter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert "amdsmi" in energy.meter_of(torch.device("cuda")).why_not


def test_a_device_without_a_counter_says_why_and_counts_nan() -> None:
    meter = energy.meter_of(torch.device("cpu"))
    assert meter.why_not == "energy is not counted: only a GPU's is read"
    assert meter.joules() != meter.joules()
    assert meter.mhz() != meter.mhz()
