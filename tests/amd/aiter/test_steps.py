"""Whole steps and a text through AITER's kernels against the reference: NaN where nothing was stored, and in pads."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.errors import BadTensor
from rocm_attn.machine.target import Target
from rocm_attn.models.config import AttentionConfig
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.rope import Rope
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import select
from rocm_attn.selection import build
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from tests.amd.aiter.serving import CPU, GFX942, partly_torch, plain_problem, vectorised_problem, world
from tests.amd.aiter.signatures import V0_1_15
from tests.amd.aiter.stand_in import StandIn, install
from tests.amd.runner.dense_attention import assert_greedy
from tests.amd.runner.serving import some_requests
from tests.amd.runner.tiny_model import CONFIG, tiny_model
from tests.amd.worlds.world import World, page_zero_is_zero

# One problem for each way that the kernels divide the work between them.
PROBLEMS = {
    "ragged and unified": plain_problem(16, dims=(64, 64)),
    "ragged and batch prefill": plain_problem(16, dims=(128, 128)),
    "unified alone": plain_problem(32, heads=(8, 1), dims=(256, 256)),
    "wide heads": plain_problem(64, heads=(2, 1), dims=(512, 512)),
    "bfloat16": plain_problem(16, dims=(128, 128), dtype=torch.bfloat16),
    "vectorised": vectorised_problem(),
    "vectorised, large pages": vectorised_problem(64, heads=(8, 2), dtype=torch.bfloat16),
    "vectorised, wide heads": vectorised_problem(heads=(2, 1), dims=(256, 256)),  # too few heads for pa_decode_gluon
}
# Problems that every release serves. unified_attention came later for vectorised pages; wide heads did not fit the LDS.
IN_EVERY_RELEASE = {
    name: problem
    for name, problem in PROBLEMS.items()
    if name not in ("wide heads", "vectorised, large pages", "vectorised, wide heads")
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def steps_at(page_size: int) -> list[list[int]]:
    """Returns new tokens of four sequences per step: one token, a page less and more by one, a whole page, and none."""
    around = [page_size - 1, page_size, page_size + 1]
    return [
        [1, *around],
        [1, 1, 1, 1],
        [page_size + 1, 2, 3, page_size],
        [1, 0, 2, 1],
        [1, 0, 1, 0],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
    ]


@pytest.mark.fast(2)
@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in IN_EVERY_RELEASE.items()])
def test_in_the_oldest_release_every_kind_of_step_equals_dense_attention(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(V0_1_15, monkeypatch)
    check_every_kind_of_step(problem)


def check_every_kind_of_step(problem: Problem) -> None:
    serving = world(problem, max_kv_len=300)
    requests = serving.served(*steps_at(problem.page_size))
    serving.step(requests[1:2], [1])
    assert page_zero_is_zero(serving)


def test_its_layers_with_windows_decode_steps_that_others_share_prefixes_in(aiter: StandIn) -> None:
    """gpt-oss has such layers. The kernel's max_seqlen_q is 1 in shared steps too, and its pads have a key."""
    plain = plain_problem(16, dims=(64, 64))
    problems = [plain, replace(plain, window_left=20, has_sinks=True)]
    selections = [partly_torch(problem) for problem in problems]
    serving = World.build(problems, CPU, "aiter", target=GFX942, selections=selections)
    (root,) = serving.begun(32)
    requests = [root, serving.fork(root, 32), serving.fork(root, 32)]
    serving.step(requests, [3, 2, 4])
    seen = aiter.noted("unified_attention")
    for groups in ([PrefixGroup(3, 32)], [PrefixGroup(1, 0), PrefixGroup(2, 16)]):
        serving.step(requests, [1, 1, 1], 5, prefixes=SharedPrefixes(groups))
    assert [call["max_seqlen_q"] for call in seen] == [1, 1]
    assert page_zero_is_zero(serving)


@pytest.mark.fast(2)
@every_problem
def test_a_full_row_is_read_to_its_end(problem: Problem, aiter: StandIn) -> None:
    serving = world(problem, max_kv_len=300)
    requests = serving.begun(299, 298, 64, 300)
    serving.step(requests[:2], [1, 2])
    serving.step(requests[1:3], [0, 1])


@pytest.mark.parametrize("layout", [PoolKind.SPLIT, PoolKind.VECTORIZED])
@pytest.mark.parametrize("unavailable", [{}, {"aiter.pa_decode_gluon": "switched off"}], ids=["first", "second"])
def test_rows_with_gaps_are_served(layout: PoolKind, unavailable: dict[str, str], aiter: StandIn) -> None:
    """q, k and v are cut out of one fused projection, and a gap follows each head of q and out."""
    problem = replace(plain_problem(16, heads=(16, 2), dims=(128, 128)), scale=128**-0.5, pool=layout)
    serving = world(problem, selections=[select(problem, GFX942, "aiter", unavailable=unavailable)])
    requests = [serving.admit(), serving.admit()]
    for q_len in ([4, 6], [1, 1], [2, 3], [1, 4]):
        step = serving.runtime.step(serving.batch(requests, q_len)).parts[0]
        rows = serving.random(step.token_ids.shape[0], 20, 136)[..., :128]
        q, k, v = torch.split(rows, [16, 2, 2], dim=1)
        serving.remember(0, requests, q_len, k[: step.num_tokens], v[: step.num_tokens])
        out = serving.random(len(rows), 16, 136)[..., :128]
        step.layers.store_and_attend(0, q, k, v, out)
        serving.check(0, requests, q_len, q, out, None)
        serving.runtime.end_step()


@pytest.mark.parametrize("head_dim", [128, 256])
def test_lse_is_that_of_the_oracle(head_dim: int, aiter: StandIn) -> None:
    problem = plain_problem(16, dims=(head_dim, head_dim), wants_lse=True)
    serving = world(problem, selections=[partly_torch(problem)])
    aiter.calls.clear()
    serving.served([5, 2, 20], [2, 3, 4], [1, 3, 0], pad_to=4)
    assert aiter.calls == ["flash_attn_varlen_func", "mha_batch_prefill_func", "mha_batch_prefill_func"]


def test_lse_of_a_kernel_that_gives_none_is_refused(aiter: StandIn) -> None:
    serving = world(PROBLEMS["ragged and unified"])
    step = serving.runtime.step(serving.batch([serving.admit()], [1])).parts[0]
    q, k, v = serving.qkv(serving.problems[0], step)
    with pytest.raises(BadTensor, match="wants_lse=True"):
        step.layers.store_and_attend(0, q, k, v, torch.empty_like(q), torch.empty(q.shape[:2]))
    serving.runtime.end_step()


TORCH = EngineOptions(
    provider="torch", page_size=16, max_batch_size=4, chunk=16, graphs=False, max_kv_len=64, capture_after=0
)


def assert_text(loaded: LoadedModel, engine: Engine) -> None:
    """Checks that each token is the likeliest one, or within a few last places of float16. Logits are up to 8."""
    for done in engine.generate(some_requests(5)):
        assert len(done.token_ids) > 4
        assert_greedy(loaded, done, margin=0.02)


@pytest.fixture
def on_mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes CPU tensors count as those of a gfx942."""

    def detect(device: torch.device) -> Target:
        return GFX942

    monkeypatch.setattr(build, "detect_target", detect)


def wide_model(dtype: torch.dtype) -> LoadedModel:
    """Returns two layers whose eight query heads share one KV head, which kernels over vectorised pages require."""
    attention = AttentionLayer(8, 1, 128, scale=128**-0.5)
    mixer = AttentionConfig(attention, Rope(theta=10000.0, head_dim=128))
    layer = replace(CONFIG.layers[0], mixers=(mixer,))
    return tiny_model(base=replace(CONFIG, layers=(layer, layer)), dtype=dtype)


@pytest.mark.fast(1)
@pytest.mark.usefixtures("on_mi300")
@pytest.mark.parametrize("kernel", ["pa_decode_gluon", "unified_attention"])
def test_over_vectorised_pages_the_text_is_the_same(kernel: str, graphs: bool, aiter: StandIn) -> None:
    loaded = wide_model(torch.float16)
    if kernel == "unified_attention":  # the probe switches the first one off
        aiter.bodies["pa_decode_gluon"] = lambda call: call["output"].zero_()
    options = replace(TORCH, provider="aiter", graphs=graphs, pool="vectorized")
    engine = Engine(loaded, options)
    assert_text(loaded, engine)
    assert_text(loaded, Engine(loaded, replace(TORCH, pool="vectorized")))
    assert engine.report().provider == "aiter"
    assert engine.report().pools == ("vectorised pages",)
    report = engine.report()
    assert any(line.startswith(f"decode: aiter.{kernel}") for line in report.kernels)
    assert not any(": not " in line for line in report.kernels)
    assert any("pa_decode_gluon" in line for line in report.rejected) == (kernel == "unified_attention")
    assert {kernel, "flash_attn_varlen_func"} <= set(aiter.calls)
