"""HostBlocks: an engine's blocks come back from host memory with the bytes that left, or are refused by name.

vLLM's connector over it, next to classes that stand for vLLM's; whole engines run it by night.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, NeverFits, Unsupported
from rocm_attn.integrations import host_blocks
from rocm_attn.integrations.host_blocks import HostBlocks, Moved, Transfer
from rocm_attn.paging.host_record import HostGuards
from rocm_lab.faults.wrong_twins import whatever_comes_back
from tests.amd.integrations.modules import install

NUM_BLOCKS, NUM_SLOTS = 12, 20
# Bytes of a block in each layer of each group; the second group's are no multiple of 16, nor even of 8.
GROUPS = ((64, 32), (40, 100, 7))


def caches_of(device: torch.device) -> list[list[Tensor]]:
    """Returns random bytes of blocks; those of the first group lie in one tensor, a gap after each block."""
    random = torch.Generator().manual_seed(0)

    def rows(width: int) -> Tensor:
        return torch.randint(-128, 128, (NUM_BLOCKS, width), generator=random, dtype=torch.int8).to(device)

    together = rows(sum(GROUPS[0]) + 16)
    return [list(torch.split(together[:, :96], [*GROUPS[0]], 1)), [rows(width) for width in GROUPS[1]]]


def ended(transfer: Transfer) -> Transfer:
    transfer.wait()
    assert transfer.is_done()
    return transfer


@pytest.fixture
def caches(device: torch.device) -> list[list[Tensor]]:
    return caches_of(device)


@pytest.fixture
def host(caches: list[list[Tensor]]) -> HostBlocks:
    return HostBlocks(caches, NUM_SLOTS, HostGuards())


LEFT = [Moved(0, [3, 0, 7], [19, 4, 5]), Moved(1, [2, 11], [0, 6])]


@pytest.mark.parametrize("at_once", [0, 1, 2, 100])  # 0: a block is larger than the memory for staging
def test_blocks_of_every_group_come_back_into_other_blocks_with_the_bytes_that_left(
    at_once: int, caches: list[list[Tensor]], host: HostBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_blocks, "_STAGED_BYTES", at_once * host.record_bytes)
    before = [[cache.clone() for cache in group] for group in caches]
    out = ended(host.send_out(LEFT))
    assert (out.num_bytes, out.refused) == (3 * 96 + 2 * 147, [])
    back = [Moved(0, [1, 2, 9], [5, 19, 4]), Moved(1, [4, 3], [6, 0])]
    for group in caches:
        for cache in group:
            cache.random_(-128, 128)
    untouched = [[cache.clone() for cache in group] for group in caches]
    assert ended(host.bring_back(back)).refused == []
    block_of_slot = {slot: block for each in LEFT for block, slot in zip(each.blocks, each.slots, strict=True)}
    for each in back:
        for cache, was, left in zip(caches[each.group], untouched[each.group], before[each.group], strict=True):
            for block, slot in zip(each.blocks, each.slots, strict=True):
                assert cache[block].equal(left[block_of_slot[slot]])
            others = [block for block in range(NUM_BLOCKS) if block not in each.blocks]
            assert cache[others].equal(was[others])


def one_bit(host: Any) -> None:
    host._records.at(4)[90] ^= 1


def swapped(host: Any) -> None:
    """Each slot holds a block that has left, but the other one."""
    one, other = (host._records.at(slot) for slot in (4, 5))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def half(host: Any) -> None:
    """The copy stopped within the block."""
    host._records.at(4)[host.record_bytes // 4 :] = 0


@pytest.mark.parametrize(("change", "slots"), [(one_bit, [4]), (swapped, [4, 5]), (half, [4])])
def test_what_changes_in_host_memory_is_refused_by_its_slot(
    change: Callable[[Any], None], slots: list[int], host: HostBlocks
) -> None:
    ended(host.send_out(LEFT))
    change(host)
    back = [Moved(0, [1, 2, 3], [19, 4, 5]), Moved(1, [0, 1], [0, 6])]
    assert ended(host.bring_back(back)).refused == slots


def test_without_the_safeguard_changed_bytes_come_back(caches: list[list[Tensor]]) -> None:
    host = HostBlocks(caches, NUM_SLOTS, HostGuards(is_unchanged=whatever_comes_back))
    ended(host.send_out(LEFT))
    one_bit(host)
    left = caches[0][1][0].clone()
    assert ended(host.bring_back([Moved(0, [2], [4])])).refused == []
    assert not caches[0][1][2].equal(left)


def test_a_slot_that_no_block_has_left_for_is_refused(host: HostBlocks) -> None:
    host._records.at(8).fill_(1)
    assert ended(host.bring_back([Moved(0, [2], [8])])).refused == [8]


def test_a_copy_that_loses_bytes_on_its_way_back_is_refused(
    caches: list[list[Tensor]], host: HostBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum is of the block that has arrived in the cache, and LMCache#4463 was a wrong copy."""
    ended(host.send_out(LEFT))
    at = host._records.at

    def too_far(slot: int) -> Tensor:
        return at(slot).roll(4)

    monkeypatch.setattr(host._records, "at", too_far)
    assert ended(host.bring_back([Moved(0, [2, 1], [4, 5])])).refused == [4, 5]


def test_copies_come_after_what_the_current_stream_has_to_do(caches: list[list[Tensor]], host: HostBlocks) -> None:
    """LMCache#4870: a block was copied before the write to it had ended."""
    device = caches[0][0].device
    busy = torch.rand(2048, 2048, device=device) if device.type == "cuda" else torch.rand(8, 8)
    for _ in range(30):
        busy = busy @ busy
    for cache in caches[0]:
        cache[3] = 17
    out = host.send_out([Moved(0, [3], [2])])
    ended(out)
    assert ended(host.bring_back([Moved(0, [5], [2])])).refused == []
    assert all((cache[5] == 17).all() for cache in caches[0])
    assert out.seconds >= 0


def test_a_transfer_of_no_block_ends(host: HostBlocks) -> None:
    nothing = [Moved(0, [], []), Moved(1, [], [])]
    for transfer in (host.send_out(nothing), host.bring_back(nothing)):
        assert (ended(transfer).refused, transfer.num_bytes) == ([], 0)


def test_a_group_without_a_layer_on_this_rank_moves_nothing(caches: list[list[Tensor]]) -> None:
    """vLLM divides the layers over the stages of a pipeline, and each stage has all groups."""
    host = HostBlocks([[], caches[1]], NUM_SLOTS, HostGuards())
    before = [cache.clone() for cache in caches[1]]
    ended(host.send_out([Moved(0, [1, 2], [0, 1]), Moved(1, [3], [2])]))
    for cache in caches[1]:
        cache[3] = 0
    back = ended(host.bring_back([Moved(0, [5, 6], [0, 1]), Moved(1, [3], [2])]))
    assert (back.refused, back.num_bytes) == ([], sum(GROUPS[1]))
    assert all(map(torch.equal, caches[1], before))


def test_caches_that_are_no_bytes_of_blocks_and_memory_without_a_slot_are_refused(
    caches: list[list[Tensor]], device: torch.device
) -> None:
    for wrong in (torch.zeros(4, 8, device=device), torch.zeros(4, 8, 1, dtype=torch.int8, device=device)):
        with pytest.raises(BadTensor, match="give the bytes of its blocks"):
            HostBlocks([[wrong]], 4, HostGuards())
    with pytest.raises(BadTensor, match="each block without gaps"):
        HostBlocks([[caches[1][0][:, ::2]]], 4, HostGuards())
    with pytest.raises(NeverFits, match="room for no record"):
        HostBlocks(caches, 0, HostGuards())


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
