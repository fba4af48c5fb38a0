"""Latent pools: one row per token that holds K and, in its first part, V. Prefills of latents that are expanded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadProblem, BadTensor, Unsupported
from rocm_attn.guards.registry import Guards
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import known_target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.aiter.mla_persistent import SharesOfFew
from rocm_attn.providers.aiter.packed import packed_varlen
from rocm_attn.providers.select import select
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.expanded import PackedAttention
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.layer_kinds import LayerKinds
from rocm_attn.step.options import RuntimeOptions
from tests.amd.aiter.checks import ContractBroken
from tests.amd.aiter.serving import CPU, GFX942, latent_problem, partly_torch, plain_problem, world
from tests.amd.aiter.stand_in import StandIn
from tests.amd.tolerances import assert_attention_close, assert_lse_close
from tests.amd.worlds.world import World, page_zero_is_zero

# Query heads -> launches of an extend step: the kernels are for 16 and for 128 heads.
LAUNCHES = {1: 1, 8: 1, 16: 1, 24: 2, 64: 4, 128: 1}


@pytest.mark.fast(1)
def test_every_kind_of_step_over_a_latent_pool_equals_dense_attention(release: StandIn) -> None:
    serve_every_kind_of_step(16, 1, release)


@pytest.mark.fast(1)
@pytest.mark.parametrize(("num_q_heads", "launches"), LAUNCHES.items())
def test_any_number_of_heads_is_served(num_q_heads: int, launches: int, aiter: StandIn) -> None:
    serve_every_kind_of_step(num_q_heads, launches, aiter)


def serve_every_kind_of_step(num_q_heads: int, launches: int, aiter: StandIn) -> None:
    serving = world(latent_problem(num_q_heads), max_kv_len=80)
    requests = [serving.admit() for _ in range(3)]
    aiter.calls.clear()
    serving.step(requests, [70, 2, 13])
    serving.step(requests, [5, 1, 0])
    assert aiter.calls == ["mla_prefill_fwd"] * 2 * launches
    aiter.calls.clear()
    for pad_to in (3, 4, 9):
        serving.step(requests, [1, 1, 1], pad_to=pad_to)
    has_schedule = num_q_heads <= 16
    assert aiter.calls == (["get_mla_metadata_v1"] * has_schedule + ["mla_decode_fwd"]) * 3
    serving.step(requests, [2, 2, 5], pad_to=4)
    assert page_zero_is_zero(serving)


# The devices have 304 and 256 compute units, and a sequence has at most 16 splits.
@pytest.mark.parametrize(("arch", "most"), [("gfx942", 18), ("gfx950", 15)])
def test_a_schedule_is_made_for_as_many_sequences_as_equal_splits_do_not_fill_the_device(arch: str, most: int) -> None:
    target = known_target(arch)
    bound = select(latent_problem(), target, "aiter").kernels[StepKind.DECODE].bound
    schedule = bound.schedule
    assert isinstance(schedule, SharesOfFew)
    for num_seqs in (most, most + 1):
        shape = PaddedShape(StepKind.DECODE, num_seqs, num_seqs)
        given = schedule.as_arguments(shape, torch.zeros(schedule.words(shape), dtype=torch.int32))
        assert ("work_info_set" in given) == (num_seqs == most)
        splits = given.get("num_kv_splits_indptr")
        assert splits is None or len(splits) == num_seqs + 1  # type: ignore[arg-type]  # a tensor


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    ("function", "q_len"), [("mla_decode_fwd", [1, 1]), ("mla_decode_fwd", [2, 3]), ("mla_prefill_fwd", [2, 5])]
)
def test_heads_that_a_kernel_gets_on_top_are_zero(function: str, q_len: list[int], aiter: StandIn) -> None:
    serving = world(latent_problem(5), max_kv_len=80)
    requests = serving.begun(9, 4)
    seen = aiter.noted(function)
    serving.step(requests, q_len)
    (call,) = seen
    assert not call["q"][:, 5:].any()
    assert bool(call["q"][:, :5].any())


def test_a_schedule_of_other_lengths_is_noticed(aiter: StandIn) -> None:
    """The stand-in would raise this if a schedule were kept from one step to the next."""
    serving = world(latent_problem(), max_kv_len=80)
    requests = serving.begun(40, 9)
    serving.step(requests, [1, 1])
    aiter.bodies["get_mla_metadata_v1"] = lambda call: None
    with pytest.raises(ContractBroken):
        serving.step(requests, [1, 1])


def test_more_heads_than_the_kernels_have_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        select(latent_problem(160), GFX942, "aiter")
    assert "decode: aiter.mla_decode_fwd: 160 query heads share a KV head; at most 128 may" in caught.value.reasons


def test_v_of_a_latent_layer_must_be_part_of_k() -> None:
    problem = Problem(6, 1, 24, torch.float32, 4, v_head_dim=16, scale=0.3, pool=PoolKind.LATENT)
    serving = World.build([problem], CPU, "torch")
    request = serving.admit()
    step = serving.runtime.step(serving.batch([request], [2])).parts[0]
    k = serving.random(step.token_ids.shape[0], 1, 24)
    with pytest.raises(BadTensor, match=r"pass k\[\.\.\., :16\] as v"):
        step.layers.store(0, k, k[..., :16].clone())
    serving.runtime.end_step()


def test_a_latent_pool_has_one_kv_head() -> None:
    with pytest.raises(BadProblem, match="num_kv_heads must be 1"):
        Problem(8, 2, 24, torch.float32, 4, v_head_dim=16, scale=1.0, pool=PoolKind.LATENT)


HEADS, TURNS, LATENT = 2, 64, 512
FUNCTION = "flash_attn_varlen_func"
LAYER = latent_problem(HEADS)


@dataclass
class Prefills:
    """Prompts of three sequences, then a chunk over every prefix but one, with all that they stored and the results."""

    provider: str = "auto"
    problem: Problem = LAYER
    chunk_tokens: int = 7

    def __post_init__(self) -> None:
        options = RuntimeOptions(num_pages=600, max_num_seqs=4, max_kv_len=256, provider=self.provider)
        kinds = LayerKinds.of([self.problem], options.spaces([self.problem]), [partly_torch(self.problem)])
        self.runtime = AttentionRuntime(kinds, options, device=CPU, guards=Guards())
        self.generator = torch.Generator().manual_seed(0)
        if self.problem.has_sinks:
            self.runtime.head_weights.set(0, HeadWeights.random(self.problem, self.generator))
        self.w_k = self.random(HEADS, 128, LATENT) / LATENT**0.5
        self.w_v = self.random(HEADS, LATENT, 128) / LATENT**0.5
        self.latents = [self.random(0, LATENT + TURNS) for _ in range(3)]
        self.rows = [self.runtime.table.admit() for _ in range(3)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).bfloat16()

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys [tokens, heads, 128 + 64] and values [tokens, heads, 128]."""
        turned = latents[:, None, LATENT:].expand(-1, HEADS, -1)
        k = torch.cat([torch.einsum("tl,hnl->thn", latents[:, :LATENT], self.w_k), turned], -1)
        return k, torch.einsum("tl,hlv->thv", latents[:, :LATENT], self.w_v)

    def step(self, q_len: list[int]) -> None:
        """Runs new tokens, whose output must equal dense attention in float64."""
        new = [self.random(count, LATENT + TURNS) for count in q_len]
        self.latents = [torch.cat(each) for each in zip(self.latents, new, strict=True)]
        kv_len = [len(each) for each in self.latents]
        for row, length in zip(self.rows, kv_len, strict=True):
            self.runtime.table.reserve(row, length)
        batch = StepBatch(*(np.array(values, np.int32) for values in (self.rows, kv_len, q_len)))
        step = self.runtime.step(batch).parts[0]
        stored = torch.cat([*new, self.random(len(step.token_ids) - sum(q_len), LATENT + TURNS)])[:, None]
        step.layers.store(0, stored, stored[..., :LATENT])
        q = self.random(sum(q_len), HEADS, 128 + TURNS)
        prefill = self.runtime.expanded_prefill(0)
        out, lse = prefill.attend(q, torch.cat(new), self.expand, chunk_tokens=self.chunk_tokens)
        self.runtime.end_step()
        first = 0
        for latents, count in zip(self.latents, q_len, strict=True):
            mine = slice(first, first + count)
            want, want_lse = self.dense(q[mine], latents)
            assert_attention_close(out[mine], want, torch.bfloat16)
            assert_lse_close(lse[mine], want_lse, torch.bfloat16)
            first += count

    def dense(self, q: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (side.double() for side in self.expand(latents))
        logits = torch.einsum("qhd,khd->hqk", q.double() * self.problem.scale, k)
        hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(len(latents) - len(q) + 1)
        logits = logits.masked_fill(hidden, float("-inf"))
        sinks = self.runtime.head_weights.of(0).sinks
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
            v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
        return torch.einsum("hqk,khv->qhv", logits.softmax(-1), v), logits.logsumexp(-1).T

    def serve(self) -> None:
        self.step([11, 0, 5])
        self.step([4, 9, 0])


@pytest.fixture
def by_extend(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list that gets an entry for each piece of attention that our kernel computes: true if the piece is causal."""
    calls: list[bool] = []
    real = PackedAttention._by_extend

    def counted(
        attention: PackedAttention, q: Tensor, k: Tensor, v: Tensor, lengths: Any, causal: bool
    ) -> tuple[Tensor, Tensor]:
        calls.append(causal)
        return real(attention, q, k, v, lengths, causal)

    monkeypatch.setattr(PackedAttention, "_by_extend", counted)
    return calls


def test_rows_of_192_and_128_are_aiters_once_both_kernels_agree(release: StandIn, by_extend: list[bool]) -> None:
    """New tokens and chunks of prefixes are compared once in every release; sequences without keys are left out."""
    calls = release.noted(FUNCTION)
    Prefills().serve()
    assert sorted(by_extend) == [False, True]
    compared = release.calls.count(FUNCTION)
    Prefills().serve()
    assert sorted(by_extend) == [False, True], "our kernel is not asked again"
    assert release.calls.count(FUNCTION) == 2 * compared
    assert all(bool((call[name].diff() > 0).all()) for call in calls for name in ("cu_seqlens_q", "cu_seqlens_k"))


def test_rows_that_are_much_longer_are_compared_anew(aiter: StandIn, by_extend: list[bool]) -> None:
    Prefills().serve()
    before = len(by_extend)
    prefills = Prefills()
    prefills.step([100, 3, 0])
    assert len(by_extend) == before + 1
    prefills.step([1, 1, 1])
    Prefills().step([100, 3, 0])
    assert by_extend.count(True) == 2


def test_keys_past_the_reach_of_its_assembly_are_not_aiters(aiter: StandIn) -> None:
    """The keys of one sequence, of 128 heads: 87,382 take 4 GiB, and releases before 0.1.20 wrap there."""
    problem = plain_problem(heads=(128, 128), dims=(192, 128), dtype=torch.bfloat16, wants_lse=True)
    for text, longest, is_aiters in (("0.1.19", 87_381, True), ("0.1.19", 87_382, False), ("0.1.20", 87_382, True)):
        releases = Releases(aiter=Release.of(text), rocm=Release.of("7.0.2"))
        target = replace(GFX942, releases=releases)
        assert (packed_varlen(problem, target, "auto", longest) is not None) == is_aiters


WRONG = {
    "out": lambda out, lse: (out * 1.2, lse),
    "a log-sum-exp by powers of 2": lambda out, lse: (out, lse * 1.4427),
    "no number": lambda out, lse: (out.fill_(float("nan")), lse),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_kernel_that_is_wrong_is_not_asked_again(how: str, aiter: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    real = aiter.bodies[FUNCTION]

    def wrong(call: Mapping[str, Any]) -> Any:
        out, lse = WRONG[how](*real(call))
        call["out"].copy_(out)
        return call["out"], lse

    aiter.bodies[FUNCTION] = wrong
    Prefills().serve()
    Prefills().serve()
    assert aiter.calls.count(FUNCTION) == 2, "once with new tokens, once with a chunk of what came before"
    said = [record.getMessage() for record in caplog.records if "does not serve expanded" in record.getMessage()]
    assert len(said) == 2


def test_values_that_are_all_zero_say_nothing_of_a_kernel(aiter: StandIn, by_extend: list[bool]) -> None:
    """An engine that warms up over latents of zeros gives such values."""
    warm = Prefills()
    warm.w_v.zero_()
    warm.serve()
    assert FUNCTION not in aiter.calls
    Prefills().serve()
    before = len(by_extend)
    Prefills().serve()
    assert len(by_extend) == before, "our kernel is not asked again"


def test_a_kernel_that_raises_is_not_asked_again(aiter: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    aiter.fail(FUNCTION, SystemExit("no compiler"))
    Prefills().serve()
    assert "it raised SystemExit: no compiler" in caplog.text
    assert aiter.calls.count(FUNCTION) == 2


def test_a_kernel_that_comes_to_raise_is_not_asked_again(aiter: StandIn, by_extend: list[bool]) -> None:
    """Our kernel serves the step in which it raises."""
    Prefills().serve()
    before, requested = len(by_extend), aiter.calls.count(FUNCTION)
    aiter.fail(FUNCTION, RuntimeError("no kernel for these lengths"))
    for _ in range(2):
        Prefills().step([9, 2, 5])
    assert aiter.calls.count(FUNCTION) == requested + 1
    assert len(by_extend) == before + 2


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_keys_of_a_sequence_without_new_tokens_are_not_those_of_the_next(
    idle: int, aiter: StandIn, by_extend: list[bool]
) -> None:
    Prefills().serve()
    before = len(by_extend)
    prefills = Prefills()
    prefills.step([5, 5, 5])
    new = [4, 6, 9]
    new[idle] = 0
    prefills.step(new)
    assert len(by_extend) == before


def test_sinks_that_its_assembly_drops_are_ours(aiter: StandIn, by_extend: list[bool]) -> None:
    """Sinks belong to the part of the new tokens; chunks of a prefix have none."""
    problem = replace(LAYER, has_sinks=True)
    for _ in range(2):
        Prefills(problem=problem).serve()
    assert by_extend.count(True) == 4
    assert by_extend.count(False) == 1
    assert aiter.calls.count(FUNCTION) > 2
