"""8-bit pages: the encodings and scales that AITER's kernels read on each arch, and the handling of queries."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import known_target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem, Scales
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection.probe_runs import FailedProbe, edge_run, random_run
from rocm_attn.watch.few_sequences import LayerOfStep
from tests.amd.aiter.checks import ContractBroken
from tests.amd.aiter.serving import (
    CPU,
    GFX942,
    in_eight_bits,
    latent_problem,
    partly_torch,
    plain_problem,
    vectorised_problem,
    world,
)
from tests.amd.aiter.signatures import E4048607, V0_1_15
from tests.amd.aiter.signatures import Release as Recorded
from tests.amd.aiter.stand_in import StandIn, install

BF16 = torch.bfloat16
LINEAR = in_eight_bits(plain_problem(16, dims=(128, 128), dtype=BF16))
VECTORISED = in_eight_bits(vectorised_problem(16, dtype=BF16))
TOKENS = replace(VECTORISED, kv_scales=Scales.TOKEN)
LARGE_PAGES = in_eight_bits(vectorised_problem(1024, heads=(8, 2), dtype=BF16))
LATENT = in_eight_bits(latent_problem(16))


def kernels(problem: Problem, arch: str = "gfx942", provider: str = "auto") -> Mapping[StepKind, str]:
    chosen = select(problem, known_target(arch), provider).kernels
    return {kind: kernel.entry.name for kind, kernel in chosen.items()}


def test_linear_pages_in_eight_bits_are_served_by_aiter_in_every_kind_of_step() -> None:
    served = kernels(LINEAR)
    for kind in (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED):
        assert served[kind] == "aiter.unified_attention"
    assert served[StepKind.PREFILL] == "aiter.flash_attn_varlen_func"
    of_one_token = kernels(replace(LINEAR, page_size=1))
    assert of_one_token[StepKind.EXTEND] == "aiter.mha_batch_prefill_func[fp8]"
    assert of_one_token[StepKind.DECODE] == "triton.decode"


def test_vectorised_pages_in_eight_bits_are_served_by_aiter_alone() -> None:
    assert kernels(VECTORISED, provider="aiter")[StepKind.DECODE] == "aiter.pa_decode_gluon"
    large = kernels(LARGE_PAGES, provider="aiter")
    assert large[StepKind.EXTEND] == "aiter.mha_batch_prefill_func[vectorised, fp8]"
    assert large[StepKind.DECODE] == "aiter.pa_decode_gluon"


def refusal(problem: Problem, arch: str, name: str) -> tuple[str, ...]:
    (row,) = (row for row in ENTRIES if row.name == f"aiter.{name}" and row.kind is StepKind.DECODE)
    return row.refusals(problem, known_target(arch))


NAMES = [
    ("unified_attention", LINEAR),
    ("pa_decode_gluon", VECTORISED),
    ("mla_decode_fwd+get_mla_metadata_v1[fp8]", LATENT),
]


@pytest.mark.parametrize(("name", "problem"), NAMES, ids=[name for name, _ in NAMES])
def test_each_arch_reads_its_own_eight_bits(name: str, problem: Problem) -> None:
    """A code of one encoding means half or twice its value in the other, and only a refusal shows the mistake."""
    own = {"gfx942": KVEncoding.E4M3FNUZ, "gfx950": KVEncoding.E4M3FN}
    for arch, encoding in own.items():
        (other,) = set(own.values()) - {encoding}
        assert refusal(replace(problem, kv_encoding=encoding), arch, name) == ()
        (reason,) = refusal(replace(problem, kv_encoding=other), arch, name)
        assert reason.startswith(f"it reads eight bits as {encoding.value} on {arch}, ")
        assert other.value in reason
        (reason,) = refusal(replace(problem, kv_encoding=KVEncoding.E5M2), arch, name)
        assert reason.startswith("it reads K and V ")
        assert reason.endswith(", not float8_e5m2")


@pytest.mark.parametrize("scales", [Scales.HEAD, Scales.TOKEN])
def test_scales_that_a_function_does_not_take_are_refused(scales: Scales) -> None:
    (reason,) = refusal(replace(LINEAR, kv_scales=scales), "gfx942", "unified_attention")
    assert reason == f"it reads no scales or a scale for each layer, not {scales.value}"


@pytest.mark.parametrize("heads", [17, 32, 64, 128])
def test_more_than_16_heads_over_latent_pages_are_refused_on_gfx950_before_a_release(heads: int) -> None:
    (row,) = (row for row in ENTRIES if row.name == "aiter.mla_decode_fwd+get_mla_metadata_v1[fp8]")
    problem, here = in_eight_bits(latent_problem(heads), arch="gfx950"), known_target("gfx950")
    before, since = (
        replace(here, releases=replace(here.releases, aiter=Release.of(text))) for text in ("0.1.17", "0.1.18")
    )
    (reason,) = row.refusals(problem, before)
    assert reason.startswith("releases differ in how they group more than 16 heads on gfx950 (AITER before 0.1.18;")
    assert row.refusals(problem, since) == row.refusals(problem, here) == ()
    assert row.refusals(replace(problem, num_q_heads=16), before) == ()


@pytest.mark.fast(2)
@pytest.mark.parametrize("heads", [17, 24, 48, 64, 128])
def test_latent_pages_in_eight_bits_are_decoded_on_gfx950(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of 32, 64 and 128 heads run unchanged, 48 in groups of 16, and the others are padded to one of these."""
    aiter = install(E4048607, monkeypatch, arch="gfx950")
    problem = in_eight_bits(latent_problem(heads), arch="gfx950")
    serving = world(problem, max_kv_len=80, selections=[partly_torch(problem, known_target("gfx950"))])
    serving.served([40, 2, 13], [1, 1, 1])
    assert aiter.calls == ["get_mla_metadata_v1", "mla_decode_fwd"]


# A call with one thing wrong: the problem, the function, the parameter, and the change.
Change = Callable[[Tensor], Any]
WRONG: Mapping[str, tuple[Problem, str, str, Change]] = {
    "codes of the other arch": (LINEAR, "unified_attention", "k", lambda k: k.view(torch.float8_e4m3fn)),
    "no scale of V": (LINEAR, "unified_attention", "v_descale", lambda scale: None),
    "a factor of two heads": (VECTORISED, "pa_decode_gluon", "key_scale", lambda scale: scale.expand(2)),
    "scales of pages in another order": (TOKENS, "pa_decode_gluon", "key_scale", lambda scale: scale.mT.contiguous()),
    "scales of V with strides of their own": (
        TOKENS,
        "pa_decode_gluon",
        "value_scale",
        lambda scale: scale[:1].expand_as(scale),
    ),
    "a factor in bfloat16": (VECTORISED, "pa_decode_gluon", "value_scale", lambda scale: scale.bfloat16()),
    "no factor of q": (LATENT, "mla_decode_fwd", "q_scale", lambda scale: None),
    "q as it is": (LATENT, "mla_decode_fwd", "q", lambda q: q.to(BF16)),
    "a schedule for another dtype": (LATENT, "get_mla_metadata_v1", "dtype_kv", lambda dtype: BF16),
}


@pytest.mark.parametrize(("problem", "function", "name", "change"), WRONG.values(), ids=WRONG)
def test_the_stand_in_refuses_a_call_with_one_thing_wrong(
    problem: Problem, function: str, name: str, change: Change, aiter: StandIn
) -> None:
    serving = world(problem, max_kv_len=80 if problem.page_size == 1 else 640, selections=[partly_torch(problem)])
    requests = serving.begun(5, 2)
    aiter.change(function, lambda call: {name: change(call[name])})
    with pytest.raises(ContractBroken):
        serving.step(requests, [1, 1])


@pytest.mark.fast
@pytest.mark.parametrize("scales", [Scales.LAYER, Scales.HEAD])
@pytest.mark.parametrize("version", [E4048607, V0_1_15], ids=lambda version: version.version)
def test_every_number_of_heads_is_served_over_latent_pages(
    scales: Scales, version: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = install(version, monkeypatch)
    problem = in_eight_bits(latent_problem(24), scales)
    serving = world(problem, max_kv_len=80, selections=[partly_torch(problem)])
    requests = serving.begun(40, 2, 13)
    for pad_to in (3, 4, 9):
        serving.step(requests, [1, 1, 1], pad_to=pad_to)
    assert release.calls == ["get_mla_metadata_v1", "mla_decode_fwd"] * 3


def test_queries_saturate_and_stay_in_their_own_rows(aiter: StandIn) -> None:
    """A request with infinite and with NaN queries does not affect its neighbour."""
    serving = world(LATENT, max_kv_len=80, selections=[partly_torch(LATENT)])
    requests = serving.begun(9, 4)
    seen = aiter.noted("mla_decode_fwd")
    step = serving.runtime.step(serving.batch(requests, [1, 1])).parts[0]
    serving._lse_rows(0, step, torch.empty(2, 16, 576))
    q, k, v = serving.qkv(LATENT, step)
    strange = torch.tensor([float("inf"), float("-inf"), 1e4, -1e4, float("nan")], dtype=BF16)
    q[0, 0, :5] = strange
    serving.remember(0, requests, [1, 1], k, v)
    out = torch.full_like(q[..., :512], float("nan"))
    step.layers.store_and_attend(0, q, k, v, out)
    serving.runtime.end_step()
    (call,) = seen
    codes = call["q"]
    assert codes.dtype == torch.float8_e4m3fnuz
    assert codes[0, 0, :4].float().tolist() == [240.0, -240.0, 240.0, -240.0]
    assert bool(codes[0, 0, 4].float().isnan())
    serving.check(0, requests[1:], [1], q[1:], out[1:], None)
    assert bool(out[0, 0].isnan().all())
    assert bool(out[0, 1:].isfinite().all())


def test_a_check_beside_serving_knows_that_queries_are_rounded(aiter: StandIn) -> None:
    serving = world(LATENT, max_kv_len=80, selections=[partly_torch(LATENT)])
    requests = serving.begun(40, 14)
    step = serving.runtime.step(serving.batch(requests, [1, 1])).parts[0]
    q, k, v = serving.qkv(LATENT, step)
    q *= 3  # logits of a standard deviation of four: rounding errors grow as much
    out = torch.empty_like(q[..., :512])
    step.layers.store_and_attend(0, q, k, v, out)
    pages = [torch.from_numpy(serving.runtime.table.pages_of(each.row)).long() for each in requests]

    def wrong(given: Tensor, *, eight_bit_products: bool) -> list[int]:
        of_step = LayerOfStep(
            LATENT,
            serving.runtime.pool.layer(0),
            serving.runtime.head_weights.of(0),
            [1, 1],
            [41, 15],
            pages.__getitem__,
            UNLIMITED_WINDOW,
            eight_bit_products,
        )
        return of_step.wrong_seqs(q, given, [0, 1])

    assert wrong(out, eight_bit_products=True) == []
    assert wrong(out, eight_bit_products=False) == [0, 1]
    assert wrong(out.flip(0), eight_bit_products=True) == [0, 1]
    serving.runtime.end_step()


PROBED = {
    "unified_attention": replace(LINEAR, num_q_heads=1, num_kv_heads=1),
    "flash_attn_varlen_func": replace(LINEAR, num_q_heads=1, num_kv_heads=1, kv_scales=Scales.HEAD),
    "pa_decode_gluon": in_eight_bits(vectorised_problem(heads=(4, 1), dtype=BF16)),
    "mha_batch_prefill_func": in_eight_bits(plain_problem(1, heads=(1, 1), dims=(128, 128), dtype=BF16)),
    "mla_decode_fwd": LATENT,
}
Run = Callable[[Selection, torch.device], FailedProbe | None]
# The parameters that a wrong kernel ignores.
FACTORS = {
    "unified_attention": ("v_descale",),
    "pa_decode_gluon": ("key_scale",),
    "mha_batch_prefill_func": ("k_descale",),
    "mla_decode_fwd": ("kv_scale",),
}


@pytest.mark.fast
@pytest.mark.parametrize("scales", [Scales.HEAD, Scales.TOKEN])
@pytest.mark.parametrize("window", [UNLIMITED_WINDOW, 20])
def test_scales_of_heads_and_tokens_are_decoded_over_vectorised_pages(
    scales: Scales, window: int, aiter: StandIn
) -> None:
    problem = replace(in_eight_bits(vectorised_problem(dtype=BF16, dims=(256, 256)), scales), window_left=window)
    serving = world(problem, selections=[partly_torch(problem)])
    serving.served([270, 2, 13], [1, 1, 1], [1, 1, 1], pad_to=4)
    assert aiter.calls.count("pa_decode_gluon") == 2


@pytest.mark.fast(4)
@pytest.mark.parametrize("run", [random_run, edge_run])
@pytest.mark.parametrize("function", PROBED)
def test_the_probe_passes_kernels_that_are_right_in_eight_bits(function: str, run: Run, aiter: StandIn) -> None:
    assert run(partly_torch(PROBED[function]), CPU) is None
    assert function in aiter.calls


@pytest.mark.parametrize("function", FACTORS)
def test_the_probe_finds_a_scale_that_is_left_out(function: str, aiter: StandIn) -> None:
    aiter.change(function, lambda call: {name: torch.ones_like(call[name]) for name in FACTORS[function]})
    wrong = random_run(partly_torch(PROBED[function]), CPU)
    assert wrong is not None
    assert function in wrong.kernel


def test_what_no_kernel_reads_is_refused_with_every_reason() -> None:
    with pytest.raises(Unsupported) as caught:
        select(replace(VECTORISED, kv_encoding=KVEncoding.E4M3FN), GFX942, "aiter")
    assert any("which halves float8_e4m3fn values" in reason for reason in caught.value.reasons)
