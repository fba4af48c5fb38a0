"""Windows, soft caps, sinks, ALiBi slopes and non-causal attention through AITER's kernels, against the reference.

The stand-in takes its scores from each function's own arguments, so a conversion that is off by one key shows.
Logits below -87 would vanish by a running maximum of 0, which the binding keeps out of unified_attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import SMALLEST_POOL
from rocm_attn.providers.select import select
from tests.amd.aiter.serving import GFX942, plain_problem, vectorised_problem, world
from tests.amd.aiter.stand_in import StandIn
from tests.amd.worlds.world import World, page_zero_is_zero

SMALL = plain_problem(16, dims=(64, 64))  # as in gpt-oss: no mha_batch_prefill_func
WIDE = plain_problem(16, dims=(128, 128))
VECTORISED = vectorised_problem()

# Scores -> the functions of a prefill, a decode, an extend and a mixed step.
VARLEN, RAGGED, UNIFIED, PAGED, GLUON = (
    "flash_attn_varlen_func",
    "paged_attention_ragged",
    "unified_attention",
    "mha_batch_prefill_func",
    "pa_decode_gluon",
)
PROBLEMS: Mapping[str, tuple[Problem, Sequence[str]]] = {
    "window and sinks": (replace(SMALL, window_left=20, has_sinks=True), (VARLEN, UNIFIED, UNIFIED, UNIFIED)),
    "sinks": (replace(WIDE, has_sinks=True), (VARLEN, UNIFIED, PAGED, UNIFIED)),
    "window": (replace(WIDE, window_left=37), (VARLEN, UNIFIED, PAGED, UNIFIED)),
    "soft cap": (replace(WIDE, logits_soft_cap=1.5), (VARLEN, RAGGED, PAGED, UNIFIED)),
    "window and soft cap": (
        replace(WIDE, window_left=37, logits_soft_cap=1.5, dtype=torch.bfloat16),
        (VARLEN, UNIFIED, PAGED, UNIFIED),
    ),
    "soft cap and sinks": (replace(SMALL, logits_soft_cap=1.5, has_sinks=True), (UNIFIED, UNIFIED, UNIFIED, UNIFIED)),
    "slopes": (replace(WIDE, has_alibi_slopes=True), (VARLEN, RAGGED, PAGED, UNIFIED)),
    "slopes and window": (replace(WIDE, has_alibi_slopes=True, window_left=20), (VARLEN, UNIFIED, PAGED, UNIFIED)),
    "slopes and soft cap": (
        replace(SMALL, has_alibi_slopes=True, logits_soft_cap=1.5),
        (UNIFIED, UNIFIED, UNIFIED, UNIFIED),
    ),
    "not causal": (replace(WIDE, window_right=UNLIMITED_WINDOW), (VARLEN, RAGGED, PAGED, PAGED)),
    "sinks in bfloat16": (replace(WIDE, has_sinks=True, dtype=torch.bfloat16), (PAGED, UNIFIED, PAGED, UNIFIED)),
}
# A prompt, a decode, an extend and a mixed step; the windows end within, at and after pages and tiles.
STEPS = ([70, 31, 16], [1, 1, 1], [9, 2, 40], [1, 25, 3])


@pytest.mark.fast(7)
@pytest.mark.parametrize(("problem", "served_by"), PROBLEMS.values(), ids=PROBLEMS)
def test_scores_are_those_of_the_oracle(problem: Problem, served_by: Sequence[str], release: StandIn) -> None:
    serving = world(problem, max_kv_len=300)
    release.calls.clear()
    requests = serving.served(*STEPS)
    assert release.calls == list(served_by)
    for q_len in STEPS[1:]:
        serving.step(requests, q_len, pad_to=4)
    assert page_zero_is_zero(serving)


@pytest.mark.fast(2)
@pytest.mark.parametrize("window_left", [0, 1, 14, 15, 16, 17, 62, 63, 64, 65])
@pytest.mark.parametrize(("base", "function"), [(SMALL, UNIFIED), (WIDE, PAGED), (VECTORISED, GLUON)])
def test_a_window_ends_at_the_same_key_in_every_function(
    base: Problem, function: str, window_left: int, aiter: StandIn
) -> None:
    serving = world(replace(base, window_left=window_left), max_kv_len=300)
    aiter.calls.clear()
    serving.served(*STEPS, [66, 1, 66])
    assert function in aiter.calls, "its probe refused it"


# Function -> the arguments that carry scores, with the value that means "none".
NOTHING: Mapping[str, Mapping[str, Any]] = {
    RAGGED: {"logits_soft_cap": 0.0, "alibi_slopes": None},
    UNIFIED: {"window_size": (-1, -1), "softcap": 0.0, "sinks": None, "alibi_slopes": None},
    PAGED: {"window_size": (-1, -1), "logits_soft_cap": 0.0, "sink_ptr": None, "alibi_slopes": None, "causal": True},
    GLUON: {"sliding_window": 0, "sinks": None},
    VARLEN: {"window_size": (-1, -1, 0), "logits_soft_cap": 0.0, "sink_ptr": None, "alibi_slopes": None},
}
ARGUMENTS = [(function, argument) for function, values in NOTHING.items() for argument in values]


def problem_that_has(argument: str, base: Problem) -> Problem:
    # replace() by name in each: mypy then checks the names in cases that only the night runs.
    changed = {
        "window_size": replace(base, window_left=5),
        "sliding_window": replace(base, window_left=5),
        "softcap": replace(base, logits_soft_cap=0.5),
        "logits_soft_cap": replace(base, logits_soft_cap=0.5),
        "sinks": replace(base, has_sinks=True),
        "sink_ptr": replace(base, has_sinks=True),
        "alibi_slopes": replace(base, has_alibi_slopes=True),
        "causal": replace(base, window_right=UNLIMITED_WINDOW),
    }
    return changed[argument]


@pytest.mark.fast(5)
@pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
def test_a_score_that_is_left_out_changes_the_output(function: str, argument: str, aiter: StandIn) -> None:
    serving = world(problem_that_has(argument, VECTORISED if function == GLUON else WIDE), max_kv_len=300)
    aiter.change(function, lambda call: {argument: NOTHING[function][argument]})
    with pytest.raises(AssertionError, match="not close"):
        serving.served(*STEPS)


# Over vectorised pages: scores -> the functions of a prefill, a decode, an extend and a mixed step.
OVER_VECTORISED: Mapping[str, tuple[Problem, Sequence[str]]] = {
    "window and sinks": (replace(VECTORISED, window_left=20, has_sinks=True), (VARLEN, GLUON, PAGED, UNIFIED)),
    "soft cap": (replace(VECTORISED, logits_soft_cap=1.5), (VARLEN, UNIFIED, PAGED, UNIFIED)),
    "slopes": (replace(VECTORISED, has_alibi_slopes=True), (VARLEN, UNIFIED, PAGED, UNIFIED)),
    "not causal": (replace(VECTORISED, window_right=UNLIMITED_WINDOW), (VARLEN, GLUON, PAGED, PAGED)),
}


@pytest.mark.fast(1)
@pytest.mark.parametrize(("problem", "served_by"), OVER_VECTORISED.values(), ids=OVER_VECTORISED)
def test_scores_over_vectorised_pages_are_those_of_the_oracle(
    problem: Problem, served_by: Sequence[str], aiter: StandIn
) -> None:
    serving = world(problem, max_kv_len=300)
    aiter.calls.clear()
    serving.served(*STEPS)
    assert aiter.calls == list(served_by)


VECTORISED_REFUSALS = [
    (
        vectorised_problem(heads=(2, 2)),
        "aiter.pa_decode_gluon",
        "it needs 3 or more query heads per KV head, and this layer has 1",
    ),
    (replace(VECTORISED, logits_soft_cap=2.0), "aiter.pa_decode_gluon", "it has no logits soft cap (2)"),
    (VECTORISED, "aiter.paged_attention_ragged", "it reads K and V pages, not vectorised pages"),
    (
        replace(VECTORISED, page_size=1024, window_left=9),
        "aiter.pa_decode_gluon",
        "with a window (window_left 9) it needs pages of up to 256 tokens, and page_size is 1024",
    ),
]


@pytest.mark.parametrize(("problem", "kernel", "reason"), VECTORISED_REFUSALS)
def test_decode_over_vectorised_pages_says_what_it_lacks(problem: Problem, kernel: str, reason: str) -> None:
    (row,) = (row for row in ENTRIES if row.name == kernel and row.kind is StepKind.DECODE)
    reasons = row.refusals(problem, GFX942)
    if not reasons:
        with pytest.raises(LookupError) as miss:
            row.bind(problem, GFX942, SMALLEST_POOL)
        reasons = miss.value.args
    assert reasons == (reason,)


@pytest.mark.parametrize("window_left", [-1, 20])
def test_the_lse_of_a_layer_with_sinks_has_the_sink_in_it(window_left: int, aiter: StandIn) -> None:
    serving = world(replace(WIDE, has_sinks=True, window_left=window_left))
    aiter.calls.clear()
    serving.served([5, 2, 20], [40, 3, 4])  # asks for the log-sum-exp of kernels that return it
    assert aiter.calls == [VARLEN, PAGED]


# Scores that AITER would compute wrongly together: problem, step, kernel, reason.
TOGETHER = [
    (
        replace(WIDE, has_sinks=True, dtype=torch.bfloat16),
        "prefill: not aiter.flash_attn_varlen_func: its assembly kernels for bfloat16 at this head_dim ignore "
        "attention sinks",
    ),
    (
        replace(WIDE, window_left=0, dtype=torch.bfloat16),
        "prefill: not aiter.flash_attn_varlen_func: it treats a window of the query's own key alone as no window",
    ),
    (
        replace(WIDE, has_alibi_slopes=True, logits_soft_cap=2.0),
        "extend: not aiter.mha_batch_prefill_func: it has no variant with both a logits soft cap and ALiBi slopes",
    ),
    (
        replace(WIDE, has_sinks=True, logits_soft_cap=2.0),
        "extend: not aiter.mha_batch_prefill_func: its attention sinks need plain logits, without a soft cap or "
        "ALiBi slopes",
    ),
    (
        replace(WIDE, has_sinks=True, has_alibi_slopes=True),
        "mixed: not aiter.unified_attention: its ALiBi slopes are wrong together with attention sinks",
    ),
    (
        replace(WIDE, window_right=UNLIMITED_WINDOW, has_alibi_slopes=True),
        "extend: not aiter.mha_batch_prefill_func: its ALiBi slopes also penalise keys after the query",
    ),
]


@pytest.mark.parametrize(("problem", "line"), TOGETHER)
def test_scores_that_a_function_gets_wrong_together_are_refused_with_the_reason(problem: Problem, line: str) -> None:
    assert line in select(problem, GFX942, "auto").refusal_lines()


# unified_attention is the only AITER function for head_dim 64 over these pages.
PLAIN = plain_problem(16, dims=(64, 64), heads=(2, 1))
LOW: Mapping[str, Problem] = {
    "no window": PLAIN,
    "a window": replace(PLAIN, window_left=20),
    "a window and slopes": replace(PLAIN, window_left=20, has_alibi_slopes=True),
    "a window and sinks": replace(PLAIN, window_left=20, has_sinks=True),
    "a window, vectorised": replace(vectorised_problem(heads=(2, 1), dims=(64, 64)), window_left=20),
}


class LowWorld(World):
    """A world in which every product of q and k is about -150 before anything is added."""

    def _held(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        away = (150 / (problem.scale * problem.head_dim)) ** 0.5
        return (0.1 * q + away).to(q.dtype), (0.1 * k - away).to(k.dtype), v


def serve(problem: Problem) -> None:
    built = world(problem, max_kv_len=900)
    serving = LowWorld(built.runtime, built.problems, built.generator)
    serving.served([70, 31, 600], [9, 40, 130], [1, 25, 3], [1, 1, 1])


@pytest.mark.fast(2)
@pytest.mark.parametrize("problem", LOW.values(), ids=LOW)
def test_low_logits_are_those_of_the_oracle(problem: Problem, aiter: StandIn) -> None:
    serve(problem)
    assert "unified_attention" in aiter.calls


# The binding's arguments against it, taken away.
WITHOUT = {
    "sinks far below": (LOW["a window"], {"sinks": None}),
    "one piece": (LOW["no window"], {"max_seqlen_k": 900}),
}


@pytest.mark.parametrize(("problem", "change"), WITHOUT.values(), ids=WITHOUT)
def test_without_what_the_binding_does_low_logits_vanish(
    problem: Problem, change: Mapping[str, Any], aiter: StandIn
) -> None:
    world(problem, max_kv_len=900)  # after its probe, whose logits are higher
    aiter.change("unified_attention", lambda call: change)
    with pytest.raises(AssertionError, match="not close"):
        serve(problem)


def test_layers_that_have_sinks_keep_their_own(aiter: StandIn) -> None:
    built = world(LOW["a window and sinks"], max_kv_len=900)
    seen = aiter.noted("unified_attention")
    built.served([40, 50], [2, 3], [1, 1])
    own = built.runtime.head_weights.of(0).sinks
    assert own is not None
    assert seen
    assert all(torch.equal(call["sinks"], own) for call in seen)
