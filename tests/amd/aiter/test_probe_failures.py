"""Whatever a kernel of another library raises in the probe refuses it, with that error; the next one serves."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported, WrongState
from tests.amd.aiter.serving import latent_problem, plain_problem, world
from tests.amd.aiter.stand_in import StandIn

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
