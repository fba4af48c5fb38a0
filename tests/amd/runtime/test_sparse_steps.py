"""Layers that select keys: every kind of step equals attention over the keys that Indexing defines, also replayed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.prefixes import NO_PREFIXES, PrefixGroup, SharedPrefixes
from rocm_attn.capture.probe_requests import ProbeRequests
from rocm_attn.errors import BadBatch, BadProblem, BadTensor, DeviceFault, Unsupported, WrongState
from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit, Pooling
from rocm_attn.machine.target import known_target
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import ALL_KEYS, EarlierSelection, Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import select
from rocm_attn.step.head_weights import HeadWeights
from tests.amd.kernels.matrix_unit import use_matrix_unit
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.problems import indexer, latent_layer, layer, record_layer
from tests.amd.worlds.world import World, selecting

TOKENS = Indexing(0.25, top=5)
BLOCKS = Indexing(0.25, top=3, unit_keys=4, first=1, last=1)
PER_HEAD = Indexing(0.25, top=4, sets=2, unit_keys=2, rectified=False, last=1)
POOLS = Indexing(0.25, top=3, key_tokens=4, last_unit=LastUnit.ADDED)
MEANS = Indexing(0.25, top=2, unit_keys=4, pooling=Pooling.MEAN, last_unit=LastUnit.LEFT_OUT)
WIDE = Indexing(0.25, top=80)
KINDS = {"tokens": TOKENS, "blocks": BLOCKS, "per head": PER_HEAD, "pools": POOLS, "means": MEANS, "wide": WIDE}

every_record = pytest.mark.parametrize("scales", [Scales.GROUP, Scales.FOOTER], ids=lambda scales: scales.name)


def short(indexing: Indexing) -> list[Problem]:
    """A layer that selects, one that reuses its selection, and one that attends to all keys."""
    return [layer(indexer(indexing)), layer(EarlierSelection(indexing)), layer()]


def serve(world: World) -> None:
    """Serves prompts, mixed steps and decodes of requests that come at different times."""
    first, second = world.admit(), world.admit()
    world.step([first], [9])
    world.step([second, first], [14, 1])
    for _ in range(3):
        world.step([first, second], [1, 1])


@pytest.mark.fast(3)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_attend_to_what_is_chosen(kind: str, graphs: bool, device: torch.device) -> None:
    serve(selecting(short(KINDS[kind]), device, graphs=graphs, capture_tokens=(16,)))


@pytest.mark.fast(interpreted=0)
def test_every_provider_attends_to_what_is_chosen(provider: str, device: torch.device) -> None:
    """The case is cut to a size that an interpreter runs in seconds."""
    world = selecting(short(BLOCKS)[:2], device, provider, graphs=True, max_kv_len=16, max_tokens=12)
    (request,) = world.begun(9)
    world.step([request], [1])


def test_latents_are_attended_by_selections(device: torch.device) -> None:
    serve(selecting([latent_layer(indexer(TOKENS)), latent_layer(EarlierSelection(TOKENS))], device, graphs=True))


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("encoding", [KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ], ids=str)
@every_record
def test_records_are_stored_and_attended_by_selections(
    scales: Scales, provider: str, encoding: KVEncoding, device: torch.device
) -> None:
    """A prompt and a decode step, replayed: a layer that selects, one that reuses its choice, one over all keys, and a
    window."""
    layers = [
        record_layer(each, encoding=encoding, scales=scales)
        for each in (indexer(TOKENS), EarlierSelection(TOKENS), ALL_KEYS)
    ]
    layers.append(replace(layers[2], window_left=3, has_sinks=True))
    world = selecting(layers, device, provider, graphs=True, max_kv_len=16, max_tokens=12)
    (request,) = world.begun(9)
    world.step([request], [1])


@every_record
def test_requests_over_records_are_served_in_any_order(scales: Scales, device: torch.device) -> None:
    layers = [record_layer(each, scales=scales) for each in (indexer(TOKENS), EarlierSelection(TOKENS))]
    serve(selecting(layers, device, graphs=True))


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("more", [{"deterministic": True}, {"shared_prefixes": True}], ids=str)
def test_torch_serves_records_in_every_mode(more: dict[str, Any], device: torch.device) -> None:
    """The deterministic kernels of torch are those of CPUs."""
    if "deterministic" in more:
        device = torch.device("cpu")
    world = World.build([record_layer()], device, "torch", graphs=True, capture_sizes=(4,), **more)
    requests = world.begun(9, 5)
    shares = SharedPrefixes([PrefixGroup(1, 8), PrefixGroup(1, 0)]) if "shared_prefixes" in more else NO_PREFIXES
    world.step(requests, [1, 1], prefixes=shares)


@every_record
def test_fresh_graphs_over_records_are_checked_over_random_rows(scales: Scales, device: torch.device) -> None:
    """Random bytes would be records of NaN and of numbers of any size."""
    world = selecting([record_layer(indexer(TOKENS), scales=scales)], device)
    with ProbeRequests(world.runtime, vocabulary=9, seed=0) as requests:
        batch = requests.admit([9, 30], [1, 1])
        pages = [page for row in batch.rows.tolist() for page in world.runtime.table.pages_of(row, Space.FULL)]
        k, _ = world.runtime.pool.layer(0).read(torch.tensor(pages, device=device))
        assert k.isfinite().all()
        assert 0.9 < float(k.std()) < 1.1


def test_rope_of_records_turns_what_follows_v_and_nothing_else(device: torch.device) -> None:
    world = selecting([record_layer(indexer(TOKENS))], device)
    request, requested = world.admit(), world.rows[0]
    world.draw(4)
    step = world.runtime.step(world.batch([request], [4])).parts[0]
    q, k = requested.q[step.tokens], requested.k[step.tokens]
    for dim in (16, 8):
        work = QkvWork(RopeTable(torch.rand(64, dim, device=device), at_end=True))
        if dim == 8:
            step.layers.rope_and_store(0, q, k, k[..., :256], q, work)
            continue
        with pytest.raises(BadTensor, match="rope rotates 16 elements of rows that are stored as records, and must"):
            step.layers.rope_and_store(0, q, k, k[..., :256], q, work)
    with pytest.raises(BadTensor, match="rope rotates 0 elements of rows"):
        step.layers.rope_and_store(0, q, k, k[..., :256], q, QkvWork(None))
    world.runtime.end_step()


def test_what_no_record_can_hold_is_no_problem() -> None:
    good = record_layer()
    for wrong in (
        {"pool": PoolKind.SPLIT},
        {"kv_encoding": KVEncoding.E5M2},
        {"dtype": torch.float16},
        {"v_head_dim": 192},
        {"head_dim": 259},
    ):
        with pytest.raises(
            BadProblem, match=r"kv_scales is GROUP, and K and V are .* records are latent, in E4M3FN or"
        ):
            replace(good, **wrong)
    of_pages = record_layer(scales=Scales.FOOTER)
    for head_dim, v_head_dim in ((192, 128), (200, 200), (640, 640)):
        with pytest.raises(BadProblem, match="that is 64 more than a multiple of 64, at most 8 times, and no"):
            replace(of_pages, head_dim=head_dim, v_head_dim=v_head_dim)
    with pytest.raises(BadProblem, match="index keys have one head and no records"):
        replace(indexer(TOKENS), key_encoding=KVEncoding.E4M3FN, key_scales=Scales.GROUP)


def coded(problem: Problem, encoding: KVEncoding = KVEncoding.E4M3FN) -> Problem:
    """Returns the layer with K and V in codes, with a scale per token."""
    return replace(problem, kv_encoding=encoding, kv_scales=Scales.TOKEN)


EVERYTHING = {
    "pages of 4": pytest.param(layer(indexer(WIDE))),
    "pages of 1, sinks": pytest.param(replace(layer(indexer(WIDE), page_size=1), has_sinks=True)),
    "pages of 16, codes": pytest.param(coded(layer(indexer(WIDE), page_size=16))),
    "latents": pytest.param(latent_layer(indexer(WIDE))),
    "latents in codes": pytest.param(coded(latent_layer(indexer(WIDE), page_size=16))),
    **{
        f"{make.__name__} in {encoding.name}, pages of {page_size}": pytest.param(
            coded(make(indexer(WIDE), page_size=page_size), encoding), marks=pytest.mark.nightly
        )
        for make in (layer, latent_layer)
        for encoding in (KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ, KVEncoding.E5M2)
        for page_size in (1, 16, 64)
    },
}


@pytest.mark.fast(interpreted=0)
@pytest.mark.parametrize("problem", EVERYTHING.values(), ids=EVERYTHING)
def test_a_selection_of_all_keys_gives_the_bits_of_deterministic_mode(
    problem: Problem, provider: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, a chunk over it and a decode step."""
    use_matrix_unit(monkeypatch)
    world = selecting([problem], device, provider, deterministic=provider == "triton", max_kv_len=48, max_tokens=48)
    all_keys_by_both(world, [33], [5], [1])


_ALL = Indexer(4, 64, Indexing(0.125, top=4096))
_MODELS = Problem(16, 4, 128, torch.bfloat16, 64, v_head_dim=128, scale=128**-0.5, indexer=_ALL)
_LATENTS = replace(_MODELS, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, pool=PoolKind.LATENT)
OF_MODELS = {
    "heads of 128": _MODELS,
    "heads of 64": replace(_MODELS, num_q_heads=64, num_kv_heads=8, head_dim=64, v_head_dim=64, has_sinks=True),
    "heads of 256": replace(_MODELS, num_q_heads=8, num_kv_heads=2, head_dim=256, v_head_dim=256),
    "latents, 128 heads": replace(_LATENTS, num_q_heads=128),
    "latents, 12 heads": replace(_LATENTS, num_q_heads=12),
    "latents of 512": replace(_LATENTS, head_dim=512),
    **{
        f"{name} in codes by {scales.name}": replace(each, kv_encoding=KVEncoding.E4M3FN, kv_scales=scales)
        for name, each in (("heads", _MODELS), ("latents", _LATENTS))
        for scales in (Scales.LAYER, Scales.TOKEN)
    },
    "latents of DeepSeek-V3.2": _LATENTS,
}


@pytest.mark.gpu
@pytest.mark.parametrize("problem", OF_MODELS.values(), ids=OF_MODELS)
def test_it_does_on_a_gpu_by_the_tiles_of_models(problem: Problem, device: torch.device) -> None:
    """Contexts are longer than a segment, and sequences share steps."""
    sizes = {"num_pages": 100, "max_kv_len": 3072, "max_tokens": 3072}
    world = selecting([problem], device, "triton", deterministic=True, **sizes)
    all_keys_by_both(world, [2300, 500], [400, 77], [1, 1], [9, 1], [1, 1])


def all_keys_by_both(world: World, *steps: list[int]) -> None:
    """Checks steps with these new tokens: a layer that selects all keys gives what attention to all keys gives."""
    problem, device = world.problems[0], world.runtime.device
    world.runtime.head_weights.set(0, HeadWeights.random(problem, torch.Generator().manual_seed(0)).to(device))
    requests, requested = world.admit_all(len(steps[0])), world.rows[0]
    for q_len in steps:
        new = sum(q_len)
        world.draw(new)
        step = world.runtime.step(world.batch(requests, q_len)).parts[0]
        at, layers = step.tokens, step.layers
        layers.store(0, requested.k[at], requested.v[at])
        layers.store_index(0, requested.index_k[at])
        layers.select(0, requested.index_q[at], requested.weights[at])
        layers.attend_selected(0, requested.q[at], requested.out[at])
        to_all = torch.full_like(requested.out[at], float("nan"))
        layers.attend(0, requested.q[at], to_all)
        world.runtime.end_step()
        world.keep(requests, q_len)
        assert to_all[:new].isfinite().all()
        if world.runtime.options.deterministic:
            assert torch.equal(requested.out[:new], to_all[:new])
        assert_attention_close(requested.out[:new], to_all[:new].double(), problem.dtype)


def test_requests_that_share_pages_share_their_index_keys(device: torch.device) -> None:
    """A fork copies a page that is partly filled, including its index keys."""
    world = selecting(short(TOKENS), device)
    (first,) = world.begun(10)
    second = world.fork(first, 10)
    world.step([first, second], [1, 1])
    world.step([second], [3])


def test_a_step_that_stored_no_index_keys_has_not_stored(device: torch.device) -> None:
    world = selecting([layer(indexer(TOKENS))], device)
    request, requested = world.admit(), world.rows[0]
    world.draw(6)
    step = world.runtime.step(world.batch([request], [6])).parts[0]
    at = step.tokens
    step.layers.store(0, requested.k[at], requested.v[at])
    with pytest.raises(BadBatch, match="stored"):
        step.layers.select(0, requested.index_q[at])
    world.runtime.end_step()
    world.keep([request], [6])
    with pytest.raises(BadBatch, match="stored"):
        world.runner.run(world.batch([request], [1]))


def test_bad_calls_say_what_is_wrong(device: torch.device) -> None:
    world = selecting(short(TOKENS), device)
    request, requested = world.admit(), world.rows[0]
    world.draw(4)
    step = world.runtime.step(world.batch([request], [4])).parts[0]
    at, layers = step.tokens, step.layers
    with pytest.raises(BadTensor, match=r"index k has shape \[4, 3\]; this step and layer need \[4, 16\]"):
        layers.store_index(0, requested.index_k[at][:, :3])
    with pytest.raises(BadTensor, match=r"index k is torch\.float64"):
        layers.store_index(0, requested.index_k[at].double())
    with pytest.raises(BadTensor, match=r"layer 1 has no indexer; the layers with one are 0"):
        layers.store_index(1, requested.index_k[at])
    with pytest.raises(BadTensor, match="layer 2 has no indexer"):
        layers.select(2, requested.index_q[at])
    with pytest.raises(BadTensor, match="layer 7 does not exist"):
        layers.attend_selected(7, requested.q[at], requested.out[at])
    layers.store_index(0, requested.index_k[at])
    layers.store(0, requested.k[at], requested.v[at])
    with pytest.raises(BadTensor, match="weights of index heads"):
        layers.select(0, requested.index_q[at], requested.weights[at].half())
    with pytest.raises(WrongState, match=r"layer 0 attends to the selection of layer 0, and nothing was selected"):
        layers.attend_selected(0, requested.q[at], requested.out[at])
    layers.select(0, requested.index_q[at])
    with pytest.raises(BadTensor, match="layer 2 attends to all keys"):
        layers.attend_selected(2, requested.q[at], requested.out[at])
    with pytest.raises(BadTensor, match="out has shape"):
        layers.attend_selected(0, requested.q[at], requested.out[at][:, :1])
    world.runtime.end_step()
    with pytest.raises(WrongState):
        layers.select(0, requested.index_q[at])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: indexer(PER_HEAD, heads=3), "3 index heads select 2 sets"),
        (lambda: indexer(TOKENS, heads=0), "num_heads of an indexer is 0"),
        (lambda: Indexer(4, 16, TOKENS, KVEncoding.E4M3FN), "index keys in E4M3FN with scales NONE"),
        (lambda: Indexer(4, 16, TOKENS, KVEncoding.E4M3FN, Scales.HEAD), "index keys have one head"),
        (lambda: layer(indexer(POOLS), page_size=6), "index keys of 4 tokens in pages of 6"),
        (lambda: layer(indexer(replace(PER_HEAD, sets=4))), "4 sets of units for 2 KV heads"),
        (lambda: replace(layer(indexer(TOKENS)), window_left=3), "causal and without a window"),
        (lambda: replace(layer(indexer(TOKENS)), custom_mask=True), "causal and without a window or custom masks"),
        (lambda: layer(indexer(replace(BLOCKS, first=3))), "1 last units and selects 3"),
        (lambda: indexer(TOKENS, heads=2.5), "num_heads of an indexer is 2.5"),  # type: ignore[arg-type]
        (lambda: indexer(replace(TOKENS, top=2.5)), "top of an indexer is 2.5; it must be of type int"),  # type: ignore[arg-type]
        (lambda: indexer(replace(TOKENS, top=True)), "top of an indexer is True"),
        # A word of a config, which counted as the other member.
        (lambda: indexer(replace(BLOCKS, pooling="max")), "it must be of type Pooling"),  # type: ignore[arg-type]
        (lambda: indexer(replace(POOLS, last_unit="added")), "of type LastUnit"),  # type: ignore[arg-type]
        (lambda: indexer(replace(TOKENS, rectified="no")), "of type bool"),  # type: ignore[arg-type]
        (lambda: Indexer(4, 16, TOKENS, "as q"), "key_encoding of an indexer is a str"),  # type: ignore[arg-type]
        (lambda: Indexer(4, 16, TOKENS, key_scales=None), "key_scales of an indexer is a NoneType"),  # type: ignore[arg-type]
        (lambda: EarlierSelection(2048), "indexing is 2048; it must be an Indexing"),  # type: ignore[arg-type]
    ],
)
def test_indexers_that_cannot_be_are_refused(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(BadProblem, match=says):
        make()


def test_a_selection_that_no_earlier_layer_makes_is_refused(device: torch.device) -> None:
    with pytest.raises(BadProblem, match="no layer before it has an Indexer"):
        selecting([layer(EarlierSelection(TOKENS)), layer(indexer(TOKENS))], device)
    with pytest.raises(BadProblem, match="give both the same"):
        selecting([layer(indexer(TOKENS)), layer(EarlierSelection(BLOCKS))], device)


def test_a_layer_that_no_kernel_selects_for_is_refused_with_reasons() -> None:
    capped = replace(layer(indexer(TOKENS)), logits_soft_cap=20.0)
    with pytest.raises(Unsupported, match="no kernels of torch select keys") as refusal:
        select(capped, known_target("cpu"), "torch")
    assert refusal.value.reasons == ("torch: torch.selected: it has no logits soft cap (20)",)
    of_threes = layer(indexer(replace(BLOCKS, unit_keys=3)))
    with pytest.raises(Unsupported) as refusal:  # Triton's kernel reshapes a block of scores, and has no such shape
        select(of_threes, known_target("gfx942"), "triton")
    assert "triton: triton.indexer: units of 3 keys are no power of two" in refusal.value.reasons
    lines = select(layer(indexer(TOKENS)), known_target("gfx942"), "triton").lines()
    assert "over a selection: triton.selected, triton.indexer" in lines


def test_what_pads_read_of_index_pages_is_watched(device: torch.device) -> None:
    world = selecting([layer(indexer(TOKENS))], device)
    world.begun(5)
    world.runtime.check_device()
    world.runtime.pool.index(0).k[0, 1] = 1.0
    with pytest.raises(Exception, match="index page 0 of layer 0 must stay zero"):
        world.runtime.check_device()


def test_a_caller_may_choose_and_is_heard_of_when_it_chooses_wrongly(device: torch.device) -> None:
    """Places outside of a sequence give no key, harm nothing, and are reported with their step."""
    world = selecting([layer(indexer(TOKENS))], device)
    request, requested = world.admit(), world.rows[0]
    world.run([request], [6])

    def decode(chosen: list[int]) -> torch.Tensor:
        world.draw(1)
        step = world.runtime.step(world.batch([request], [1])).parts[0]
        at = step.tokens
        units = torch.full((len(requested.q[at][: len(step.token_ids)]), 1, 5), -1, dtype=torch.int32, device=device)
        units[0, 0, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        assert len(units) > 1
        counts = torch.ones(units.shape[:2], dtype=torch.int32, device=device)  # pads may choose anything
        counts[0] = len(chosen)
        step.layers.store(0, requested.k[at], requested.v[at])
        step.layers.store_index(0, requested.index_k[at])
        with pytest.raises(BadTensor, match=r"units is torch\.int64"):
            step.layers.give_selection(0, units.long(), counts)
        step.layers.give_selection(0, units, counts)
        step.layers.attend_selected(0, requested.q[at], requested.out[at])
        world.runtime.end_step()
        world.keep([request], [1])
        return requested.out[0].clone()

    right = decode([1, 4, 6])
    dense = layer()
    seen = torch.zeros(1, 7, dtype=torch.bool, device=device)
    seen[0, [1, 4, 6]] = True
    assert_attention_close(
        right[None], attend_sequence(requested.q[:1], request.k[0], request.v[0], dense, visible=seen)[0], dense.dtype
    )
    world.runtime.check_device()
    wrong = decode([1, 4, 900])
    assert wrong.isfinite().all()
    with pytest.raises(DeviceFault, match="the selected units of a token are not in ascending order"):
        world.runtime.check_device()
    decode([4, 1])
    with pytest.raises(DeviceFault, match="in ascending order"):
        world.runtime.check_device()
