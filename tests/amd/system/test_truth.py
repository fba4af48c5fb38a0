"""The truth test finds every needle in a correct runtime, and misses some with each fault that it must detect."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadProblem, BadSetting
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit, Pooling
from rocm_attn.problem import (
    ALL_KEYS,
    UNLIMITED_WINDOW,
    AllKeys,
    EarlierSelection,
    Indexer,
    KVEncoding,
    PoolKind,
    Problem,
    Row,
    Scales,
)
from rocm_attn.providers.contract import LayerKernel
from rocm_attn.providers.launches import StepOps
from rocm_attn.providers.select import Selection
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.core import OpsChange
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import LayerCalls, WrappedLayers
from rocm_attn.truth.check import NeedleCheck, TruthPlan, TruthReport
from rocm_attn.truth.needle_layer import NeedleLayer
from rocm_attn.truth.wide_pages import wrapping_pages
from tests.amd.faulty_kernels import faulty, with_launches
from tests.amd.worlds.problems import providers

SHORT = TruthPlan(lengths=(60, 200), first_chunk=50, chunk=90, decode_steps=2)
TOKENS = Indexing(0.125, top=12)
BLOCKS = Indexing(0.125, top=4, unit_keys=16, first=1, last=1)
POOLS = Indexing(0.125, top=6, key_tokens=4, last_unit=LastUnit.ADDED)
MEANS = Indexing(0.125, top=3, sets=2, unit_keys=16, pooling=Pooling.MEAN, last_unit=LastUnit.LEFT_OUT)
ROWS = Indexing(0.125, top=6, key_tokens=4, last_unit=LastUnit.LEFT_OUT)
DENSE = Problem(4, 2, 64, torch.float32, 16, v_head_dim=64, scale=64**-0.5)
LATENT = Problem(4, 1, 96, torch.float32, 16, v_head_dim=64, scale=96**-0.5, pool=PoolKind.LATENT)
WINDOW = replace(DENSE, window_left=40, has_sinks=True)


def selecting(indexing: Indexing, problem: Problem = DENSE) -> list[Problem]:
    """Returns a layer that selects, and one that reuses its selection."""
    return [
        replace(problem, indexer=Indexer(4, 128, indexing)),
        replace(problem, indexer=EarlierSelection(indexing)),
    ]


def rows() -> list[Problem]:
    """Returns rows of 4 tokens that an indexer chooses from, a layer that shares its choice, and all rows of 8."""
    chosen = replace(LATENT, row=Row(4, overlaps=True, also=128), indexer=Indexer(4, 128, ROWS))
    shared = replace(chosen, row=Row(4, overlaps=True), indexer=EarlierSelection(ROWS))
    return [chosen, shared, replace(LATENT, row=Row(8))]


def coded(problem: Problem, encoding: KVEncoding = KVEncoding.E4M3FN, scales: Scales = Scales.TOKEN) -> Problem:
    """Returns the layer with eight-bit K and V, and eight-bit index keys with a scale each."""
    indexer = problem.indexer
    if isinstance(indexer, Indexer):
        indexer = replace(indexer, key_encoding=encoding, key_scales=Scales.TOKEN)
    return replace(problem, kv_encoding=encoding, kv_scales=scales, indexer=indexer)


def truth(
    problems: Sequence[Problem],
    device: torch.device,
    plan: TruthPlan = SHORT,
    guards: Guards | None = None,
) -> TruthReport:
    """Returns the report on the needles of these layers."""

    def build(layers: Sequence[Problem], options: RuntimeOptions) -> AttentionRuntime:
        return build_runtime(layers, options, device=device, guards=guards)

    return NeedleCheck(problems, plan, build).run()


def assert_all_found(report: TruthReport, *, replayed: bool = True) -> None:
    """Checks that no needle was missed. replayed: whether all steps were replays, or none"""
    assert report.passed, "\n".join(map(str, report.misses))
    assert report.replays == report.steps * replayed


LAYERS = {
    "dense, and a window with sinks": [DENSE, WINDOW],
    "latents": [LATENT],
    "soft cap and slopes": [replace(DENSE, logits_soft_cap=50.0), replace(DENSE, has_alibi_slopes=True)],
    "tokens": selecting(TOKENS),
    "blocks": selecting(BLOCKS),
    "pools over latents": selecting(POOLS, LATENT),
    "means": selecting(MEANS),
    "rows": rows(),
}


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_needle_is_found(kind: str, device: torch.device) -> None:
    """They are found in chunks and decode steps, all of them replays."""
    report = truth(LAYERS[kind], device)
    assert_all_found(report)
    assert all(tally.hidden > 0 for of_layer in report.tallies for tally in of_layer)


@pytest.mark.fast
@pytest.mark.parametrize(
    "fault",
    [
        lambda ops: replace(
            ops,
            fold_rows=lambda pages, step, rows, **row: ops.fold_rows(
                pages, replace(step, table=step.table * 0), rows, **row
            ),
        ),
        lambda ops: replace(
            ops,
            fold_rows=lambda pages, step, rows, **row: ops.fold_rows(
                pages,
                replace(step, position_of_token=(step.position_of_token - row["tokens"]).clamp(min=0)),
                rows,
                **row,
            ),
        ),
    ],
    ids=["pages", "places"],
)
def test_rows_that_are_folded_of_other_tokens_are_missed(fault: OpsChange, device: torch.device) -> None:
    """The state is read in page 0, or the row before is folded again."""
    guards = with_launches(lambda selection: selection, fault)
    assert not truth([rows()[2]], device, replace(SHORT, graphs=False), guards).passed


@pytest.mark.fast
@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.HEAD, Scales.TOKEN], ids=lambda scales: scales.name)
@pytest.mark.parametrize("encoding", [kind for kind in KVEncoding if kind is not KVEncoding.LIKE_Q])
def test_every_needle_is_found_in_every_encoding(encoding: KVEncoding, scales: Scales, device: torch.device) -> None:
    layers = [coded(problem, encoding, scales) for problem in (DENSE, *selecting(TOKENS))]
    assert_all_found(truth(layers, device, replace(SHORT, graphs=False)), replayed=False)


@pytest.mark.fast
@pytest.mark.parametrize(("dims", "scales"), [((144, 128), Scales.GROUP), ((192, 192), Scales.FOOTER)], ids=str)
@pytest.mark.parametrize("encoding", [KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ])
def test_every_needle_is_found_in_records(
    encoding: KVEncoding, dims: tuple[int, int], scales: Scales, device: torch.device
) -> None:
    latent = replace(LATENT, head_dim=dims[0], v_head_dim=dims[1], scale=dims[0] ** -0.5)
    layers = [coded(problem, encoding, scales) for problem in (latent, *selecting(TOKENS, latent))]
    is_captured = encoding is KVEncoding.E4M3FN
    assert_all_found(truth(layers, device, replace(SHORT, graphs=is_captured)), replayed=is_captured)


@pytest.mark.parametrize("provider", [name for name in providers() if name != "torch"])
def test_every_provider_finds_every_needle(provider: str, device: torch.device) -> None:
    plan = replace(SHORT, provider=provider)
    assert truth([DENSE, WINDOW, *selecting(TOKENS), *selecting(BLOCKS)], device, plan).passed


@pytest.mark.nightly
@pytest.mark.parametrize("problem", [DENSE, LATENT], ids=["dense", "latents"])
def test_a_chunk_of_more_than_8192_tokens_loses_nothing(problem: Problem, device: torch.device) -> None:
    """2k to 10k tokens, on any machine: as few heads as possible, in eight bits, in replays."""
    few = replace(problem, num_q_heads=2, num_kv_heads=1, page_size=64)
    plan = TruthPlan(lengths=(2048, 6144, 10240), chunk=9240, decode_steps=2)
    report = truth([coded(few, KVEncoding.E4M3FNUZ, Scales.TOKEN)], device, plan)
    assert plan.most_tokens > 9000
    assert_all_found(report)


def wide(problem: Problem, plan: TruthPlan = SHORT) -> TruthPlan:
    """Returns the plan over K pages of 4.5 GiB: on a CPU untouched memory is never allocated."""
    form = problem.page_format
    page_bytes = max(form.side_elements) * form.page_size * form.encoding.dtype.itemsize
    return replace(plan, num_pages=(9 << 29) // page_bytes)


LARGE = Problem(8, 8, 128, torch.float32, 16, v_head_dim=128, scale=128**-0.5)


@pytest.fixture
def untouched_memory() -> Iterator[None]:
    """New memory is not filled, so that a large pool takes only the memory that is written to."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def offsets_wrap_at(page: int, *, page_size: int) -> Guards:
    """Stores and reads wrap alike at a page, so that a read returns the last store at either place."""

    def wrapped_ops(ops: StepOps) -> StepOps:
        def store_kv(
            k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool
        ) -> None:
            slots = torch.where(slot_of_token >= page_size, slot_of_token % (page * page_size), slot_of_token)
            ops.store_kv(k, v, slots, counts, pages, null_page=null_page)

        return replace(ops, store_kv=store_kv)

    return with_launches(partial(faulty, lambda args: args._replace(table=args.table % page)), wrapped_ops)


def reading(encoding: Encoding) -> Callable[[AttendArgs], AttendArgs]:
    """Returns a fault: pages are read in this encoding, whatever they were written in."""

    def in_another(args: AttendArgs) -> AttendArgs:
        pages = args.pages
        k, v = (side.view(torch.uint8).view(encoding.dtype) for side in (pages.k, pages.v))
        return args._replace(
            pages=LayerPages(k, v, replace(pages.format, encoding=encoding), pages.k_scale, pages.v_scale)
        )

    return in_another


@pytest.mark.usefixtures("untouched_memory")
def test_needles_lie_on_both_sides_of_what_32_bits_reach(device: torch.device) -> None:
    plan = wide(LARGE)
    boundaries = wrapping_pages([LARGE], plan.num_pages)
    assert boundaries == (1 << 15, 1 << 16)

    def build(layers: Sequence[Problem], options: RuntimeOptions) -> AttentionRuntime:
        return build_runtime(layers, options, device=device)

    test = NeedleCheck([LARGE], plan, build)
    assert test.run().passed
    for row in test._rows:
        pages = test.runtime.table.pages_of(row)
        for boundary in boundaries:
            assert pages.min() < boundary <= pages.max()
    all_pages = {int(page) for row in test._rows for page in test.runtime.table.pages_of(row)}
    assert any(page + boundaries[1] in all_pages for page in all_pages)


@pytest.mark.usefixtures("untouched_memory")
def test_offsets_of_32_bits_are_found(device: torch.device) -> None:
    plan = wide(LARGE)
    wraps_at = wrapping_pages([LARGE], plan.num_pages)[1]

    guards = offsets_wrap_at(wraps_at, page_size=16)
    report = truth([LARGE], device, replace(plan, graphs=False), guards)
    assert not report.passed
    assert all(miss.visible for miss in report.misses)


@pytest.mark.parametrize(
    ("written", "read"), [(KVEncoding.E4M3FNUZ, Encoding.E4M3FN), (KVEncoding.E4M3FN, Encoding.E4M3FNUZ)]
)
def test_a_wrong_encoding_is_found(written: KVEncoding, read: Encoding, device: torch.device) -> None:
    problem = coded(DENSE, written, Scales.LAYER)
    report = truth([problem], device, replace(SHORT, graphs=False), with_launches(partial(faulty, reading(read))))
    assert not report.passed


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("side", ["window_left", "window_right"])
def test_a_window_that_is_off_by_one_is_found(side: str, by: int, device: torch.device) -> None:
    problem = WINDOW if side == "window_left" else replace(WINDOW, window_left=UNLIMITED_WINDOW, window_right=9)

    def with_another_window(selection: Selection) -> Selection:
        other = replace(problem, **{side: getattr(problem, side) + by})
        kernels = {
            kind: LayerKernel(kernel.entry, replace(kernel.bound, problem=other))  # type: ignore[type-var]
            for kind, kernel in selection.kernels.items()
        }
        return replace(selection, kernels=kernels)

    plan = replace(SHORT, provider="torch")
    assert truth([problem], device, plan).passed
    report = truth([problem], device, plan, with_launches(with_another_window))
    assert not report.passed
    assert {miss.visible for miss in report.misses} == {by < 0}


class SelectsOnce(WrappedLayers):
    """The calls of a layer whose later steps reuse the selection of the first one."""

    _layers: LayerCalls
    has_selected = False

    def around(self, layers: LayerCalls) -> LayerCalls:
        self._layers = layers
        return self

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        if name == "select" and self.has_selected:
            return
        self.has_selected |= name == "select"
        getattr(self._layers, name)(layer, *given, **named)


def select_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault: later steps reuse the selection of the first one."""
    once, run = SelectsOnce(), NeedleLayer.run

    def stale(layer: NeedleLayer, layers: LayerCalls, number: int, num_tokens: int) -> Tensor:
        return run(layer, once.around(layers), number, num_tokens)

    monkeypatch.setattr(NeedleLayer, "run", stale)


def test_a_stale_selection_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    select_once(monkeypatch)
    plan = replace(SHORT, graphs=False)
    report = truth(selecting(TOKENS)[:1], device, plan, Guards().without("fresh_selection"))
    assert not report.passed
    assert report.misses[0].token >= SHORT.first_chunk or report.misses[0].length != SHORT.lengths[0]


def test_a_layer_that_attends_to_all_keys_instead_is_found(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that an indexer did not choose must not be seen."""

    def dense(layer: NeedleLayer, layers: LayerCalls, number: int, num_tokens: int) -> Tensor:
        q, k, v, out = (rows[:num_tokens] for rows in (layer._q, layer._k, layer._v, layer._out))
        layer._chooser.choose(layers, number, num_tokens)
        layers.store_and_attend(number, q, k, v, out)
        return out

    monkeypatch.setattr(NeedleLayer, "run", dense)
    report = truth(selecting(replace(TOKENS, top=4))[:1], device, replace(SHORT, lengths=(400,), graphs=False))
    assert not report.passed
    assert not any(miss.visible for miss in report.misses)


def test_what_cannot_be_reported_apart_is_refused(device: torch.device) -> None:
    with pytest.raises(BadProblem, match="rows of 8 elements do not tell 202 keys apart"):
        truth([replace(DENSE, head_dim=8, v_head_dim=8)], device)
    with pytest.raises(BadProblem, match="index rows of 32 elements"):
        truth([replace(DENSE, indexer=Indexer(4, 32, TOKENS))], device)
    with pytest.raises(BadProblem, match="selects only the forced units"):
        truth(selecting(replace(BLOCKS, top=2)), device)
    with pytest.raises(BadSetting, match="chunk is 0"):
        TruthPlan(chunk=0)
    with pytest.raises(BadSetting, match="lengths are"):
        TruthPlan(lengths=())
    assert isinstance(ALL_KEYS, AllKeys)


def test_short_rows_in_which_keys_lie_near_each_other_are_right(device: torch.device) -> None:
    """A third of such runs found a key wrong, whose value had a few hundredths of another one's."""
    short = replace(DENSE, head_dim=16, v_head_dim=16, scale=0.25)
    for seed in range(8):
        plan = TruthPlan(lengths=(16, 7), first_chunk=9, chunk=9, decode_steps=2, graphs=False, seed=seed)
        assert_all_found(truth([short], device, plan), replayed=False)
