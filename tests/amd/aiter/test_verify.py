"""Verify steps: up to four new tokens in each sequence, evenly or not, by kernels that take four of each."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import FEW_TOKENS, StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter.few_tokens import LastRows
from rocm_attn.providers.contract import SMALLEST_POOL, StepBounds
from rocm_attn.providers.select import select
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.aiter.checks import ContractBroken
from tests.amd.aiter.one_layer import OneLayer
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
from tests.amd.aiter.signatures import E4048607, V0_1_15, Release
from tests.amd.aiter.stand_in import StandIn, install
from tests.amd.graphs.small_models import same, serve
from tests.amd.worlds.world import runtime_of

LATENT_CODES = in_eight_bits(latent_problem())
PROBLEMS = {
    "vectorised": (vectorised_problem(), "pa_decode_gluon"),
    "latent": (latent_problem(), "mla_decode_fwd"),
    "latent, eight bits": (LATENT_CODES, "get_mla_metadata_v1"),
}
each_pool = pytest.mark.parametrize(("problem", "function"), PROBLEMS.values(), ids=PROBLEMS)
# A prompt and uneven verify steps: of no sequence with one token (extend), and of some (mixed).
STEPS = [[9, 2, 7], [4, 2, 3], [1, 4, 2], [4, 4, 4], [2, 2], [1, 1, 1], [3, 1, 1, 4]]


def model_of(problem: Problem, verify_tokens: int = FEW_TOKENS) -> OneLayer:
    # AITER serves no prompts over latent pages in eight bits.
    selections = [partly_torch(problem)] if problem == LATENT_CODES else None
    model = OneLayer.build(problem, selections=selections)
    options = RuntimeOptions(
        num_pages=300,
        max_num_seqs=4,
        max_kv_len=256,
        provider="aiter",
        capture_sizes=(2, 4),
        verify_tokens=verify_tokens,
    )
    runtime = runtime_of([problem], options, CPU, GFX942, selections)
    runtime.pool.layer(0).fill_nan(slice(1, None))
    return replace(model, runtime=runtime)


def plan(runtime: AttentionRuntime, q_len: list[int], pad_to: PadTo | None = None) -> PaddedShape:
    rows = list(range(1, 1 + len(q_len)))
    batch = StepBatch(rows, [each + 40 for each in q_len], q_len)
    return runtime.plan(batch, pad_to).shape


@pytest.mark.fast(2)
@each_pool
def test_a_step_with_few_new_tokens_in_each_sequence_is_a_verify_step(
    problem: Problem, function: str, aiter: StandIn
) -> None:
    runtime = model_of(problem).runtime
    for q_len in ([4, 3, 2], [1, 4], [0, 2, 2], [2]):
        assert plan(runtime, q_len).kind is StepKind.VERIFY, q_len
    assert plan(runtime, [1, 1]).kind is StepKind.DECODE
    assert plan(runtime, [5, 2]).kind is StepKind.EXTEND
    assert plan(runtime, [5, 1]).kind is StepKind.MIXED
    # Ranks agree on tokens, and not on the longest of them.
    assert plan(runtime, [4, 3], PadTo(4, 64)).kind is StepKind.EXTEND


def test_layers_without_a_kernel_for_verify_steps_have_none(aiter: StandIn) -> None:
    runtime = model_of(plain_problem(16, dims=(128, 128))).runtime
    assert plan(runtime, [4, 3]).kind is StepKind.EXTEND
    assert plan(runtime, [4, 1]).kind is StepKind.MIXED


@pytest.mark.fast(1)
@each_pool
def test_a_captured_step_of_more_tokens_than_a_verify_step_has_is_none(
    problem: Problem, function: str, aiter: StandIn
) -> None:
    """Its graph serves steps with up to eight tokens too."""
    runtime = model_of(problem, verify_tokens=8).runtime
    assert plan(runtime, [4, 3]).kind is StepKind.EXTEND


@pytest.mark.fast(1)
@each_pool
def test_one_graph_serves_even_and_uneven_verify_steps_with_the_bits_of_eager_ones(
    problem: Problem, function: str, aiter: StandIn
) -> None:
    graphed, eager = model_of(problem), model_of(problem)
    runner = StepRunner(graphed.runtime, graphed.forward, recorder_for(CPU))
    runner.capture_all()
    captured = [bucket.key.shape for bucket in runner.capture_report().buckets]
    verify = [shape for shape in captured if shape.kind is StepKind.VERIFY]
    assert verify == [PaddedShape(StepKind.VERIFY, size, 4 * size, drafts=NO_DRAFTS) for size in (4, 2)]
    assert not {StepKind.EXTEND, StepKind.MIXED} & {shape.kind for shape in captured}
    assert function in aiter.calls
    replayed = serve(runner, graphed.runtime, STEPS)
    assert same(replayed, serve(StepRunner(eager.runtime, eager.forward, None), eager.runtime, STEPS))
    assert runner.counters.replays == len(STEPS) - 1  # all but the prompt
    assert len(runner.capture_report().buckets) == len(captured)


@each_pool
@pytest.mark.parametrize("on_device", [False, True], ids=["lengths of the host", "lengths on the device"])
def test_a_sequence_without_a_token_is_no_sequence_without_a_key(
    on_device: bool, problem: Problem, function: str, aiter: StandIn
) -> None:
    """Kernels divide by the number of its keys."""
    model = model_of(problem)
    runtime, rows = model.runtime, [model.runtime.table.admit() for _ in range(3)]
    lengths, bounds = [4, 0, 2], [4, 4, 4]
    runtime.table.reserve_all(rows, bounds)
    if on_device:
        known = torch.tensor(lengths, dtype=torch.int32)
        batch = StepBatch(rows, bounds, bounds, [1] * 12, inputs=DeviceInputs(kv_len=known, q_len=known.clone()))
    else:
        batch = StepBatch(rows, lengths, lengths, [1] * 6)
    with runtime.step(batch) as step:
        assert step.plan.shape.kind is StepKind.VERIFY
        model.forward(step.parts[0])
    assert function in aiter.calls
    runtime.check_device()


def test_every_token_gets_one_of_the_last_rows_of_its_sequence() -> None:
    q_len, num_tokens = [3, 0, 4, 1], 10  # two of them padded
    ends = torch.tensor(q_len).cumsum(0).int()
    shape, schedule = PaddedShape(StepKind.VERIFY, len(q_len), num_tokens), LastRows()
    step: Any = SimpleNamespace(
        q_indptr=torch.cat([torch.zeros(1, dtype=torch.int32), ends]),
        seq_of_token=torch.tensor([0] * 3 + [2] * 4 + [3] * 3, dtype=torch.int32),
    )
    bounds, queries = StepBounds(shape, FEW_TOKENS, 64), cast(Queries, None)  # it does not read them
    words = torch.full((schedule.words(shape),), -1, dtype=torch.int32)
    schedule.build(queries, step, bounds, words)
    tokens = torch.arange(num_tokens * 2.0).view(-1, 2, 1)
    rows = torch.full((len(q_len) * FEW_TOKENS, 3, 1), float("nan"))
    schedule.spread(tokens, rows, words)
    back = torch.full_like(tokens, float("nan"))
    schedule.collect(rows, back, words)
    assert (rows[:, 2] == 0).all()
    token = 0
    for seq, new in enumerate(q_len):
        last = rows[(seq + 1) * FEW_TOKENS - new : (seq + 1) * FEW_TOKENS, :2]
        assert torch.equal(last, tokens[token : token + new])
        token += new
    assert torch.equal(back[:token], tokens[:token])


@pytest.mark.parametrize(
    "problem", [vectorised_problem(), vectorised_problem(heads=(8, 1)), latent_problem(), LATENT_CODES], ids=str
)
def test_memory_for_the_most_sequences_is_enough_for_fewer_which_are_cut_into_more_parts(problem: Problem) -> None:
    kernels = partly_torch(problem).kernels
    for kind, each in ((StepKind.DECODE, 1), (StepKind.VERIFY, FEW_TOKENS)):
        bound, room = kernels[kind].bound, 0
        for num_seqs in range(1, 400):
            words = bound.workspace_words(PaddedShape(kind, num_seqs, num_seqs * each))
            assert words >= room, f"{kind} of {num_seqs}"
            room = words


# 33 to 35 keys are cut after 32, unless what is left has fewer keys than a sequence has new tokens.
SHORT_SHARES = [[29, 31, 60], [4, 4, 4], [1, 4, 2]]


@pytest.mark.fast(2)
@pytest.mark.parametrize("heads", [5, 16])
@pytest.mark.parametrize(("version", "arch"), [(E4048607, "gfx942"), (E4048607, "gfx950"), (V0_1_15, "gfx942")])
def test_every_token_sees_a_key_of_each_share_of_latent_pages_in_eight_bits(
    version: Release, arch: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    aiter = install(version, monkeypatch, arch=arch)
    problem = in_eight_bits(latent_problem(heads), arch=arch)
    serving = world(problem, max_kv_len=80, selections=[partly_torch(problem, known_target(arch))])
    serving.served(*SHORT_SHARES, pad_to=4)
    assert aiter.calls == ["get_mla_metadata_v1", "mla_decode_fwd"] * 2


def test_a_part_of_a_sequence_without_a_window_loses_keys_of_early_queries(
    aiter: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    aiter.change("pa_decode_gluon", lambda call: {"sliding_window": 0})
    with pytest.raises(ContractBroken, match="loses keys of all queries but the last"):
        model_of(vectorised_problem())  # the probe runs verify steps


def test_the_row_refuses_what_does_not_fit_64_rows_on_a_head() -> None:
    chosen = select(vectorised_problem(heads=(64, 2)), GFX942, "auto", pool=SMALLEST_POOL)
    assert StepKind.VERIFY not in chosen.kernels
    assert any(
        "not aiter.pa_decode_gluon[verify]: 32 query heads share a KV head" in line for line in chosen.refusal_lines()
    )
