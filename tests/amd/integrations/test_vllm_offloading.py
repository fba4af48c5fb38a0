"""vLLM's connector over checked host memory, next to classes that stand for vLLM's; whole engines run it by night."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rocm_attn.errors import Unsupported
from tests.amd.integrations.modules import install

OURS = "rocm_attn.integrations.vllm_offloading"
_CONNECTORS, _OFFLOAD = "vllm.distributed.kv_transfer.kv_connector.v1", "vllm.v1.kv_offload"
# The names that the module takes from each of vLLM's.
NAMES = {
    f"{_CONNECTORS}.base": ("KVConnectorTransferResults",),
    f"{_CONNECTORS}.offloading.common": ("OffloadingConnectorMetadata", "OffloadingWorkerMetadata"),
    f"{_OFFLOAD}.base": (
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "LookupResult",
        "OffloadingManager",
        "OffloadingWorker",
        "OffloadKey",
        "PrepareStoreOutput",
        "ReqContext",
        "TransferResult",
    ),
    f"{_OFFLOAD}.cpu.common": ("CPULoadStoreSpec",),
    f"{_OFFLOAD}.cpu.manager": ("CPUOffloadingManager",),
    f"{_OFFLOAD}.cpu.spec": ("CPUOffloadingSpec",),
}


class OffloadingConnector:
    """Takes what vLLM's takes, and keeps the settings."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.chosen = vllm_config.kv_transfer_config.kv_connector_extra_config


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    modules: dict[str, dict[str, Any]] = {
        name: {each: type(each, (), {}) for each in names} for name, names in NAMES.items()
    }
    modules[f"{_CONNECTORS}.offloading_connector"] = {"OffloadingConnector": OffloadingConnector}
    install(monkeypatch, modules)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield importlib.import_module(OURS)
    sys.modules.pop(OURS, None)
    vars(importlib.import_module("rocm_attn.integrations")).pop("vllm_offloading", None)


def connected(ours: Any, **chosen: Any) -> Any:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=chosen))
    return ours.CheckedOffloadingConnector(config, None, None)


def test_the_connector_names_its_own_memory(ours: Any) -> None:
    for more in ({}, {"sync_load_budget_bytes": 0}):
        made = connected(ours, cpu_bytes_to_use=1 << 20, **more)
        assert made.chosen["spec_name"] == "CheckedSpec"
        assert made.chosen["spec_module_path"] == OURS


@pytest.mark.parametrize("size", [1 << 20, "1024"])
def test_loads_within_the_step_that_reads_them_are_refused(size: object, ours: Any) -> None:
    """vLLM 0.33 has them. The step would have read a block that has changed before it is refused."""
    with pytest.raises(Unsupported, match=f"sync_load_budget_bytes is {size}: a step would read blocks .* leave it ou"):
        connected(ours, sync_load_budget_bytes=size)
