"""Needles between steps that SGLang serves, in a row and slots that its scheduler lends.

The stand-ins follow SGLang 0.5.23: the allocators of srt/mem_cache/allocator, and evict_from_tree_cache.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import DeviceFault
from rocm_attn.external import ExternalAttention
from rocm_attn.integrations.sglang.hooks import AttentionHooks
from rocm_attn.integrations.sglang.seen import PAD_ROW, slot_map
from rocm_attn.machine.settings import NEEDLES_EVERY
from rocm_attn.truth.adopted import EngineRow, probe_idle
from rocm_attn.truth.verdict import TruthVerdict
from tests.amd.integrations.modules import install
from tests.amd.integrations.sglang_stand_in import Engine, Mode, Request
from tests.amd.integrations.test_sglang_truth import POOLS
from tests.amd.planted import reading_a_wrong_page

CPU = torch.device("cpu")
IDLE_ROWS = "rocm_attn.integrations.sglang.idle_rows"


class Allocator:
    """The allocators of SGLang, over the free pages of an engine.

    as_new: whether both pools of a model with windows give out equal numbers, as they do when they are new
    """

    def __init__(self, engine: Engine) -> None:
        self.page_size, self._engine, self.as_new = engine.page_size, engine, False

    def get_kvcache(self) -> Any:
        return self._engine.pool

    def alloc(self, need_size: int) -> Tensor | None:
        assert self.page_size == 1
        return self._pages(need_size)

    def alloc_extend(
        self, prefix: Tensor, prefix_cpu: Tensor, lens: Tensor, lens_cpu: Tensor, last: Tensor, count: int
    ) -> Tensor | None:
        assert self.page_size > 1
        assert (prefix.tolist(), prefix_cpu.tolist(), lens.tolist(), lens_cpu.tolist()) == ([0], [0], [count], [count])
        assert last.tolist() == [-1]
        assert count % self.page_size == 0
        # SGLang counts a page more for each request, and one more again.
        return None if len(self._engine.free) < count // self.page_size + 2 else self._pages(count // self.page_size)

    def _pages(self, count: int) -> Tensor | None:
        """Takes the pages with the lowest numbers: SGLang's are in order too."""
        free, size = self._engine.free, self.page_size
        if len(free) < count:
            return None
        taken = sorted(free)[:count]
        self._engine.free = [page for page in free if page not in taken]
        slots = torch.tensor(taken)[:, None] * size + torch.arange(size)
        mapping = slot_map(self._engine.pool)
        if mapping is not None:
            mapping[slots.flatten()] = self._mapped(slots.flatten())
        return slots.flatten()

    def _mapped(self, slots: Tensor) -> Tensor:
        """The slots of the pool of windows, as the engine maps those of requests."""
        size, most = self.page_size, self._engine.num_slots // self.page_size
        return slots if self.as_new else (most - slots // size) * size + slots % size

    def free(self, slots: Tensor) -> None:
        mapping = slot_map(self._engine.pool)
        if mapping is not None:
            assert torch.equal(mapping[slots], self._mapped(slots)), "slots of the pool of windows would be lost"
            mapping[slots] = 0
        pages = {*(slots // self.page_size).tolist()}
        assert not pages & {*self._engine.free}
        self._engine.free += pages


class Served:
    """An engine of SGLang's whose steps are run by a scheduler, with needles before each of them."""

    def __init__(self, lending: Any, **kind: Any) -> None:
        kind = {"provider": "torch", "device": CPU, "dim": 64, "windows": (-1, -1), **kind}
        self.engine = engine = Engine(serve=False, **kind)
        self.verdicts, self.slots, self._lending = list[TruthVerdict](), list[Tensor](), lending
        serving = replace(engine.serving, lent=lending.lent_row, tried_again=self._try)
        engine.hooks = AttentionHooks(engine.runner, serving)
        self.allocator = Allocator(engine)
        self.tree = SimpleNamespace(evicted=list[int]())

        class Scheduler:
            """The part of SGLang's scheduler that is read, with a name that a reference may be weak to."""

            token_to_kv_pool_allocator, tree_cache = self.allocator, self.tree
            req_to_token_pool = engine.runner.req_to_token_pool

        self.scheduler = Scheduler()

    def run(self, mode: Mode, requests: list[Request], new: list[int], *, compares: bool = True) -> None:
        def run_batch(scheduler: Any, batch: str) -> str:
            assert (scheduler, batch) == (self.scheduler, "batch")
            if compares:
                self.engine.run(mode, requests, new)
            else:
                step = self.engine.step_of(self.engine.batch(mode, requests, new), new)
                self.engine.hooks.init_forward_metadata(step.batch)
                self.engine.forward(step)
            return "results"

        assert self._lending.lend(run_batch, self.scheduler, "batch") == "results"

    def _try(self, attention: ExternalAttention, row: EngineRow) -> None:
        engine, ids = self.engine, [layer.layer_id for layer in self.engine.layers]
        others = torch.ones(engine.num_slots, dtype=torch.bool)
        mapping = slot_map(engine.pool)
        others[row.slots if mapping is None else torch.cat([row.slots, mapping[row.slots]])] = False
        before = [engine.pool.get_key_buffer(layer)[others].clone().view(torch.uint8) for layer in ids]
        self.slots.append(row.slots)
        self.verdicts.append(probe_idle(attention, row))
        for layer, rows in zip(ids, before, strict=True):
            now = engine.pool.get_key_buffer(layer)[others].view(torch.uint8)
            assert torch.equal(rows, now), "slots of requests were written"


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields our module over SGLang's, with needles before each step, hidden from other tests."""

    def evict(tree: Any, num_tokens: int) -> None:
        tree.evicted.append(num_tokens)

    install(monkeypatch, {"sglang.srt.mem_cache.common": {"evict_from_tree_cache": evict}})
    monkeypatch.setenv(NEEDLES_EVERY, "1")
    yield importlib.import_module(IDLE_ROWS)
    del sys.modules[IDLE_ROWS]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", POOLS)
def test_a_wrong_entry_of_one_layers_table_is_found_while_it_serves(
    kind: dict[str, Any], layer: int, lending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(lending, **kind)
    reading_a_wrong_page(layer)(monkeypatch)
    served.run(Mode.EXTEND, [served.engine.admit()], [7], compares=False)
    (verdict,) = served.verdicts
    assert (verdict.word, list(verdict.wrong)) == ("wrong", [layer])


def test_a_windowed_layer_that_reads_the_numbers_of_the_other_pool_is_found(
    lending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pools give out equal numbers, so that only the map of the needles' own slots differs."""
    gathered = ExternalAttention._gather

    def wrong(self: ExternalAttention, tables: Any, run: Any) -> None:
        gathered(self, tables, run)
        if len(tables) > 1:
            tables[-1].entries.copy_(tables[0].entries)

    monkeypatch.setattr(ExternalAttention, "_gather", wrong)
    served = Served(lending, windows=(-1, 90), with_window_pool=True)
    served.allocator.as_new = True
    served.run(Mode.EXTEND, [served.engine.admit()], [7], compares=False)
    (verdict,) = served.verdicts
    assert (verdict.word, list(verdict.wrong)) == ("wrong", [1])


def test_needles_wait_for_slots_and_run_before_every_so_many_steps(
    lending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NEEDLES_EVERY, "2")
    served = Served(lending)
    request, ran = served.engine.admit(), []
    served.run(Mode.EXTEND, [request], [7])
    free, served.engine.free = served.engine.free, served.engine.free[:3]
    served.run(Mode.DECODE, [request], [1])
    served.engine.free = [page for page in free if page not in request.pages]
    for _ in range(5):
        served.run(Mode.DECODE, [request], [1])
        ran.append(len(served.verdicts))
    assert ran == [1, 1, 2, 2, 3]


def test_slots_come_back_from_a_step_that_fails(lending: Any) -> None:
    served = Served(lending)
    pages = {*served.engine.free}

    def fails(scheduler: Any, batch: str) -> str:
        raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        lending.lend(fails, served.scheduler, "batch")
    assert {*served.engine.free} == pages
    assert lending.lent_row() is lending.NO_ROW


def test_a_fault_of_a_requests_step_goes_to_the_engine_and_not_to_the_needles(
    lending: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NEEDLES_EVERY, "2")
    served = Served(lending)
    request = served.engine.admit()
    served.run(Mode.EXTEND, [request], [7])
    engine = served.engine
    step = engine.step_of(engine.batch(Mode.DECODE, [request], [1]), [1])
    step.batch.out_cache_loc = step.batch.out_cache_loc + 8
    engine.hooks.init_forward_metadata(step.batch)
    engine.forward(step)
    with pytest.raises(DeviceFault, match="step 2: "):
        served.run(Mode.DECODE, [request], [1])
    assert served.verdicts == []
    assert not engine.table[PAD_ROW].any()
