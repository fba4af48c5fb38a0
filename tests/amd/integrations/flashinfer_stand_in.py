"""A plug-in for pytest, under which FlashInfer's own tests run against ours: flashinfer_suite.py loads it.

`import flashinfer` gives our module. FlashInfer modules that we lack are empty ones, whose functions raise NotHere.
Without a GPU their cuda devices are the CPU. A few cases of each test are kept, spread over all that are small enough
for the machine, and their results are written to the file that FLASHINFER_OUTCOMES names.

It is loaded by its name alone, because FlashInfer's folder of tests has the same name as ours.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import rocm_attn.integrations.flashinfer as ours
from rocm_attn.errors import Unsupported

# Number of cases kept per test, among those with at most this product of queries, keys, heads and elements.
CASES = int(os.environ.get("FLASHINFER_CASES", "4"))
MOST_WORK = float(os.environ.get("FLASHINFER_MOST_WORK", "1e7"))
# Parameters that increase a case's work.
_SIZES = (
    "batch_size",
    "kv_len",
    "seq_len",
    "seq_len_kv",
    "seq_len_q",
    "unique_kv_len",
    "shared_kv_len",
    "num_qo_heads",
    "num_heads",
    "head_dim",
    "qo_len",
    "max_seq_len",
    "batch_size_d",
    "kv_len_d",
    "kv_len_p",
    "qo_len_p",
    "vocab_size",
)


class NotHere(Exception):
    """A test calls a function of FlashInfer that we do not offer."""


class _Absent(ModuleType):
    """A FlashInfer module that we lack: its names exist, and raise when they are called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("has_", "is_")):
            return lambda *args, **kwargs: name.startswith("has_")
        if name == "get_compute_capability":
            return lambda device: (9, 0)
        return _refusal(f"{self.__name__}.{name}")


class _Refusal:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotHere(f"{self._name} is not offered")

    __getitem__ = __call__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Refusal(f"{self._name}.{name}")


def _refusal(name: str) -> Any:
    """Returns a refusal of the kind that FlashInfer has: annotations need classes in place of its classes."""
    refusal = _Refusal(name)
    is_class = name.rpartition(".")[2][:1].isupper()
    return type(name, (), {"__init__": refusal.__call__}) if is_class else refusal


class _FlashInfer(_Absent):
    """A module of ours, for names that it has."""

    def __init__(self, name: str, own: ModuleType) -> None:
        super().__init__(name)
        self._own = own

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._own, name):
            return super().__getattr__(name)
        found = getattr(self._own, name)
        return _FlashInfer(f"{self.__name__}.{name}", found) if isinstance(found, ModuleType) else found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "flashinfer":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        own = ours if spec.name == "flashinfer" else getattr(ours, spec.name.partition(".")[2], None)
        return _FlashInfer(spec.name, own) if isinstance(own, ModuleType) else _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is complete when it is created."""


class _CpuForCuda(TorchFunctionMode):
    """Replaces cuda:0, and device 0, by the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _mapped(kwargs["device"])
        if function is torch.Tensor.to:
            args = [args[0], *map(_mapped, args[1:])]
        return function(*args, **kwargs)


def _mapped(device: Any) -> Any:
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    is_cuda = isinstance(device, str) and device.startswith("cuda")
    return "cpu" if is_cuda or (isinstance(device, int) and not isinstance(device, bool)) else device


def _properties(device: Any = None) -> Any:
    """Returns properties of a GPU with enough memory."""
    return SimpleNamespace(total_memory=1 << 37, name="CPU")


class _Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces functions that wait for a GPU."""


def _work(item: pytest.Item) -> float:
    """Returns a number that grows with the sizes of a case. A case without sizes is small."""
    spec = getattr(item, "callspec", None)
    work = 1.0
    for name, value in (spec.params if spec is not None else {}).items():
        if name in _SIZES and isinstance(value, int):
            work *= max(value, 1)
    return work


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, _Finder())
    if not torch.cuda.is_available():
        for name in ("synchronize", "empty_cache", "manual_seed", "manual_seed_all"):
            setattr(torch.cuda, name, _nothing)
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
            setattr(torch.cuda, name, lambda *args, **kwargs: 0)
        torch.cuda.get_device_properties = _properties
        torch.Generator = _Generator  # type: ignore[misc]
        torch.cuda.get_device_capability = lambda device=None: (9, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    of_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        of_test[item.nodeid.partition("[")[0]].append(item)
    kept = []
    for cases in of_test.values():
        by_work = sorted(cases, key=_work)
        small = [case for case in by_work if _work(case) <= MOST_WORK] or by_work[:CASES]
        step = max(1, len(small) // CASES)
        # An odd step, so that no parameter stays at one value.
        kept += small[:: step | 1][:CASES]
    _totals.update({test: len(cases) for test, cases in of_test.items()})
    items[:] = kept


_totals: dict[str, int] = {}
_outcomes: list[dict[str, str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    if torch.cuda.is_available():
        return (yield)
    with _CpuForCuda():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call" or (call.when == "setup" and not report.passed):
        _outcomes.append({"test": item.nodeid, **_outcome(call)})
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        why = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
        _outcomes.append({"test": report.nodeid, "outcome": "failed", "why": f"the file does not load: {why}"})


def _outcome(call: pytest.CallInfo[None]) -> dict[str, str]:
    if call.excinfo is None:
        return {"outcome": "passed", "why": ""}
    error = call.excinfo.value
    if isinstance(error, pytest.skip.Exception):
        return {"outcome": "skipped", "why": str(error)}
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, Unsupported | NotHere):
        return {"outcome": "refused", "why": why}
    if "No module named 'flashinfer'" in str(error):
        return {"outcome": "skipped", "why": "it starts a process of its own"}
    if not torch.cuda.is_available() and ("CUDA" in why or "cuda" in why):
        return {"outcome": "skipped", "why": "it needs a GPU"}
    return {"outcome": "failed", "why": f"{type(error).__name__}: {why}"}


def pytest_sessionfinish() -> None:
    kept = {"cases": sum(_totals.values()), "outcomes": _outcomes}
    Path(os.environ["FLASHINFER_OUTCOMES"]).write_text(json.dumps(kept, indent=1), encoding="utf-8")
