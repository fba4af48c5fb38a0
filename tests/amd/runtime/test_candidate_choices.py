"""Choices among the blocks that an earlier choice left (DeepSeek-V4.1), eager and in graphs, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.problem import Indexer, PoolKind, Problem
from rocm_attn.step.step import Part
from tests.amd.kernels.sparse_cases import candidates_of
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.world import SELECTING, Request, Rows, World, is_right

INDEXING = Indexing(0.25, top=3, last_unit=LastUnit.LEFT_OUT, candidate_blocks=2, block_keys=4)
LAYER = Problem(4, 1, 16, torch.float32, 8, pool=PoolKind.LATENT, indexer=Indexer(2, 16, INDEXING))
NOTHING_LEFT = replace(LAYER, indexer=Indexer(2, 16, replace(INDEXING, candidate_blocks=0)))


class Choosing(World):
    """Layer 0 chooses and leaves blocks, and the queries of the other layers choose among them.

    between: layers that select between these
    """

    between: tuple[int, ...] = ()

    @classmethod
    def of(cls, device: torch.device, provider: str, **more: Any) -> Choosing:
        return cls.build([LAYER, LAYER, NOTHING_LEFT], device, provider, **{**SELECTING, **more})

    def _attend(self, step: Part, rows_of_layers: Sequence[Rows]) -> None:
        at, calls = step.tokens, step.layers
        for layer, rows in enumerate(rows_of_layers):
            calls.store(layer, rows.k[at], rows.v[at])
            calls.store_index(layer, rows.index_k[at])
        first, *later = rows_of_layers
        calls.select(0, first.index_q[at], first.weights[at])
        calls.attend_selected(0, first.q[at], first.out[at])
        for layer in self.between:
            calls.select(layer, later[0].index_q[at], later[0].weights[at])
        for rows in later:
            calls.select_among(0, rows.index_q[at], rows.weights[at])
            calls.attend_selected(0, rows.q[at], rows.out[at])

    def check_step(self, requests: Sequence[Request], q_len: Sequence[int]) -> None:
        places = iter(self.places.tolist())
        for request, new in zip(requests, q_len, strict=True):
            for position in range(request.kv_len - new, request.kv_len):
                place = next(places)
                for rows in self.rows:
                    want = self.wanted(request, position, place, rows)
                    assert_attention_close(rows.out[place].cpu(), want, torch.float32)
        self.runtime.check_device()

    def wanted(self, request: Request, position: int, place: int, rows: Rows) -> Tensor:
        """float64 [heads, dim]"""
        k, index_k = (side[0][: position + 1].double().cpu() for side in (request.k, request.index))

        def scores(of: Rows) -> list[float]:
            products: Tensor = (of.index_q[place].double().cpu() @ index_k.T * INDEXING.scale).clamp(min=0)
            return (of.weights[place].double().cpu() @ products).tolist()

        kept = set(range(position + 1)) if rows is self.rows[0] else candidates_of(scores(self.rows[0]), INDEXING)
        mine = scores(rows)
        best = sorted(kept, key=lambda unit: (-mine[unit], unit))[: INDEXING.top]
        keys = k[best, 0]
        weights = (rows.q[place].double().cpu() @ keys.T * LAYER.scale).softmax(1)
        attended: Tensor = weights @ keys
        return attended


@pytest.mark.fast(interpreted=0)
def test_later_layers_choose_among_the_blocks_that_one_has_left(
    provider: str, graphs: bool, device: torch.device
) -> None:
    world = Choosing.of(device, provider, graphs=graphs)
    all_ = world.admit_all(3)
    more = [] if provider == "triton" and device.type == "cpu" else [*[(all_, [1, 1, 1])] * 5, (all_[1:], [9, 1])]
    for some, q_len in ((all_[:2], [11, 2]), (all_, [1, 1, 3]), (all_[:1], [1]), *more):
        world.step(some, q_len)
    assert not graphs or world.runner.counters.replays > 0


def test_blocks_of_another_layer_are_not_chosen_among(device: torch.device) -> None:
    world = Choosing.of(device, "torch")
    world.between = (1,)
    with pytest.raises(WrongState, match="layer 1 has selected since"):
        world.begun(30)
    world = Choosing.of(device, "torch", guards=Guards().without("fresh_selection"))
    world.between = (1,)
    requests = world.admit_all(1)
    world.run(requests, [30])
    assert not is_right(world, requests, [30])


def test_a_selection_between_that_leaves_no_blocks_does_no_harm(device: torch.device) -> None:
    world = Choosing.of(device, "torch")
    world.between = (2,)
    world.begun(30)


def test_a_layer_that_leaves_no_blocks_has_none_to_choose_among(device: torch.device) -> None:
    world = Choosing.of(device, "torch")
    step = world.runtime.step(world.batch([world.admit()], [1])).parts[0]
    at, rows = step.tokens, world.rows[0]
    for layer in (0, 2):
        step.layers.store(layer, rows.k[at], rows.v[at])
        step.layers.store_index(layer, rows.index_k[at])
    with pytest.raises(
        BadTensor, match="layer 2 leaves no blocks to choose among: its indexing has candidate_blocks=0"
    ):
        step.layers.select_among(2, rows.index_q[at], rows.weights[at])
    with pytest.raises(WrongState, match="nothing was selected in this step"):
        step.layers.select_among(0, rows.index_q[at], rows.weights[at])


def test_a_selection_that_the_caller_gives_leaves_no_blocks_to_choose_among(device: torch.device) -> None:
    world = Choosing.of(device, "torch")
    requests = world.begun(30)  # leaves blocks, in memory that the next step has too
    step = world.runtime.step(world.batch(requests, [1])).parts[0]
    rows = world.rows[0]
    step.layers.store_index(0, rows.index_k[step.tokens])
    units = torch.zeros(len(step.token_ids), 1, INDEXING.width, dtype=torch.int32, device=device)
    step.layers.give_selection(0, units, torch.ones_like(units[..., 0]))
    with pytest.raises(WrongState, match="nothing was selected in this step"):
        step.layers.select_among(0, rows.index_q[step.tokens], rows.weights[step.tokens])
