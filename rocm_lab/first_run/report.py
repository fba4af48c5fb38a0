"""GpuReport: the file that `bash scripts/test.sh rocm` leaves, read whole or refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rocm_attn.errors import BadProblem, BadSetting
from rocm_attn.kernels.tuning.measured import MeasuredLayer
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target, known_target
from rocm_attn.machine.values_json import from_json
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem, Scales
from rocm_lab.bench.batch_spec import Group
from rocm_lab.simulator.code_figures import CodeFigures

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
_ARCHS = ("gfx942", "gfx950")
# Rows of tiles name the versions of these.
_PACKAGES = ("rocm-attn", "torch", "triton", "rocm")
# Any cap compiles the same code, and a layer of a report says only whether it has one.
_SOME_CAP = 50.0


@dataclass(frozen=True, slots=True)
class DriverFigures:
    """The driver's figures of a loaded kernel.

    registers:       vector registers of a lane; 0: the driver does not say
    scratch_bytes:   private memory of a lane
    programs_per_cu: that a CU has room for; 0: the driver does not say
    """

    registers: int
    scratch_bytes: int
    programs_per_cu: int


@dataclass(frozen=True, slots=True)
class ReportedKernel:
    """A variant of a kernel that was launched. kernel: "module:name"; static: the figures that its assembly states"""

    kernel: str
    arch: str
    sha256: str
    num_waves: int
    lds_bytes: int
    static: CodeFigures
    driver: DriverFigures


@dataclass(frozen=True, slots=True)
class ReportedTest:
    """A test. kernels: "module:name" of those that it launched, if it failed"""

    name: str
    outcome: str
    measured: Mapping[str, Any]
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuReport:
    """A report of one kind of AMD GPU.

    target:   the GPU, with the report's Triton
    versions: package of _PACKAGES -> its version; "" for one that is not installed
    date:     when the run began, ISO 8601
    """

    device: str
    target: Target
    versions: Mapping[str, str]
    commit: str
    date: str
    tests: tuple[ReportedTest, ...]
    kernels: tuple[ReportedKernel, ...]

    @classmethod
    def read(cls, path: Path, arch: str) -> GpuReport:
        """Reads a file. Raises BadSetting if it is no report, or not one of a GPU of this arch."""
        try:
            content = json.loads(path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("its JSON is no object")
            found = cls._of(content)
        except OSError as error:
            raise BadSetting(f"the report {path} cannot be read ({error.strerror}); name another file") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise BadSetting(
                f"{path} is no report of this release ({why}); name the file that "
                "`bash scripts/test.sh rocm` has written, unchanged"
            ) from error
        found._check(path, arch)
        return found

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> GpuReport:
        environment = content["environment"]
        gpus = {(each["name"], each["arch"], each["compute_units"]) for each in environment["devices"]}
        if len(gpus) != 1:
            raise BadSetting(
                f"the report has {len(gpus)} kinds of GPUs, and times are of one; run the tests where torch sees one "
                "kind (HIP_VISIBLE_DEVICES), on a machine with a GPU"
            )
        ((device, arch, units),) = gpus
        versions = {name: from_json(str, environment["versions"][name] or "", name) for name in _PACKAGES}
        if arch not in _ARCHS:
            raise BadSetting(f"the report is of {device} ({arch}); reports of {' and '.join(_ARCHS)} are read")
        if from_json(int, units, "compute_units") < 1:
            raise ValueError(f"{device} has {units} compute units")
        known = known_target(arch)
        releases = replace(known.releases, triton=Release.of(versions["triton"]))
        return cls(
            device=str(device),
            target=replace(known, compute_units=units, releases=releases),
            versions=versions,
            commit=from_json(str, content["commit"], "commit"),
            date=from_json(str, content["started"], "started"),
            tests=tuple(_test(name, each) for name, each in content["tests"].items()),
            kernels=tuple(_kernel(each) for each in content["kernels"] if each["static"] is not None),
        )

    def _check(self, path: Path, arch: str) -> None:
        if self.target.arch != arch:
            raise BadSetting(
                f"the report {path} is of {self.device} ({self.target.arch}), not of {arch}; give "
                f"--arch {self.target.arch} if that is the GPU that you mean"
            )
        others = sorted({each.arch for each in self.kernels} - {arch})
        if others:
            raise BadSetting(
                f"the report {path} is of {arch}, and kernels in it were compiled for {', '.join(others)}: the driver "
                "and the compiler disagree about the GPU; look at HSA_OVERRIDE_GFX_VERSION and run the tests again"
            )

    @property
    def failed(self) -> list[ReportedTest]:
        """The tests that failed."""
        return [test for test in self.tests if test.outcome == FAILED]

    def measured(self, name: str) -> Iterator[tuple[ReportedTest, Any]]:
        """The tests that measured something of this name, with what they measured."""
        return ((test, test.measured[name]) for test in self.tests if name in test.measured)


def _test(name: str, given: Mapping[str, Any]) -> ReportedTest:
    measured = dict(given["measured"])
    if not isinstance(measured.get("tile trials", []), list):
        raise ValueError(f"the tile trials of {name} are no list")
    if given["outcome"] not in (PASSED, FAILED, SKIPPED):
        raise ValueError(f"{name} is {given['outcome']!r:.80}, neither {PASSED}, {FAILED} nor {SKIPPED}")
    return ReportedTest(name, given["outcome"], measured, tuple(given.get("kernels", ())))


def _kernel(given: Mapping[str, Any]) -> ReportedKernel:
    kernel: ReportedKernel = from_json(ReportedKernel, given, f"kernel {given.get('kernel')}")
    if kernel.num_waves < 1:
        raise ValueError(f"{kernel.kernel} has {kernel.num_waves} waves")
    return kernel


def problem_in(given: object) -> Problem:
    """A layer of a report. Raises BadSetting."""
    try:
        layer: MeasuredLayer = from_json(MeasuredLayer, given, "layer")
        return Problem(
            layer.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            getattr(torch, layer.dtype),
            layer.page_size,
            v_head_dim=layer.v_head_dim,
            kv_encoding=KVEncoding[layer.kv_encoding],
            kv_scales=Scales[layer.kv_scales],
            window_left=layer.window_left,
            logits_soft_cap=_SOME_CAP if layer.soft_cap else 0.0,
            has_sinks=layer.sinks,
            has_alibi_slopes=layer.alibi,
            window_right=0 if layer.causal else UNLIMITED_WINDOW,
        )
    except (ValueError, KeyError, AttributeError, ArithmeticError, BadProblem) as error:
        raise BadSetting(f"a layer of the report is not one that this release knows ({error})") from error


def shape_in(given: object) -> Group:
    """A shape of a report: sequences, tokens of each, new ones among them. Raises BadSetting."""
    try:
        num_seqs, kv_len, q_len = from_json(tuple[int, ...], given, "shape")
    except ValueError as error:
        raise BadSetting(f"a shape of the report is not three whole numbers ({error})") from error
    if not (num_seqs >= 1 and kv_len >= q_len >= 1):
        raise BadSetting(f"a shape of the report is {given}: sequences, tokens of each, and new ones among them")
    return Group(num_seqs, q_len, kv_len - q_len)
