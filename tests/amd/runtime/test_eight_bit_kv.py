"""Steps over eight-bit K and V, eager and graphed, of every encoding and kind of scale, against the reference."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import BadProblem, BadTensor, WrongState
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.problem import KVEncoding, PoolKind, Scales
from rocm_attn.step.kv_scales import KVScales
from tests.amd.worlds.problems import deterministic_providers, providers, small_problem
from tests.amd.worlds.world import World, page_zero_is_zero

ENCODINGS = [KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ, KVEncoding.E5M2]
EVERY_SCALES = [Scales.LAYER, Scales.HEAD, Scales.TOKEN]
each_scales = pytest.mark.parametrize("scales", EVERY_SCALES, ids=lambda scales: scales.name)


def given(scales: Scales) -> KVScales:
    """Scales of the kind, all different."""
    return (
        KVScales(torch.tensor([0.011, 0.026]), torch.tensor([0.019, 0.008]))
        if scales is Scales.HEAD
        else KVScales(0.013, torch.tensor([0.02]))
    )


def serve(serving: World) -> None:
    """Requests that begin, go on in chunks, decode, and leave, with pads."""
    if serving.problems[0].kv_scales is not Scales.TOKEN:
        serving.runtime.set_kv_scales(0, given(serving.problems[0].kv_scales))
    requests = serving.begun(9, 1, 4)
    serving.step(requests, [3, 1, 7])
    for pad_to in (None, 8):
        serving.step(requests, [1, 1, 1], pad_to)
    serving.free(requests.pop(1))
    serving.step(requests, [1, 1])
    serving.runtime.check_device()


@pytest.mark.fast(interpreted=1)
@each_scales
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_steps_read_what_steps_have_quantised(
    graphs: bool, provider: str, scales: Scales, encoding: KVEncoding, device: torch.device
) -> None:
    problem = small_problem(kv_encoding=encoding, kv_scales=scales, has_sinks=False)
    serving = World.one_layer(device, graphs=graphs, provider=provider, problem=problem)
    serve(serving)
    assert (serving.runner.counters.replays > 0) == graphs


@pytest.mark.fast(1, interpreted=0)
@each_scales
@pytest.mark.parametrize("provider", deterministic_providers())
def test_deterministic_steps_read_eight_bits_too(provider: str, scales: Scales, device: torch.device) -> None:
    problem = small_problem(kv_encoding=KVEncoding.E4M3FN, kv_scales=scales)
    serving = World.one_layer(device, graphs=False, provider=provider, problem=problem, deterministic=True)
    serve(serving)


def test_what_is_no_number_is_stored_as_zero_and_reported_whatever_the_encoding(
    provider: str, device: torch.device
) -> None:
    """Page 0 stays zero, even in an encoding in which negative 0 is NaN."""
    for encoding in ENCODINGS:
        problem = small_problem(kv_encoding=encoding, kv_scales=Scales.TOKEN)
        world = World.build([problem], device, provider)
        request = world.admit()
        step = world.runtime.step(world.batch([request], [2])).parts[0]
        q, k, v = world.qkv(problem, step)
        k[0, 0, 3], v[1, 1] = float("inf"), -1e-30
        step.layers.store_and_attend(0, q, k, v, torch.empty_like(q))
        world.runtime.end_step()
        page = world.runtime.table.pages_of(request.row)[0]
        stored = world.runtime.pool.layer(0).read(torch.tensor([int(page)], device=world.runtime.device))
        assert all(bool(side[0, :2].isfinite().all()) for side in stored)
        assert float(stored[0][0, 0, 0, 3]) == 0.0
        assert page_zero_is_zero(world)
        with pytest.raises(RuntimeError, match="infinite or NaN"):
            world.runtime.check_device()


@pytest.mark.fast(interpreted=0)
def test_graphs_use_scales_that_were_given_after_they_were_made(provider: str, device: torch.device) -> None:
    problem = small_problem(kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.HEAD)
    serving = World.one_layer(device, graphs=True, provider=provider, problem=problem)
    requests = serving.begun(3, 1)
    serving.step(requests, [1, 1])
    captured = serving.runner.counters.captures
    with pytest.raises(WrongState, match="cannot change while requests are admitted"):
        serving.runtime.set_kv_scales(0, given(Scales.HEAD))
    kept = serving.runtime.table.kept
    kept.keep(requests[0].row, 0, 1)
    serving.free(*requests)
    with pytest.raises(WrongState, match="cannot change while requests are admitted or pages are kept"):
        serving.runtime.set_kv_scales(0, given(Scales.HEAD))
    kept.drop_all()
    serving.runtime.set_kv_scales(0, given(Scales.HEAD))
    requests = serving.begun(3, 1)
    serving.step(requests, [1, 1])
    assert serving.runner.counters.captures == captured


def test_scales_that_no_code_can_be_divided_by_are_refused_and_change_nothing(device: torch.device) -> None:
    problem = small_problem(kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.HEAD)
    runtime = World.one_layer(device, graphs=False, provider=providers()[0], problem=problem).runtime
    refused: list[tuple[KVScales, str]] = [
        (KVScales(torch.tensor([1.0, 0.0]), torch.ones(2)), r"k of layer 0 are \[1.0, 0.0\]; each must be a positive"),
        (KVScales(torch.ones(2), torch.tensor([1.0, float("nan")])), "v of layer 0 are"),
        (KVScales(torch.ones(2, device="meta"), torch.ones(2)), "k of layer 0 are on the meta device"),
        (KVScales(torch.ones(3), torch.ones(2)), r"\[3\]; they must be floating point, 2 of them"),
        (KVScales(torch.ones(2, dtype=torch.int32), torch.ones(2)), "torch.int32"),
        (KVScales(torch.ones(2), torch.ones(2), KVEncoding.E5M2), "computed for float8_e5m2"),
        (KVScales(torch.ones(2), torch.ones(2), "E4M3FN"), "made_for is a str; it must be of type KVEncoding"),  # type: ignore[arg-type]
        (KVScales("1", torch.ones(2)), "k of layer 0 are '1'; give a number, or a floating-point tensor"),  # type: ignore[arg-type]
        (KVScales(torch.ones(2), None), "v of layer 0 are None; give a number, or"),  # type: ignore[arg-type]
        (KVScales(10**400, torch.ones(2)), "k of layer 0 are 1000"),
    ]
    for scales, sentence in refused:
        with pytest.raises(BadTensor, match=sentence):
            runtime.set_kv_scales(0, scales)
    scale = runtime.pool.layer(0).k_scale
    assert scale is not None
    assert scale.tolist() == [1.0, 1.0]
    with pytest.raises(BadTensor, match="layer 1 does not exist"):
        runtime.set_kv_scales(1, KVScales(1.0, 1.0))
    latent = replace(problem, num_kv_heads=1, v_head_dim=8, pool=PoolKind.LATENT, kv_scales=Scales.LAYER)
    runtime = World.one_layer(device, graphs=False, provider="torch", problem=latent).runtime
    with pytest.raises(BadTensor, match="its V is a part of its K, so give the same for both"):
        runtime.set_kv_scales(0, KVScales(2.0**-5, 2.0**-11))
    runtime.set_kv_scales(0, KVScales(2.0**-5, 2.0**-5))
    runtime.set_kv_scales(0, KVScales(1, 1))
    of_tokens = replace(problem, kv_scales=Scales.TOKEN)
    runtime = World.one_layer(device, graphs=False, provider=providers()[0], problem=of_tokens).runtime
    with pytest.raises(BadTensor, match="a scale for each token and KV head; scales can be set only by"):
        runtime.set_kv_scales(0, KVScales(1.0, 1.0))


def test_scales_of_a_checkpoint_are_doubled_where_its_codes_are_worth_half(device: torch.device) -> None:
    problem = small_problem(kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.LAYER)
    runtime = World.one_layer(device, graphs=False, provider=providers()[0], problem=problem).runtime
    runtime.set_kv_scales(0, KVScales(0.25, torch.tensor(0.5), made_for=KVEncoding.E4M3FN))
    pages = runtime.pool.layer(0)
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    assert (pages.k_scale.tolist(), pages.v_scale.tolist()) == ([0.5], [1.0])


def test_eight_bits_have_a_scale_and_others_have_none() -> None:
    for encoding, scales in ((KVEncoding.E4M3FN, Scales.NONE), (KVEncoding.LIKE_Q, Scales.TOKEN)):
        with pytest.raises(BadProblem, match="eight-bit encodings need LAYER"):
            small_problem(kv_encoding=encoding, kv_scales=scales)
    form = small_problem(kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.TOKEN).page_format
    assert (form.encoding, form.page_bytes) == (Encoding.E4M3FN, 4 * 2 * (2 * 16 + 2 * 4))
