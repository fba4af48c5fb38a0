"""Rounds of drafts without the safeguards: the reports of engines whose draft workers keep lists of their own."""

from __future__ import annotations

import re

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.errors import CapacityExceeded, DeviceFault
from rocm_attn.guards.registry import Guards
from tests.amd.guards.drafting import Drafting
from tests.amd.guards.serving import ALL_ON, DEVICE_FAULT, run_elsewhere
from tests.amd.runtime.stepping import providers

both_ways = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
each_provider = pytest.mark.parametrize("provider", providers())
shapes = pytest.mark.parametrize("drafts", [Drafts(1, 3), Drafts(3, 2)], ids=str)


def two_rounds(drafting: Drafting) -> list[bool]:
    """A round of five requests, and one of two of them in its padded size; whether each was right."""
    requests = drafting.admit([5, 1, 9, 4, 3])
    right = []
    for count in (5, 2):
        drafting.run(requests[:count])
        right.append(drafting.is_right(requests[:count]))
    return right


@both_ways
@shapes
@each_provider
def test_every_draft_step_sees_the_drafts_before_it(
    provider: str, drafts: Drafts, graphs: bool, device: torch.device
) -> None:
    """H8: the lengths that a kernel is given leave out the drafts of this round."""
    assert two_rounds(Drafting(device, ALL_ON, drafts=drafts, provider=provider, graphs=graphs)) == [True, True]

    off = Drafting(device, Guards().without("draft_lengths"), drafts=drafts, provider=provider, graphs=graphs)
    assert two_rounds(off) == [False, False]


@both_ways
@shapes
def test_each_draft_step_has_memory_of_its_own(drafts: Drafts, graphs: bool, device: torch.device) -> None:
    """H4: what several steps keep in one matrix runs over into the next step's line."""
    assert two_rounds(Drafting(device, ALL_ON, drafts=drafts, graphs=graphs)) == [True, True]

    off = run_elsewhere(
        "import torch\nfrom tests.amd.guards.test_drafts import *\n"
        'guards = Guards().without("child_ranges").without("echo_check", "last_steps")\n'
        f"print(two_rounds(Drafting(torch.device({device.type!r}), guards, drafts={drafts}, graphs={graphs})))"
    )
    assert off.stdout == "[False, False]\n" or re.search(DEVICE_FAULT, off.stderr), off.stdout + off.stderr


@both_ways
@shapes
def test_room_is_for_branches_and_not_for_requests(drafts: Drafts, graphs: bool, device: torch.device) -> None:
    """H3, H5: buffers and scratch are counted in requests of the pool, and used with padded ones and their branches."""
    assert two_rounds(Drafting(device, ALL_ON, drafts=drafts, graphs=graphs, capture_sizes=(16,))) == [True, True]

    off = run_elsewhere(
        "import torch\nfrom tests.amd.guards.test_drafts import *\n"
        f"off = Drafting(torch.device({device.type!r}), Guards().without('capacity'), drafts={drafts}, "
        f"graphs={graphs}, capture_sizes=(16,))\nprint(two_rounds(off))"
    )
    assert off.returncode != 0 or "False" in off.stdout, off.stdout
    assert off.returncode == 0 or re.search(r"size|out of bounds|invalid|" + DEVICE_FAULT, off.stderr), off.stderr


@both_ways
@shapes
@each_provider
def test_padded_sequences_of_a_round_are_rewritten(
    provider: str, drafts: Drafts, graphs: bool, device: torch.device
) -> None:
    """Seed 001 in its draft runners: a smaller round keeps the rows of those that sat there before."""
    sound = Drafting(device, ALL_ON, drafts=drafts, provider=provider, graphs=graphs)
    assert two_rounds(sound) == [True, True]
    pads = slice(2 * drafts.branches, None)
    assert all(not out[pads].any() for out in sound.out)

    off = Drafting(device, Guards().without("pads"), drafts=drafts, provider=provider, graphs=graphs)
    two_rounds(off)
    # A query of zeros weighs all keys alike: the pads hold what they have read of the third request and its drafts.
    stale = off.out[0][pads][: drafts.branches]
    assert stale.any()


def overfull(drafting: Drafting, page_size: int, prefix: int) -> tuple[bool, bool]:
    """A round whose drafts may leave a request's row: whether it was refused, and whether its neighbour is whole."""
    first, neighbour = drafting.admit([prefix, 2 * page_size])
    table = drafting.runtime.table
    assert neighbour.row == first.row + 1
    try:
        table.reserve(first.row, first.kv_len + drafting.drafts.tokens)
        drafting.run_batch([first], drafting.batch([first]))
    except CapacityExceeded:
        return True, drafting_is_whole(drafting, neighbour.row)
    return False, drafting_is_whole(drafting, neighbour.row)


def drafting_is_whole(drafting: Drafting, row: int) -> bool:
    """Whether a request's stored tokens are what it stored, by way of its row."""
    (request,) = (request for request in drafting.world.requests if request.row == row)
    table, pages = drafting.runtime.table, drafting.runtime.pool.layer(0)
    page_size, entries = table.page_size, table.spaces[0].entries.cpu()
    for place in range(request.kv_len):
        page, offset = int(entries[row, place // page_size]), place % page_size
        if not torch.equal(pages.k[page, offset], request.k[0][place]):
            return False
    return True


@pytest.mark.parametrize("page_size", [2, 16])
def test_drafts_stay_in_their_row_at_every_last_page_length(page_size: int, device: torch.device) -> None:
    """Seed 002: the drafts of K branches and S steps span more pages than a row has left.

    Every length of the last page, branches 1 and 3, steps 1 to 4; the neighbour's row and tokens are the sentinels.
    """
    width = 3 * page_size
    for branches in (1, 3):
        for steps in (1, 2, 4):
            drafts = Drafts(branches, steps)
            sizes = {"max_kv_len": width, "num_pages": 24, "page_size": page_size, "max_num_seqs": 2}
            for last in range(page_size):
                prefix = width - page_size + 1 + last
                drafting = Drafting(
                    device,
                    ALL_ON,
                    drafts=drafts,
                    graphs=False,
                    capture_sizes=(2,),
                    **sizes,  # type: ignore[arg-type]
                )
                refused, whole = overfull(drafting, page_size, prefix)
                assert whole
                assert refused == (prefix + drafts.tokens > width)


@each_provider
def test_a_round_past_its_row_reaches_the_neighbour_without_its_width(provider: str, device: torch.device) -> None:
    def drafting(guards: Guards) -> Drafting:
        return Drafting(
            device,
            guards,
            drafts=Drafts(1, 4),
            graphs=False,
            provider=provider,
            page_size=2,
            max_kv_len=6,
            num_pages=24,
            max_num_seqs=2,
            capture_sizes=(2,),
        )

    assert overfull(drafting(ALL_ON), 2, 5) == (True, True)
    assert overfull(drafting(Guards().without("row_width")), 2, 5) == (False, False)


@both_ways
@each_provider
def test_a_prefix_on_the_device_beyond_its_bound_reaches_no_neighbour(
    provider: str, graphs: bool, device: torch.device
) -> None:
    """H17 in draft steps: a length that only the device knows leads past the pages that were reserved."""
    from rocm_attn.batch.inputs import DeviceInputs

    def round_beyond(guards: Guards) -> Drafting:
        drafting = Drafting(
            device, guards, drafts=Drafts(1, 3), graphs=graphs, provider=provider, page_size=2, max_kv_len=16
        )
        one, _ = drafting.admit([5, 16])
        drafting.runtime.table.reserve(one.row, one.kv_len + 3)
        lengths = torch.tensor([14], dtype=torch.int32, device=device)
        inputs = DeviceInputs(kv_len=lengths, ahead=3)
        drafting.run_batch([one], drafting.batch([one], inputs))
        return drafting

    sound = round_beyond(ALL_ON)
    assert sound.is_right(sound.world.requests[:1])
    with pytest.raises(DeviceFault, match="a length on the device lay outside"):
        sound.runtime.check_device()
    off = round_beyond(Guards().without("length_bounds"))
    assert not off.is_right(off.world.requests[:1])
