"""Layers that select keys over an engine's pages: index pages are bound like others, and selections are fresh."""

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, DeviceFault, WrongState
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.paging.adopted import TableSource
from rocm_attn.problem import EarlierSelection
from rocm_attn.step.external_step import ExternalStep, NewLengths
from tests.amd.worlds.problems import indexer, layer

TOKENS = Indexing(0.25, top=4)
KV_LEN, PAGES = 11, 6


class Engine:
    """One sequence of 11 tokens, all of them new, over pages 1, 2 and 3; every page is filled with NaN."""

    def __init__(self, device: torch.device, guards: Guards | None = None) -> None:
        problems = [layer(indexer(TOKENS)), layer(EarlierSelection(TOKENS))]
        table = torch.tensor([[1, 2, 3, 0]], dtype=torch.int32, device=device)
        self.attention = ExternalAttention(
            [LayerSource(problem) for problem in problems],
            TableSource(table, null_page=True),
            device=device,
            bounds=Bounds(num_seqs=1, num_tokens=16, kv_len=16, num_pages=PAGES),
            options=ExternalOptions(provider="torch"),
            guards=guards,
        )
        self.device = device
        for number in range(2):
            self.attention.pages.bind(number, self.nan(PAGES, 4, 2, 16), self.nan(PAGES, 4, 2, 16))
        generator = torch.Generator().manual_seed(0)
        self.q, self.k, self.v, self.other_k, self.other_v = (
            torch.randn(KV_LEN, heads, 16, generator=generator).to(device) for heads in (4, 2, 2, 2, 2)
        )
        self.index_q, self.index_k = (
            torch.randint(-2, 3, shape, generator=generator).float().to(device)
            for shape in ((KV_LEN, 4, 16), (KV_LEN, 16))
        )

    def nan(self, *shape: int) -> Tensor:
        return torch.full(shape, float("nan"), device=self.device)

    def begin(self) -> None:
        kv_len = torch.tensor([KV_LEN], dtype=torch.int32, device=self.device)
        step = ExternalStep(1, 1, KV_LEN, kv_len, NewLengths(kv_len), None, KV_LEN, KV_LEN, KV_LEN)
        self.attention.begin(step)
        self.attention.fill()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("selects", [False, True])
def test_what_a_table_holds_after_a_sequences_pages_is_not_read(
    selects: bool, deterministic: bool, device: torch.device
) -> None:
    """An engine leaves there what it likes. The second sequence has one page, the first one three."""
    if deterministic and (selects or device.type != "cpu"):
        pytest.skip("torch's deterministic kernels are for CPUs, and select nothing")
    outs = []
    for rest in (0, -1, 10**6):
        engine, generator = Engine(device), torch.Generator().manual_seed(1)
        table = torch.tensor([[1, 2, 3, rest], [4, rest, rest, rest]], dtype=torch.int32, device=device)
        engine.attention = attention = ExternalAttention(
            [LayerSource(layer(indexer(TOKENS)) if selects else layer())],
            TableSource(table),
            device=device,
            bounds=Bounds(num_seqs=3, num_tokens=16, kv_len=16, num_pages=PAGES),
            options=ExternalOptions(provider="torch", deterministic=deterministic),
        )
        attention.pages.bind(0, engine.nan(PAGES, 4, 2, 16), engine.nan(PAGES, 4, 2, 16))
        lengths = torch.tensor([KV_LEN, 2, 0], dtype=torch.int32, device=device)
        q, k, index_q, index_k = (
            torch.randn(KV_LEN + 3, *shape, generator=generator).to(device)
            for shape in ((4, 16), (2, 16), (4, 16), (16,))
        )
        attention.begin(ExternalStep(2, 3, KV_LEN + 3, lengths, NewLengths(lengths), None, 1, KV_LEN, KV_LEN))
        attention.fill()
        outs.append(torch.empty_like(q))
        attention.layers.store(0, k, k)
        if selects:
            attention.pages.bind_index(0, engine.nan(PAGES, 4, 16))
            attention.layers.store_index(0, index_k)
            attention.layers.select(0, index_q)
            attention.layers.attend_selected(0, q, outs[-1])
        else:
            attention.layers.attend(0, q, outs[-1])
        attention.check_device()
    assert outs[0].isfinite().all()
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize(("lost", "page"), [(0, 10**6), (1, -1), (2, PAGES)])
def test_a_sequence_that_lost_its_pages_sees_no_key_of_row_0(
    lost: int, page: int, device: torch.device, provider: str
) -> None:
    """It saw the first one, another sequence's, or read a page past the pool if the sequence of row 0 was lost."""
    outs = []
    for wrong in (False, True):
        generator = torch.Generator().manual_seed(1)
        table = torch.tensor([[1, 0], [2, 3], [4, 5]], dtype=torch.int32)
        if wrong:
            table[lost, 0] = page
        attention = ExternalAttention(
            [LayerSource(layer(indexer(TOKENS)))],
            TableSource(table.to(device)),
            device=device,
            bounds=Bounds(num_seqs=3, num_tokens=16, kv_len=8, num_pages=PAGES),
            options=ExternalOptions(provider=provider),
        )
        shapes = (PAGES, 4, 2, 16), (PAGES, 4, 16), (6, 4, 16), (6, 4, 16)
        pages, index_pages, q, index_q = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
        attention.pages.bind(0, pages, pages.clone())
        attention.pages.bind_index(0, index_pages)
        lengths, new = (torch.tensor(each, device=device) for each in ([4, 7, 6], [2, 1, 3]))
        attention.begin(ExternalStep(3, 3, 6, lengths, NewLengths(new), None, 1, 3, 8))
        attention.fill()
        outs.append(torch.empty_like(q))
        attention.layers.select(0, index_q)
        attention.layers.attend_selected(0, q, outs[-1])
    own = slice(*([0, 2, 3, 6][lost : lost + 2]))
    outs[0][own] = 0
    assert torch.equal(outs[1], outs[0])
    with pytest.raises(DeviceFault, match="a page in the table"):
        attention.check_device()


def test_index_pages_that_do_not_fit_are_refused(device: torch.device) -> None:
    engine = Engine(device)
    attention = engine.attention
    engine.begin()
    with pytest.raises(WrongState, match=r"layer 0 has no index pages yet; call pages.bind_index\(\)"):
        attention.layers.store_index(0, engine.index_k)
    with pytest.raises(
        BadTensor,
        match=r"layer 0: k has pages of 4 tokens, 1 heads and 8 elements; its pages are .* of 4 tokens, 1 x 16/16",
    ):
        attention.pages.bind_index(0, engine.nan(PAGES, 4, 8))
    with pytest.raises(BadTensor, match=r"layer 0: k is torch\.float16; its pages are .* in float32"):
        attention.pages.bind_index(0, engine.nan(PAGES, 4, 16).half())
    with pytest.raises(BadTensor, match=r"layer 0: k_scale was given; its pages are .* with no scales"):
        attention.pages.bind_index(0, engine.nan(PAGES, 4, 16), torch.ones(1, device=device))
    with pytest.raises(BadTensor, match="the scale of the index keys of layer 0 is a float; give a tensor"):
        attention.pages.bind_index(0, engine.nan(PAGES, 4, 16), 0.5)  # type: ignore[arg-type]
    with pytest.raises(BadTensor, match="layer 1 has no indexer"):
        attention.pages.bind_index(1, engine.nan(PAGES, 4, 16))
    with pytest.raises(WrongState, match=r"call pages.bind_index\(\)"):
        attention.seal()
    attention.pages.bind_index(0, engine.nan(PAGES, 4, 16))
    attention.seal()
    with pytest.raises(WrongState, match="the index pages of layer 0 have moved"):
        attention.pages.bind_index(0, engine.nan(PAGES, 4, 16))


def test_a_selection_does_not_outlive_its_step(device: torch.device) -> None:
    """A later step has not selected, so the buffer holds an earlier step's selection."""
    engine = Engine(device)
    attention = engine.attention
    attention.pages.bind_index(0, engine.nan(PAGES, 4, 16))
    out = torch.empty_like(engine.q)
    engine.begin()
    attention.layers.store(0, engine.k, engine.v)
    attention.layers.store_index(0, engine.index_k)
    attention.layers.select(0, engine.index_q)
    attention.layers.attend_selected(0, engine.q, out)
    engine.begin()
    with pytest.raises(WrongState, match="nothing was selected in this step"):
        attention.layers.attend_selected(0, engine.q, out)
