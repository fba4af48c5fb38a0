"""Cut points: a deterministic runtime cuts a sequence's KV in places that do not depend on the batch."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.machine.target import detect_target
from tests.amd.guards.ways import both_ways
from tests.amd.runtime.token_stories import Story, Teller, Told, same_bits
from tests.amd.worlds.problems import deterministic_providers, small_problem
from tests.amd.worlds.world import ALL_ON


@both_ways
@pytest.mark.parametrize("provider", deterministic_providers())
def test_a_sequence_gives_the_same_bits_beside_a_longer_one(provider: str, graphs: bool, device: torch.device) -> None:
    # With so few units the longer sequence takes some from the other; a whole GPU has one for every tile of both.
    target = replace(detect_target(device), compute_units=2)

    def tell(guards: Guards, *, beside: bool) -> tuple[Teller, Told]:
        teller = Teller.of(device, provider, small_problem(), graphs=graphs, guards=guards, target=target)
        reported, other = (teller.begin(Story.random(teller.problems[0], n, seed)) for n, seed in ((110, 1), (400, 2)))
        if beside:
            teller.serve([(other, 390)])
        for chunk in (100, *[1] * 10):
            teller.serve([(reported, chunk), *([(other, 1)] if beside and chunk == 1 else [])])
        teller.check_told(reported)
        return teller, reported

    guarded = [tell(ALL_ON, beside=beside) for beside in (False, True)]
    assert all(teller.runtime.selections[0].deterministic for teller, _ in guarded)
    assert same_bits(guarded[0][1], guarded[1][1])
    unguarded = [tell(ALL_ON.without("cut_points"), beside=beside)[1] for beside in (False, True)]
    assert not same_bits(unguarded[0], unguarded[1])
