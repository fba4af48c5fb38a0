"""Absorbed latent attention, and pages that are cut into vectors: every kind of step, checked against the reference."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.errors import BadBatch, BadProblem, BadSetting, BadTensor, Unsupported, WrongState
from rocm_attn.guards.registry import Guards
from rocm_attn.machine.target import known_target
from rocm_attn.paging.kv_pool import KVPool
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Row, Scales
from rocm_attn.providers.select import select
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.kv_scales import KVScales
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Step
from tests.amd.tolerances import assert_attention_close, assert_lse_close
from tests.amd.vectorised import linear_keys, linear_values
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World, page_zero_is_zero


def latent_problem(page_size: int = 4, *, heads: int = 6, dims: tuple[int, int] = (24, 16)) -> Problem:
    """Rows of 16 elements of V and 8 after it, unless specified otherwise."""
    plain = small_problem(page_size, num_q_heads=heads, num_kv_heads=1, head_dim=dims[0], v_head_dim=dims[1])
    return replace(plain, pool=PoolKind.LATENT, wants_lse=True)


PROBLEMS = {
    "by_token": replace(latent_problem(), kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.TOKEN),
    "plain": latent_problem(),
    "nothing_after_v": latent_problem(1, heads=4, dims=(32, 32)),
    "window": replace(latent_problem(16, heads=12), window_left=5),
    "sinks_and_cap": replace(latent_problem(3, heads=20), has_sinks=True, logits_soft_cap=1.5, window_left=21),
}


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_kind_of_step_is_right(problem: Problem, provider: str, device: torch.device) -> None:
    """Prefill, drafts of two to eight tokens, decode, a mixed step with all of them, and chunks over a prefix."""
    world = World.build([problem], device, provider, num_pages=200)
    requests = world.begun(13, 1, 7)
    world.step(requests, [1, 1, 1], pad_to=4)
    world.step(requests, [4, 8, 2])
    world.step(requests, [1, 5, 11])
    world.step(requests, [9, 0, 3], pad_to=4)
    assert page_zero_is_zero(world)


def test_masked_steps_are_right(provider: str, device: torch.device) -> None:
    world = World.build([replace(latent_problem(), custom_mask=True)], device, provider)
    requests = world.begun(9, 5)
    visible = [torch.rand(new, new + old) < 0.6 for new, old in ((4, 9), (1, 5))]
    world.step(requests, [4, 1], visible=visible)


def test_shared_prefixes_are_read_once(provider: str, device: torch.device) -> None:
    world = World.build([latent_problem()], device, provider)
    (first,) = world.begun(13)
    requests = [first, world.fork(first, 12), world.fork(first, 12)]
    world.step(requests, [1, 1, 1], prefixes=SharedPrefixes([PrefixGroup(3, 12)]))


@dataclass(frozen=True, slots=True)
class Weights:
    """The projections that expand latents: w_k [heads, 16, 32], w_v [heads, 32, 12]; 8 elements are rotary."""

    w_k: Tensor
    w_v: Tensor

    def absorbed(self, q: Tensor) -> Tensor:
        """Returns q [tokens, heads, 16 + 8] in the space of latents, [tokens, heads, 32 + 8]."""
        return torch.cat([torch.einsum("thn,hnl->thl", q[..., :16], self.w_k), q[..., 16:]], -1)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys [tokens, heads, 16 + 8] and values [tokens, heads, 12]."""
        turned = latents[:, None, 32:].expand(-1, len(self.w_k), -1)
        k = torch.cat([torch.einsum("tl,hnl->thn", latents[:, :32], self.w_k), turned], -1)
        return k, torch.einsum("tl,hlv->thv", latents[:, :32], self.w_v)


HEADS, SCALE = 5, 0.2
EXPANDED = Problem(
    HEADS,
    1,
    40,
    torch.float32,
    4,
    v_head_dim=32,
    scale=SCALE,
    pool=PoolKind.LATENT,
    wants_lse=True,
    logits_soft_cap=4.0,
)

EXACT = KVEncoding.LIKE_Q, Scales.NONE
CODES = [encoding for encoding in KVEncoding if encoding is not KVEncoding.LIKE_Q]


def dense(q: Tensor, latents: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Attention of a sequence's last tokens over all of its latents, in float64."""
    double = Weights(weights.w_k.double(), weights.w_v.double())
    k, v = double.expand(latents.double())
    logits = torch.einsum("qhd,khd->hqk", q.double() * SCALE, k)
    logits = EXPANDED.logits_soft_cap * torch.tanh(logits / EXPANDED.logits_soft_cap)
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool, device=q.device).triu(len(latents) - len(q) + 1)
    logits = logits.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khv->qhv", logits.softmax(-1), v), logits.logsumexp(-1).T


ONE_PREFIX = [
    pytest.param(4, 7, EXACT),
    pytest.param(4, 1, EXACT),
    pytest.param(1, 5, EXACT),
    pytest.param(64, 1000, EXACT),
    pytest.param(16, 1000, (KVEncoding.E4M3FNUZ, Scales.TOKEN)),
    pytest.param(1, 7, (KVEncoding.E4M3FN, Scales.TOKEN)),
    pytest.param(5, 4, (KVEncoding.E4M3FN, Scales.LAYER)),
    pytest.param(4, 7, (KVEncoding.E5M2, Scales.LAYER)),
    *(
        pytest.param(page_size, chunk_tokens, kept, marks=pytest.mark.nightly)
        for page_size in (1, 4, 16, 64)
        for chunk_tokens in (1, 7, 1000)
        for kept in (EXACT, *((encoding, scales) for encoding in CODES for scales in (Scales.LAYER, Scales.TOKEN)))
    ),
]


@pytest.mark.fast(4, interpreted=1)
@pytest.mark.parametrize(("page_size", "chunk_tokens", "kept"), ONE_PREFIX)
def test_absorbed_expanded_and_dense_attention_are_one(
    page_size: int, chunk_tokens: int, kept: tuple[KVEncoding, Scales], provider: str, device: torch.device
) -> None:
    """On pages of every size, in chunks of every size, and over the rows that each encoding keeps."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / 3).to(device)

    weights = Weights(random(HEADS, 16, 32), random(HEADS, 32, 12))
    options = RuntimeOptions(num_pages=64, max_num_seqs=4, max_kv_len=64, provider=provider)
    problem = replace(EXPANDED, page_size=page_size, kv_encoding=kept[0], kv_scales=kept[1])
    runtime = build_runtime([problem], options, device=device)
    if kept[1] is Scales.LAYER:
        runtime.set_kv_scales(0, KVScales(0.02, 0.02))
    rows, lengths = [runtime.table.admit() for _ in range(3)], [0, 0, 0]
    # Prompts, then chunks over them: one sequence has no prefix, and one has no new tokens.
    for q_len in ([11, 0, 5], [4, 9, 0]):
        lengths = [length + new for length, new in zip(lengths, q_len, strict=True)]
        for row, length in zip(rows, lengths, strict=True):
            runtime.table.reserve(row, length)
        batch = StepBatch(*(np.array(values, np.int32) for values in (rows, lengths, q_len)))
        q, latents = random(sum(q_len), HEADS, 24), random(sum(q_len), 40)
        step, absorbed, lse = absorbed_step(runtime, batch, weights.absorbed(q), latents)
        kept_latents = [stored_rows(runtime, row, length) for row, length in zip(rows, lengths, strict=True)]
        new_rows = torch.cat([each[len(each) - new :] for each, new in zip(kept_latents, q_len, strict=True)])
        half_a_step = 0.0 if kept == EXACT else torch.finfo(problem.page_format.encoding.dtype).eps / 2
        torch.testing.assert_close(new_rows, latents, rtol=half_a_step, atol=half_a_step / 8)
        prefill = runtime.expanded_prefill(0)
        out, out_lse = prefill.attend(q, new_rows, weights.expand, chunk_tokens=chunk_tokens)
        step.end()
        token = 0
        for stored, new in zip(kept_latents, q_len, strict=True):
            mine = slice(token, token + new)
            want, want_lse = dense(q[mine], stored, weights)
            by_head = torch.einsum("thl,hlv->thv", absorbed[mine], weights.w_v)
            for result, result_lse in ((by_head, lse[mine]), (out[mine], out_lse[mine])):
                assert_attention_close(result, want, torch.float32)
                assert_lse_close(result_lse, want_lse, torch.float32)
            token += new


def stored_rows(runtime: AttentionRuntime, row: int, length: int) -> Tensor:
    """Returns the first rows of a sequence as stored in its pages, [length, 40]."""
    ids = torch.from_numpy(np.array(runtime.table.pages_of(row), np.int64)).to(runtime.device)
    k, _ = runtime.pool.layer(0).read(ids)
    return k.flatten(0, 1)[:length, 0]


def absorbed_step(
    runtime: AttentionRuntime, batch: StepBatch, q: Tensor, latents: Tensor
) -> tuple[Step, Tensor, Tensor]:
    """Returns out and lse of a step over latents that it stores; the step still runs."""
    step = runtime.step(batch)
    (part,) = step.parts
    num_tokens, padded = len(q), part.token_ids.shape[0]

    def with_pads(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.new_zeros(padded - num_tokens, *rows.shape[1:])])

    k = with_pads(latents)[:, None]
    out, lse = k.new_empty(padded, HEADS, 32), k.new_empty(padded, HEADS)
    part.layers.store_and_attend(0, with_pads(q), k, k[..., :32], out, lse)
    return step, out[:num_tokens], lse[:num_tokens]


def test_what_cannot_be_expanded_is_refused(device: torch.device) -> None:
    options = RuntimeOptions(num_pages=8, max_num_seqs=4, max_kv_len=16, provider="torch")
    runtime = build_runtime([EXPANDED, small_problem()], options, device=torch.device("cpu"))
    with pytest.raises(BadProblem, match="only latent layers can be expanded, and this layer has K and V pages"):
        runtime.expanded_prefill(1)
    for other in (replace(EXPANDED, has_alibi_slopes=True), replace(EXPANDED, row=Row(4), logits_soft_cap=0.0)):
        of_other = build_runtime([other], options, device=torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        of_other.head_weights.set(0, HeadWeights.random(other, generator))
        with pytest.raises(BadProblem, match="expanded attention needs a layer without ALiBi slopes, whose latents"):
            of_other.expanded_prefill(0)
    deterministic = build_runtime([EXPANDED], replace(options, deterministic=True), device=torch.device("cpu"))
    with pytest.raises(Unsupported, match="expanded attention cuts prefixes by their number in the step"):
        deterministic.expanded_prefill(0)
    row = runtime.table.admit()
    runtime.table.reserve(row, 3)
    prefill = runtime.expanded_prefill(0)
    with pytest.raises(WrongState, match="this needs a running step"):
        prefill.attend(torch.zeros(3, 5, 24), torch.zeros(3, 40), lambda latents: (latents, latents))
    runtime.step(StepBatch([row], [3], [3], NO_TOKEN_IDS))
    with pytest.raises(BadTensor, match=r"q has shape \[2, 5, 24\].*the step's 3 tokens"):
        prefill.attend(torch.zeros(2, 5, 24), torch.zeros(3, 40), lambda latents: (latents, latents))
    with pytest.raises(BadTensor, match=r"expand returned keys of shape \[3, 40\].*must be \[3, 5, 24\]"):
        prefill.attend(torch.zeros(3, 5, 24), torch.zeros(3, 40), lambda latents: (latents, latents))
    with pytest.raises(BadTensor, match="latents is on meta; the runtime is on cpu"):
        prefill.attend(torch.zeros(3, 5, 24), torch.zeros(3, 40, device="meta"), lambda latents: (latents, latents))
    with pytest.raises(BadTensor, match="latents is a NoneType; give a tensor"):
        prefill.attend(torch.zeros(3, 5, 24), None, lambda latents: (latents, latents))  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match=r"chunk_tokens is 2.5; it must be a whole number"):
        prefill.attend(torch.zeros(3, 5, 24), torch.zeros(3, 40), lambda rows: (rows, rows), chunk_tokens=2.5)  # type: ignore[arg-type]
    runtime.end_step()
    lengths = DeviceInputs(kv_len=torch.tensor([3], dtype=torch.int32))
    runtime.step(StepBatch([row], [3], [3], NO_TOKEN_IDS, inputs=lengths))
    with pytest.raises(BadBatch, match="expanded attention needs the lengths on the host"):
        prefill.attend(torch.zeros(3, 5, 24), torch.zeros(3, 40), lambda latents: (latents, latents))
    runtime.end_step()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 640}, "head_dim 640 is outside 1..576"),
        ({"head_dim": 576, "v_head_dim": 448}, r"rows of 448 \+ 128 elements"),
    ],
)
def test_latent_layers_that_no_kernel_serves_are_refused_with_the_reason(
    change: dict[str, object], reason: str
) -> None:
    problem = replace(
        Problem(16, 1, 576, torch.bfloat16, 64, v_head_dim=512, scale=0.07, pool=PoolKind.LATENT),
        **change,  # type: ignore[arg-type]
    )
    with pytest.raises(Unsupported, match=reason):
        select(problem, known_target("gfx942"), "triton")


CPU = torch.device("cpu")
VECTORISED = replace(small_problem(8, head_dim=24, v_head_dim=16), pool=PoolKind.VECTORIZED)


def test_pages_have_the_shapes_that_kernels_read() -> None:
    for dtype, x in ((torch.float32, 4), (torch.bfloat16, 8)):
        problem = replace(VECTORISED, dtype=dtype)
        pages = KVPool([problem], num_pages=5, page_size=8, device=CPU).layers[0]
        assert pages.k.shape == (5, 2, 24 // x, 8, x)
        assert pages.v.shape == (5, 2, 8 // x, 16, x)
        assert pages.k.is_contiguous()
        assert pages.v.is_contiguous()
        assert not pages.k[0].any()
        assert not pages.v[0].any()


def test_what_is_stored_lies_where_kernels_look_for_it() -> None:
    world = World.build([VECTORISED], CPU, "torch")
    (request,) = world.begun(19)
    pages, held = world.runtime.pool.layer(0), world.runtime.table.pages_of(request.row).tolist()
    assert torch.equal(linear_keys(pages.k)[held].flatten(0, 1)[:19], request.k[0])
    assert torch.equal(linear_values(pages.v)[held].flatten(0, 1)[:19], request.v[0])


@pytest.mark.parametrize("page_size", [4, pytest.param(8, marks=pytest.mark.nightly), 16])
@pytest.mark.parametrize("window_left", [-1, 5])
def test_every_kind_of_step_equals_dense_attention(page_size: int, window_left: int) -> None:
    problem = replace(VECTORISED, page_size=page_size, window_left=window_left, has_sinks=True)
    world = World.build([problem], CPU, "torch", num_pages=200)
    world.served([1, page_size, page_size + 1], [1, 1, 1], [2, 9, 3], [1, 0, 4], [1, 1, 1], pad_to=4)
    assert page_zero_is_zero(world)


def test_layers_of_both_layouts_share_pages() -> None:
    linear = small_problem(8)
    world = World.build([linear, VECTORISED, linear], CPU, "torch")
    world.served([6, 3], [1, 1], [1, 4])


def test_layers_with_a_window_live_in_a_pool_of_their_own() -> None:
    windowed = replace(VECTORISED, window_left=7)
    world = World.build([windowed, VECTORISED], CPU, "torch", num_pages=33, swa_pages=12)
    world.served([9, 3], *[[1, 1]] * 20, [3, 2], *[[1, 1]] * 20)
    assert page_zero_is_zero(world)


@pytest.mark.parametrize("guards", [Guards(), Guards().without("v_mask")], ids=["on", "off"])
def test_what_lies_after_a_sequence_in_its_page_is_not_read(guards: Guards) -> None:
    serving = World.one_layer(CPU, guards, graphs=False, problem=VECTORISED)
    serving.run(serving.admit_all(2), [5, 8])
    assert bool(serving.rows[0].out[:5].isnan().all()) == (guards != Guards())
    # The second sequence fills its page: nothing lies after it.
    assert torch.isfinite(serving.rows[0].out[5:13]).all()
