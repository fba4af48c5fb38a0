"""The boundary matrix: numbers of sequences, lengths and page sizes, eagerly and as graphs, against the reference."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.problem import EarlierSelection, KVEncoding, PoolKind, Problem, Scales
from tests.amd.guards.test_selections import PAGES, TOKENS
from tests.amd.guards.ways import PROVIDERS, both_ways
from tests.amd.worlds.problems import indexer, latent_layer, layer, small_problem
from tests.amd.worlds.rotating import LAYER as ROTATED
from tests.amd.worlds.rotating import Rotating
from tests.amd.worlds.world import Request, World, selecting

POOL, CAP = 6, 4
POOLS = Indexing(0.25, top=2, key_tokens=2, last_unit=LastUnit.ADDED)
# Numbers of sequences and their padded sizes: up to one more than the largest graph takes, and twice the pool.
COUNTS = [(0, None), (1, None), (CAP - 1, None), (CAP, None), (CAP + 1, None), (POOL, 2 * POOL), (0, 2 * POOL)]


def grow_to(serving: World, requests: list[Request], lengths: list[int]) -> None:
    """Runs two steps: all but the last token of each request, then that token. A length of 0 brings none in either."""
    for short in (1, 0):
        q_len = [max(length - short, 0) - r.kv_len for r, length in zip(requests, lengths, strict=True)]
        serving.step(requests, q_len)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("provider", "graphs", "largest"),
    [
        pytest.param(
            provider,
            graphs,
            largest,
            id=f"{provider}-{'graphed' if graphs else 'eager'}-cap of {largest}",
            # Without graphs, their sizes only determine the padding of steps.
            marks=[pytest.mark.nightly] * (graphs != (largest > POOL)),
        )
        for provider, graphs, largest in product(PROVIDERS, (False, True), (CAP, 2 * POOL))
    ],
)
@pytest.mark.parametrize("page_size", [1, 16, pytest.param(64, marks=pytest.mark.nightly)])
def test_sequences_of_every_count_and_length(
    provider: str, page_size: int, graphs: bool, largest: int, device: torch.device
) -> None:
    walk(small_problem(page_size), provider, largest, graphs=graphs, device=device)


KEPT = {
    "codes by token": replace(small_problem(1), kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.TOKEN),
    "codes by head": replace(small_problem(16), kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.HEAD),
    "codes by layer": replace(small_problem(1), kv_encoding=KVEncoding.E5M2, kv_scales=Scales.LAYER),
    "rows of 320": replace(small_problem(16), head_dim=320, v_head_dim=320, scale=320**-0.5),
    "latents": replace(small_problem(16), num_kv_heads=1, head_dim=24, pool=PoolKind.LATENT),
    "latents in codes": replace(
        small_problem(4),
        num_kv_heads=1,
        head_dim=24,
        pool=PoolKind.LATENT,
        kv_encoding=KVEncoding.E4M3FNUZ,
        kv_scales=Scales.TOKEN,
    ),
}


@pytest.mark.fast(1)
@both_ways
@pytest.mark.parametrize("kept", KEPT)
def test_sequences_of_every_count_and_length_whatever_pages_hold(
    provider: str, kept: str, graphs: bool, device: torch.device
) -> None:
    walk(KEPT[kept], provider, CAP, graphs=graphs, device=device)


@both_ways
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.nightly), 16])
def test_rows_of_every_count_and_length_are_turned_stored_gated_and_turned_back(
    provider: str, page_size: int, graphs: bool, device: torch.device
) -> None:
    walk(replace(ROTATED, page_size=page_size), provider, CAP, graphs=graphs, device=device, kind=Rotating)


@pytest.mark.fast(1)
@both_ways
@pytest.mark.parametrize(
    ("indexing", "of"),
    [
        pytest.param(TOKENS, layer, id="tokens"),
        pytest.param(PAGES, layer, id="pages"),
        pytest.param(TOKENS, latent_layer, id="tokens of latents", marks=pytest.mark.nightly),
        pytest.param(POOLS, latent_layer, id="pools of latents"),
    ],
)
def test_selections_for_sequences_of_every_count_and_length(
    provider: str, indexing: Indexing, of: Callable[..., Problem], graphs: bool, device: torch.device
) -> None:
    """Lengths are one key, as many as are selected, one more, and whole pages with and without one more token."""
    world = selecting([of(indexer(indexing)), of(EarlierSelection(indexing))], device, provider, graphs=graphs)
    lengths = [1, 3, 4, 5, 8, 9, 20]
    for count in range(1, 5):
        requests = [world.admit() for _ in range(count)]
        for first in range(0, len(lengths), count):
            wanted = [lengths[(first + seq) % len(lengths)] for seq in range(count)]
            new = [max(length - r.kv_len, 1) for length, r in zip(wanted, requests, strict=True)]
            world.step(requests, new)
            world.step(requests, [1] * count)
        for request in requests:
            world.free(request)


def walk(
    problem: Problem,
    provider: str,
    largest: int,
    *,
    graphs: bool,
    device: torch.device,
    kind: type[World] = World,
) -> None:
    """Serves every number of sequences at every length around the edges of pages.

    largest: sequences that graphs take; kind: of world
    """
    page_size = problem.page_size
    max_kv_len = 2 * page_size + 3
    lengths = sorted({0, 1, max(page_size - 1, 1), page_size, page_size + 1, max_kv_len})
    serving = kind.one_layer(
        device,
        graphs=graphs,
        provider=provider,
        problem=problem,
        max_num_seqs=POOL,
        max_kv_len=max_kv_len,
        num_pages=1 + POOL * (max_kv_len // page_size + 1),
        capture_sizes=(largest,),
        capture_tokens=sorted({2 * POOL, 4 * page_size}),
        max_tokens=POOL * max_kv_len,
    )
    for count, pad_to in COUNTS:
        for first in range(0, len(lengths), max(count, 1)):
            requests = serving.admit_all(count)
            wanted = [lengths[(first + seq) % len(lengths)] for seq in range(count)]
            grow_to(serving, requests, wanted)
            # Then one more token each, if there is room: a decode step whatever the lengths were.
            going_on = [request for request in requests if request.kv_len < max_kv_len]
            serving.step(going_on, [1] * len(going_on), pad_to)
            serving.free(*requests)
    counters = serving.runner.counters
    assert counters.graphs_off == ""
    assert (counters.replays > 0) == graphs
