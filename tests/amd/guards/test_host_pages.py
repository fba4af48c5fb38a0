"""Pages that were in host memory: what may have happened to them there, with the safeguard and without.

With it the page counts as missing, and the row computes its tokens again; without it the text goes on, and is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.integrations.host_pages import CHANGED, OTHER, HostPages
from rocm_attn.paging.host_memory import HostMemory
from rocm_attn.paging.host_record import HEAD_WORDS
from rocm_attn.step.metrics import Metrics
from tests.amd.guards.ways import in_each_way
from tests.amd.worlds.world import ALL_ON, Request, World, is_right

KEYS = [bytes([number]) * 32 for number in range(4)]
PAGE, NUM_TOKENS = 4, 8


@dataclass
class Tiered:
    """A world, host memory, and a request whose two pages went there. Another request has written over both since."""

    serving: World
    first: Request
    memory: HostMemory
    tier: HostPages
    metrics: Metrics

    @classmethod
    def of(cls, device: torch.device, guards: Guards, graphs: bool, provider: str) -> Tiered:
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        runtime, metrics = serving.runtime, Metrics()
        memory = HostMemory(1 << 20, HostPages.record_bytes(runtime), pinned=device.type == "cuda")
        tier = HostPages(runtime, memory, model="a model", metrics=metrics)
        (first,) = serving.admit_all(1)
        serving.step([first], [NUM_TOKENS])
        pages = runtime.table.pages_of(first.row)
        tier.put(KEYS[:2], pages)
        left = first.first(first.row, NUM_TOKENS)
        serving.free(first)
        (other,) = serving.admit_all(1)
        serving.step([other], [NUM_TOKENS])
        assert {*runtime.table.pages_of(other.row)} == {*pages}
        return cls(serving, left, memory, tier, metrics)

    def come_back(self, keys: list[bytes]) -> tuple[Request, int]:
        """Returns a request whose row has got the pages of keys, with the tokens of the first one, and their number."""
        table = self.serving.runtime.table
        row = table.admit()
        table.reserve(row, NUM_TOKENS)
        kv_len = PAGE * self.tier.restore(keys, table.pages_of(row))
        table.mark_stored([row], [kv_len])
        request = self.first.first(row, kv_len)
        self.serving.requests.append(request)
        return request, kv_len


def a_flipped_bit(memory: HostMemory) -> None:
    """One bit of the second page: the sign of an element of K."""
    memory.at(KEYS[1])[8 * HEAD_WORDS + 3] ^= 0x80


def halves_exchanged(memory: HostMemory) -> None:
    """Two words of the second page are at each other's place."""
    words = memory.at(KEYS[1]).view(torch.int64)[HEAD_WORDS:]
    words[[0, 5]] = words[[5, 0]]


def an_old_half(memory: HostMemory) -> None:
    """The second half of the second page was never copied, and is what was there before."""
    of_page = memory.at(KEYS[1])[8 * HEAD_WORDS :]
    of_page[len(of_page) // 2 :] = memory.at(KEYS[0])[8 * HEAD_WORDS :][len(of_page) // 2 :]


@in_each_way
@pytest.mark.parametrize("happens", [a_flipped_bit, halves_exchanged, an_old_half], ids=lambda each: each.__name__)
def test_a_page_whose_bytes_have_changed_in_host_memory_is_a_miss(
    happens: Callable[[HostMemory], None], provider: str, graphs: bool, device: torch.device
) -> None:
    world = Tiered.of(device, ALL_ON, graphs, provider)
    happens(world.memory)
    request, kv_len = world.come_back(KEYS[:2])
    assert (kv_len, world.metrics.host_kv_hits, world.metrics.host_kv_refusals) == (PAGE, 1, {CHANGED: 1})
    assert len(world.memory) == world.metrics.host_kv_bytes == 0
    world.serving.step([request], [PAGE])
    world.serving.step([request], [1])

    world = Tiered.of(device, Guards().without("host_bytes"), graphs, provider)
    happens(world.memory)
    request, kv_len = world.come_back(KEYS[:2])
    assert (kv_len, world.metrics.host_kv_refusals) == (NUM_TOKENS, {})
    world.serving.run([request], [1])
    assert not is_right(world.serving, [request], [1])


def a_slot_of_other_tokens(world: Tiered) -> None:
    """The record of the second page was overwritten by that of another request's page."""
    runtime = world.serving.runtime
    world.tier.put(KEYS[2:3], runtime.table.pages_of(world.serving.requests[-1].row)[:1])
    if runtime.device.type == "cuda":
        torch.cuda.synchronize(runtime.device)
    world.memory.at(KEYS[1]).copy_(world.memory.at(KEYS[2]))


def another_models_page(world: Tiered) -> None:
    """Another model with the same tokens and the same formats has put its page there."""
    runtime = world.serving.runtime
    other = HostPages(runtime, world.memory, model="another model", metrics=world.metrics)
    other.put(KEYS[1:2], runtime.table.pages_of(world.serving.requests[-1].row)[:1])


@in_each_way
@pytest.mark.parametrize("happens", [a_slot_of_other_tokens, another_models_page], ids=lambda each: each.__name__)
def test_a_page_of_other_tokens_or_of_another_model_is_a_miss(
    happens: Callable[[Tiered], None], provider: str, graphs: bool, device: torch.device
) -> None:
    world = Tiered.of(device, ALL_ON, graphs, provider)
    happens(world)
    request, kv_len = world.come_back(KEYS[:2])
    assert (kv_len, world.metrics.host_kv_refusals) == (PAGE, {OTHER: 1})
    world.serving.step([request], [PAGE])

    world = Tiered.of(device, Guards().without("host_lineage"), graphs, provider)
    happens(world)
    request, kv_len = world.come_back(KEYS[:2])
    assert (kv_len, world.metrics.host_kv_refusals) == (NUM_TOKENS, {})
    world.serving.run([request], [1])
    assert not is_right(world.serving, [request], [1])
