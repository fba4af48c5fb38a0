"""flashinfer-bench's files: read, run by us, judged by the reference, and written as its documentation defines them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.errors import BadSetting, Unsupported
from rocm_lab.bench import flashinfer_run
from rocm_lab.bench.flashinfer_run import WorkloadRun
from rocm_lab.bench.flashinfer_schema import Definition, Solution, Trace, Workload, read_definition, read_traces
from rocm_lab.bench.flashinfer_solution import entry_of, require_runs, solution_of
from tests.amd.bench.flashinfer_files import DEFINITIONS, GQA_DECODE, data_set, tensors_of, workload_of
from tests.amd.bench.layers import CPU

each_definition = pytest.mark.parametrize("name", DEFINITIONS)
# Fields of an evaluation, as listed in the documentation. All are required if the status is PASSED.
EVALUATION = {"status", "log", "correctness", "performance", "environment", "timestamp"}

# The example of the documentation's page on solutions, shortened; the one on traces and workloads, whole.
SOLUTION = {
    "name": "rmsnorm_triton_v1",
    "definition": "rmsnorm",
    "description": "A high-performance RMSNorm implementation using Triton.",
    "author": "gemini-2.5-pro-mystery-agent",
    "spec": {
        "language": "Triton",
        "target_hardware": ["NVIDIA_H100", "NVIDIA_A100", "NVIDIA_B200"],
        "dependencies": ["torch", "triton >= 2.3"],
        "entry_point": "main.py::run",
        "build_commands": [],
    },
    "sources": [{"path": "main.py", "content": "def run(input, weight, eps):\n    return input\n"}],
}
TRACE = {
    "definition": "rmsnorm",
    "solution": "rmsnorm_triton_v1",
    "workload": {
        "uuid": "6120f144-b973-4bd9-b884-77ecb132914e",
        "axes": {"batch_size": 32},
        "inputs": {
            "input": {
                "type": "safetensors",
                "path": "/data/b32_input.safetensors",
                "tensor_key": "input",
            },
            "weight": {"type": "random"},
            "eps": {"type": "scalar", "value": 1e-6},
        },
    },
    "evaluation": {
        "status": "PASSED",
        "log": "...",
        "correctness": {"max_relative_error": 1.15e-05, "max_absolute_error": 0.89e-05},
        "performance": {"latency_ms": 0.008, "reference_latency_ms": 0.019, "speedup_factor": 2.375},
        "environment": {"hardware": "NVIDIA_H100", "libs": {"cuda": "12.6", "torch": "2.6.0", "triton": "2.4.0"}},
        "timestamp": "2025-06-27T12:45:00Z",
    },
}
WORKLOAD = {**TRACE, "solution": None, "evaluation": None}


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits timing to one call: no test looks at the times."""
    for name in ("_WARM_UP", "_CALLS", "_ROUNDS"):
        monkeypatch.setattr(flashinfer_run, name, 1)


@pytest.mark.parametrize(
    ("read", "written"),
    [
        (Solution.of, SOLUTION),
        (Trace.of, TRACE),
        (Trace.of, WORKLOAD),
        (Workload.of, TRACE["workload"]),
        *((Definition.of, definition) for definition in DEFINITIONS.values()),
    ],
)
def test_what_is_read_is_written_again(read: Callable[[Any], Any], written: dict[str, Any]) -> None:
    assert read(written).as_json() == written
    later = {**written, "field_of_a_later_release": [1, {"a": 2}]}
    assert read(later).as_json() == later


def traced(tmp_path: Path, name: str, *, run_reference: bool = False) -> Trace:
    """Returns the trace of a definition's workload."""
    definition_file, workload_file = data_set(tmp_path, DEFINITIONS[name])
    definition, (workload,) = read_definition(definition_file), read_traces(workload_file)
    run = WorkloadRun(CPU, tmp_path, run_reference)
    return run.trace(definition, workload.workload, solution_of(definition, "torch"))


@each_definition
def test_a_workload_passes_and_its_trace_has_every_field(name: str, tmp_path: Path) -> None:
    """The definition's own reference agrees with ours too."""
    trace = traced(tmp_path, name, run_reference=True)
    evaluation = trace.evaluation
    assert evaluation is not None
    assert evaluation["status"] == "PASSED", evaluation["log"]
    assert evaluation.keys() == EVALUATION
    assert 0 <= evaluation["correctness"]["max_absolute_error"] < 1e-4
    performance = evaluation["performance"]
    assert performance["speedup_factor"] == performance["reference_latency_ms"] / performance["latency_ms"]
    assert evaluation["environment"].keys() == {"hardware", "libs"}
    assert Trace.of(json.loads(json.dumps(trace.as_json()))) == trace


@each_definition
def test_a_source_that_is_wrong_does_not_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = entry_of
    spoils: dict[str, Callable[[Any, Any], Any]] = {
        "INCORRECT_NUMERICAL": lambda out, lse: (out, lse * 0.6931),  # natural instead of base 2
        "INCORRECT_SHAPE": lambda out, lse: (out[:-1], lse),
        "INCORRECT_DTYPE": lambda out, lse: (out.double(), lse),
    }
    for status, spoil in spoils.items():
        monkeypatch.setattr(
            flashinfer_run, "entry_of", lambda solution, spoil=spoil: lambda **inputs: spoil(*right(solution)(**inputs))
        )
        evaluation = traced(tmp_path, name).evaluation
        assert evaluation is not None
        assert (evaluation["status"], evaluation["performance"]) == (status, None)


def test_a_source_that_raises_is_a_runtime_error(tmp_path: Path) -> None:
    definition_file, workload_file = data_set(tmp_path, GQA_DECODE)
    definition, (workload,) = read_definition(definition_file), read_traces(workload_file)
    broken = replace(
        solution_of(definition, "torch"), sources={"main.py": "def run(**inputs):\n    raise OSError('no')\n"}
    )
    evaluation = WorkloadRun(CPU, tmp_path).trace(definition, workload.workload, broken).evaluation
    assert evaluation is not None
    assert (evaluation["status"], evaluation["log"]) == ("RUNTIME_ERROR", "OSError: no")
    assert evaluation["correctness"] is evaluation["performance"] is None


def test_a_reference_that_is_wrong_is_named(tmp_path: Path) -> None:
    definition_file, workload_file = data_set(tmp_path, GQA_DECODE)
    definition, (workload,) = read_definition(definition_file), read_traces(workload_file)
    wrong = replace(definition, reference=definition.reference.replace("* sm_scale", "* sm_scale * 1.1"))
    with pytest.raises(BadSetting, match="gives INCORRECT_NUMERICAL by our reference"):
        WorkloadRun(CPU, tmp_path, run_reference=True).trace(wrong, workload.workload, solution_of(wrong, "torch"))


def test_the_inputs_of_a_workload_are_the_same_each_time(tmp_path: Path) -> None:
    definition_file, workload_file = data_set(tmp_path, GQA_DECODE)
    definition, (workload,) = read_definition(definition_file), read_traces(workload_file)
    first, second = (WorkloadRun(CPU, tmp_path).inputs(definition, workload.workload) for _ in range(2))
    assert first["q"].equal(second["q"])
    assert first["kv_indices"].tolist() == tensors_of(GQA_DECODE)["kv_indices"].tolist()
    assert first["sm_scale"] == 0.25


def changed(**inputs: Any) -> dict[str, Any]:
    """Returns the workload with other inputs."""
    line = workload_of(GQA_DECODE, "./blob/workloads/gqa_paged/gqa_paged_decode_h4_kv2_d16_ps4.safetensors")
    line["workload"]["inputs"] |= inputs
    return line


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (changed(kv_indices={"type": "random"}), "random indices"),
        (changed(q={"type": "scalar", "value": 1}), "gives it as a scalar"),
        (changed(sm_scale={"type": "random"}), "gives it as random"),
        (changed(q={"type": "safetensors", "path": "../../etc/q", "tensor_key": "q"}), "outside of"),
        (changed(q={"type": "safetensors", "path": "missing", "tensor_key": "q"}), "cannot be read from"),
        (changed(q={"type": "file"}), "its type must be random, scalar, safetensors"),
        (changed(q={"type": "safetensors", "path": "x"}), "lacks tensor_key"),
        ({"definition": GQA_DECODE["name"]}, "line 1: trace : workload is None"),
        ({"definition": "another"}, "line 1"),
    ],
)
def test_a_workload_that_contradicts_its_definition_is_refused(
    line: dict[str, Any], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    definition, workloads = data_set(tmp_path, GQA_DECODE)
    workloads.write_text(json.dumps(line))
    arguments = ["bench", "flashinfer", str(definition), "--workloads", str(workloads), "--device", "cpu"]
    assert main([*arguments, "--provider", "torch"]) == BAD_INPUT
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("kv_indices", (6, 0, 3, 5, 10), "must be below 10"),
        ("kv_indptr", (0, 2, 4, 4), "kv_indptr ends at 4"),
        ("kv_indptr", (0, 2, 5, 5), "sequence 2 has 1 new tokens and 0 in its pages"),
    ],
)
def test_lists_that_contradict_each_other_are_refused(
    name: str, values: tuple[int, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.amd.bench import flashinfer_files

    monkeypatch.setitem(flashinfer_files._PAGES_OF_4, name, flashinfer_files.ints(*values))
    with pytest.raises(BadSetting, match=complaint):
        traced(tmp_path, GQA_DECODE["name"])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": 3}, "name is 3"),
        ({"axes": {"page_size": {"type": "const"}}}, "axis page_size"),
        ({"axes": {}}, "unknown axes"),
        ({"inputs": {"q": {"dtype": "float32"}}}, "tensor q"),
    ],
)
def test_a_definition_that_is_none_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadSetting, match=complaint):
        Definition.of({**GQA_DECODE, **change})


def test_what_is_not_paged_attention_is_unsupported() -> None:
    gemm = {"name": "gemm", "op_type": "gemm", "reference": "", "axes": {}, "inputs": {}, "outputs": {}}
    with pytest.raises(Unsupported, match="only gqa_paged and mla_paged"):
        solution_of(Definition.of(gemm), "torch")


def test_the_command_writes_solution_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    definition, workloads = data_set(tmp_path, GQA_DECODE)
    solution, traces = tmp_path / "solution.json", tmp_path / "traces.jsonl"
    arguments = ["bench", "flashinfer", str(definition), "--workloads", str(workloads), "--device", "cpu"]
    files = ["--solution-out", str(solution), "--traces-out", str(traces)]
    assert main([*arguments, "--provider", "torch", *files]) == DONE
    assert capsys.readouterr().out.startswith("PASSED 6120f144")
    written = Solution.of(json.loads(solution.read_text()))
    (trace,) = read_traces(traces)
    assert (trace.solution, trace.definition) == (written.name, written.definition)
    # No AITER is installed here: the trace reports a failure.
    assert main([*arguments, "--provider", "aiter"]) == FAILED
    assert "RUNTIME_ERROR" in capsys.readouterr().out


def test_another_solution_is_read_run_and_named_in_the_traces(tmp_path: Path) -> None:
    definition, workloads = data_set(tmp_path, GQA_DECODE)
    theirs = {
        **solution_of(read_definition(definition), "torch").as_json(),
        "name": "theirs",
        "author": "somebody",
        "spec": {"language": "python", "entry_point": "kernel.py::attend"},
        "sources": [{"path": "kernel.py", "content": read_definition(definition).reference + "\n\nattend = run\n"}],
    }
    file, traces, again = (tmp_path / name for name in ("theirs.json", "traces.jsonl", "again.json"))
    file.write_text(json.dumps(theirs))
    arguments = ["bench", "flashinfer", str(definition), "--workloads", str(workloads), "--device", "cpu"]
    files = ["--solution", str(file), "--solution-out", str(again), "--traces-out", str(traces)]
    assert main([*arguments, *files]) == DONE
    assert json.loads(again.read_text()) == theirs
    (trace,) = read_traces(traces)
    assert trace.solution == "theirs"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"definition": "other"}, "solution theirs is for other"),
        (
            {"spec": {"language": "cuda", "entry_point": "main.py::run"}},
            "is in 'cuda'.*it must be one file in python",
        ),
        (
            {"spec": {"language": "python", "entry_point": "b.py::run"}},
            r"one file in python, that of its entry_point \(b",
        ),
        ({"sources": []}, "with the files none"),
    ],
)
def test_a_solution_that_cannot_be_run_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    definition = read_definition(data_set(tmp_path, GQA_DECODE)[0])
    theirs = {**solution_of(definition, "torch").as_json(), "name": "theirs"} | change
    with pytest.raises(BadSetting, match=complaint):
        require_runs(Solution.of(theirs), definition)


def test_a_source_that_cannot_be_loaded_is_a_compile_error(tmp_path: Path) -> None:
    definition_file, workload_file = data_set(tmp_path, GQA_DECODE)
    definition, (workload,) = read_definition(definition_file), read_traces(workload_file)
    for source, says in (("def run(:", "SyntaxError: "), ("x = 1", "has no function run")):
        broken = replace(solution_of(definition, "torch"), sources={"main.py": source})
        evaluation = WorkloadRun(CPU, tmp_path).trace(definition, workload.workload, broken).evaluation
        assert evaluation is not None
        assert evaluation["status"] == "COMPILE_ERROR"
        assert says in evaluation["log"]
