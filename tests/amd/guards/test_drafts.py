"""Rounds of drafts without the guards: the reports of engines whose draft workers keep lists of their own."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.errors import CapacityExceeded, DeviceFault
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.speculative.arguments import Accepted
from tests.amd.guards.ways import DEVICE_FAULT, both_ways, run_elsewhere
from tests.amd.worlds.drafting import DraftWorld, drafting
from tests.amd.worlds.world import ALL_ON, Request

CHAIN, TREE = Drafts(1, 3), Drafts(3, 2)
shapes = pytest.mark.parametrize("drafts", [CHAIN, TREE], ids=["chain", "tree"])


def two_rounds(world: DraftWorld) -> list[bool]:
    """Runs a round of five requests, and one of two of them in its padded size. Returns whether each was right."""
    requests = world.prompted([5, 1, 9, 4, 3])
    right = []
    for count in (5, 2):
        world.run_round(requests[:count])
        right.append(world.round_is_right(requests[:count]))
    return right


@both_ways
@shapes
def test_every_draft_step_sees_the_drafts_before_it(
    provider: str, drafts: Drafts, graphs: bool, device: torch.device
) -> None:
    """H8: a kernel's lengths leave out the drafts of this round."""
    assert two_rounds(drafting(device, ALL_ON, drafts=drafts, provider=provider, graphs=graphs)) == [True, True]

    off = drafting(device, Guards().without("draft_lengths"), drafts=drafts, provider=provider, graphs=graphs)
    assert two_rounds(off) == [False, False]


@pytest.mark.parametrize(
    ("page_size", "graphs"),
    [
        pytest.param(*way, marks=[] if way == (2, True) else [pytest.mark.nightly])
        for way in product((1, 2, 16), (False, True))
    ],
)
def test_every_draft_step_has_page_lists_and_block_tables_of_its_own(
    page_size: int, graphs: bool, device: torch.device
) -> None:
    """Kernels of other libraries read these, with 64-bit lengths: even sequences the lists, odd ones the tables."""
    world = drafting(device, ALL_ON, drafts=CHAIN, provider="csr", graphs=graphs, page_size=page_size)
    assert two_rounds(world) == [True, True]

    guards = Guards().without("draft_lengths")
    off = drafting(device, guards, drafts=CHAIN, provider="csr", graphs=graphs, page_size=page_size)
    assert two_rounds(off) == [False, False]


def split_round(provider: str, graphs: bool, guards: Guards, device: torch.device) -> bool:
    """Runs a round of ten requests in two halves, whose masks follow each other. True if it was right."""
    world = drafting(
        device,
        guards,
        drafts=Drafts(8, 3),
        graphs=graphs,
        provider=provider,
        max_num_seqs=10,
        num_pages=128,
        capture_sizes=(10,),
        split_steps=True,
    )
    requests = world.prompted([5, 1, 9, 4, 3, 2, 7, 6, 8, 5])
    world.run_round(requests, halves=True)
    return world.round_is_right(requests)


@both_ways
def test_the_mask_of_drafts_has_room_for_the_drafts(provider: str, graphs: bool, device: torch.device) -> None:
    """H16: page lists had room for drafts, and their mask had none: it was written past its end."""
    assert split_round(provider, graphs, ALL_ON, device)

    off = run_elsewhere(
        "import torch\nfrom tests.amd.guards.test_drafts import *\n"
        'guards = Guards().without("mask_room")\n'
        f"print(split_round({provider!r}, {graphs}, guards, torch.device({device.type!r})))"
    )
    # The last mask of the first half overlaps the first one of the second half, or does not fit.
    assert off.stdout == "False\n" or re.search(r"index out of range|" + DEVICE_FAULT, off.stderr), off


def is_whole(world: DraftWorld, request: Request) -> bool:
    """True if a request's tokens, read through its row, equal the tokens that it stored."""
    pages, page_size = world.runtime.pool.layer(0), world.runtime.table.page_size
    entries = world.runtime.table.spaces[0].entries[request.row].long()
    place = torch.arange(request.kv_len, device=entries.device)
    page, offset = entries[place // page_size], place % page_size
    return torch.equal(pages.k[page, offset], request.k[0]) and torch.equal(pages.v[page, offset], request.v[0])


def overfull(world: DraftWorld, prefix: int) -> tuple[bool, bool]:
    """Runs a round that may leave its row. Returns whether it was refused, and whether the rows around it are whole."""
    full = world.runtime.table.max_kv_len
    before, request, after = world.prompted([full, prefix, full])
    assert [row - before.row for row in (request.row, after.row)] == [1, 2]
    refused = False
    try:
        world.runtime.table.reserve(request.row, request.kv_len + world.drafts.tokens)
        world.run_round([request], world.round_batch([request], world.drafts, reserve=False))
    except CapacityExceeded:
        refused = True
    whole = is_whole(world, before) and is_whole(world, after) and is_whole(world, request)
    return refused, whole and (refused or world.round_is_right([request]))


@pytest.mark.parametrize("page_size", [2, pytest.param(16, marks=pytest.mark.nightly)])
def test_drafts_stay_in_their_row_at_every_last_page_length(page_size: int, device: torch.device) -> None:
    """Seed 002: the drafts of K branches and S steps span more pages than a row has left.

    Every length of the last page is tried; the rows before and after, full of tokens, are the sentinels.
    """
    refusals = []
    rows = {"max_num_seqs": 3, "page_size": page_size, "max_kv_len": 3 * page_size}
    for branches in (1, 3, 8):
        for steps in (1, 2, 4):
            drafts = Drafts(branches, steps)
            world = drafting(
                device, ALL_ON, drafts=drafts, graphs=False, provider="torch", num_pages=16, capture_sizes=(1,), **rows
            )
            for last in range(page_size):
                prefix = page_size + 1 + last
                refused, whole = overfull(world, prefix)
                assert whole
                assert refused == (prefix + branches * steps > 3 * page_size)
                refusals.append(refused)
                world.free(*reversed(world.requests))
    assert len(set(refusals)) == 2


@both_ways
def test_a_prefix_on_the_device_beyond_its_bound_reaches_no_neighbour(
    provider: str, graphs: bool, device: torch.device
) -> None:
    """H17 in draft steps: a length that only the device knows exceeds the pages that were reserved."""

    def round_beyond(guards: Guards) -> DraftWorld:
        world = drafting(
            device, guards, drafts=Drafts(1, 3), graphs=graphs, provider=provider, page_size=2, max_kv_len=16
        )
        one, _ = world.prompted([5, 16])
        world.runtime.table.reserve(one.row, one.kv_len + 3)
        lengths = torch.tensor([14], dtype=torch.int32, device=device)
        inputs = DeviceInputs(kv_len=lengths, ahead=3)
        world.run_round([one], replace(world.round_batch([one], world.drafts, reserve=False), inputs=inputs))
        return world

    sound = round_beyond(ALL_ON)
    assert sound.round_is_right(sound.requests[:1])
    with pytest.raises(DeviceFault, match="a length on the device was outside"):
        sound.runtime.check_device()
    off = round_beyond(Guards().without("length_bounds"))
    assert not off.round_is_right(off.requests[:1])


def token_after_a_path_past_the_row(guards: Guards, provider: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns K of a row's last token of eight, before and after a path moves token 10, of no page, to its place."""
    world = drafting(device, guards, drafts=TREE, provider=provider, graphs=False)
    (request,) = world.prompted([4])
    world.step([request], [4], visible=[torch.ones(4, 8, dtype=torch.bool)])
    table, pages = world.runtime.table.spaces[0], world.runtime.pool.layer(0)
    page = int(table.entries[request.row, 1])
    path = torch.tensor([[0, 4]], dtype=torch.int32, device=device)
    num_accepted, kv_len = (torch.tensor([number], dtype=torch.int32, device=device) for number in (1, 8))
    accepted = Accepted.empty(1, 2, device)._replace(path=path, num_accepted=num_accepted, kv_len=kv_len)
    before = pages.k[page, 3].clone()
    world.runtime.move_accepted(accepted)
    return before, pages.k[page, 3]


def test_a_path_past_the_rows_pages_moves_nothing(provider: str, device: torch.device) -> None:
    """Paths are numbers on the device, which the host does not check."""
    before, after = token_after_a_path_past_the_row(ALL_ON, provider, device)
    assert torch.equal(before, after)

    before, after = token_after_a_path_past_the_row(Guards().without("path_pages"), provider, device)
    assert before.any()
    assert not after.any()
