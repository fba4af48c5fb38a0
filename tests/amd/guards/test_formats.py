"""Page formats: a writer and a reader that disagree are not built, and scales keep the addresses that graphs read."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding, FormatMismatch, PageFormat, PoolKind
from rocm_attn.kernels.cache.page_rows import empty_vectorised_pages
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.adopted_pages import EnginePages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.kv_pool import HybridKVPool
from rocm_attn.problem import Indexer, KVEncoding, Problem, Scales
from rocm_attn.step.external_step import ExternalStep
from rocm_attn.step.kv_scales import KVScales
from tests.amd.worlds.problems import layer as sparse_layer
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import ALL_ON, Request, World, is_right

FN = small_problem(16, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.LAYER)
FNUZ = replace(FN, kv_encoding=KVEncoding.E4M3FNUZ)
PAGES = 6

# Formats that one side may assume for the other's pages: each gives finite, wrong results to such a reader.
OTHERS: list[Callable[[Problem], Problem]] = [
    lambda problem: replace(problem, kv_encoding=KVEncoding.E4M3FNUZ),
    lambda problem: replace(problem, kv_scales=Scales.HEAD),
    lambda problem: replace(problem, kv_scales=Scales.TOKEN),
    lambda problem: replace(problem, pool=PoolKind.VECTORIZED),
    lambda problem: replace(problem, page_size=32),
    lambda problem: replace(problem, num_q_heads=12, num_kv_heads=4, head_dim=8, v_head_dim=8),
]


# Rows of 24 elements, of which 16 are V, and formats that a reader may assume.
LATENT = replace(FN, num_kv_heads=1, head_dim=24, v_head_dim=16, pool=PoolKind.LATENT)
OTHER_LATENTS = [
    replace(LATENT, v_head_dim=20),
    replace(LATENT, v_head_dim=24),
    replace(LATENT, head_dim=32),
    replace(LATENT, kv_encoding=KVEncoding.E5M2),
    replace(LATENT, kv_scales=Scales.TOKEN),
]


@pytest.mark.parametrize(
    ("written", "read"),
    [*((other(FN), FN) for other in OTHERS), *((other, LATENT) for other in OTHER_LATENTS), (LATENT, OTHER_LATENTS[0])],
)
def test_a_writer_and_a_reader_of_different_formats_are_not_built(
    written: Problem, read: Problem, provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index cache that was written flat and read shuffled lost everything beyond 4 thousand tokens (vllm#52109)."""
    assert written.page_format != read.page_format

    class PoolOfTheWriter(HybridKVPool):
        def __init__(self, problems: list[Problem], spaces: list[Space], **sizes: object) -> None:
            super().__init__([written] * len(problems), spaces, **sizes)  # type: ignore[arg-type]

    World.one_layer(device, graphs=False, provider=provider, problem=read)
    monkeypatch.setattr("rocm_attn.runtime.HybridKVPool", PoolOfTheWriter)
    with pytest.raises(BadTensor, match=r"the pages of layer 0 hold .*; its kernels need .*float8_e4m3fn"):
        World.one_layer(device, graphs=False, provider=provider, problem=read)


def test_pages_that_are_not_what_their_format_says_are_refused(device: torch.device) -> None:
    k = torch.zeros(PAGES, 16, 2, 16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    one, heads = torch.ones(1, device=device), torch.ones(2, device=device)
    form = FN.page_format
    LayerPages(k, k, form, one, one)
    refused: list[tuple[tuple[object, ...], str]] = [
        ((k, k, FNUZ.page_format, one, one), "k is torch.float8_e4m3fn; its pages are .* float8_e4m3fnuz"),
        ((k, k, replace(form, page_size=8), one, one), "k has pages of 16 tokens, 2 heads and 16 elements"),
        ((k, k, replace(form, kind=PoolKind.VECTORIZED), one, one), "k has 4 dimensions; its pages are vectorised"),
        ((k, k, form), "k_scale is missing; it must be float32"),
        ((k, k, form, heads, one), r"k_scale is torch.float32 \[2\].*; it must be float32 \[1\]"),
        ((k, k, form, one.double(), one), "k_scale is torch.float64"),
        ((k, k, replace(form, scales=Scales.NONE), one, one), "k_scale was given"),
    ]
    for given, sentence in refused:
        with pytest.raises(FormatMismatch, match=sentence):
            LayerPages(*given)  # type: ignore[arg-type]


def test_a_kernel_refuses_pages_that_lie_in_another_order_before_it_is_launched(device: torch.device) -> None:
    k, v = empty_vectorised_pages(PAGES, 16, 2, (16, 16), 4, dtype=torch.float32, device=device)
    ints = torch.zeros(3, dtype=torch.int32, device=device)
    q = torch.zeros(2, 6, 16, device=device)
    queries = Queries(ints[:2], ints[:2], ints, 2, 1, 16)
    nothing = torch.zeros(0, device=device)

    def args(pages: LayerPages) -> AttendArgs:
        return AttendArgs(q, pages, ints[None], queries, q.clone(), None, None, None, ints, nothing)

    with pytest.raises(ValueError, match=r"with q in torch.float32 it reads K and V pages .*, not vectorised pages of"):
        args(LayerPages.plain(k, v)).check("decode")
    halves = torch.zeros(PAGES, 16, 2, 16, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"in that dtype or in eight bits, not K and V pages .* in float16"):
        args(LayerPages.plain(halves, halves)).check("decode")
    args(LayerPages.plain(halves.float(), halves.float())).check("decode")


class Adopted:
    """One layer over an engine's pages: bytes whose format the engine declares."""

    def __init__(self, device: torch.device, provider: str, guards: Guards = ALL_ON, problem: Problem = FN) -> None:
        self.table = torch.arange(1, PAGES, dtype=torch.int32, device=device)[None]
        self.attention = ExternalAttention(
            [LayerSource(problem)],
            TableSource(self.table),
            device=device,
            bounds=Bounds(num_seqs=4, num_tokens=64, kv_len=64, num_pages=PAGES),
            options=ExternalOptions(provider=provider),
            guards=guards,
        )
        self.k = torch.zeros(PAGES, 16, 2, 16, dtype=torch.uint8, device=device)
        self.v = self.k.clone()
        self.scales = torch.tensor(0.02, device=device), torch.tensor(0.03, device=device)

    def bind(self, form: PageFormat) -> None:
        self.attention.pages.bind(0, self.k, self.v, EnginePages(*self.scales, form))

    def decode(self, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, *, stores: bool) -> torch.Tensor:
        """Returns the attention of the last of some tokens. stores: true if the tokens are stored first"""
        n, attention = len(k), self.attention
        out = torch.empty_like(q)
        lengths = torch.tensor([n], dtype=torch.int32, device=k.device)
        if stores:
            indptr = torch.tensor([0, n], dtype=torch.int32, device=k.device)
            attention.begin(ExternalStep.extend(indptr, lengths, num_tokens=n, max_q_len=n, max_kv_len=n))
            attention.fill()
            attention.layers.store(0, k, v)
        attention.begin(ExternalStep.decode(lengths, num_seqs=1, max_kv_len=n))
        attention.fill()
        attention.layers.attend(0, q, out)
        attention.check_device()
        return out


def rows(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(21, 2, 16, generator=generator).to(device) for _ in range(2))
    return k, v, torch.randn(1, 6, 16, generator=generator).to(device)


def test_pages_of_another_format_are_not_adopted(provider: str, device: torch.device) -> None:
    """An engine has written E4M3FN, and the layer reads E4M3FNUZ: without the guard every value is halved."""
    k, v, q = rows(device)
    engine = Adopted(device, provider, ALL_ON)
    engine.bind(FN.page_format)
    right = engine.decode(k, v, q, stores=True)

    reader = Adopted(device, provider, ALL_ON, problem=FNUZ)
    reader.k, reader.v = engine.k, engine.v
    with pytest.raises(BadTensor, match=r"the pages of layer 0 hold .* float8_e4m3fn .*; their kernels need"):
        reader.bind(FN.page_format)
    with pytest.raises(WrongState, match=r"layer 0 has no pages yet"):
        reader.decode(k, v, q, stores=False)

    reader = Adopted(device, provider, Guards().without("page_format"), problem=FNUZ)
    reader.k, reader.v = engine.k, engine.v
    reader.bind(FN.page_format)
    wrong = reader.decode(k, v, q, stores=False)
    assert wrong.isfinite().all(), "nothing shows that it is wrong"
    assert (wrong - right).abs().max() > 0.1


def test_what_an_engine_says_of_its_bytes_is_checked(provider: str, device: torch.device) -> None:
    engine = Adopted(device, provider)
    with pytest.raises(BadTensor, match=r"the pages of layer 0 are in float8_e4m3fn; give their format and scales"):
        engine.attention.pages.bind(0, engine.k, engine.v)
    for form in (
        replace(FN.page_format, producer="vllm: shuffled"),
        replace(FN.page_format, kind=PoolKind.VECTORIZED),
        replace(FN.page_format, encoding=Encoding.E5M2),
    ):
        with pytest.raises(BadTensor, match=r"Build the layer with a Problem of the engine's format"):
            engine.bind(form)
    engine.k = engine.k.view(torch.float8_e5m2)
    with pytest.raises(BadTensor, match=r"layer 0: k is torch.float8_e5m2; its pages are .* in float8_e4m3fn"):
        engine.bind(FN.page_format)
    engine.k, engine.scales = engine.v, (torch.ones(2, device=device), torch.ones(2, device=device))
    with pytest.raises(BadTensor, match=r"layer 0: k_scale is torch.float32 \[2\]"):
        engine.bind(FN.page_format)


@pytest.mark.parametrize("scale_value", [0.0, -0.5, float("nan"), float("inf"), 1e-45])
@pytest.mark.parametrize("side", [0, 1])
def test_scales_that_no_store_can_divide_by_are_not_adopted(
    side: int, scale_value: float, provider: str, device: torch.device
) -> None:
    engine = Adopted(device, provider)
    engine.scales[side].fill_(scale_value)
    with pytest.raises(BadTensor, match=f"the scales of {'kv'[side]} of layer 0 are .*a positive number from"):
        engine.bind(FN.page_format)
    with pytest.raises(WrongState, match="layer 0 has no pages yet"):
        engine.attention.pages.layer(0)


def test_latent_rows_of_an_engine_have_one_scale(device: torch.device) -> None:
    """V is a part of K: a scale of its own for V would also apply to K."""
    latent = replace(FN, num_kv_heads=1, head_dim=16, v_head_dim=8, pool=PoolKind.LATENT)
    engine = Adopted(device, "torch", problem=latent)
    engine.k = torch.zeros(PAGES, 16, 1, 16, dtype=torch.uint8, device=device)
    engine.v = engine.k[..., :8]
    with pytest.raises(BadTensor, match=r"layer 0 is latent, and its scales are .* give the same for both"):
        engine.bind(latent.page_format)
    engine.scales = engine.scales[0], engine.scales[0].clone()
    engine.bind(latent.page_format)


def test_pages_that_have_no_scales_may_be_declared_too(provider: str, device: torch.device) -> None:
    """An engine that lays out float32 pages in an order of its own declares it, and is refused."""
    plain = small_problem(16)
    engine = Adopted(device, provider, problem=plain)
    engine.k = torch.zeros(PAGES, 16, 2, 16, device=device)
    own = plain.page_format
    engine.attention.pages.bind(0, engine.k, engine.k.clone(), EnginePages(None, None, own))
    for form in (replace(own, producer="vllm: shuffled"), replace(own, encoding=Encoding.FP16)):
        with pytest.raises(BadTensor, match=r"the pages of layer 0 hold .*; their kernels need .* float32"):
            engine.attention.pages.bind(0, engine.k, engine.k.clone(), EnginePages(None, None, form))
    with pytest.raises(BadTensor, match=r"layer 0: k_scale was given"):
        engine.attention.pages.bind(0, engine.k, engine.k.clone(), EnginePages(engine.scales[0], None, own))


SELECTING = sparse_layer(
    Indexer(4, 32, Indexing(0.25, top=3), key_encoding=KVEncoding.E4M3FN, key_scales=Scales.LAYER), page_size=16
)
INDEX_FORMAT = PageFormat(Encoding.E4M3FN, PoolKind.LATENT, 16, 1, 32, 32, Scales.LAYER)


class Selects:
    """One sequence of 60 tokens over an engine's pages, whose last token selects; index keys are bytes."""

    def __init__(self, device: torch.device, provider: str, guards: Guards = ALL_ON) -> None:
        table = torch.arange(1, PAGES, dtype=torch.int32, device=device)[None]
        self.attention = ExternalAttention(
            [LayerSource(SELECTING)],
            TableSource(table),
            device=device,
            bounds=Bounds(num_seqs=1, num_tokens=64, kv_len=64, num_pages=PAGES),
            options=ExternalOptions(provider=provider),
            guards=guards,
        )
        self.k, self.v = (torch.zeros(PAGES, 16, 2, 16, device=device) for _ in range(2))
        self.attention.pages.bind(0, self.k, self.v)
        self.keys = torch.zeros(PAGES, 16, 32, dtype=torch.uint8, device=device)
        self.scale_value = torch.full((1,), 0.5, device=device)

    def bind(self, form: PageFormat) -> None:
        self.attention.pages.bind_index(0, self.keys, self.scale_value, form)

    def run(self, *, stores: bool) -> torch.Tensor:
        """Returns the last token's output. stores: true to store all tokens, false to store only the last one"""
        device, n = self.k.device, 60
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(n, heads, 16, generator=generator).to(device) for heads in (4, 2, 2))
        index_q, index_k = (
            torch.randint(-2, 3, shape, generator=generator).float().to(device) for shape in ((n, 4, 32), (n, 32))
        )
        new = n if stores else 1
        rows = [each[-new:].contiguous() for each in (q, k, v, index_q, index_k)]
        lengths = torch.tensor([n], dtype=torch.int32, device=device)
        indptr = torch.tensor([0, new], dtype=torch.int32, device=device)
        self.attention.begin(ExternalStep.extend(indptr, lengths, num_tokens=new, max_q_len=new, max_kv_len=n))
        self.attention.fill()
        out = torch.empty_like(rows[0])
        self.attention.layers.store(0, rows[1], rows[2])
        self.attention.layers.store_index(0, rows[4])
        self.attention.layers.select(0, rows[3])
        self.attention.layers.attend_selected(0, rows[0], out)
        self.attention.check_device()
        return out[-1]


def test_index_pages_of_another_format_are_not_adopted(provider: str, device: torch.device) -> None:
    """Written in tiles and read in rows, as in vllm#52109: without the guard the wrong keys are selected silently."""
    writer = Selects(device, provider)
    with pytest.raises(BadTensor, match=r"the index pages of layer 0 are in float8_e4m3fn; give their format"):
        writer.attention.pages.bind_index(0, writer.keys, writer.scale_value)
    writer.bind(INDEX_FORMAT)
    right = writer.run(stores=True)
    shuffled = replace(INDEX_FORMAT, producer="vllm: shuffled")
    for form in (shuffled, replace(INDEX_FORMAT, encoding=Encoding.E4M3FNUZ)):
        with pytest.raises(BadTensor, match=r"the index pages of layer 0 hold .*; their kernels need"):
            writer.bind(form)

    reader = Selects(device, provider, Guards().without("page_format"))
    reader.k.copy_(writer.k)
    reader.v.copy_(writer.v)
    reader.keys.copy_(writer.keys)
    reader.bind(INDEX_FORMAT)
    torch.testing.assert_close(reader.run(stores=False), right, rtol=1e-5, atol=1e-5)
    tiles = writer.keys.view(PAGES, 16, 2, 16).transpose(1, 2).reshape(PAGES, 16, 32)
    reader.keys.copy_(tiles)
    reader.bind(shuffled)
    wrong = reader.run(stores=False)
    assert wrong.isfinite().all(), "nothing shows that it is wrong"
    assert (wrong - right).abs().max() > 0.1


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_of_index_keys_is_a_positive_number_as_those_of_k_and_v_are(scale: float, device: torch.device) -> None:
    """The store divides by it: with 0 every index key would be the largest code, or NaN, and chosen by chance."""
    engine = Selects(device, "torch")
    engine.scale_value.fill_(scale)
    with pytest.raises(BadTensor, match=r"of the index keys of layer 0 are .*; each must be a positive number"):
        engine.bind(INDEX_FORMAT)


def test_scales_are_not_replaced_under_a_graph(provider: str, device: torch.device) -> None:
    problem = small_problem(kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.LAYER)

    def served(guards: Guards) -> tuple[World, list[Request]]:
        """Serves a request that decodes through a graph, and another one after scales have changed."""
        serving = World.one_layer(device, guards, graphs=True, provider=provider, problem=problem)
        requests = serving.begun(1)
        serving.free(*requests)
        serving.runtime.set_kv_scales(0, KVScales(0.02, 0.03))
        requests = serving.admit_all(1)
        serving.run(requests, [1])
        assert serving.runner.counters.replays == 2
        return serving, requests

    serving, requests = served(ALL_ON)
    assert is_right(serving, requests, [1])
    serving, requests = served(Guards().without("kv_scales"))
    assert not is_right(serving, requests, [1])
