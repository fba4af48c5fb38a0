"""A layer that stores and attends in one launch is prepared like other calls."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from rocm_attn.kernels.launch import launch
from rocm_attn.step import prepared
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.prepared import PreparedCalls, forms_alike
from tests.amd.host.test_prepared_calls import STREAM, WITH_SINKS, Kernel, forms_of, kv, q_and_out


def test_one_launch_for_both_is_made_again_with_what_it_is_given_now() -> None:
    forms, pool, weights = forms_of(WITH_SINKS)
    weights.set(0, HeadWeights(sinks=torch.zeros(8)))
    kernel, calls = Kernel(("k", "v", "q", "out", "lse", "pages", "sinks")), PreparedCalls()

    def make(k: Tensor, v: Tensor, q: Tensor, out: Tensor, lse: Tensor | None = None) -> str:
        """Returns how the call was made."""
        if lse is None and forms.both_again(calls, 0, q, k, v, out):
            return "the same"
        call = forms.store_and_attend(calls, 0, q, k, v, out, lse)
        if call is None:
            return "prepared"
        with calls.noting(call, ()):
            launch(kernel, (1,), k, v, q, out, lse, pool.layer(0).raw_k, weights.of(0).sinks)
        return "as it is"

    def ran_with(*given: Tensor | None) -> bool:
        """True if the last launch got these, and the layer's current memory."""
        sinks = weights.of(0).sinks
        addresses = [None if each is None else each.data_ptr() for each in (*given, pool.layer(0).raw_k, sinks)]
        return kernel.ran[-1][3] == STREAM and list(kernel.ran[-1][-7:]) == addresses

    given, other, lse = (*kv(), *q_and_out()), (*kv(), *q_and_out()), torch.zeros(4, 8)
    assert [make(*given) for _ in range(4)] == ["as it is", "prepared", "prepared", "the same"]
    assert ran_with(*given, None)
    for at in range(4):
        changed = [*given[:at], other[at], *given[at + 1 :]]
        assert make(*changed) == "prepared"
        assert ran_with(*changed, None)
    assert [make(*given, lse) for _ in range(3)] == ["as it is", "prepared", "prepared"]
    assert ran_with(*given, lse)
    weights.set(0, HeadWeights(sinks=torch.ones(8)))
    assert [make(*given) for _ in range(2)] == ["prepared", "the same"]
    assert ran_with(*given, None)


def test_what_asks_for_all_forms_holds_no_tensor_and_takes_none_twice() -> None:
    q, out = q_and_out()
    same = forms_alike(q, out)
    assert same is not None
    gone = weakref.ref(q)
    del q
    gc.collect(1)
    assert gone() is None
    assert same(*q_and_out())
    assert not same(*q_and_out(5))
    assert forms_alike(out, out) is None


def test_without_torchs_check_forms_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_TENSOR_GUARDS", None)
    assert forms_alike(*q_and_out()) is None
