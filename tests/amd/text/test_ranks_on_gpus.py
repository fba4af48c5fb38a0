"""Two tensor-parallel ranks, each on its own GPU: NCCL or RCCL in graphs, and the end of a rank that waits."""

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.parallel import processes
from rocm_serve.parallel.processes import RankFailed
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.peer_sums import PeerSums
from rocm_serve.ranks import Ranks, RanksOfGroup
from rocm_serve.request import Request
from tests.amd.runner.round_texts import OPTIONS, repeating_requests, round_model
from tests.amd.runner.thread_ranks import LoadSabotaged, assert_all_end, pids
from tests.amd.runner.tiny_model import CONFIG, tiny_model
from tests.amd.text.test_text_equality import PLAIN_FACTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

BASE = EngineOptions(max_batch_size=4, chunk=16, max_kv_len=64)
REQUESTS = [Request(tuple(range(10 + number, 14 + 3 * number)), 12) for number in range(4)]


def load_tiny(*, device: torch.device, ranks: Ranks) -> LoadedModel:
    return tiny_model(device=device, ranks=ranks)


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_in_float32_are_those_of_one_gpu(graphs: bool, deterministic: bool) -> None:
    options = EngineOptions(max_batch_size=4, chunk=16, max_kv_len=64, graphs=graphs, deterministic=deterministic)
    one = Engine(tiny_model(device=torch.device("cuda", 0)), options).generate(REQUESTS)
    with RankedEngine(load_tiny, options, num_ranks=2, device_type="cuda") as engine:
        if graphs:
            engine.capture_all(lambda *_: None)
        assert engine.generate(REQUESTS) == one
        report = engine.report()
    assert (report.metrics.replays > 0) == graphs
    assert report.metrics.graphs_off == ""


def sum_on_rank(rank: int, store: str) -> None:
    """Small sums have the bits of sums in order by a collective: many in a row, late ranks, and graphs that replay."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    ranks = RanksOfGroup(dist.group.WORLD)
    assert isinstance(ranks._small, PeerSums)
    random = torch.Generator(device).manual_seed(rank)
    for turn in range(40):
        for num in (8, 520, 40008, 1 << 20, 1 << 22):
            for dtype in (torch.bfloat16, torch.float16):
                x = torch.randn(num, generator=random, device=device).to(dtype)
                wanted = ranks._collected(x)
                if turn % 2 == rank:
                    torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
                assert torch.equal(ranks.sum_in_order(x), wanted)
    first = torch.randn(32, 2048, generator=random, device=device).to(torch.bfloat16)
    x, wanted = first.clone(), first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            ranks.sum(x).mul_(0.5)
    for _ in range(5):
        graph.replay()
        for _ in range(8):
            wanted = ranks._collected(wanted).mul_(0.5)
        assert torch.equal(x, wanted)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # a graph holds a collective's memory


def test_small_sums_have_the_bits_of_sums_in_order(tmp_path: Path) -> None:
    context, store = multiprocessing.get_context("spawn"), str(tmp_path / "meeting")
    ranks = [context.Process(target=sum_on_rank, args=(rank, store)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("windows", [(), (9, -1)], ids=["full", "window"])
def test_drafts_of_two_gpus_give_the_texts_of_plain_decoding_on_one(windows: tuple[int, ...], graphs: bool) -> None:
    """Drafts of n-grams, greedy texts and drawn ones."""
    options = replace(OPTIONS, provider="auto", max_kv_len=200, graphs=graphs, num_pages=400)
    plain = replace(options, speculative="off", draft_tokens=4, steps_ahead=0)
    wanted = Engine(round_model(torch.device("cuda", 0), windows), plain).generate(repeating_requests())
    with RankedEngine(partial(round_model, windows=windows), options, num_ranks=2, device_type="cuda") as engine:
        if graphs:
            engine.capture_all(lambda *_: None)
        for _ in range(2):  # the second time over the cached pages of the first
            assert engine.generate(repeating_requests()) == wanted
        report = engine.report()
    assert report.ranks == 2
    assert report.metrics.accepted_drafts > len(wanted) * 20
    assert (report.metrics.replays > 0) == graphs
    assert report.metrics.graphs_off == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_text_makes_sense(dtype: torch.dtype) -> None:
    load = partial(load_model, "smollm2", dtype=dtype)
    tokenizer = load(device=torch.device("cpu")).tokenizer
    assert tokenizer is not None
    requests = [Request(tuple(tokenizer.encode(prompt)), 6) for prompt, _ in PLAIN_FACTS]
    with RankedEngine(load, BASE, num_ranks=2, device_type="cuda") as engine:
        for completion, (_, word) in zip(engine.generate(requests), PLAIN_FACTS, strict=True):
            assert completion.text.startswith(word)
        assert engine.report().metrics.replays > 0


@pytest.mark.parametrize("where", ["step", "capture_all"])
@pytest.mark.parametrize(("what", "sentence"), [("dies", "^rank 1 was killed by SIGKILL"), ("raises", "^rank 1 ")])
def test_a_rank_that_leaves_the_other_in_a_collective_ends_both(
    what: str, sentence: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sum of the first layer's second half: the other rank's GPU waits for it."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(processes, "AGREE_SECONDS", 1.0)
    with RankedEngine(LoadSabotaged(what, 2 * CONFIG.num_layers + 2), BASE, num_ranks=2, device_type="cuda") as engine:
        ranks = pids(engine)
        serve = partial(engine.generate, REQUESTS) if where == "step" else partial(engine.capture_all, lambda *_: None)
        with pytest.raises(RankFailed, match=sentence):
            serve()
        assert_all_end(ranks)
