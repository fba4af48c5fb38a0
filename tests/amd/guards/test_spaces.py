"""Two spaces of pages: a layer reads the space that it writes, and pages that a step still sees stay.

No id is allocated in both spaces, so that every mix-up shows.
"""

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.paging.index_spaces import Space
from tests.amd.guards.ways import both_ways, in_each_way
from tests.amd.worlds.problems import deterministic_providers, providers, small_problem
from tests.amd.worlds.world import ALL_ON, Request, World, is_right, poison_free_pages


def windowed(
    device: torch.device, guards: Guards, *, graphs: bool, provider: str, deterministic: bool = False
) -> World:
    """Returns one layer that sees nine tokens, in the SWA space: twelve pages of four."""
    return World.one_layer(
        device,
        guards,
        graphs=graphs,
        provider=provider,
        problem=small_problem(window_left=8),
        swa_pages=12,
        capture_sizes=(4,),
        capture_tokens=(16,),
        deterministic=deterministic,
    )


@both_ways
@pytest.mark.parametrize(
    ("provider", "deterministic"),
    [(name, False) for name in providers()] + [(name, True) for name in deterministic_providers()],
)
def test_a_layer_reads_in_the_space_that_it_writes_in(
    provider: str, deterministic: bool, graphs: bool, device: torch.device
) -> None:
    """Seed 003: a unified deterministic extend read new tokens by full ids that were written by SWA ids."""

    def serve(guards: Guards) -> tuple[World, list[Request]]:
        serving = windowed(device, guards, graphs=graphs, provider=provider, deterministic=deterministic)
        if guards is not ALL_ON:
            # Not NaN: wrong reads get this, and Triton's interpreter stops at NaN where a GPU program would continue.
            pages = serving.runtime.pool.layer(0)
            pages.k[1:] = pages.v[1:] = 100.0
        requests = serving.admit_all(2)
        full, swa = (table.entries_host for table in serving.runtime.table.spaces)
        serving.run(requests, [6, 9])
        assert not (set(full[full > 0].tolist()) & set(swa[swa > 0].tolist()))
        serving.run(requests, [1, 1])
        return serving, requests

    serving, requests = serve(ALL_ON)
    serving.check_step(requests, [1, 1])
    serving, requests = serve(Guards().without("layer_space"))
    assert not is_right(serving, requests, [1, 1])
    # It was written to the right place, which was not read.
    page = int(serving.runtime.table.pages_of(requests[0].row, Space.SWA)[1])
    assert torch.equal(serving.runtime.pool.layer(0).k[page, 2], requests[0].k[0][6])


@in_each_way
def test_a_step_gives_back_no_page_that_its_first_token_sees(provider: str, graphs: bool, device: torch.device) -> None:
    def serve(guards: Guards, graphs: bool) -> tuple[World, list[Request]]:
        """Runs a chunk of six tokens after twelve: its first token sees tokens 4 .. 12, its last one 9 .. 17."""
        serving = windowed(device, guards, graphs=graphs, provider=provider)
        requests = serving.admit_all(2)
        serving.run(requests, [12, 5])
        serving.run(requests, [6, 1])
        return serving, requests

    serving, requests = serve(ALL_ON, graphs)
    serving.check_step(requests, [6, 1])
    assert (serving.runtime.table.pages_of(requests[0].row, Space.SWA) > 0).tolist() == [False, *[True] * 4]
    poison_free_pages(serving.runtime)
    serving.step(requests, [1, 6])
    # A graph's capture stages the step twice; the second time it is refused, because its pages are freed.
    serving, requests = serve(Guards().without("window_reach"), False)
    assert not is_right(serving, requests, [6, 1])
