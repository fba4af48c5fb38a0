"""The cases that run on a real MI300 (tests/amd/rocm/test_aiter.py), on the stand-in."""

from collections import Counter

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.problem import KVEncoding, PoolKind
from rocm_attn.providers.aiter.entries import ENTRIES
from tests.amd.aiter.eight_bit_world import eight_bit_kinds
from tests.amd.aiter.every_kernel import Case, cases, graphs_equal_eager, largest_error, selection_of
from tests.amd.aiter.serving import CPU, GFX942, functions_of
from tests.amd.aiter.stand_in import StandIn

CASES = list(cases(GFX942))
# A few cases for each kernel and kind of step: the stand-in computes in float64 on one core.
_SOME = (
    "64x64-pages of 16",
    "128x128-pages of 16",
    "128x128-pages of 1024",
    "window and sinks",
)
# These go through 1024 keys of float64 for each token.
_SLOW = "128x128-pages of 1024"
# Fewer cases in 8 bits: the granularity of the scale, and the side that multiplies by it.
_SOME_EIGHT_BITS = ("128x128-pages of 16", "192x128-pages of 16")


def _is_some(case: Case) -> bool:
    what, _, coded = case.what.partition(f"-{case.problem.kv_encoding.name} ")
    if case.problem.pool is PoolKind.LATENT:
        return what == ("24 heads" if coded == "LAYER" else "8 heads")
    if not coded:
        return what.removesuffix("-vectorised") in _SOME
    is_first = case.problem.dtype == torch.bfloat16 and case.problem.kv_encoding is not KVEncoding.E5M2
    return is_first and what.removesuffix("-vectorised") in _SOME_EIGHT_BITS


SOME = [case for case in CASES if _is_some(case)]


def test_every_bound_kernel_and_kind_of_step_has_cases_with_every_dtype_and_page_size() -> None:
    counted = Counter((case.entry.name, case.entry.kind) for case in CASES)
    for entry in ENTRIES:
        if not entry.not_bound:
            own = [case.problem for case in CASES if case.entry is entry]
            assert counted[entry.name, entry.kind] >= 2
            assert {problem.dtype for problem in own} == set(entry.limits.dtypes)
            assert {problem.page_size for problem in own} >= set(entry.limits.page_sizes)
            dims = {(problem.head_dim, problem.v_head_dim) for problem in own}
            assert dims == set(entry.limits.exact_dims)
            kinds = {KVEncoding.LIKE_Q} & set(entry.limits.encodings) | {
                *eight_bit_kinds(entry.limits.encodings, "gfx942")
            }
            assert {problem.kv_encoding for problem in own} == kinds
            assert {problem.kv_scales for problem in own} == set(entry.limits.scales)


def _marked(case: Case) -> object:
    """Marks a case as a nightly one or not.

    Every run has the first of five cases of a row, in one of its dtypes, by turns; among slow cases only those of
    decode. Mixed steps run at night if the function's extend steps are among the cases: both call it in the same way.
    """
    of_entry = [other for other in SOME if other.entry is case.entry]
    turn = list(dict.fromkeys(other.what for other in of_entry)).index(case.what)
    dtypes = [other.problem.dtype for other in of_entry if other.what == case.what]
    is_slow = case.what.startswith(_SLOW) and case.entry.kind is not StepKind.DECODE
    is_other = case.problem.dtype != dtypes[turn % len(dtypes)]
    extends = any(other.entry.name == case.entry.name and other.entry.kind is StepKind.EXTEND for other in SOME)
    is_repeated = case.entry.kind is StepKind.MIXED and extends
    is_later = turn % 5 > 0
    return pytest.param(case, marks=[pytest.mark.nightly] * (is_slow or is_other or is_repeated or is_later))


@pytest.mark.fast(6)
@pytest.mark.parametrize("case", [_marked(case) for case in SOME], ids=str)
def test_a_case_passes_on_the_stand_in(case: Case, aiter: StandIn) -> None:
    error = largest_error(case, CPU, selection_of(case, GFX942, "aiter"))
    assert error > 0
    assert set(functions_of(case.entry)) <= set(aiter.calls)


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "name",
    [
        "aiter.unified_attention",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in (
                "aiter.unified_attention[vectorised]",
                "aiter.mha_batch_prefill_func[vectorised]",
            )
        ),
        "aiter.pa_decode_gluon",
        "aiter.mla_decode_fwd+get_mla_metadata_v1[fp8]",
        "aiter.mha_batch_prefill_func[fp8]",
    ],
)
def test_a_captured_case_passes_on_the_stand_in(name: str, aiter: StandIn) -> None:
    case = next(case for case in SOME if case.entry.name == name)
    assert graphs_equal_eager(case, CPU, selection_of(case, GFX942, "aiter"))
    assert set(functions_of(case.entry)) <= set(aiter.calls)


def test_a_kernel_that_is_wrong_fails_its_case(aiter: StandIn) -> None:
    case = next(case for case in SOME if case.entry.name == "aiter.paged_attention_ragged")
    aiter.change("paged_attention_ragged", lambda call: {"scale": call["scale"] * 1.5})
    with pytest.raises(AssertionError, match="not close"):
        largest_error(case, CPU, selection_of(case, GFX942, "aiter"))
