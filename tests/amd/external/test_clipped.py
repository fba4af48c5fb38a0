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
from rocm_attn.paging.adopted import CsrSource, Source, TableSource, TableUnit
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import ONE_EACH, BoolCells, ExternalStep, NewLengths
from tests.amd.external.oracle import Array, attention

PAGE, POOL, MEMORY, WIDTH = 4, 16, 24, 8
HEADS, DIM, SCALE = 2, 16, 0.3
HOLE, PAST = -1, POOL
KINDS = ("in place", "int64", "slots", "lists")


class Owner:
    """An engine with a pool of POOL pages in a memory of MEMORY, none of them zero; page 0 is a normal page.

    A's first six tokens are stored in pages 0 and 4. The rows of its table are the given ones.
    """

    def __init__(
        self, device: torch.device, provider: str, rows: Sequence[Sequence[int]], kind: str = "in place"
    ) -> None:
        self.device, self.random = device, np.random.default_rng(0)
        self.k, self.v = (torch.full((MEMORY, PAGE, 1, DIM), 9.0, device=device) for _ in range(2))
        stored = self.draw(6, 1)
        self.stored = stored.double().cpu().numpy()
        for side in (self.k, self.v):
            side[0], side[4, :2] = stored[:4], stored[4:]
        self.problem = Problem(
            num_q_heads=HEADS,
            num_kv_heads=1,
            head_dim=DIM,
            v_head_dim=DIM,
            scale=SCALE,
            dtype=torch.float32,
            page_size=PAGE,
            custom_mask=True,
        )
        self.table = self.source(rows, kind)
        self.attention = ExternalAttention(
            [LayerSource(self.problem)] * 2,
            self.table,
            device=device,
            bounds=Bounds(num_seqs=4, num_tokens=32, kv_len=WIDTH * PAGE, num_pages=POOL),
            options=ExternalOptions(provider=provider),
        )
        for layer in range(2):
            self.attention.pages.bind(layer, self.k[:POOL], self.v[:POOL])

    def source(self, rows: Sequence[Sequence[int]], kind: str) -> Source:
        """Returns the table in one of an engine's forms. In lists the last hole lies past the end of the list."""
        pages = torch.full((len(rows), WIDTH), HOLE)
        for line, row in zip(pages, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        if kind == "lists":
            ends = [sum(map(len, rows[:at])) for at in range(len(rows) + 1)]
            flat = [page for row in rows for page in row]
            while flat[-1] == HOLE:
                flat.pop()
            return CsrSource(self.ints(ends), self.ints(flat))
        if kind == "slots":
            slots = torch.where(pages[:, :, None] < 0, -1, pages[:, :, None] * PAGE + torch.arange(PAGE))
            return TableSource(slots.flatten(1).int().to(self.device), TableUnit.SLOT, null_page=False)
        dtype = torch.int64 if kind == "int64" else torch.int32
        return TableSource(pages.to(self.device, dtype), null_page=False)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def draw(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.standard_normal((*shape, DIM))).float().to(self.device)

    def step(self, kv_len: Sequence[int], q_len: Sequence[int], rows: Sequence[int], **others: object) -> ExternalStep:
        lengths, new = self.ints(kv_len), NewLengths(self.ints(q_len))
        sizes = {"min_q_len": 0, "max_q_len": max(q_len), "max_kv_len": WIDTH * PAGE, **others}
        return ExternalStep(len(kv_len), len(kv_len), sum(q_len), lengths, new, self.ints(rows), **sizes)  # type: ignore[arg-type]

    def run(
        self, step: ExternalStep, slots: Tensor | None = None, layers: Sequence[int] = (0,)
    ) -> tuple[Tensor, Tensor]:
        """Returns the new rows, the same for K and V, and the output. q is K, twice."""
        new = self.draw(step.shape.num_tokens, 1)
        out = torch.full((step.shape.num_tokens, HEADS, DIM), 7.0, device=self.device)
        self.attention.begin(step)
        self.attention.fill(slots)
        for layer in layers:
            self.attention.layers.store(layer, new, new)
            self.attention.layers.attend(layer, new.expand(-1, HEADS, -1), out)
        return new, out

    def wanted(self, kv: Array, new: int, shown: Array | None = None) -> Array:
        q = np.repeat(kv[-new:], HEADS, axis=1)
        return attention(q, kv, kv, scale=SCALE, shown=shown)[0]

    def assert_reported(self, words: str) -> None:
        with pytest.raises(DeviceFault, match=words):
            self.attention.check_device()
        self.attention.check_device()


def together(*rows: Array | Tensor) -> Array:
    return np.concatenate([row.double().cpu().numpy() if isinstance(row, Tensor) else row for row in rows])


@pytest.mark.fast(12, interpreted=3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [HOLE, PAST, 2**31 - 1])
@pytest.mark.parametrize("at", [0, 1])
def test_a_page_that_does_not_exist_is_neither_read_nor_written(
    kind: str, wrong: int, at: int, device: torch.device, provider: str
) -> None:
    """B stores two tokens after its first four; one of its two pages does not exist. A and C are in the same step."""
    of_b = [5, 5]
    of_b[at] = wrong
    if kind == "slots" and wrong == 2**31 - 1:
        wrong = of_b[at] = 2**29 - 1
    owner = Owner(device, provider, [[0, 4], [6], of_b], kind)
    before = [side.clone() for side in (owner.k, owner.v)]
    new, out = owner.run(owner.step([7, 6, 2], [1, 2, 2], [0, 2, 1]))
    for side, was in zip((owner.k, owner.v), before, strict=True):
        was[4, 2], was[6, :2] = new[0], new[3:]
        assert torch.equal(side, was), "A's token and C's, and nothing else"
    assert np.allclose(out[:1].cpu(), owner.wanted(together(owner.stored, new[:1]), 1), atol=2e-5)
    assert (out[1:3] == 0).all()
    assert np.allclose(out[3:].cpu(), owner.wanted(together(new[3:]), 2), atol=2e-5)
    owner.assert_reported("a new token had no page of its own.* a page in the table of a sequence's KV is negative")
    owner.run(owner.step([7, 2], [1, 2], [0, 1]))
    owner.attention.check_device()


def test_the_layer_with_the_fewest_pages_counts(device: torch.device, provider: str) -> None:
    """Pages that graphs read may also become fewer, at the same addresses."""
    owner = Owner(device, provider, [[0, 4], [5]])
    owner.attention.pages.bind(1, owner.k[:5], owner.v[:5])
    owner.run(owner.step([2], [2], [1]), layers=(0, 1))
    owner.assert_reported("a page in the table")
    owner.attention.pages.bind(1, owner.k[:6], owner.v[:6])
    owner.run(owner.step([2], [2], [1]), layers=(0, 1))
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


def test_a_row_of_two_sequences_is_reported(device: torch.device, provider: str) -> None:
    owner = Owner(device, provider, [[0, 4], [5], [6]])
    owner.run(owner.step([2, 7, 2], [2, 1, 2], [1, 0, 1]))
    owner.assert_reported("two sequences with new tokens have the same row")
    owner.run(owner.step([2, 7, 2], [2, 1, 2], [1, 0, 2]))
    owner.run(owner.step([2, 7, 2], [2, 0, 0], [1, 0, 0]))
    owner.attention.check_device()


def test_a_captured_step_has_the_rows_that_the_table_has_now(device: torch.device, provider: str) -> None:
    owner = Owner(device, provider, [[0, 4], [5], [6]])
    assert isinstance(owner.table, TableSource)
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


def test_tokens_without_a_slot_are_reported(device: torch.device, provider: str) -> None:
    owner = Owner(device, provider, [[0, 4], [5, 6]])
    before = owner.k.clone()
    slots = owner.ints([5 * PAGE + at for at in range(3)])
    new, _ = owner.run(owner.step([5], [5], [1]), slots)
    before[5, :3] = new[:3]
    assert torch.equal(owner.k, before)
    owner.assert_reported("fewer slots, positions or mask cells were given than the step has")
    owner.run(owner.step([3], [3], [1]), slots)
    owner.attention.check_device()


def test_cells_and_positions_that_were_not_given_are_reported(device: torch.device, provider: str) -> None:
    """Keys of missing cells are hidden, whatever the cells of earlier steps were."""
    owner = Owner(device, provider, [[0, 4], [5, 6, 7, 8]])
    everything = torch.ones(32 * 32, dtype=torch.bool, device=device)
    positions = torch.arange(32, device=device)

    def run(kv_len: int, num_cells: int, num_positions: int = 32) -> tuple[Tensor, Tensor]:
        mask = BoolCells(everything[:num_cells], positions[:num_positions])
        return owner.run(owner.step([kv_len], [4], [1], mask=mask))

    first, _ = run(4, 16)
    owner.attention.check_device()
    more, out = run(8, 13)
    owner.assert_reported("fewer slots, positions or mask cells were given than the step has")
    shown = (np.arange(32) < 13).reshape(4, 8).astype(np.float64)
    assert np.allclose(out.cpu(), owner.wanted(together(first, more), 4, shown), atol=2e-5)
    run(8, 32)
    owner.attention.check_device()
    run(8, 32, num_positions=3)
    owner.assert_reported("fewer slots, positions or mask cells were given than the step has")
