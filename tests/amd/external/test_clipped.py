"""An engine's tensors with wrong or missing entries are reported, and no other request's page is touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import DeviceFault
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.paging.adopted import TableSource
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import ONE_EACH, ExternalStep, NewLengths

PAGE, POOL, MEMORY, WIDTH = 4, 16, 24, 8
HEADS, DIM, SCALE = 2, 16, 0.3
HOLE = -1


class Owner:
    """An engine with a pool of POOL pages in a memory of MEMORY, none of them zero; page 0 is a normal page.

    The rows of its table are the given ones.
    """

    def __init__(self, device: torch.device, provider: str, rows: Sequence[Sequence[int]]) -> None:
        self.device, self.random = device, np.random.default_rng(0)
        self.k, self.v = (torch.full((MEMORY, PAGE, 1, DIM), 9.0, device=device) for _ in range(2))
        self.problem = Problem(
            num_q_heads=HEADS,
            num_kv_heads=1,
            head_dim=DIM,
            v_head_dim=DIM,
            scale=SCALE,
            dtype=torch.float32,
            page_size=PAGE,
        )
        self.table = self.source(rows)
        self.attention = ExternalAttention(
            [LayerSource(self.problem)] * 2,
            self.table,
            device=device,
            bounds=Bounds(num_seqs=4, num_tokens=32, kv_len=WIDTH * PAGE, num_pages=POOL),
            options=ExternalOptions(provider=provider),
        )
        for layer in range(2):
            self.attention.pages.bind(layer, self.k[:POOL], self.v[:POOL])

    def source(self, rows: Sequence[Sequence[int]]) -> TableSource:
        pages = torch.full((len(rows), WIDTH), HOLE, dtype=torch.int32)
        for line, row in zip(pages, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        return TableSource(pages.to(self.device), null_page=False)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def draw(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.standard_normal((*shape, DIM))).float().to(self.device)

    def step(self, row: int) -> ExternalStep:
        """Returns a step of two tokens that are new to a row."""
        return ExternalStep(1, 1, 2, self.ints([2]), NewLengths(self.ints([2])), self.ints([row]), 0, 2, WIDTH * PAGE)

    def run(self, step: ExternalStep, layers: Sequence[int] = (0,)) -> None:
        """K and V are the same, and q is K, twice."""
        new = self.draw(step.shape.num_tokens, 1)
        out = torch.full((step.shape.num_tokens, HEADS, DIM), 7.0, device=self.device)
        self.attention.begin(step)
        self.attention.fill()
        for layer in layers:
            self.attention.layers.store(layer, new, new)
            self.attention.layers.attend(layer, new.expand(-1, HEADS, -1), out)

    def assert_reported(self, words: str) -> None:
        with pytest.raises(DeviceFault, match=words):
            self.attention.check_device()
        self.attention.check_device()


def test_the_layer_with_the_fewest_pages_counts(device: torch.device, provider: str) -> None:
    """Pages that graphs read may also become fewer, at the same addresses."""
    owner = Owner(device, provider, [[0, 4], [5]])
    owner.attention.pages.bind(1, owner.k[:5], owner.v[:5])
    owner.run(owner.step(1), layers=(0, 1))
    owner.assert_reported("a page in the table")
    owner.attention.pages.bind(1, owner.k[:6], owner.v[:6])
    owner.run(owner.step(1), layers=(0, 1))
    owner.attention.check_device()

    owner.attention.seal()
    captured = ExternalStep(1, 4, 4, owner.ints([3, 0, 0, 0]), ONE_EACH, owner.ints([1, 0, 0, 0]), 1, 1, 1, True)
    owner.attention.begin(captured)
    fill = owner.attention.record_fill(recorder_for(device))
    for pages, is_reported in ((6, False), (5, True), (6, False)):
        owner.attention.pages.bind(1, owner.k[:pages], owner.v[:pages])
        owner.attention.begin(captured)
        owner.attention.replay_fill(fill)
        if is_reported:
            owner.assert_reported("a page in the table")
        owner.attention.check_device()


def test_a_captured_step_has_the_rows_that_the_table_has_now(device: torch.device, provider: str) -> None:
    owner = Owner(device, provider, [[0, 4], [5], [6]])
    table, before = owner.table.entries, owner.k.clone()
    owner.attention.seal()

    def run(row: int) -> None:
        lengths, rows = owner.ints([1, 0, 0, 0]), owner.ints([row, 0, 0, 0])
        owner.run(ExternalStep(1, 4, 4, lengths, ONE_EACH, rows, 1, 1, 1, True))

    run(1)
    owner.attention.tables.use(table[:2])
    run(2)
    owner.assert_reported("a row that was given lies outside of the table")
    assert torch.equal(owner.k[6], before[6])
    owner.attention.tables.use(table)
    run(2)
    owner.attention.check_device()
    assert not torch.equal(owner.k[6], before[6])
