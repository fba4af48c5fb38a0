"""Needles between steps that vLLM serves, in blocks that its scheduler lends."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rocm_attn.errors import DeviceFault
from rocm_attn.external import ExternalAttention
from rocm_attn.integrations.vllm import idle_blocks
from rocm_attn.integrations.vllm.group import give_chosen
from rocm_attn.integrations.vllm.idle_blocks import NO_BLOCKS, IdleBlocks, lent_blocks
from rocm_attn.integrations.vllm.latent_probe import LatentProbe
from rocm_attn.machine.settings import NEEDLES_EVERY
from rocm_attn.truth.adopted import EngineRow, probe_idle
from rocm_attn.truth.choosers import BY_INDEXERS, ByEngines
from rocm_attn.truth.row_needles import MOST_TOKENS
from rocm_attn.truth.verdict import TruthVerdict
from tests.amd.integrations.modules import install
from tests.amd.integrations.test_vllm_latent import Rank, rows_of
from tests.amd.integrations.test_vllm_state_hooks import REGISTRY, no_registry
from tests.amd.integrations.test_vllm_truth import Lines, by_a_wrong_scale
from tests.amd.integrations.vllm_runner import MAX_SEQS, NUM_BLOCKS, TERMS, Runner
from tests.amd.planted import reading_a_wrong_page

pytestmark = pytest.mark.usefixtures("inference_mode")

CPU = torch.device("cpu")


class Served:
    """A runner that serves, and the verdicts of needles in the blocks that it lends."""

    def __init__(self, terms: Sequence[Any], **options: Any) -> None:
        self.now, self.verdicts, self.pages = NO_BLOCKS, list[TruthVerdict](), list[int]()
        options = {"groups": [0] * len(terms), "device": CPU, "provider": "torch", **options}
        self.runner = Runner(terms, lent=lambda: self.now, tried_again=self._try, **options)

    def lend(self, count: int = 5) -> None:
        (free,) = self.runner.free
        self.now = IdleBlocks(self.now.turn + 1, [free.pop() for _ in range(count)], NUM_BLOCKS)

    def _try(self, attention: ExternalAttention, row: EngineRow) -> None:
        runner = self.runner
        self.pages = (row.slots[:: runner.block_size] // runner.block_size).tolist()
        others = [block for block in range(NUM_BLOCKS) if block not in self.pages]
        before = [layer.kv_cache[others].view(torch.uint8).clone() for layer in runner.layers]
        self.verdicts.append(probe_idle(attention, row))
        for layer, was in zip(runner.layers, before, strict=True):
            assert torch.equal(layer.kv_cache[others].view(torch.uint8), was), "blocks of requests were written"


def test_every_row_of_the_table_may_have_a_request() -> None:
    served = Served([TERMS])
    for _ in range(MAX_SEQS):
        served.runner.admit()
    served.runner.step([3] * MAX_SEQS)
    served.lend()
    table = served.runner.tables[0]
    served.runner.step([1] * MAX_SEQS)
    assert [verdict.word for verdict in served.verdicts] == ["right"]
    assert table[-1].tolist() == [*served.runner.requests[-1].blocks[0], *[0] * (table.shape[1] - 1)]


def test_needles_run_between_the_replays_of_graphs() -> None:
    served = Served([TERMS])
    graph = served.runner.capture(4, 4, 1)
    for _ in range(2):
        served.runner.admit()
    served.runner.step([9, 40])
    graph.run([1, 1])
    served.lend()
    graph.run([1, 1])
    graph.run([1, 1])
    assert [verdict.word for verdict in served.verdicts] == ["right"]


def test_a_block_that_is_several_pages_of_the_table_lends_them_all() -> None:
    """Blocks of hybrid models: the table has NUM_BLOCKS pages, and the scheduler counts half as many blocks."""
    served = Served([TERMS])
    runner = served.runner
    runner.free = [[page for page in free if page not in (30, 31, 38, 39)] for free in runner.free]
    runner.admit()
    runner.step([9])
    served.now = IdleBlocks(1, [19, 15], NUM_BLOCKS // 2)
    runner.step([1])
    assert served.pages == [38, 39, 30, 31]
    assert [verdict.word for verdict in served.verdicts] == ["right"]


@pytest.mark.parametrize("layer", [0, 1])
def test_what_one_layer_reads_wrongly_is_found_while_it_serves(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served([TERMS, TERMS])
    served.runner.admit()
    served.runner.step([30])
    reading_a_wrong_page(layer)(monkeypatch)
    served.lend()
    served.runner.step_unseen([1])
    (verdict,) = served.verdicts
    assert (verdict.word, list(verdict.wrong)) == ("wrong", [layer])


def test_a_fault_of_a_requests_step_goes_to_the_engine_and_not_to_the_needles() -> None:
    served = Served([TERMS])
    for _ in range(2):
        served.runner.admit()
    served.runner.step([9, 40])

    def wrong_slot(runner: Runner) -> None:
        runner.slots[0][0] += 1

    served.runner.step_unseen([1, 1], wrong_slot)
    served.lend()
    with pytest.raises(DeviceFault, match="step 2: "):
        served.runner.step_unseen([1, 1])
    assert served.verdicts == []


@pytest.mark.parametrize("top", [0, 12], ids=["all keys", "selected keys"])
@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "by a wrong scale"])
def test_rows_that_vllm_stores_in_its_own_pages_are_found(top: int, is_wrong: bool) -> None:
    log, lines, now = logging.Logger("vllm.rocm_attn"), Lines(), [NO_BLOCKS]
    log.addHandler(lines)

    def again(attention: ExternalAttention, row: EngineRow) -> None:
        LatentProbe([rank.layer], log, choosers=ByEngines(give_chosen) if top else BY_INDEXERS).again(attention, row)

    rank = Rank(0, 1, CPU, "torch", top, lent=lambda: now[0], tried_again=again)
    (rows,) = rows_of([5])
    rank.slots[0] = rank.store(0, rows)[-1]
    rank.group.begin(rank.common(1, 1))
    if is_wrong:
        rank.layer.impl.do_kv_cache_update = by_a_wrong_scale
    used, blocks = set(rank.table.flatten().tolist()), rank.layer.kv_cache.shape[0]
    now[0] = IdleBlocks(1, [block for block in range(1, blocks) if block not in used][:6], blocks)
    rank.group.begin(rank.common(1, 1))
    (line,) = lines.written
    assert line.startswith(f"{'ERROR' if is_wrong else 'INFO'}: needles in idle pages of 1 layers: ")
    assert (": wrong; " in line) == is_wrong


class Pool:
    """Stands for vLLM's BlockPool."""

    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks, self.free = num_blocks, list(range(1, num_blocks))

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Any]:
        taken, self.free = self.free[:count], self.free[count:]
        return [SimpleNamespace(block_id=block) for block in taken]

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        self.free += [block.block_id for block in blocks]


class Output:
    """Stands for vLLM's SchedulerOutput, which takes other attributes too."""

    def __init__(self, tokens: int) -> None:
        self.total_num_scheduled_tokens = tokens


def engine_of(every: int, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Stands for a scheduler and a worker of vLLM's, whose classes have our hooks."""

    class Scheduler:
        def __init__(self) -> None:
            group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
            config = SimpleNamespace(kv_cache_groups=[group])
            self.kv_cache_manager = SimpleNamespace(block_pool=pool, kv_cache_config=config)
            self.running: list[object] = []
            self.connector: object = None

        def schedule(self, tokens: int) -> Output:
            return Output(tokens)

        def update_from_output(self, output: Output, results: Callable[[], str]) -> str:
            return results()

    class WorkerWrapperBase:
        def execute_model(self, output: Output) -> IdleBlocks:
            return lent_blocks()

    engine = {"core.sched.scheduler": Scheduler, "worker.worker_base": WorkerWrapperBase}
    install(monkeypatch, {f"vllm.v1.{name}": {class_.__name__: class_} for name, class_ in engine.items()})
    for _ in range(2):  # vLLM may load a plug-in again
        idle_blocks.lend_blocks(every)
    return Scheduler(), WorkerWrapperBase()


def test_a_scheduler_lends_blocks_before_every_so_many_steps_and_gets_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(100)
    scheduler, worker = engine_of(3, pool, monkeypatch)
    found: list[int] = []
    for step in range(1, 8):
        assert worker.execute_model(scheduler.schedule(0)) is NO_BLOCKS  # no tokens: it is no step
        output = scheduler.schedule(4)
        lent = worker.execute_model(output)
        if lent.turn:
            found.append(step)
            assert len(lent.numbers) == len({*lent.numbers}) == -(-MOST_TOKENS // 16)
            assert not {*lent.numbers} & {*pool.free}
            assert list(lent.numbers) != sorted(lent.numbers)
            assert (lent.pool, lent.turn) == (100, len(found))
        assert lent_blocks() is NO_BLOCKS
        assert scheduler.update_from_output(output, lambda: "results") == "results"
        assert sorted(pool.free) == list(range(1, 100))
    assert found == [3, 6]


@pytest.mark.parametrize("every", ["", "0", "5"])
def test_vllm_is_hooked_only_where_needles_are_asked_for(every: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = list[int]()
    monkeypatch.setitem(sys.modules, REGISTRY, no_registry())
    monkeypatch.setattr(idle_blocks, "lend_blocks", hooked.append)
    monkeypatch.setenv(NEEDLES_EVERY, every)
    importlib.import_module("rocm_attn.integrations.vllm")._register_names()
    assert hooked == ([5] if every == "5" else [])


def test_blocks_come_back_also_from_two_steps_at_once_and_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(200)
    scheduler, _ = engine_of(1, pool, monkeypatch)
    one, other = scheduler.schedule(4), scheduler.schedule(4)

    def fails() -> str:
        raise RuntimeError("it failed")

    with pytest.raises(RuntimeError, match="it failed"):
        scheduler.update_from_output(one, fails)
    scheduler.update_from_output(other, lambda: "")
    assert sorted(pool.free) == list(range(1, 200))


def test_blocks_that_requests_may_need_soon_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * -(-MOST_TOKENS // 16)
    pool = Pool(1 + needed)
    scheduler, worker = engine_of(1, pool, monkeypatch)
    scheduler.running = [object()]
    assert worker.execute_model(scheduler.schedule(4)) is NO_BLOCKS
    scheduler.running = []
    assert worker.execute_model(scheduler.schedule(4)).turn == 1


def test_blocks_that_a_connector_may_have_yet_to_copy_are_not_lent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's OffloadingConnector copies blocks of a finished request in the step after those blocks are free."""
    pool = Pool(100)
    scheduler, worker = engine_of(1, pool, monkeypatch)
    scheduler.connector = object()
    for _ in range(2):
        assert worker.execute_model(scheduler.schedule(4)) is NO_BLOCKS
    assert sorted(pool.free) == list(range(1, 100))
    assert [record.message.split(":")[0] for record in caplog.records] == [f"{NEEDLES_EVERY} is ignored"]
