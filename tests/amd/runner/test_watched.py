"""Checks that run while an engine serves: each option enables its check, and none changes a token."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadLogits, BadSetting, DeviceFault
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.oracle.reference import attend_paged
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import NO_EVIDENCE, Evidence, WrongLayer
from rocm_attn.watch.evidence import EvidenceFile
from rocm_attn.watch.few_sequences import LayerOfStep
from rocm_serve import watched
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model
from rocm_serve.request import RequestsFaulted
from rocm_serve.sampling.sampling import PickedTokens
from tests.amd.runner.serving import engine, some_requests, tokens_of
from tests.amd.tolerances import assert_layers_close


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("every", "graphs"),
    [(3, True), *(pytest.param(*both, marks=pytest.mark.nightly) for both in ((1, False), (1, True)))],
)
def test_a_sampled_check_looks_at_one_step_in_so_many_and_finds_nothing(
    every: int, graphs: bool, loaded: LoadedModel
) -> None:
    plain, checked = (engine(loaded, graphs=graphs, check_every=number) for number in (0, every))
    assert tokens_of(checked.generate(some_requests())) == tokens_of(plain.generate(some_requests()))
    metrics = checked.report().metrics
    assert metrics.steps == plain.report().metrics.steps
    assert metrics.samples == metrics.steps // every
    assert (metrics.rows_differ, metrics.attention_differs, metrics.reserved_written) == (0, 0, 0), metrics.finding
    assert plain.report().metrics.samples == 0


def test_what_a_sampled_check_finds_is_logged_and_in_the_report(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def another(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend_paged(*arguments)
        return out + 0.1, lse

    monkeypatch.setattr("rocm_attn.watch.few_sequences.attend_paged", another)
    checked = engine(loaded, graphs=True, check_every=2)
    plain = engine(loaded).generate(some_requests())
    assert tokens_of(checked.generate(some_requests())) == tokens_of(plain), "a finding does not stop serving"
    metrics = checked.report().metrics
    assert metrics.attention_differs == metrics.samples > 0
    assert "differs from the reference" in metrics.finding
    assert f"{metrics.attention_differs} DIFFER FROM THE REFERENCE" in str(metrics)
    assert len(caplog.messages) == metrics.attention_differs
    assert all(message.startswith("sampled check: layer") for message in caplog.messages)


def test_a_wrong_layer_is_handed_over_with_a_way_to_run_it_again(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No kernel of a CPU is Triton's, so nothing is kept, and the log says why."""
    handed: list[WrongLayer] = []
    keep = EvidenceFile.keep

    def kept(file: EvidenceFile, wrong: WrongLayer) -> None:
        handed.append(wrong)
        around: list[str] = []

        @contextmanager
        def context() -> Iterator[None]:
            around.append("before")
            yield
            around.append("after")

        again = wrong.again(context)
        assert again is not None
        assert around == ["before", "after"]
        assert torch.equal(again.q, wrong.found.q)
        assert torch.equal(again.out, wrong.found.out)
        assert again.place.shape == again.out.shape
        keep(file, wrong)

    monkeypatch.setattr(EvidenceFile, "keep", kept)
    monkeypatch.setattr(LayerOfStep, "wrong_seqs", lambda layer, q, out, seqs: sorted(seqs)[:1])
    path = tmp_path / "wrong.evidence"
    plain = engine(loaded).generate(some_requests())
    served = engine(loaded, graphs=True, check_every=4, evidence=path)
    assert tokens_of(served.generate(some_requests())) == tokens_of(plain), "a finding does not stop serving"
    assert handed
    assert handed[0].finding.startswith(f"layer {handed[0].layer} of sequences [0]")
    assert not path.exists()
    assert "kept: its attention is launched by something else than Triton" in caplog.text
    with pytest.raises(BadSetting, match="gone is not a folder; create it"):
        engine(loaded, evidence=tmp_path / "gone" / "wrong.evidence")


def test_evidence_that_cannot_be_written_does_not_stop_serving(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EvidenceFile, "_content", lambda file, wrong: {"out": torch.zeros(9)})
    monkeypatch.setattr(LayerOfStep, "wrong_seqs", lambda layer, q, out, seqs: sorted(seqs)[:1])
    folder = tmp_path / "gone"
    folder.mkdir()
    served = engine(loaded, check_every=4, evidence=folder / "wrong.evidence")
    folder.rmdir()
    assert served.generate(some_requests())
    assert "wrong.evidence could not be written" in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_does_not_run_a_step_again_alone(
    num_ranks: int, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the sums of the others."""
    given: list[Evidence] = []

    def watch(*arguments: Any) -> Any:
        given.append(arguments[4])
        raise InterruptedError

    shard = replace(loaded.ranks.shard, num_ranks=num_ranks)
    monkeypatch.setattr(type(loaded.ranks), "shard", shard)
    monkeypatch.setattr("rocm_serve.engine.watched_steps", watch)
    with pytest.raises(InterruptedError):
        engine(loaded, check_every=1, evidence=tmp_path / "wrong.evidence")
    assert [each is not NO_EVIDENCE for each in given] == [num_ranks == 1]


def test_a_fault_that_the_second_run_of_a_step_reports_ends_the_requests_of_its_step(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampled step itself was run; its requests continue as after any other fault."""
    checked = engine(loaded, check_every=1)
    again, calls = checked._runner.run_eagerly, []

    def faulty(batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
        calls.append(batch)
        if len(calls) == 2:
            raise DeviceFault("a fault of step 1", 1)
        return again(batch, pad_to)

    monkeypatch.setattr(checked._runner, "run_eagerly", faulty)
    with pytest.raises(RequestsFaulted) as raised:
        checked.generate(some_requests())
    failed = [completion for completion in raised.value.completions if completion.error]
    plain = engine(loaded).generate(some_requests())
    assert 0 < len(failed) < len(plain)
    for completion, alone in zip(raised.value.completions, plain, strict=True):
        assert completion.error or completion == alone


@pytest.mark.parametrize("has_record", [False, True])
def test_a_step_that_hangs_is_named_and_leaves_the_flight_record(
    has_record: bool, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ends when the watchdog has reported, so that the test depends on no time."""
    spoken, record = threading.Event(), tmp_path / "last_steps.json"
    report, forward = Watchdog._report, Model.forward

    def reports(watchdog: Watchdog, what: str) -> None:
        report(watchdog, what)
        spoken.set()

    def hangs(model: Model, step: Any) -> Tensor:
        spoken.wait()
        return forward(model, step)

    monkeypatch.setattr(Watchdog, "_report", reports)
    monkeypatch.setattr(Model, "forward", hangs)
    with (tmp_path / "stderr.txt").open("w+") as stream:
        monkeypatch.setattr(sys, "__stderr__", stream)
        slow = engine(loaded, hang_after=0.01, flight_record=record if has_record else None)
        assert slow._steps is not slow._runner, "without a watchdog around its steps it would hang here for good"
        slow.generate(some_requests(1))
        stream.seek(0)
        said = stream.read()
    prompt_len = len(some_requests(1)[0].prompt_token_ids)
    sentence = f"step 1 (1 sequences, {min(prompt_len, 16)} tokens) has not finished after 0.01 s"
    assert f"rocm-attn: {sentence}" in said
    assert "hangs" in said, "the stacks of all threads are there"
    assert record.exists() == has_record
    if has_record:
        assert "has not finished after 0.01 s" in json.loads(record.read_text())["reason"]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_step_whose_tokens_never_come_is_named(
    steps_ahead: int, loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device hangs after its launches were made: where the host waits for the picks."""
    spoken = threading.Event()
    report, read = Watchdog._report, PickedTokens.read

    def reports(watchdog: Watchdog, what: str) -> None:
        report(watchdog, what)
        if what.startswith("a launched step"):
            spoken.set()

    def waits(picks: PickedTokens) -> list[int | BadLogits]:
        spoken.wait()
        return read(picks)

    monkeypatch.setattr(Watchdog, "_report", reports)
    monkeypatch.setattr(PickedTokens, "read", waits)
    with (tmp_path / "stderr.txt").open("w+") as stream:
        monkeypatch.setattr(sys, "__stderr__", stream)
        engine(loaded, hang_after=0.01, steps_ahead=steps_ahead).generate(some_requests(1))
        stream.seek(0)
        assert "a launched step (1 sequences, " in stream.read()


def test_a_hang_whose_record_cannot_be_written_is_still_named(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    slow = engine(loaded, hang_after=3600, flight_record=folder / "last_steps.json")
    folder.rmdir()
    watched._dump(slow.flight, "a step has not ended")
    assert caplog.messages[0].startswith("the last steps could not be written")


def test_the_shipped_model_runs_split_steps(graphs: bool, loaded: LoadedModel) -> None:
    results = []
    for split in (False, True):
        runtime = build_runtime(
            loaded.config.attention.problems(dtype=torch.float32, page_size=4),
            RuntimeOptions(num_pages=60, max_num_seqs=4, max_kv_len=32, provider="torch", split_steps=True),
            device="cpu",
        )
        model = Model(loaded.config, loaded.weights, runtime.head_weights, max_kv_len=32)
        runner = StepRunner(runtime, model.forward, recorder_for(runtime.device) if graphs else None)
        rows = np.array([runtime.table.admit() for _ in range(4)], np.int32)
        outs, kv_len = [], np.zeros(4, np.int32)
        for q_len in ([5, 3, 1, 7], [1] * 4, [1] * 4):
            kv_len = kv_len + np.array(q_len, np.int32)
            runtime.table.reserve_all(rows, kv_len)
            ids = np.arange(1, 1 + sum(q_len), dtype=np.int32)
            batch = StepBatch(rows, kv_len, np.array(q_len, np.int32), ids)
            outs.append((partial(runner.run, halves=2) if split else runner.run)(batch).clone())
        assert (runner.counters.replays > 0) == graphs
        results.append(torch.stack(outs))
    whole, halves = results
    assert_layers_close(halves, whole)
