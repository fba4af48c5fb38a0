"""The probe's edge rows: a kernel that sees one key too few or too many is refused at every window; others are not.

Whatever a kernel of another library raises in the probe refuses it, with that error; the next one serves.
"""

import ast
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported, WrongState
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection.probe_runs import FailedProbe, edge_run, random_run
from tests.amd.aiter import checks, decode_functions, latent_functions, prefill_functions
from tests.amd.aiter.checks import Scores
from tests.amd.aiter.serving import CPU, GFX942, latent_problem, plain_problem, vectorised_problem, world
from tests.amd.aiter.stand_in import StandIn

MODULES = (decode_functions, latent_functions, prefill_functions)

# A kernel's error in the keys that a query sees: bool [q_len, keys] -> the same with one more or one less.
Damage = Callable[[Tensor], Tensor]


def ends(visible: Tensor, *, first: bool, steps: int) -> Tensor:
    """Returns `visible` with one cell of each row inverted, if any: `steps` after the first or last visible key."""
    places = torch.arange(visible.shape[1])
    at = torch.where(visible, places, visible.shape[1]).amin(1) if first else torch.where(visible, places, -1).amax(1)
    cell = places[None] == (at + steps)[:, None]
    return visible ^ cell


DAMAGES: Mapping[str, Damage] = {
    "leaves out the first key": lambda visible: ends(visible, first=True, steps=0),
    "sees the key before the first": lambda visible: ends(visible, first=True, steps=-1),
    "leaves out the last key": lambda visible: ends(visible, first=False, steps=0),
    "sees the key after the last": lambda visible: ends(visible, first=False, steps=1),
}
# Without a window, nothing lies before the first key.
OF_UNLIMITED = [name for name in DAMAGES if name != "sees the key before the first"]


@contextmanager
def damaged(damage: Damage) -> Iterator[None]:
    """Makes the stand-in's functions see other keys. A row of zeros follows a sequence's last key, as in a page."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        k, v = (torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])]) for rows in (k, v))
        visible = damage(torch.cat([scores.visible, scores.visible.new_zeros(len(scores.visible), 1)], dim=1))
        bias = None if scores.bias is None else torch.cat([scores.bias, scores.bias[..., -1:]], dim=-1)
        return checks.attend(q, k, v, replace(scores, visible=visible, bias=bias))

    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "attend", attend)
        yield


def make_wrong(aiter: StandIn, function: str, damage: Damage) -> None:
    right = aiter.bodies[function]

    def wrong(call: Mapping[str, Any]) -> Any:
        with damaged(damage):
            return right(call)

    aiter.bodies[function] = wrong


# Function -> a layer that it serves, with as few heads as it takes.
LINEAR = plain_problem(16, heads=(1, 1), dims=(128, 128))
PROBLEMS: Mapping[str, Problem] = {
    "flash_attn_varlen_func": LINEAR,
    "mha_batch_prefill_func": LINEAR,
    "unified_attention": LINEAR,
    "pa_decode_gluon": vectorised_problem(heads=(4, 1)),
}
UNLIMITED: Mapping[str, Problem] = {
    **PROBLEMS,
    "paged_attention_ragged": LINEAR,
    "pa_decode_gluon": vectorised_problem(1024, heads=(4, 1)),
    "mla_decode_fwd": latent_problem(16),
    "mla_prefill_fwd": latent_problem(16),
}
WINDOWS = (0, 1, 15, 127, 1023, pytest.param(4095, marks=pytest.mark.nightly))
every_window = pytest.mark.parametrize("window_left", WINDOWS)


def selected(problem: Problem) -> Selection:
    return select(problem, GFX942, "aiter")


def edges_of(problem: Problem) -> FailedProbe | None:
    return edge_run(selected(problem), CPU)


def assert_each_is_refused(problem: Problem, function: str, aiter: StandIn, names: Iterable[str]) -> None:
    right = aiter.bodies[function]
    for name in names:
        make_wrong(aiter, function, DAMAGES[name])
        wrong = edges_of(problem)
        assert wrong is not None, f"{function} {name}"
        assert wrong.kernel.startswith(f"aiter.{function}")
        assert wrong.what.startswith("by a key at an edge: sequence ")
        aiter.bodies[function] = right


@pytest.mark.fast(2)
@every_window
@pytest.mark.parametrize("function", PROBLEMS)
def test_one_key_too_few_or_too_many_at_a_window_is_refused(function: str, window_left: int, aiter: StandIn) -> None:
    assert_each_is_refused(replace(PROBLEMS[function], window_left=window_left), function, aiter, DAMAGES)


@pytest.mark.fast(1)
@pytest.mark.parametrize("function", UNLIMITED)
def test_one_key_too_few_or_too_many_without_a_window_is_refused(function: str, aiter: StandIn) -> None:
    assert_each_is_refused(UNLIMITED[function], function, aiter, OF_UNLIMITED)


@pytest.mark.fast(1)
@pytest.mark.parametrize("window_left", [-1, *WINDOWS])
@pytest.mark.parametrize("base", [LINEAR, vectorised_problem(heads=(4, 1))], ids=["linear", "vectorised"])
def test_right_kernels_pass_at_every_window(base: Problem, window_left: int, aiter: StandIn) -> None:
    assert edges_of(replace(base, window_left=window_left)) is None


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"logits_soft_cap": 2.0},
        {"logits_soft_cap": 50.0},
        {"has_sinks": True},
        {"has_alibi_slopes": True},
        {"window_right": UNLIMITED_WINDOW},
        {"page_size": 1},
        {"scale": 1.5},
    ],
    ids=str,
)
def test_right_kernels_of_any_scores_pass_and_one_key_too_few_is_seen(
    change: Mapping[str, Any], aiter: StandIn
) -> None:
    problem = replace(LINEAR, **change)
    assert edges_of(problem) is None
    for function in ("flash_attn_varlen_func", "mha_batch_prefill_func", "paged_attention_ragged", "unified_attention"):
        make_wrong(aiter, function, DAMAGES["leaves out the last key"])
    assert edges_of(problem) is not None


def test_random_rows_do_not_show_one_key_among_many(aiter: StandIn) -> None:
    """Random rows do not suffice, so the probe has edge rows: a bound for rounding hides one key among hundreds."""
    problem = replace(LINEAR, dtype=torch.bfloat16, window_left=255)
    make_wrong(aiter, "unified_attention", DAMAGES["sees the key before the first"])
    selection = selected(problem)
    assert selection.kernels[StepKind.DECODE].entry.name == "aiter.unified_attention"
    assert random_run(selection, CPU) is None
    assert edge_run(selection, CPU) is not None


def test_keys_that_a_large_page_loses_after_the_first_2048_are_missed(aiter: StandIn) -> None:
    aiter.change("pa_decode_gluon", lambda call: {"context_lengths": call["context_lengths"].clamp(max=2048)})
    problem = vectorised_problem(1024, heads=(4, 1))
    assert random_run(selected(problem), CPU) is None
    wrong = edges_of(problem)
    assert wrong is not None
    assert wrong.kernel == "aiter.pa_decode_gluon"


def test_a_kernel_that_is_wrong_in_large_batches_alone_is_refused(aiter: StandIn) -> None:
    """For such batches pa_decode_gluon runs one program per sequence, which writes its result without the reduction."""
    right = aiter.bodies["pa_decode_gluon"]

    def wrong(call: Mapping[str, Any]) -> None:
        right(call)
        if call["max_context_partition_num"] == 1:
            call["output"].mul_(0.5)

    aiter.bodies["pa_decode_gluon"] = wrong
    # Enough KV heads for 512 sequences to fill the device.
    found = edges_of(vectorised_problem(heads=(8, 2)))
    assert found is not None
    assert (found.kernel, "decode" in found.what) == ("aiter.pa_decode_gluon", True)


PROBLEM = plain_problem(16, dims=(128, 128))

# The error raised, and the text of it in the reason.
FAILURES: Mapping[str, tuple[BaseException, str]] = {
    "tiles that do not fit": (OutOfResources(131072, 65536, "shared memory"), "out of resource: shared memory"),
    "a kernel that does not compile": (CompilationError("a = b", ast.parse("a").body[0], "no such name"), "at 1:0"),
    "hipcc fails": (subprocess.CalledProcessError(1, ["hipcc", "pa_ragged.cpp"]), "Command '['hipcc'"),
    "an assertion without words": (AssertionError(), "it raised AssertionError"),
    "a value": (ValueError("unsupported head size"), "it raised 'unsupported head size'"),
    "a table without the key": (KeyError(96), "it raised '96'"),
    "a module that is not there": (ImportError("No module named 'flydsl'"), "No module named 'flydsl'"),
    "a library that is not there": (OSError("librocm.so.7: cannot open"), "librocm.so.7"),
    "a failed build leaves": (SystemExit("[aiter] build failed"), "it raised '[aiter] build failed'"),
    "no memory on the host": (MemoryError(), "it raised MemoryError"),
    "no memory on the device": (torch.OutOfMemoryError("HIP out of memory"), "HIP out of memory"),
    "a keyword that it does not take": (TypeError("not 'stream'"), "it raised \"not 'stream'\""),
    "a function that is not there": (AttributeError("no attribute 'launch_reduce'"), "no attribute 'launch_reduce'"),
    "no variant": (RuntimeError("no matching kernel found\nsecond line"), "it raised 'no matching kernel found' in"),
}
LACK_MEMORY = {"no memory on the host", "no memory on the device"}


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", FAILURES)
def test_a_kernel_that_fails_is_switched_off_with_what_it_raised(name: str, aiter: StandIn, own_cache: Path) -> None:
    error, said = FAILURES[name]
    aiter.fail("paged_attention_ragged", error)
    selection = world(PROBLEM).runtime.selections[0]
    assert selection.kernels[StepKind.DECODE].entry.name == "aiter.unified_attention"
    (reason,) = (r.reason for r in selection.refusals if r.kernel == "aiter.paged_attention_ragged")
    assert reason.startswith("switched off by its probe: it raised ")
    assert said in reason
    # The verdict on the kernels that serve instead is always written.
    kept = [place.read_text() for place in own_cache.iterdir()]
    assert any("paged_attention_ragged" in verdict for verdict in kept) == (name not in LACK_MEMORY)


def test_a_schedule_that_fails_switches_its_kernel_off(aiter: StandIn) -> None:
    """The schedule is made when a step begins, before its kernel is called."""
    aiter.fail("get_mla_metadata_v1", ValueError("unsupported head size"))
    selection = world(latent_problem(16), max_kv_len=80).runtime.selections[0]
    assert selection.kernels[StepKind.DECODE].entry.name == "aiter.mla_decode_fwd"
    scheduled = "aiter.mla_decode_fwd+get_mla_metadata_v1"
    (reason,) = (each.reason for each in selection.refusals if each.kernel == scheduled)
    assert reason.startswith(
        "switched off by its probe: it raised 'unsupported head size' in a decode step of lengths "
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WrongState("of our own")], ids=["a user", "our own mistake"])
def test_what_is_no_failure_of_the_library_is_raised(error: BaseException, aiter: StandIn) -> None:
    aiter.fail("paged_attention_ragged", error)
    with pytest.raises(type(error)):
        world(PROBLEM)


def test_a_sequence_without_new_tokens_that_spoils_its_neighbour_is_noticed(aiter: StandIn) -> None:
    """No caller of AITER's own passes such sequences to mla_prefill_fwd, but padding makes them; so the probe does."""
    right = aiter.bodies["mla_prefill_fwd"]

    def wrong(call: Mapping[str, Any]) -> None:
        right(call)
        empty = (call["qo_indptr"].diff() == 0).nonzero().flatten().tolist()
        for seq in empty:
            call["o"][int(call["qo_indptr"][seq]) :][:1] = 1.0

    aiter.bodies["mla_prefill_fwd"] = wrong
    with pytest.raises(Unsupported, match="serves extend and mixed steps"):
        world(latent_problem(16), max_kv_len=80)
