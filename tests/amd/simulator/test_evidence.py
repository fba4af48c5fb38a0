"""From a wrong step on a GPU to its cause on a laptop: rehearsed with gfx942 code, the simulator being the GPU.

A runtime serves a prompt and decodes, with a fault planted in the kernel's source, in its machine code, or in the
result of one run. The sampled check or the truth probe finds it and leaves evidence; `replay-step --simulate` names
the cause.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.amd.compiler import HIPBackend

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.attention import decode
from rocm_attn.kernels.compile_only import cache_at
from rocm_attn.kernels.noted_launches import kernel_named, of_plain
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.triton_later import triton_launches
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from rocm_attn.truth.live import LiveTruth
from rocm_attn.watch import evidence
from rocm_attn.watch.evidence import EvidenceFile, StepEvidence
from rocm_attn.watch.sampled_check import LayerTap, SampledCheck
from rocm_lab.simulator.evidence import judge
from rocm_lab.simulator.launcher import simulated
from tests.amd.simulator.test_broken_kernels import import_copy, source_of

ARCH = "gfx942"
# Sequences that a decode is padded to.
PADDED = 2
PROBLEM = Problem(2, 1, 64, torch.float16, 16, scale=0.125)


class FlipsOnce(LayerTap):
    """Layers whose checked decode, its second run, has a flipped bit, as a faulty GPU may give."""

    def __init__(self) -> None:
        super().__init__()
        self._decodes = 0

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        getattr(self._layers, name)(layer, *given, **named)
        if name == "attend" and given[1].shape[0] == PADDED:
            self._decodes += 1
            if self._decodes == 2:
                given[1][0, 1, 7] += 8


def runtime_of(problem: Problem = PROBLEM) -> AttentionRuntime:
    options = RuntimeOptions(num_pages=6, max_num_seqs=2, max_kv_len=48, provider="triton", capture_sizes=(PADDED,))
    return build_runtime([problem], options, device="cpu", target=replace(known_target(ARCH), compute_units=2))


def serve(path: Path, tap: LayerTap | None = None, problem: Problem = PROBLEM) -> str:
    """Serves a prompt and a decode, each checked; returns the last finding."""
    with simulated(ARCH):
        runtime = runtime_of(problem)
        own, outer = LayerTap(), tap or LayerTap()
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(48, heads, 64, generator=generator).to(problem.dtype) for heads in (2, 1, 1))

        def forward(step: Part) -> Tensor:
            at, tokens = step.positions, len(step.positions)
            queries = q[at]
            queries[1 if tokens == PADDED else 17 :] = torch.nan  # pads may hold anything
            out = torch.empty(len(at), 2, 64, dtype=problem.dtype)
            own.around(outer.around(step.layers)).store_and_attend(0, queries, k[at], v[at], out)
            return out[step.last_token_of_seq]

        runner = StepRunner(runtime, forward, None)
        check = SampledCheck(runner, runtime, [problem], own, every=2, evidence=EvidenceFile(runtime, path))
        row = runtime.table.admit()
        runtime.table.reserve(row, 18)
        for length, new in ((17, 17), (18, 1)):
            check.run(StepBatch([row], [length], [new], NO_TOKEN_IDS))
        return str(check.counters.finding)


def cause_of(path: Path, capsys: pytest.CaptureFixture[str], code: int = FAILED) -> tuple[str, str]:
    """The cause that `replay-step --simulate` prints, and what it rests on."""
    capsys.readouterr()
    assert main(["replay-step", str(path), "--simulate", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert all(re.match(rf"[0-9a-f]{{12}} {ARCH} \w+$", each) for each in said["launches"])
    return said["cause"], "\n".join(said["because"])


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Returns a function that plants a copy of decode, with a text of its source replaced.

    A process of Triton's interpreter finds the copy too.
    """

    def plant(right: str, wrong: str) -> None:
        source = source_of(decode)
        assert source.count(right) == 1
        broken = import_copy(decode, source.replace(right, wrong), tmp_path)
        monkeypatch.setattr(triton_launches, "launch_paged_decode", broken.launch_paged_decode)

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield plant
    sys.modules.pop("broken_decode", None)


@contextmanager
def edited_code(folder: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, right: str, wrong: str) -> Iterator[None]:
    """While active, the compiler makes other instructions of a kernel, and compiles everything anew into a folder."""
    make, changes = HIPBackend.make_amdgcn, list[int]()

    def edited(src: Any, metadata: dict[str, Any], options: Any) -> str:
        text, count = make(src, metadata, options), 0
        if metadata["name"] == kernel:
            text, count = re.subn(right, wrong, text)
            changes.append(count)
        return str(text)

    with cache_at(str(folder)), monkeypatch.context() as patch:
        patch.setattr(HIPBackend, "make_amdgcn", staticmethod(edited))
        yield
    assert sum(changes) > 0


KERNEL = "_decode_kernel"
SOUND = "kv_index < keys.end", "keys.end > kv_index"


@pytest.mark.nightly
def test_a_sound_run_leaves_nothing(tmp_path: Path) -> None:
    assert serve(tmp_path / "a.evidence") == ""
    assert not list(tmp_path.iterdir())


def test_a_flipped_result_is_the_hardwares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.evidence"
    assert "layer 0 of sequences [0]" in serve(path, FlipsOnce())
    cause, because = cause_of(path, capsys)
    assert cause == "hardware"
    assert because.startswith(
        "run again at once, its result was right\non the simulator its code gives a right result\n"
    )
    assert f"waits of {KERNEL}: proved" in because


def test_a_fault_of_the_source_is_the_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planted: Callable[[str, str], None]
) -> None:
    path = tmp_path / "a.evidence"
    planted("kv_index < keys.end", "kv_index < keys.end - 4")
    assert "layer 0 of sequences [0]" in serve(path)
    cause, because = cause_of(path, capsys)
    assert cause == "kernel"
    assert "which differs from the recorded one by 0 at most" in because
    assert because.endswith("Triton's interpreter gives a wrong result from its source")


@pytest.mark.nightly
def test_other_instructions_than_the_source_has_are_the_compilers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    planted: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "a.evidence"
    planted(*SOUND)
    with edited_code(tmp_path / "cache", monkeypatch, KERNEL, r"\bv_exp_f32_e32", "v_log_f32_e32"):
        assert "layer 0 of sequences [0]" in serve(path)
    cause, because = cause_of(path, capsys)
    assert cause == "compiler"
    assert because.endswith("Triton's interpreter gives a right result from its source")


@pytest.mark.nightly
def test_a_wait_that_is_missing_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    planted: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the simulator code without waits is right; what a GPU may read too early is planted as a flipped result."""
    path = tmp_path / "a.evidence"
    planted(*SOUND)
    with edited_code(tmp_path / "cache", monkeypatch, KERNEL, r"s_waitcnt vmcnt\(0\)", "s_nop 0"):
        assert "layer 0 of sequences [0]" in serve(path, FlipsOnce())
    cause, because = cause_of(path, capsys)
    assert cause == "wait"
    assert f"waits of {KERNEL}: fault" in because
    assert "is not waited for" in because


@pytest.mark.nightly
def test_needles_that_are_missed_leave_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planted: Callable[[str, str], None]
) -> None:
    path = tmp_path / "a.evidence"
    planted("kv_index < keys.end", "kv_index < keys.end - 4")
    with simulated(ARCH):
        runtime = runtime_of(replace(PROBLEM, dtype=torch.bfloat16))
        verdict = LiveTruth(runtime, lambda kv_len, most_new: True, 24, EvidenceFile(runtime, path)).run(0)
    assert "was not found" in verdict.wrong[0]
    cause, _ = cause_of(path, capsys)
    assert cause == "kernel"


@pytest.mark.nightly
def test_pools_are_kept_page_by_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they take most of the memory. Here the limit on a pool that is kept whole is low."""
    path = tmp_path / "a.evidence"
    monkeypatch.setattr(evidence, "WHOLE_BYTES", 4096)
    serve(path, FlipsOnce())
    content = torch.load(path, weights_only=True)
    assert [len(each["pages"]) for each in content["rows"]] == [2, 2]
    assert cause_of(path, capsys)[0] == "hardware"
    monkeypatch.setattr(evidence, "_MOST_BYTES", 4095)
    serve(tmp_path / "b.evidence", FlipsOnce())
    assert not (tmp_path / "b.evidence").exists()


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.evidence"
    for content in ("{}", "", "GGUF"):  # the last one begins as a pickle of a number does
        path.write_text(content)
        assert main(["replay-step", str(path), "--simulate"]) == BAD_INPUT
        (said,) = capsys.readouterr().err.splitlines()  # torch's own message has several
        assert "a.evidence holds no evidence of a step (File is not a zip file); give a file that" in said


def test_a_file_whose_bytes_have_changed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its inputs or its code would be others than the server's, and the cause that is named a wrong one."""
    path = tmp_path / "a.evidence"
    serve(path, FlipsOnce())
    content = bytearray(path.read_bytes())
    code = torch.load(path, weights_only=True)["launches"][0]["code"].numpy().tobytes()
    content[content.index(code) + 9] ^= 1
    path.write_bytes(content)
    assert main(["replay-step", str(path), "--simulate"]) == BAD_INPUT
    assert "a.evidence is damaged: the bytes of" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["function", "named"])
def test_a_file_names_kernels_and_named_tuples_alone(key: str) -> None:
    """Otherwise the author of a file would choose what is called."""
    with pytest.raises(ValueError, match="os:system is no"):
        of_plain({key: "os:system", "values": ["true"]})
    with pytest.raises(ValueError, match="os:system is no kernel"):
        kernel_named("os:system")


def test_a_code_object_that_is_not_its_text_needs_a_disassembler(tmp_path: Path) -> None:
    path = tmp_path / "a.evidence"
    serve(path, FlipsOnce())
    content = torch.load(path, weights_only=True)
    content["launches"][0]["code"][-1] ^= 1
    torch.save(content, path)
    with pytest.raises(BadSetting, match="no llvm-objdump is found for"):
        judge(StepEvidence.read(path), path, objdumps=())


@pytest.mark.nightly
def test_a_result_that_is_right_has_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.evidence"
    serve(path, FlipsOnce())
    content = torch.load(path, weights_only=True)
    content["recorded"] = content["again"]
    torch.save(content, path)
    assert cause_of(path, capsys, DONE)[0] == "none"
