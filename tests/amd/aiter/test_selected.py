"""unified_attention_sparse_mla attends to selections of latent layers, in every kind of step; Triton's come first."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadTensor, Unsupported
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.machine.target import known_target
from rocm_attn.problem import ALL_KEYS, EarlierSelection, Indexer, KVEncoding, Problem, Scales
from rocm_attn.providers.aiter import library
from rocm_attn.providers.contract import SMALLEST_POOL, PoolSize
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection.kernels import choose_kernels
from rocm_attn.selection.probe import wrong_kernels
from tests.amd.aiter.checks import ContractBroken
from tests.amd.aiter.selected_steps import CASES, ROW, attended, in_wide_rows, with_leftovers
from tests.amd.aiter.serving import CPU, GFX942, latent_problem, plain_problem, with_installed_aiter
from tests.amd.aiter.stand_in import Body, StandIn
from tests.amd.aiter.test_probe import was_not_built
from tests.amd.kernels.sparse_cases import SelectedCase
from tests.amd.worlds.world import World, selecting

TOKENS = Indexing(0.25, top=20)
BLOCKS = Indexing(0.25, top=3, unit_keys=4)
NAME = "unified_attention_sparse_mla"
TRITONS = {"triton.selected": "it is off", "triton.selected_segments": "it is off"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_token_sees_its_selection(case: SelectedCase, aiter: StandIn) -> None:
    attended(case, GFX942)
    assert aiter.calls == [NAME]


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_may_lie_apart(page_size: int, aiter: StandIn) -> None:
    attended(CASES[f"page{page_size}"], GFX942, in_wide_rows)


def test_entries_past_a_count_give_no_key(aiter: StandIn) -> None:
    attended(CASES["page16"], GFX942, with_leftovers)


def sparse_layer(num_heads: int = 16, page_size: int = 1, indexing: Indexing = TOKENS) -> Problem:
    return replace(latent_problem(num_heads), page_size=page_size, indexer=Indexer(4, 16, indexing))


def over_selections(problem: Problem) -> Selection:
    """Selects torch's kernels, but AITER's attention over a selection."""
    chosen = select(problem, known_target("cpu"), "torch")
    assert chosen.sparse is not None
    bound = ROW.bind(problem, GFX942, SMALLEST_POOL)
    sparse = replace(chosen.sparse, entry=ROW, selected=bound, gives_lse=False)
    dense = select(replace(problem, indexer=ALL_KEYS), known_target("cpu"), "torch").kernels
    return replace(chosen, kernels={kind: sparse.beside(kernel) for kind, kernel in dense.items()}, sparse=sparse)


def world(problem: Problem, *, graphs: bool = False) -> World:
    """Returns a world of a layer that selects and one that attends to the same selection."""
    problems = [problem, replace(problem, indexer=EarlierSelection(TOKENS))]
    return selecting(
        problems, CPU, selections=[over_selections(each) for each in problems], graphs=graphs, num_pages=140
    )


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("num_heads", "page_size", "graphs"),
    [(16, 1, False), (16, 16, True), (8, 1, True), (24, 16, False)],
)
def test_steps_of_a_runtime_attend_to_what_is_chosen(
    num_heads: int, page_size: int, graphs: bool, aiter: StandIn
) -> None:
    """Prompts, mixed steps and decodes, with padded sequences, whose queries are NaN; also replayed."""
    serving = world(sparse_layer(num_heads, page_size), graphs=graphs)
    first, second = serving.admit(), serving.admit()
    serving.step([first], [23])
    serving.step([second, first], [14, 1])
    for _ in range(3):
        serving.step([first, second], [1, 1])
    assert set(aiter.calls) == {NAME}


def test_an_lse_that_it_does_not_return_is_refused(aiter: StandIn) -> None:
    serving = world(sparse_layer())
    request, rows = serving.admit(), serving.rows[0]
    serving.draw(4)
    step = serving.runtime.step(serving.batch([request], [4])).parts[0]
    at, layers = step.tokens, step.layers
    layers.store(0, rows.k[at], rows.v[at])
    layers.store_index(0, rows.index_k[at])
    layers.select(0, rows.index_q[at], rows.weights[at])
    with pytest.raises(BadTensor, match=f"aiter.{NAME} returns no lse; build the runtime"):
        layers.attend_selected(0, rows.q[at], rows.out[at], rows.lse[at])
    serving.runtime.end_step()


Change = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda call: {"topk_indices": call["topk_indices"] + 1}, "not close"),
        (lambda call: {"topk_indices": torch.where(call["topk_indices"] < 0, 0, call["topk_indices"])}, "not close"),
        (lambda call: {"softmax_scale": 2 * call["softmax_scale"]}, "not close"),
        (lambda call: {"cu_seqlens_q": call["cu_seqlens_q"] - call["cu_seqlens_q"].sign()}, "not close"),
        (lambda call: {"topk_indices": call["topk_indices"].long()}, "topk_indices is torch.int64"),
        (lambda call: {"q": call["q"][:, :8], "out": call["out"][:, :8]}, "the grid has 0 blocks"),
    ],
    ids=["next places", "no -1", "scale", "a token less", "int64", "8 heads"],
)
def test_a_wrong_argument_is_noticed(change: Change, what: str, aiter: StandIn) -> None:
    """Each change is an error that the binding could make."""
    aiter.change(NAME, change)
    with pytest.raises((AssertionError, ContractBroken), match=what):
        attended(CASES["page16"], GFX942)


@pytest.mark.fast(2)
@pytest.mark.parametrize("selects", [True, False], ids=["selects", "reuses"])
@pytest.mark.parametrize(
    ("layer", "function", "instead"),
    [
        (plain_problem(), "paged_attention_ragged", "aiter.unified_attention"),
        (latent_problem(), "mla_decode_fwd", "aiter.mla_decode_fwd"),
    ],
    ids=["split", "latent"],
)
def test_layers_with_an_indexer_are_probed_in_their_steps_over_all_keys(
    layer: Problem, function: str, instead: str, selects: bool, aiter: StandIn
) -> None:
    right = aiter.bodies[function]
    wrong = was_not_built(right)
    # Only the kernels of mla_decode_fwd with a schedule are missing.
    aiter.bodies[function] = lambda call: (right if call.get("num_kv_splits_indptr") is not None else wrong)(call)
    layer = replace(layer, indexer=Indexer(4, 16, TOKENS) if selects else EarlierSelection(TOKENS))
    (chosen,) = choose_kernels([layer], with_installed_aiter(GFX942), "auto", PoolSize(100, 64, 4), device=CPU)
    assert chosen.kernels[StepKind.DECODE].entry.name == instead
    assert any(each.reason.startswith("switched off by its probe: it raised") for each in chosen.refusals)


def forgets_heads(right: Body) -> Body:
    """Leaves the last head as it is."""

    def wrong(call: Mapping[str, Any]) -> Any:
        before = call["out"][:, -1].clone()
        right(call)
        call["out"][:, -1] = before

    return wrong


def ignores_where_there_is_nothing(right: Body) -> Body:
    """Takes the first place of the pool for -1."""
    return lambda call: right({**call, "topk_indices": call["topk_indices"].clamp(min=0)})


def reads_places_as_keys(right: Body) -> Body:
    """Counts places from the next one."""
    return lambda call: right({**call, "topk_indices": (call["topk_indices"] + 1) * (call["topk_indices"] >= 0)})


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "damage",
    [forgets_heads, ignores_where_there_is_nothing, reads_places_as_keys, was_not_built],
    ids=lambda f: f.__name__,
)
def test_a_wrong_kernel_is_switched_off(damage: Callable[[Body], Body], page_size: int, aiter: StandIn) -> None:
    aiter.bodies[NAME] = damage(aiter.bodies[NAME])
    layer = sparse_layer(page_size=page_size)
    assert wrong_kernels([over_selections(layer)], CPU)[ROW.name].startswith("switched off by its probe: ")


@pytest.mark.parametrize(("num_heads", "page_size"), [(16, 1), (24, 64)])
def test_a_right_kernel_is_probed_once(num_heads: int, page_size: int, aiter: StandIn) -> None:
    chosen = over_selections(sparse_layer(num_heads, page_size))
    assert wrong_kernels([chosen, chosen], CPU) == {}
    assert aiter.calls == [NAME]


def test_auto_prefers_tritons_and_takes_aiters_where_those_are_off() -> None:
    layer = sparse_layer(page_size=64)
    chosen = select(layer, GFX942, "auto").sparse
    assert chosen is not None
    assert chosen.entries == ("triton.selected", "triton.indexer")
    chosen = select(layer, GFX942, "auto", unavailable=TRITONS).sparse
    assert chosen is not None
    assert chosen.entries == (ROW.name, "triton.indexer")


def test_aiter_alone_serves_a_layer_with_tritons_indexer() -> None:
    chosen = select(sparse_layer(), GFX942, "aiter")
    assert chosen.sparse is not None
    assert chosen.sparse.entries == (ROW.name, "triton.indexer")


def test_a_release_without_the_function_is_refused_with_its_complaint() -> None:
    missing = {ROW.name: library.unavailable()[ROW.name]}
    with pytest.raises(Unsupported) as refusal:
        select(sparse_layer(), GFX942, "aiter", unavailable=missing)
    (reason,) = refusal.value.reasons
    assert reason.startswith(f"aiter: {ROW.name}: AITER is not installed")


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (sparse_layer(indexing=BLOCKS), "a unit has 4 tokens, and it takes single ones"),
        (sparse_layer(page_size=128), "page_size 128 is not 1 or 16 or 32 or 64"),
        (replace(sparse_layer(), wants_lse=True), "it returns no log-sum-exp"),
        (replace(sparse_layer(), has_sinks=True), "it has no attention sinks"),
        (
            replace(sparse_layer(), kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.LAYER),
            "it reads K and V as q, not",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(layer: Problem, reason: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        select(layer, GFX942, "auto", unavailable={**TRITONS})
    assert any(each.startswith(f"aiter: {ROW.name}: {reason}") for each in refusal.value.reasons)


def test_a_pool_of_more_places_than_int32_counts_is_refused() -> None:
    pages = 2**27
    ROW.bind(sparse_layer(), GFX942, PoolSize(pages, 64, 4))
    with pytest.raises(LookupError, match=r"it counts 2147483664 places in 134217729 pages"):
        ROW.bind(sparse_layer(), GFX942, PoolSize(pages + 1, 64, 4))
