"""Padded sequences, padded tokens and the memory after a sequence are inert, and are not without their guards."""

import numpy as np
import pytest
import torch

from rocm_attn.errors import DeviceFault
from rocm_attn.guards.registry import Guards
from rocm_attn.oracle.reference import attend_sequence
from tests.amd.guards.ways import PROVIDERS, both_ways, each_way, in_each_way
from tests.amd.tolerances import assert_same_but_for_rounding
from tests.amd.worlds.problems import deterministic_providers, small_problem
from tests.amd.worlds.world import ALL_ON, Request, World, is_right, page_zero_is_zero


def crowd_then_two(serving: World) -> tuple[list[Request], Request]:
    """Seed 001: five requests, then two of them next to pads in the places of the others. One row has a new owner.

    Returns the two and the new owner, whose row was the fifth request's; the two were run last.
    """
    crowd = serving.admit_all(5)
    for request, length in zip(crowd, [4, 3, 2, 5, 6], strict=True):
        serving.run([request], [length])
    serving.run(crowd, [1] * 5)
    row = crowd[4].row
    serving.free(*crowd[2:])
    (stranger,) = serving.admit_all(1)
    assert stranger.row == row
    serving.run([stranger], [9])
    serving.run(crowd[:2], [1, 1])
    return crowd[:2], stranger


@in_each_way
def test_padded_sequences_are_rewritten_every_step(provider: str, graphs: bool, device: torch.device) -> None:
    serving = World.one_layer(device, ALL_ON, graphs=graphs, provider=provider, pad_q=0.0)
    two, _ = crowd_then_two(serving)
    serving.check_step(two, [1, 1])

    serving = World.one_layer(device, Guards().without("pads"), graphs=graphs, provider=provider, pad_q=0.0)
    two, stranger = crowd_then_two(serving)
    # A query of zeros weighs all keys alike: the pad holds the mean of seven tokens of the stranger, which it has read.
    read = stranger.v[0][:7].mean(0).repeat_interleave(3, 0)
    assert_same_but_for_rounding(serving.rows[0].out[4], read)
    assert not is_right(serving, two, [1, 1])


@each_way(*PROVIDERS, "csr_min_1")
def test_padded_tokens_are_never_stored(provider: str, graphs: bool, device: torch.device) -> None:
    def padded_rows(guards: Guards) -> torch.Tensor:
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider, pad_q=0.0)
        requests = serving.admit_all(2)
        serving.run(requests, [4, 3])
        serving.run(requests, [1, 1])
        assert page_zero_is_zero(serving) == (guards is ALL_ON)
        return serving.rows[0].out[2:8]

    # Where kernels read a token of page 0 for each pad, the values that pads have stored there are cleared.
    for guards in (ALL_ON, Guards().without("store_drops")):
        assert not padded_rows(guards).any()


@both_ways
def test_the_reserved_row_is_never_written(graphs: bool, device: torch.device) -> None:
    def reserved_entry(guards: Guards) -> int:
        """Returns the page that pads read after the host has written one into their row."""
        serving = World.one_layer(device, guards, graphs=graphs, provider="csr_min_1", pad_q=0.0)
        requests = serving.admit_all(2)
        serving.run(requests, [4, 3])
        table = serving.runtime.table
        table.full.entries_host[0, 0] = table.pages_of(requests[0].row)[0]
        table.full.pending.cells.append(np.arange(1))
        serving.run(requests, [1, 1])
        assert not serving.rows[0].out[2:8].any()
        return int(table.full.entries[0, 0])

    assert reserved_entry(ALL_ON) == 0
    assert reserved_entry(Guards().without("row_zero")) > 0


@both_ways
def test_nothing_of_an_earlier_step_stays_after_the_last_page(graphs: bool, device: torch.device) -> None:
    def after(guards: Guards) -> tuple[list[int], list[int]]:
        """Returns the entries after the only page of the only sequence, in the page list and in its dense row."""
        serving = World.one_layer(device, guards, graphs=graphs, provider="csr")
        crowd = serving.begun(9, 13, 5)
        serving.step(crowd, [1, 1, 1])
        serving.free(*crowd)
        requests = serving.begun(2)
        serving.step(requests, [1])
        buffers = serving.runtime.seals.tensors()
        width = serving.runtime.table.width
        return buffers["page_list"][1 : 8 * width].tolist(), buffers["block_table"][1:width].tolist()

    for entries in after(ALL_ON):
        assert not any(entries)
    page_list, block_row = after(Guards().without("table_tails"))
    # The pages of three freed requests: 3 + 4 + 2 in the list, the first one's in its row.
    assert sum(page > 0 for page in page_list) == 8
    assert sum(page > 0 for page in block_row) == 2


@pytest.mark.fast
@in_each_way
@pytest.mark.parametrize("page_size", [4, 16])
def test_what_lies_after_a_sequence_in_its_page_is_not_read(
    provider: str, graphs: bool, page_size: int, device: torch.device
) -> None:
    problem = small_problem(page_size)
    requests_q_len = [5, page_size - 1]
    serving = World.one_layer(device, ALL_ON, graphs=graphs, provider=provider, problem=problem)
    requests = serving.admit_all(2)
    serving.step(requests, requests_q_len)
    serving.step(requests, [1, 1])

    serving = World.one_layer(device, Guards().without("v_mask"), graphs=graphs, provider=provider, problem=problem)
    requests = serving.admit_all(2)
    serving.run(requests, requests_q_len)
    assert serving.rows[0].out[:5].isnan().all()
    serving.run(requests, [1, 1])
    assert serving.rows[0].out[0].isnan().all()
    # The second sequence fills its page: nothing follows it.
    assert torch.isfinite(serving.rows[0].out[1]).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # in the interpreter, at 0 * inf
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_a_v_that_is_no_number_stays_with_the_tokens_that_see_it(
    provider: str, deterministic: bool, value: float, device: torch.device
) -> None:
    if deterministic and provider not in deterministic_providers():
        return

    def attended(guards: Guards) -> tuple[World, list[bool]]:
        """Runs a chunk of eight tokens; the seventh has such a V. Returns whether each token's result is right."""
        serving = World.one_layer(device, guards, graphs=False, provider=provider, deterministic=deterministic)
        runtime, requests = serving.runtime, serving.admit_all(1)
        step = runtime.step(serving.batch(requests, [8])).parts[0]
        q, k, v = serving.qkv(serving.problems[0], step)
        stored = v.clone()
        v[6, 1, 3], stored[6, 1, 3] = value, 0.0
        out = torch.empty_like(q)
        step.layers.store_and_attend(0, q, k, v, out)
        runtime.end_step()
        want, _ = attend_sequence(q[:8], k[:8], stored[:8], serving.problems[0])
        close = torch.isclose(out[:8].double(), want, atol=1e-5, rtol=1e-5)
        return serving, close.flatten(1).all(1).tolist()

    serving, right = attended(ALL_ON)
    assert all(right)
    with pytest.raises(DeviceFault, match="K or V of a new token was infinite or NaN"):
        serving.runtime.check_device()
    serving, right = attended(Guards().without("finite_kv"))
    assert not all(right[:6])  # the number of earlier tokens that it reaches depends on the tile size
    serving.runtime.check_device()
