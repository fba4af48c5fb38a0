"""Selections of indexers on the device: they are fresh, and share no memory with anything else."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.problem import EarlierSelection
from rocm_attn.step.step import Part
from tests.amd.guards.test_plans import sharing_memory
from tests.amd.guards.ways import both_ways
from tests.amd.worlds.problems import indexer, layer
from tests.amd.worlds.world import ALL_ON, SELECTING, Request, World, is_right, selecting

# Sequences that graphs are padded to. Selections are of pages: three of a sequence's pages, the last one among them.
PADDED = 4
PAGES = Indexing(0.25, top=3, unit_keys=4, last=1)
TOKENS = Indexing(0.25, top=4)


class AnyLengths(World):
    """Decodes at any length of requests whose tokens are all stored, so that few steps meet many distributions."""

    def decode_at(self, requests: list[Request], kv_len: list[int]) -> None:
        """Runs one decode step in which each request has kv_len tokens; its last one is written again."""
        rows = np.array([request.row for request in requests], np.int32)
        self.runtime.table.mark_stored(rows, np.array([request.kv_len for request in requests], np.int32))
        self.draw(len(requests))
        self.runner.run(StepBatch(rows, np.array(kv_len), np.ones(len(rows), np.int32), NO_TOKEN_IDS))
        for seq, (request, length) in enumerate(zip(requests, kv_len, strict=True)):
            for number, requested in enumerate(self.rows):
                for held, new in (
                    (request.k, requested.k),
                    (request.v, requested.v),
                    (request.index, requested.index_k),
                ):
                    held[number][length - 1] = new[seq]

    def check_at(self, requests: list[Request], kv_len: list[int]) -> None:
        """Checks that decode_at equals the reference."""
        cut = [request.first(request.row, length) for request, length in zip(requests, kv_len, strict=True)]
        self.check_step(cut, [1] * len(requests))

    def boundaries(self) -> dict[str, Tensor]:
        """Returns every indptr of the last step, by name: its padded sequences, and the end."""
        sealed = self.runtime.seals.tensors().items()
        return {name: tensor[: PADDED + 1] for name, tensor in sealed if name.endswith("indptr")}


def random_steps(world: AnyLengths, steps: int) -> Iterator[tuple[list[Request], list[int]]]:
    """Yields decode steps of one to four requests at random lengths, each after its run. Each request has 40 tokens."""
    requests = [world.admit() for _ in range(4)]
    for request in requests:
        world.run([request], [40])
    random = np.random.default_rng(0)
    for _ in range(steps):
        some = [requests[seq] for seq in random.permutation(4)[: random.integers(1, 5)]]
        kv_len = [int(length) for length in random.integers(1, 41, len(some))]
        world.decode_at(some, kv_len)
        yield some, kv_len


def dense_after_sparse(device: torch.device, provider: str, guards: Guards, graphs: bool) -> AnyLengths:
    """Returns a layer that selects pages, one that reuses them, and a dense one, which reads the step's boundaries."""
    problems = [layer(indexer(PAGES)), layer(EarlierSelection(PAGES)), layer()]
    return AnyLengths.build(problems, device, provider, guards=guards, graphs=graphs, **SELECTING)


def is_monotone(boundaries: Tensor) -> bool:
    return bool((boundaries.diff() >= 0).all())


@pytest.mark.parametrize("steps", [30, pytest.param(1000, marks=pytest.mark.nightly)])
def test_boundaries_stay_monotone_whatever_is_selected(provider: str, steps: int, device: torch.device) -> None:
    """Seed 000: the device selects pages in every replay, and no input of plans or later layers moves."""
    world = dense_after_sparse(device, provider, ALL_ON, graphs=True)
    chosen = set()
    for requests, kv_len in random_steps(world, steps):
        assert all(is_monotone(each) for each in world.boundaries().values() if each.numel())
        world.check_at(requests, kv_len)
        chosen.add(tuple(world.runtime.seals.tensors()["selection_units"][: PAGES.top].tolist()))
    assert world.runner.metrics.replays >= steps
    assert len(chosen) > 12
    if device.type == "cuda":
        return  # with the guard off, kernels follow wrong boundaries, and may end the process
    world = dense_after_sparse(device, provider, Guards().without("selection_place"), graphs=True)
    wrong = broken = 0
    for requests, kv_len in random_steps(world, 20):
        broken += not all(is_monotone(each) for each in world.boundaries().values() if each.numel())
        try:
            world.check_at(requests, kv_len)
        except (AssertionError, RuntimeError):
            wrong += 1
    assert broken > 0
    assert wrong > 0


@both_ways
def test_a_layer_attends_to_no_other_selection_than_its_own(graphs: bool, device: torch.device) -> None:
    """Layer 0 attends after layer 1 has selected, and in a step without a selection."""

    def late(guards: Guards) -> World:
        world = selecting([layer(indexer(TOKENS)), layer(indexer(TOKENS))], device, guards=guards, graphs=graphs)

        def forward(step: Part) -> Tensor:
            at, layers = step.tokens, step.layers
            for number, requested in enumerate(world.rows):
                layers.store(number, requested.k[at], requested.v[at])
                layers.store_index(number, requested.index_k[at])
                layers.select(number, requested.index_q[at], requested.weights[at])
            for number, requested in enumerate(world.rows):
                layers.attend_selected(number, requested.q[at], requested.out[at])
            return world.rows[0].out[at][step.last_token_of_seq.long()]

        world.runner._forward = forward
        return world

    world = late(ALL_ON)
    request = world.admit()
    says = r"layer 0 attends to the selection of layer 0, and layer 1 has selected since; call select\(0, ...\) first"
    with pytest.raises(WrongState, match=says):
        world.run([request], [12])
    world = late(Guards().without("fresh_selection"))
    request = world.admit()
    world.run([request], [12])
    assert not is_right(world, [request], [12])


def test_a_selection_does_not_outlive_its_step(device: torch.device) -> None:
    def second_step(guards: Guards) -> tuple[World, Request]:
        world = selecting([layer(indexer(TOKENS))], device, guards=guards)
        (request,) = world.begun(12)
        world.draw(1)
        step = world.runtime.step(world.batch([request], [1])).parts[0]
        try:
            requested, at = world.rows[0], step.tokens
            step.layers.store(0, requested.k[at], requested.v[at])
            step.layers.store_index(0, requested.index_k[at])
            step.layers.attend_selected(0, requested.q[at], requested.out[at])
        finally:
            world.runtime.end_step()
        world.keep([request], [1])
        return world, request

    with pytest.raises(WrongState, match="nothing was selected in this step"):
        second_step(ALL_ON)
    world, request = second_step(Guards().without("fresh_selection"))
    assert not is_right(world, [request], [1])


def test_selections_share_no_memory_with_what_a_step_is_given(device: torch.device) -> None:
    world = dense_after_sparse(device, "torch", ALL_ON, graphs=True)
    (request,) = world.begun(5)
    world.step([request], [1])
    sealed = world.runtime.seals.tensors()
    for name in ("selection_units", "selection_counts"):
        assert sharing_memory(sealed[name], sealed) == [name]
