"""HostPages: pages that were in host memory decode with the bits of pages that stayed, and wrong ones never come back.

Two public threads are replayed here, each as a copy that goes wrong in the way that its reporters found.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.errors import BadBatch, BadSetting, NeverFits, Unsupported, WrongState
from rocm_attn.integrations.host_pages import CHANGED, OTHER, HostPages
from rocm_attn.paging.host_memory import HostMemory
from rocm_attn.paging.host_record import HEAD_WORDS, checksums
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.kv_scales import KVScales
from rocm_attn.step.metrics import Metrics
from tests.amd.integrations.kv_stories import MODELS, Story, assert_others_untouched, coded, runtime_of, storages
from tests.amd.runtime.interrupts import every_line
from tests.amd.worlds.hybrid import GATED_DELTA, Hybrid
from tests.amd.worlds.problems import record_layer, small_problem

NUM_TOKENS, NUM_PAGES = 24, 6
KEYS = [bytes([number]) * 32 for number in range(20)]


def memory_for(runtime: AttentionRuntime, num_records: int = 20) -> HostMemory:
    record_bytes = HostPages.record_bytes(runtime)
    return HostMemory(num_records * record_bytes, record_bytes, pinned=runtime.device.type == "cuda")


def tier_of(runtime: AttentionRuntime, memory: HostMemory, kind: type[HostPages] = HostPages) -> HostPages:
    return kind(runtime, memory, model="a model", metrics=Metrics())


def stored(story: Story, runtime: AttentionRuntime) -> tuple[int, Int32Array]:
    row = story.prefill(runtime, NUM_TOKENS)
    pages = runtime.table.pages_of(row)
    assert len(pages) == NUM_PAGES
    return row, pages


class PutPage(NamedTuple):
    """A row, its pages, and a tier that has the first of them."""

    runtime: AttentionRuntime
    tier: HostPages
    row: int
    pages: Int32Array

    @classmethod
    def by_a_row(cls, device: torch.device) -> "PutPage":
        problems = [small_problem()]
        runtime = runtime_of(problems, device, "torch")
        tier = tier_of(runtime, memory_for(runtime))
        row, pages = stored(Story(problems, device), runtime)
        tier.put(KEYS[:1], pages[:1])
        return cls(runtime, tier, row, pages)


def free_and_fill(runtime: AttentionRuntime, row: int) -> None:
    runtime.table.free(row)
    for layer in runtime.pool.in_space(runtime.table.spaces[0].space).layers:
        layer.fill_nan(slice(1, None))


def come_back(runtime: AttentionRuntime, tier: HostPages, keys: Sequence[bytes]) -> tuple[int, int]:
    row = runtime.table.admit()
    runtime.table.reserve(row, NUM_TOKENS)
    right = tier.restore(keys, runtime.table.pages_of(row))
    runtime.table.mark_stored([row], [right * runtime.pool.page_size])
    return row, right


@pytest.mark.parametrize("staged", [0, 1, 4, 100])
@pytest.mark.parametrize("model", MODELS)
def test_pages_from_host_memory_decode_with_the_bits_of_pages_that_stayed(
    model: str, staged: int, provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's page ids are others, and no page around them is written. staged: records that there is memory for"""
    if provider == "triton" and "latent" in model:
        provider = "torch"  # rows of 16 elements are too short for its latent kernels
    problems = MODELS[model]
    story, runtime = Story(problems, device), runtime_of(problems, device, provider)
    staying = runtime_of(problems, device, provider)
    wanted = story.decode(staying, story.prefill(staying, NUM_TOKENS), NUM_TOKENS)
    monkeypatch.setattr("rocm_attn.integrations.host_pages._STAGED_BYTES", staged * HostPages.record_bytes(runtime))
    memory = memory_for(runtime)
    tier = tier_of(runtime, memory)
    row, pages = stored(story, runtime)
    tier.put(KEYS[:NUM_PAGES], pages)
    free_and_fill(runtime, row)
    others = runtime.table.admit()
    runtime.table.reserve(others, 9)
    assert all(map(tier.found, KEYS[:NUM_PAGES]))
    assert len(memory) == NUM_PAGES
    before = {tensor: tensor.clone() for tensor in storages(runtime)}
    row, right = come_back(runtime, tier, KEYS[:NUM_PAGES])
    assert right == NUM_PAGES
    assert len(memory) == 0
    runtime.table.free(others)
    for of_pages, tensor_before in before.items():
        assert_others_untouched(runtime, of_pages, tensor_before)
    for found, out in zip(story.decode(runtime, row, NUM_TOKENS), wanted, strict=True):
        assert torch.equal(found, out)
    runtime.check_device()


def test_the_least_recently_used_record_is_given_back_first(device: torch.device) -> None:
    problems = [small_problem()]
    story, runtime = Story(problems, device), runtime_of(problems, device, "torch")
    memory = memory_for(runtime, 4)
    tier = tier_of(runtime, memory)
    _, pages = stored(story, runtime)
    tier.put(KEYS[:4], pages[:4])
    assert tier.found(KEYS[0])
    tier.put(KEYS[4:6], pages[4:])
    assert [key in memory for key in KEYS[:6]] == [True, False, False, True, True, True]
    tier.put(KEYS[3:4], pages[:1])  # in place of its older record
    assert len(memory) == 4
    tier.put(KEYS[:6], pages)  # more than there is room for
    assert [key in memory for key in KEYS[:6]] == [False, False, True, True, True, True]
    assert memory.num_bytes == 4 * memory.record_bytes == tier._metrics.host_kv_bytes
    row = runtime.table.admit()
    runtime.table.reserve(row, NUM_TOKENS)
    assert tier.restore(KEYS[1:6], runtime.table.pages_of(row)) == 0, "the first of them is not there"
    tier.clear()
    assert len(memory) == tier._metrics.host_kv_bytes == 0
    tier.put(KEYS[:4], pages[:4])
    assert len(memory) == 4


def test_an_interrupt_loses_no_record_of_host_memory() -> None:
    memory = HostMemory(4 * 16, 16, pinned=False)

    def changed() -> None:
        memory.take(KEYS[4])
        memory.take(KEYS[4])
        memory.clear()
        memory.take(KEYS[5])

    for _ in every_line(changed):
        for key in KEYS[:4]:
            memory.take(key).fill_(key[0])
        assert all(key in memory and (memory.at(key) == key[0]).all() for key in KEYS[:4])


@pytest.mark.parametrize("block_bytes", [8, 40, 1 << 20])
def test_each_record_has_memory_of_its_own_whatever_a_block_holds(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_attn.paging.host_memory._BLOCK_BYTES", block_bytes)
    memory = HostMemory(5 * 16, 16, pinned=False)
    for key in KEYS[:5]:
        memory.take(key).fill_(key[0])
    assert all((memory.at(key) == key[0]).all() for key in KEYS[:5])


class PutMeanwhile(HostPages):
    """Lets another thread put a page while this one has gathered its first one."""

    def put(self, keys: Sequence[bytes], pages: Int32Array) -> None:
        self._others = [(keys[1:], pages[1:])]
        self._threads = ThreadPoolExecutor(1)
        super().put(keys[:1], pages[:1])
        self._threads.shutdown()

    def _gather(self, page: Tensor, records: Tensor) -> None:
        super()._gather(page, records)
        if self._others:
            wait([self._threads.submit(super().put, *self._others.pop())], 0.1)


def test_threads_that_put_pages_at_a_time_lose_none(device: torch.device) -> None:
    problems = [small_problem()]
    story, runtime = Story(problems, device), runtime_of(problems, device, "torch")
    tier = tier_of(runtime, memory_for(runtime), PutMeanwhile)
    row, pages = stored(story, runtime)
    tier.put(KEYS[:2], pages[:2])
    free_and_fill(runtime, row)
    _, right = come_back(runtime, tier, KEYS[:2])
    assert (right, tier._metrics.host_kv_refusals) == (2, {})


def wrong_pages(
    kind: type[HostPages], device: torch.device
) -> tuple[Story, AttentionRuntime, HostMemory, HostPages, list[Tensor]]:
    """Returns a tier that has put pages by its kind of copy, and what the request decodes where it stays."""
    problems = [small_problem()] * 2
    story, runtime = Story(problems, device), runtime_of(problems, device, "torch")
    staying = runtime_of(problems, device, "torch")
    wanted = story.decode(staying, story.prefill(staying, NUM_TOKENS), NUM_TOKENS)
    memory = memory_for(runtime)
    tier = tier_of(runtime, memory, kind)
    row, pages = stored(story, runtime)
    tier.put(KEYS[:NUM_PAGES], pages)
    free_and_fill(runtime, row)
    return story, runtime, memory, tier, wanted


class HalfRows(HostPages):
    """Takes half of each row for all of it: the second half goes to the place of the first, and comes back twice."""

    def _gather(self, page: Tensor, records: Tensor) -> None:
        for line, place in zip(self._lines, self._places, strict=True):
            half = line.shape[1] // 2
            rows, of_line = line.index_select(0, page), records[:, place : place + line[0].nbytes].view(line.dtype)
            of_line[:, :half] = rows[:, :half]
            of_line[:, :half] = rows[:, half:]

    def _scatter(self, page: Tensor, records: Tensor) -> None:
        for line, place in zip(self._lines, self._places, strict=True):
            half = line.shape[1] // 2
            of_line = records[:, place : place + line[0].nbytes].view(line.dtype)
            line[page] = torch.cat([of_line[:, :half]] * 2, 1)


def test_lmcache_4463_rows_of_another_width_are_refused(device: torch.device) -> None:
    """LMCache#4463: silent corruption on a packed layout of K and V.

    Mechanism: vLLM 0.26 stores [K | V] of a head in one row of twice the head's elements. The connector took the row
    for one of K alone, so slots of its buffer were half as wide as rows, halves landed on each other, and the same
    wrong places were read on the way back. No copy failed, and a checksum over what was copied would be right at both
    ends.

    Here the pages' own format gives the width, and `host_bytes` reports such a copy: the checksum is of the page in the
    pool, where it was stored and where it has arrived, not of the bytes in between.
    """
    story, runtime, memory, tier, wanted = wrong_pages(HalfRows, device)
    if device.type == "cuda":  # the copies are on their way
        torch.cuda.synchronize(device)
    sent = [memory.at(key)[8 * HEAD_WORDS :].clone() for key in KEYS[:NUM_PAGES]]
    row, right = come_back(runtime, tier, KEYS[:NUM_PAGES])
    assert (right, tier._metrics.host_kv_refusals) == (0, {CHANGED: 1})
    assert KEYS[0] not in memory
    kept = [memory.at(key)[8 * HEAD_WORDS :] for key in KEYS[1:NUM_PAGES]]
    assert all(map(torch.equal, kept, sent[1:])), "the bytes that were copied have not changed since"
    runtime.table.free(row)
    row = story.prefill(runtime, NUM_TOKENS)
    assert all(map(torch.equal, story.decode(runtime, row, NUM_TOKENS), wanted))


class Unordered(HostPages):
    """Copies records to the host before the launch that gathers pages has written them."""

    def put(self, keys: Sequence[bytes], pages: Int32Array) -> None:
        self._late: list[tuple[Tensor, Tensor]] = []
        super().put(keys, pages)
        for page, records in self._late:
            super()._gather(page, records)

    def _gather(self, page: Tensor, records: Tensor) -> None:
        self._late.append((page, records))


def test_lmcache_4870_a_copy_that_is_not_ordered_after_the_writes_is_refused(device: torch.device) -> None:
    """LMCache#4870: on ROCm, stale chunks that are readable and plausible, and answers that are wrong.

    Mechanism: an asynchronous copy looked for CUDA's name in HIP's library, did not find it, and fell back to a copy
    by the host, ordered with no stream. It read the staging buffer before the transfer kernel had written it, and found
    the chunk of an earlier store. The same thread reports a layout that could not be imported and became "none", and
    views of padded pages of recurrent layers.

    Here all copies are launches of one stream. `host_bytes` reports one that is not: the checksum in the record is of
    the page, and the bytes next to it are not. `host_lineage` cannot: the head is right. The layout is the pool's own,
    and recurrent layers are refused (test_pages_that_are_not_everything_are_refused).
    """
    story, runtime, memory, tier, wanted = wrong_pages(HostPages, device)
    tier.clear()
    late = tier_of(runtime, memory, Unordered)
    late._staged.copy_(tier._staged)  # an earlier store of the same pages: each is readable and plausible
    row, pages = stored(story, runtime)
    late.put(KEYS[:NUM_PAGES], pages)  # each record is that of the earlier store, which here is right
    free_and_fill(runtime, row)
    row, right = come_back(runtime, late, KEYS[:NUM_PAGES])
    assert right == NUM_PAGES, "right by luck"
    assert all(map(torch.equal, story.decode(runtime, row, NUM_TOKENS), wanted))
    runtime.table.free(row)

    row, pages = stored(story, runtime)
    late.put(KEYS[:NUM_PAGES], np.roll(pages, 1))  # now the earlier store is one of other pages
    free_and_fill(runtime, row)
    row, right = come_back(runtime, late, KEYS[:NUM_PAGES])
    assert (right, late._metrics.host_kv_refusals) == (0, {CHANGED: 1})


def test_scales_that_have_changed_make_pages_others(device: torch.device) -> None:
    problems = coded(KVEncoding.E4M3FN, Scales.LAYER)
    story, runtime = Story(problems, device), runtime_of(problems, device, "torch")
    memory = memory_for(runtime)
    tier = tier_of(runtime, memory)
    row, pages = stored(story, runtime)
    tier.put(KEYS[:NUM_PAGES], pages)
    free_and_fill(runtime, row)
    scale = torch.full((1,), 0.5)
    runtime.set_kv_scales(1, KVScales(scale, scale, made_for=KVEncoding.E4M3FN))
    _, right = come_back(runtime, tier, KEYS[:NUM_PAGES])
    assert (right, tier._metrics.host_kv_refusals) == (0, {OTHER: 1})


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ([small_problem(8, num_kv_heads=1)], [small_problem(4, num_kv_heads=2)]),
        ([small_problem(dtype=torch.float16)], [small_problem(dtype=torch.bfloat16)]),
        ([small_problem(num_kv_heads=1, head_dim=32, v_head_dim=32)], [small_problem()]),
        ([small_problem(window_left=3)], [small_problem()]),
    ],
    ids=["page size", "dtype", "heads", "window"],
)
def test_pages_of_another_layout_in_shared_memory_are_refused(
    there: list[Problem], here: list[Problem], device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Their records have the same size and the same keys."""
    one, other = (runtime_of(problems, device, "torch") for problems in (there, here))
    memory = memory_for(one)
    from_there, to_here = tier_of(one, memory), tier_of(other, memory)
    row = Story(there, device).prefill(one, NUM_TOKENS)
    from_there.put(KEYS[:2], one.table.pages_of(row)[:2])
    with caplog.at_level(logging.WARNING, logger="rocm_attn"):
        row, right = come_back(other, to_here, KEYS[:2])
    assert (right, to_here._metrics.host_kv_refusals, to_here._metrics.host_kv_hits) == (0, {OTHER: 1}, 0)
    assert "a page in host memory was refused and is computed again: it holds other tokens, or pages of another" in (
        caplog.text
    )


def test_one_rank_that_refuses_a_page_makes_all_compute_it_again(device: torch.device) -> None:
    problems = [small_problem()]
    story, runtime = Story(problems, device), runtime_of(problems, device, "torch")
    memory, seen = memory_for(runtime), list[int]()

    def least(number: int) -> int:
        seen.append(number)
        return min(number, 2)  # another rank refuses the third page

    tier = HostPages(runtime, memory, model="a model", metrics=Metrics(), least=least)
    row, pages = stored(story, runtime)
    tier.put(KEYS[:NUM_PAGES], pages)
    free_and_fill(runtime, row)
    _, right = come_back(runtime, tier, KEYS[:NUM_PAGES])
    assert (right, seen, tier._metrics.host_kv_refusals) == (2, [NUM_PAGES], {})
    assert [key in memory for key in KEYS[:NUM_PAGES]] == [False] * 3 + [True] * 3


def test_pages_that_are_not_everything_are_refused(device: torch.device) -> None:
    hybrid = Hybrid(device, "torch", layers=(GATED_DELTA,)).runtime
    memory = HostMemory(1 << 16, 1 << 12, pinned=False)
    with pytest.raises(Unsupported, match="recurrent layers do not move to host memory, because a request can begin"):
        tier_of(hybrid, memory)
    windowed = runtime_of([small_problem(window_left=4), small_problem()], device, "torch", swa_pages=20)
    with pytest.raises(Unsupported, match="have pages of their own do not move to host memory"):
        tier_of(windowed, memory)
    footer = runtime_of([record_layer(scales=Scales.FOOTER)], device, "torch")
    of_footers = memory_for(footer)
    with pytest.raises(Unsupported, match="scales in the page's footer"):
        tier_of(footer, of_footers)
    plain = runtime_of([small_problem()], device, "torch")
    with pytest.raises(BadSetting, match="the memory has records of 4096 bytes, and this runtime's have 1152"):
        tier_of(plain, memory)
    for given, words in (
        ({"model": None}, "model is a NoneType; it must be"),
        ({"memory": 9}, "memory is a int; it must"),
    ):
        with pytest.raises(BadSetting, match=words):
            HostPages(plain, **{"memory": memory_for(plain), "model": "m", "metrics": Metrics(), **given})  # type: ignore[arg-type]
    with pytest.raises(NeverFits, match="host memory has room for no record of 4096 bytes"):
        HostMemory(100, 1 << 12, pinned=False)
    with pytest.raises(BadSetting, match=r"num_bytes is 8000000000.0; it must be a whole number"):
        HostMemory(8e9, 1 << 12, pinned=False)  # type: ignore[arg-type]
    for wrong in (0, -1, 4096.0, True):
        with pytest.raises(BadSetting, match=f"record_bytes is {wrong}; it must be"):
            HostMemory(1 << 16, wrong, pinned=False)  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="pinned is a int; it must be of type bool"):
        HostMemory(1 << 16, 1 << 12, pinned=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("record_bytes", [1 << 12, 1 << 50])
def test_more_than_the_machines_memory_is_refused_before_any_is_taken(record_bytes: int) -> None:
    """The operating system promises any amount, and ends the process when pages fill it."""
    with pytest.raises(NeverFits, match=f"{1 << 50} bytes of host memory are wanted, and the machine has"):
        HostMemory((1 << 50) + 1, record_bytes, pinned=False)


def test_memory_that_the_machine_does_not_give_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("HIP error: out of memory")))
    with pytest.raises(NeverFits, match="the machine does not give 65536 bytes of host memory; ask for fewer"):
        HostMemory(1 << 16, 1 << 12, pinned=False)


def test_nothing_comes_back_while_a_step_runs(device: torch.device) -> None:
    runtime, tier, row, pages = PutPage.by_a_row(device)
    runtime.table.reserve(row, NUM_TOKENS + 1)
    runtime.step(StepBatch([row], [NUM_TOKENS + 1], [1]))
    with pytest.raises(WrongState, match="pages cannot come back from host memory"):
        tier.restore(KEYS[:1], pages[:1])


@pytest.mark.parametrize(
    ("keys", "pages", "message"),
    [
        (KEYS[:2], [1], "2 keys of"),
        ([b"short"], [1], "of .5. bytes"),
        (["k" * 32], [1], "a key is a str; it must be of type bytes"),
        (None, [1], "keys is a NoneType; it must be of type Sequence"),
        (KEYS[:2], [1, 0], "pages 0 to 1 were given"),
        (KEYS[:1], [-1], "pages -1 to -1 were given"),
        (KEYS[:1], [10**6], "pages 1000000 to"),
        (KEYS[:2], [1, 1], "a page was given twice"),
    ],
)
def test_keys_without_a_page_of_their_own_move_nothing(
    keys: Any, pages: list[int], message: str, device: torch.device
) -> None:
    """Two keys of one page had its content both, and page 0, which pads read, was written."""
    problems = [small_problem()]
    story, runtime = Story(problems, device), runtime_of(problems, device, "torch")
    tier = tier_of(runtime, memory := memory_for(runtime))
    _, held = stored(story, runtime)
    tier.put(KEYS[:2], held[:2])
    for call in (tier.put, tier.restore):
        with pytest.raises(BadBatch, match=message):
            call(keys, np.array(pages, np.int32))
    assert len(memory) == 2
    runtime.check_device()


def test_no_keys_move_nothing(device: torch.device) -> None:
    _, tier, _, pages = PutPage.by_a_row(device)
    tier.put([], pages[:0])
    assert tier.restore([], pages[:0]) == 0
    assert tier.found(KEYS[0])


def test_pages_that_others_use_are_not_loaded_into(device: torch.device) -> None:
    """Those of a fork, which share the first page and copy the second in the next step; and those of no row."""
    runtime, tier, row, pages = PutPage.by_a_row(device)
    page_size = runtime.pool.page_size
    fork = runtime.table.fork(row, page_size + 1)
    runtime.table.reserve(fork, page_size + 2)
    before = [tensor.clone().view(torch.uint8) for tensor in storages(runtime)]
    for page in (*runtime.table.pages_of(fork), pages[1], runtime.pool.num_pages - 1):
        with pytest.raises(BadBatch, match="no row has, or more than one"):
            tier.restore(KEYS[:1], np.array([page], np.int32))
    assert all(map(torch.equal, (tensor.view(torch.uint8) for tensor in storages(runtime)), before))
    runtime.table.free(fork)
    assert tier.restore(KEYS[:1], pages[:1]) == 1


def test_a_checksum_is_that_of_its_formula_and_sees_every_bit_and_place(device: torch.device) -> None:
    """The formula, in Python's integers."""

    def mixed(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    words = torch.randint(-(2**63), 2**63 - 1, (3, 11), generator=torch.Generator().manual_seed(5))
    found = checksums(words.to(device)).tolist()
    for line, checksum in zip(words.tolist(), found, strict=True):
        terms = [mixed((word + at * 0x9E3779B97F4A7C15) % 2**64) for at, word in enumerate(line, 1)]
        assert sum(terms) % 2**64 == checksum % 2**64
    flipped = words[0].repeat(64 * 11, 1)
    for line in range(64 * 11):
        flipped[line, line // 64] ^= -(2**63) if line % 64 == 63 else 1 << line % 64
    exchanged = torch.stack([words[0, [*range(at), at + 1, at, *range(at + 2, 11)]] for at in range(10)])
    constant = torch.stack([torch.full((11,), value) for value in (0, -1, 1, -(2**63))])
    many = torch.cat([words[:1], flipped, exchanged, constant]).to(device)
    assert len(set(checksums(many).tolist())) == len(many)
