"""Choices among the blocks that an earlier choice left (DeepSeek-V4.1), eager and in graphs, against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.problem import Indexer, PoolKind, Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.kernels.sparse_cases import candidates_of
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.world import ALL_ON

HEADS, DIM, INDEX_HEADS, INDEX_DIM, ROOM = 4, 16, 2, 16, 64
INDEXING = Indexing(0.25, top=3, last_unit=LastUnit.LEFT_OUT, candidate_blocks=2, block_keys=4)
LAYER = Problem(
    HEADS, 1, DIM, torch.float32, 8, pool=PoolKind.LATENT, indexer=Indexer(INDEX_HEADS, INDEX_DIM, INDEXING)
)
NOTHING_LEFT = replace(LAYER, indexer=Indexer(INDEX_HEADS, INDEX_DIM, replace(INDEXING, candidate_blocks=0)))


class Choosing:
    """Requests over layer 0, which chooses and leaves blocks, and two choices among them by other queries.

    between: layers that select between these
    """

    def __init__(self, device: torch.device, provider: str, *, graphs: bool = False, guards: Guards = ALL_ON) -> None:
        self.between: tuple[int, ...] = ()
        options = RuntimeOptions(num_pages=40, max_num_seqs=3, max_kv_len=64, capture_sizes=(3,), provider=provider)
        self.runtime = build_runtime([LAYER, LAYER, NOTHING_LEFT], options, device=device, guards=guards)
        self.k, self.index_k = self._zeros(1, DIM), self._zeros(INDEX_DIM)
        self.q = [self._zeros(HEADS, DIM) for _ in range(3)]
        self.index_q = [self._zeros(INDEX_HEADS, INDEX_DIM) for _ in range(3)]
        self.out = [self._zeros(HEADS, DIM) for _ in range(3)]
        recorder = recorder_for(device) if graphs else None
        self.runner = StepRunner(self.runtime, self.forward, recorder, check=NO_CHECK)
        self.generator = torch.Generator().manual_seed(0)
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(ROOM, *shape, device=self.runtime.device)

    def forward(self, step: Part) -> Tensor:
        at, calls = step.tokens, step.layers
        for layer in range(3):
            calls.store(layer, self.k[at], self.k[at])
            calls.store_index(layer, self.index_k[at])
        calls.select(0, self.index_q[0][at])
        calls.attend_selected(0, self.q[0][at], self.out[0][at])
        for layer in self.between:
            calls.select(layer, self.index_q[1][at])
        for choice in (1, 2):
            calls.select_among(0, self.index_q[choice][at])
            calls.attend_selected(0, self.q[choice][at], self.out[choice][at])
        return self.out[2][at][step.last_token_of_seq.long()]

    def step(self, rows: list[int], q_len: list[int]) -> None:
        for given in (self.k, self.index_k, *self.q, *self.index_q):
            given.copy_(torch.randn(given.shape, generator=self.generator))
        first = 0
        for row, new in zip(rows, q_len, strict=True):
            place = slice(first, first + new)
            k, index_k = self.stored.get(row, (self.k[:0], self.index_k[:0]))
            self.stored[row] = torch.cat([k, self.k[place]]), torch.cat([index_k, self.index_k[place]])
            self.runtime.table.reserve(row, len(self.stored[row][0]))
            first += new
        kv_len = [len(self.stored[row][0]) for row in rows]
        self.runner.run(StepBatch(rows, kv_len, q_len, NO_TOKEN_IDS))
        self.runtime.check_device()

    def assert_right(self, rows: list[int], q_len: list[int]) -> None:
        token = 0
        for row, new in zip(rows, q_len, strict=True):
            length = len(self.stored[row][0])
            for position in range(length - new, length):
                for choice in range(3):
                    want = self.wanted(row, position, token, choice)
                    assert_attention_close(self.out[choice][token].cpu(), want, torch.float32)
                token += 1

    def wanted(self, row: int, position: int, token: int, choice: int) -> Tensor:
        """float64 [HEADS, DIM]"""
        k, index_k = (each[: position + 1].double().cpu() for each in self.stored[row])

        def scores(of: int) -> list[float]:
            products: Tensor = self.index_q[of][token].double().cpu() @ index_k.T * INDEXING.scale
            return products.clamp(min=0).sum(0).tolist()

        kept = candidates_of(scores(0), INDEXING) if choice else set(range(position + 1))
        mine = scores(choice)
        best = sorted(kept, key=lambda unit: (-mine[unit], unit))[: INDEXING.top]
        keys = k[best, 0]
        weights = (self.q[choice][token].double().cpu() @ keys.T * DIM**-0.5).softmax(1)
        attended: Tensor = weights @ keys
        return attended


@pytest.mark.fast(interpreted=0)
def test_later_layers_choose_among_the_blocks_that_one_has_left(
    provider: str, graphs: bool, device: torch.device
) -> None:
    world = Choosing(device, provider, graphs=graphs)
    rows = [world.runtime.table.admit() for _ in range(3)]
    more = [] if provider == "triton" and device.type == "cpu" else [*[(rows, [1, 1, 1])] * 5, (rows[1:], [9, 1])]
    for some, q_len in ((rows[:2], [11, 2]), (rows, [1, 1, 3]), (rows[:1], [1]), *more):
        world.step(some, q_len)
        world.assert_right(some, q_len)
    assert not graphs or world.runner.counters.replays > 0


def test_blocks_of_another_layer_are_not_chosen_among(device: torch.device) -> None:
    world = Choosing(device, "torch")
    world.between = (1,)
    row = world.runtime.table.admit()
    with pytest.raises(WrongState, match="layer 1 has selected since"):
        world.step([row], [30])
    world = Choosing(device, "torch", guards=Guards().without("fresh_selection"))
    world.between = (1,)
    row = world.runtime.table.admit()
    world.step([row], [30])
    with pytest.raises(AssertionError):
        world.assert_right([row], [30])


def test_a_selection_between_that_leaves_no_blocks_does_no_harm(device: torch.device) -> None:
    world = Choosing(device, "torch")
    world.between = (2,)
    row = world.runtime.table.admit()
    world.step([row], [30])
    world.assert_right([row], [30])


def test_a_layer_that_leaves_no_blocks_has_none_to_choose_among(device: torch.device) -> None:
    world = Choosing(device, "torch")
    row = world.runtime.table.admit()
    world.runtime.table.reserve(row, 1)
    step = world.runtime.step(StepBatch([row], [1], [1], NO_TOKEN_IDS)).parts[0]
    at = step.tokens
    for layer in (0, 2):
        step.layers.store(layer, world.k[at], world.k[at])
        step.layers.store_index(layer, world.index_k[at])
    with pytest.raises(
        BadTensor, match="layer 2 leaves no blocks to choose among: its indexing has candidate_blocks=0"
    ):
        step.layers.select_among(2, world.index_q[0][at])
    with pytest.raises(WrongState, match="nothing was selected in this step"):
        step.layers.select_among(0, world.index_q[0][at])


def test_a_selection_that_the_caller_gives_leaves_no_blocks_to_choose_among(device: torch.device) -> None:
    world = Choosing(device, "torch")
    row = world.runtime.table.admit()
    world.step([row], [30])  # leaves blocks, in memory that the next step has too
    world.runtime.table.reserve(row, 31)
    step = world.runtime.step(StepBatch([row], [31], [1], NO_TOKEN_IDS)).parts[0]
    step.layers.store_index(0, world.index_k[step.tokens])
    units = torch.zeros(len(step.token_ids), 1, INDEXING.width, dtype=torch.int32, device=device)
    step.layers.give_selection(0, units, torch.ones_like(units[..., 0]))
    with pytest.raises(WrongState, match="nothing was selected in this step"):
        step.layers.select_among(0, world.index_q[0][step.tokens])
