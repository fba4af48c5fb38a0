"""`rocm-attn replay-step`: runs a dumped step again; its exit code reports whether all ways agree."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.cli import DONE, FAILED, main
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.torch_ref import TorchDecode
from rocm_attn.watch.flight_recorder import FlightRecorder, read_dump
from tests.amd.graphs.small_models import SERVED, Lazy, Tiny
from tests.amd.worlds.problems import deterministic_providers

# Prompts, decode steps, a chunk among decodes, steps above the largest graph, an idle sequence.
STEPS = [*SERVED, [1, 6, 1], [3, 3, 3], [1, 0, 1], [20, 20, 1]]


def dumped(provider: str, device: torch.device, tmp_path: Path, *, deterministic: bool = False) -> str:
    """Returns the path of the dump of a run of STEPS."""
    tiny = Tiny.build(device, provider, [2, 4], tokens=(8, 16), deterministic=deterministic)
    flight = FlightRecorder(tiny.runtime, tmp_path / "dump.json")
    runner = tiny.runner(flight=flight)
    requests = tiny.admitted(3)
    for q_len in STEPS:
        requests.run(runner, q_len)
    requests.run(runner, [1, 1], pad_to=4)
    return str(flight.dump("a test"))


@pytest.fixture(scope="module")
def path(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of a dump that all tests read."""
    return dumped("torch", device, tmp_path_factory.mktemp("dumped"))


@pytest.mark.nightly
@pytest.mark.parametrize("provider", deterministic_providers())
def test_a_step_of_deterministic_mode_is_run_again_in_that_mode(
    provider: str, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dumped(provider, device, tmp_path, deterministic=True)
    for noted in read_dump(Path(path)).steps:
        assert all("segment" in kernel for kernel in noted.kernels)
        assert main(["replay-step", path, "--step", str(noted.number), "--json", "--device", str(device)]) == DONE
        result = json.loads(capsys.readouterr().out)
        assert result["deterministic"]
        assert result["same_kernels"]
    assert main(["replay-step", path, "--device", str(device)]) == DONE
    assert "in deterministic mode, then and now" in capsys.readouterr().out
    assert main(["replay-step", dumped(provider, device, tmp_path), "--device", str(device)]) == DONE
    assert "deterministic" not in capsys.readouterr().out


def test_a_step_that_shared_prefixes_shares_them_again(
    graphs: bool, provider: str, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows hold the same pages again; a row of the second group shares nothing."""
    tiny = Tiny.build(device, provider, [4], shared_prefixes=graphs)
    flight = FlightRecorder(tiny.runtime, tmp_path / "dump.json")
    runner = tiny.runner(flight=flight)
    requests = tiny.admitted(1)
    requests.run(runner, [9])
    requests.fork(2, 8)
    groups = [PrefixGroup(2, 8), PrefixGroup(1, 0)]
    batch = replace(requests.batch([1, 1, 1]), prefixes=SharedPrefixes(groups))
    runner.run(batch)
    path = str(flight.dump("a test"))
    noted = read_dump(Path(path)).step(None)
    assert (noted.group_seqs, noted.group_prefix_len) == ((2, 1), (8, 0))
    assert main(["replay-step", path, "--json", "--device", str(device)]) == DONE
    result = json.loads(capsys.readouterr().out)
    assert result["same_kernels"]
    assert result["step"]["kind"] == "shared"
    (kind,) = result["layer_kinds"]
    assert kind["eager"] == "agrees"
    assert kind["graph"] == ("agrees" if graphs else "none: steps of this kind and size are not captured")


def test_a_step_without_sequences_is_run_again_and_has_no_graph(
    provider: str, device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An idle rank replays a graph that others' steps have made. It was said to agree, and none had run."""
    tiny = Tiny.build(device, provider, [4])
    flight = FlightRecorder(tiny.runtime, tmp_path / "dump.json")
    tiny.runner(flight=flight).run(StepBatch([], [], []))
    path = str(flight.dump("a test"))
    assert main(["replay-step", path, "--json", "--device", str(device)]) == DONE
    (kind,) = json.loads(capsys.readouterr().out)["layer_kinds"]
    no_graph = "none: a step without sequences is captured with others alone"
    assert (kind["eager"], kind["graph"], kind["bitwise"]) == ("agrees", no_graph, None)


def test_the_last_step_is_the_default_and_is_described(
    path: str, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay-step", path, "--device", str(device)]) == DONE
    printed = capsys.readouterr().out
    assert "reason of the dump: a test" in printed
    assert f"step {len(STEPS)}: decode, 2 of 4 sequences, 2 of 4 tokens" in printed
    assert "the same kernels" in printed
    assert "layer kind 0: eager agrees with the reference" in printed
    assert "layer kind 0: graph: agrees, bitwise equal to eager" in printed


def test_a_kernel_that_is_wrong_fails(
    path: str, device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TorchDecode.attend

    def wrong(self: TorchDecode, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        right(self, args, step, bounds)
        args.out.mul_(1.001)

    monkeypatch.setattr(TorchDecode, "attend", wrong)
    assert main(["replay-step", path, "--device", str(device)]) == FAILED
    printed = capsys.readouterr()
    assert "layer kind 0: eager differs with the reference" in printed.out
    assert f"step {len(STEPS)} gives different results" in printed.err


def test_a_result_that_is_no_number_is_null_in_the_json(
    path: str, device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchDecode, "attend", lambda self, args, step, bounds: args.out.fill_(float("nan")))
    assert main(["replay-step", path, "--json", "--device", str(device)]) == FAILED
    said = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert (said["layer_kinds"][0]["eager"], said["layer_kinds"][0]["worst"]) == ("differs", None)


def test_a_graph_that_is_wrong_fails(
    path: str, device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_lab.cli.replay_step.recorder_for", lambda device: Lazy(recorder_for(device)))
    assert main(["replay-step", path, "--device", str(device)]) == FAILED
    printed = capsys.readouterr().out
    assert "layer kind 0: eager agrees with the reference" in printed
    assert "layer kind 0: graph: differs, not bitwise equal to eager" in printed


def test_a_step_that_does_not_fit_says_so(
    path: str, device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_lab.cli.replay_step._available_bytes", lambda device: 100)
    assert main(["replay-step", path, "--device", str(device)]) == FAILED
    assert "100 are free" in capsys.readouterr().err
