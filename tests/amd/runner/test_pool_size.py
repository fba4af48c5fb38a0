"""The pool gets the memory that a model's largest step and its graphs leave; windows share it and change no token.

The memory is that of tensors on the CPU, metered, of a made-up size; tests/amd/system/test_pool_on_gpu.py has a GPU's.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.capture.graphs import capture_shapes, draft_shapes
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import CapacityExceeded
from rocm_attn.hip_graphs import host_pool
from rocm_attn.models.config import ModelConfig
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_serve import engine_runtime, pool_size
from rocm_serve.engine import Engine
from rocm_serve.engine_runtime import runtime_for
from rocm_serve.measured_memory import LargestSteps, memory_of
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.pool_size import (
    NOT_MEASURED,
    MeasuredMemory,
    PoolPages,
    is_small,
    most_kv_bytes,
    pool_pages,
    swa_pages_for,
)
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.eagle import EagleDrafter
from tests.amd.runner.largest_steps import run_largest_steps
from tests.amd.runner.metered_memory import MeteredMemory
from tests.amd.runner.serving import BASE as SERVED
from tests.amd.runner.tiny_model import CONFIG, RECURRENT, tiny_model, with_windows

GIB = 2**30
LAYER = Problem(
    num_q_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, dtype=torch.float32, page_size=16, scale=8**-0.5
)
CONTEXT = 512
MANY = EngineOptions(provider="torch", page_size=4, max_batch_size=32, chunk=32, graphs=False, capture_after=0)
BASE = EngineOptions(provider="torch", page_size=4, max_batch_size=4, chunk=16, graphs=False, capture_after=0)


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], MeteredMemory]:
    """Returns a function: bytes -> memory, which CPU engines take for the device's; no rounding, and none for code.

    Earlier objects of the process are exempt from garbage collection from then on, so that collecting takes no time.
    """

    def of(total: int) -> MeteredMemory:
        memory = MeteredMemory(total)
        monkeypatch.setattr(engine_runtime, "memory_of", lambda device: memory)
        for name in ("_ALLOCATION_BYTES", "_CODE_BYTES"):
            monkeypatch.setattr(pool_size, name, 0)
        return memory

    gc.collect()
    gc.freeze()
    return of


def test_k_and_v_get_what_is_left_of_the_share() -> None:
    measured = MeasuredMemory(total=100 * GIB, free=80 * GIB, step=6 * GIB, graph=2 * GIB)
    of_code, roundings = 2**24, 2 * 2 * 2**20  # two tensors of a layer
    assert measured.kv_bytes(1.0, [LAYER]) == 72 * GIB - roundings - of_code
    assert measured.kv_bytes(0.75, [LAYER]) == (72 - 25) * GIB - roundings - of_code
    latent = replace(LAYER, pool=PoolKind.LATENT, num_kv_heads=1)
    assert measured.kv_bytes(1.0, [latent] * 3) == 72 * GIB - 3 * 2 * 2**20 - of_code


def test_where_nothing_is_left_the_numbers_say_why() -> None:
    measured = MeasuredMemory(total=100 * GIB, free=17 * GIB, step=6 * GIB, graph=2 * GIB)
    with pytest.raises(CapacityExceeded) as why:
        measured.kv_bytes(0.9, [LAYER])
    assert str(why.value) == (
        "no memory is left for K and V: of 100.00 GiB 17.00 are free, a step takes 6.00, graphs take 2.00, and 10.00 "
        "must stay free; lower max_batch_size or chunk, raise gpu_memory_share, or use a smaller model"
    )


def test_a_pool_that_takes_a_quarter_of_what_is_free_is_small() -> None:
    assert is_small(25, 100)
    assert not is_small(26, 100)


def test_the_most_that_sequences_can_use_is_what_an_endless_memory_gives_them() -> None:
    page_bytes = 2 * 16 * 2 * 8 * 4
    assert most_kv_bytes([LAYER] * 3, max_num_seqs=5, max_kv_len=33, chunk=8) == 3 * (1 + 5 * 3) * page_bytes
    windowed = [LAYER, replace(LAYER, window_left=15)]
    # A window of 16 tokens lies in up to 3 pages, and a chunk in one.
    assert most_kv_bytes(windowed, max_num_seqs=5, max_kv_len=320, chunk=8) == (1 + 5 * 20 + 1 + 5 * 3 + 1) * page_bytes


@pytest.mark.parametrize(
    "steps",
    [
        LargestSteps(4, 16, 40, 100),
        LargestSteps(1, 1, 5, 5),
        LargestSteps(8, 8, 3, 1000),
        LargestSteps(4, 16, 1, 100),
        LargestSteps(4, 5, 2, 100),
        LargestSteps(3, 90, 20, 10),
        LargestSteps(4, 20, 40, 100, captured=5),
        LargestSteps(8, 40, 3, 1000, captured=5),
    ],
    ids=str,
)
def test_the_largest_steps_fill_every_bound(steps: LargestSteps) -> None:
    lengths = list(steps.lengths())
    most = min(steps.num_tokens, steps.num_seqs * steps.longest)
    assert max(sum(q_len) for _, q_len in lengths) == most
    assert {len(q_len) for _, q_len in lengths} >= {steps.num_seqs, 1}
    assert any(len(q_len) == steps.num_seqs and sum(q_len) == most for _, q_len in lengths)
    for kv_len, q_len in lengths:
        assert len(kv_len) == len(q_len) <= steps.num_seqs
        assert all(1 <= new <= length <= steps.longest for new, length in zip(q_len, kv_len, strict=True))
    assert max(max(kv_len) for kv_len, _ in lengths) == steps.longest
    assert lengths[-1][1] == [min(steps.captured, steps.longest)] * steps.num_seqs
    for page_size in (1, 4):
        own = [sum(-(-new // page_size) + 1 for new in q_len) for _, q_len in lengths]
        assert steps.pages(page_size) > -(-steps.longest // page_size) + max(own) - 2


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(CONFIG, id="full", marks=pytest.mark.nightly),
        pytest.param(with_windows(CONFIG, 9, -1), id="windows"),
        pytest.param(RECURRENT, id="states"),
    ],
)
def test_an_engine_fills_its_share_and_never_takes_more(
    base: ModelConfig, metered: Callable[[int], MeteredMemory]
) -> None:
    """The sequences could use far more: the pool is cut, all of it is filled with tokens, and steps are the largest."""
    memory = metered(6_000_000)
    with memory:
        loaded = tiny_model(base=base, context_len=CONTEXT)
        served = Engine(loaded, replace(MANY, gpu_memory_share=0.8))
        report, pool = served.report(), served.runtime.pool
        assert report.state_bytes == served.runtime.states.num_bytes
        assert (report.checkpoints > 0) == (base is RECURRENT)
        assert (report.kv_bytes, report.weights_bytes) == (pool.num_bytes, loaded.weights.num_bytes)
        assert report.step_bytes > 0
        memory.start_peak()
        served.generate([Request((number,) * (480 if number == 0 else 4), 4) for number in range(34)])
        run_largest_steps(served)
        assert 0.9 * 0.8 * memory.total() < memory.most_held() <= 0.8 * memory.total()


@pytest.mark.nightly
def test_nothing_of_the_measuring_stays(
    metered: Callable[[int], MeteredMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[AttentionRuntime]] = []
    counted: list[int] = []

    def watched(*arguments: Any, **named: Any) -> AttentionRuntime:
        counted.append(sum(made() is not None for made in alive))
        made = build_runtime(*arguments, **named)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(engine_runtime, "build_runtime", watched)
    with metered(100_000_000):
        runtime, measured = runtime_for(tiny_model(context_len=30_000), replace(BASE, graphs=True))
    assert counted == [0, 0], "the small runtime is gone before the pool is made"
    assert measured.step > 0
    assert measured.graph > 0
    assert runtime.faults.step_number == 0


def test_what_is_measured_grows_with_the_step_and_the_vocabulary(metered: Callable[[int], MeteredMemory]) -> None:
    def step_bytes(vocab_size: int = 64, **changes: Any) -> int:
        loaded = tiny_model(context_len=CONTEXT, base=replace(CONFIG, vocab_size=vocab_size))
        return runtime_for(loaded, replace(MANY, **changes))[1].step

    with metered(16_000_000):
        small = step_bytes()
        assert step_bytes(chunk=64) > small
        assert step_bytes(vocab_size=12_000) > small


def test_what_only_garbage_holds_is_free(metered: Callable[[int], MeteredMemory]) -> None:
    """A runner and its graphs refer to each other, so that a deleted engine holds its memory for a while."""
    memory = metered(16_000_000)
    with memory:
        loaded = tiny_model(context_len=CONTEXT)
        gc.disable()
        try:
            first = runtime_for(loaded, MANY)[1]
            garbage: list[Any] = [torch.zeros(memory.free() - 200_000, dtype=torch.uint8)]
            garbage.append(garbage)
            del garbage
            assert runtime_for(loaded, MANY)[1] == first
        finally:
            gc.enable()


def test_pages_may_be_longer_than_sequences(metered: Callable[[int], MeteredMemory]) -> None:
    with metered(3_000_000):
        runtime, measured = runtime_for(tiny_model(context_len=20), replace(MANY, page_size=128))
    assert measured.step > 0
    assert runtime.max_kv_len == 20


def test_a_step_that_does_not_fit_is_refused_in_a_sentence(
    metered: Callable[[int], MeteredMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRunner, "run_eagerly", Mock(side_effect=torch.OutOfMemoryError("HIP out of memory")))
    with metered(1_200_000), pytest.raises(CapacityExceeded, match="a step of 16 tokens in 4 sequences does not fit"):
        runtime_for(tiny_model(context_len=4096), BASE)


@pytest.mark.parametrize(
    "changes", [{"kv_bytes": 60_000}, {"num_pages": 30}, {"max_kv_len": 32}], ids=["bytes", "pages", "small"]
)
def test_what_is_given_or_small_is_not_measured(
    changes: dict[str, Any], metered: Callable[[int], MeteredMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_runtime, "measure", None)
    with metered(1_200_000):
        runtime, measured = runtime_for(tiny_model(context_len=4096), replace(BASE, **changes))
    assert measured == NOT_MEASURED
    pages = {"kv_bytes": 60_000 // 1024, "num_pages": 30, "max_kv_len": 1 + 4 * 8}
    assert runtime.pool.num_pages == pages[next(iter(changes))]


def test_a_cpu_is_not_measured() -> None:
    assert memory_of(torch.device("cpu")) is None
    runtime, measured = runtime_for(tiny_model(context_len=4096), BASE)
    assert measured == NOT_MEASURED
    assert runtime.pool.num_pages == 1 + 4 * 1024


def test_what_drafts_has_room_for_as_many_tokens_in_the_same_memory() -> None:
    """A head of one layer next to a model of two takes a third."""
    options = replace(BASE, kv_bytes=300_000, max_batch_size=64, speculative="ngram")
    alone = Engine(tiny_model(), options).runtime.pool
    engine = Engine(tiny_model(), replace(options, speculative="eagle:seeded"))
    drafting = engine._speculation._drafter.runners._runtime.pool  # type: ignore[attr-defined]
    own = engine.runtime.pool
    assert own.num_pages in (alone.num_pages * 2 // 3, alone.num_pages * 2 // 3 + 1)
    room_for_drafts = 64 * 2
    assert drafting.num_pages == own.num_pages + room_for_drafts
    both = own.num_bytes + own.num_pages * (drafting.num_bytes // drafting.num_pages)
    assert both <= 300_000 < alone.num_bytes * 1.1


def test_graphs_of_what_drafts_have_room_beside_the_pool(
    metered: Callable[[int], MeteredMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver keeps memory for each of them, and they share a pool of memory of their own."""
    of_driver = 1_000_000
    monkeypatch.setattr(MeteredMemory, "of_a_graph", lambda memory: of_driver)
    monkeypatch.setattr(engine_runtime, "is_small", lambda wanted, free: False)
    monkeypatch.setattr(host_pool, "CHUNK_BYTES", 100_000)  # a chunk of the graphs' pool is metered whole
    options = replace(BASE, graphs=True, speculative="eagle:seeded", draft_tokens=2, max_batch_size=2)
    with metered(40_000_000):
        engine = Engine(tiny_model(context_len=64), options)
        measured = engine.report().graph_bytes
    drafter = engine._speculation._drafter
    assert isinstance(drafter, EagleDrafter)
    of_drafts = drafter.runners.make_largest_graphs()
    padding = drafter.runners._runtime.padding
    assert len(of_drafts.outputs) == len(capture_shapes(padding)) + len(draft_shapes(padding))
    assert of_drafts.pool > of_drafts.kept > 0
    own = len(capture_shapes(engine.runtime.padding))
    assert measured // of_driver == own + len(of_drafts.outputs)
    assert measured > own * of_driver + of_drafts.num_bytes(of_driver)


@pytest.mark.nightly
def test_drafts_that_are_drawn_have_room_beside_the_pool(metered: Callable[[int], MeteredMemory]) -> None:
    """Their probabilities cover the whole vocabulary, and are allocated after the pool."""
    options = replace(MANY, gpu_memory_share=0.8, speculative="eagle:seeded", draft_tokens=6, topk=2)
    kept, stepping = {}, {}
    for sampled in (False, True):
        memory = metered(9_000_000)
        with memory:
            engine = Engine(tiny_model(context_len=CONTEXT), replace(options, sampled_drafts=sampled))
            drafter = engine._speculation._drafter
            assert isinstance(drafter, EagleDrafter)
            runners = drafter.runners
            kept[sampled] = runners.probabilities.nbytes + runners._first_level.drawn_by.nbytes
            stepping[sampled] = engine.report().step_bytes
            memory.start_peak()
            requests = [Request((number,) * 40, 4, sampling=Sampling(0.8, seed=number)) for number in range(34)]
            engine.generate(requests)
            assert memory.most_held() <= 0.8 * memory.total()
    assert kept[False] == 0
    assert stepping[True] - stepping[False] >= kept[True] > 4 * options.max_batch_size * CONFIG.vocab_size * 7


WINDOW = 9


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Every other layer has a window, as in Gemma."""
    return tiny_model(base=with_windows(CONFIG, WINDOW, -1))


def test_a_pool_that_holds_no_window_and_chunk_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(
        CapacityExceeded, match="in steps of up to 16, needs 8 pages of the SWA space and there are 5; "
    ):
        Engine(loaded, replace(SERVED, swa_pages=6))


def problems(*windows: int) -> list[Problem]:
    return [
        Problem(4, 2, 8, torch.float32, v_head_dim=8, page_size=4, scale=1.0, window_left=window_left)
        for window_left in windows
    ]


def test_windows_take_what_they_need_and_leave_the_rest_to_the_full_space() -> None:
    layers = problems(15, -1, 15)
    sizes = {"max_num_seqs": 4, "chunk": 8}
    needed = swa_pages_for([layers[0]], **sizes)
    assert needed == 1 + 4 * (4 + 2) + 2
    roomy = pool_pages(layers, max_kv_len=400, kv_bytes=1 << 30, **sizes)
    assert roomy == PoolPages(401, needed)
    per_page = page_bytes(layers[:1])
    tight = pool_pages(layers, max_kv_len=400, kv_bytes=200 * per_page, **sizes)
    assert tight == PoolPages(200 - 2 * needed, needed)
    tiny = pool_pages(layers, max_kv_len=400, kv_bytes=30 * per_page, **sizes)
    assert tiny == PoolPages(10, 10)
    assert pool_pages(problems(-1), max_kv_len=400, kv_bytes=1 << 30, **sizes) == PoolPages(401, 0)
    # Nothing lies in the full space, so its pages cost nothing.
    assert pool_pages(problems(15), max_kv_len=400, kv_bytes=30 * per_page, **sizes) == PoolPages(401, needed)
    with pytest.raises(CapacityExceeded, match="at least 2 are needed; raise kv_bytes"):
        pool_pages(layers, max_kv_len=400, kv_bytes=5 * per_page, **sizes)
