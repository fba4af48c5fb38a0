"""A prepared call launches the same as the call itself. Calls that cannot be prepared are not."""

import gc
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from math import prod
from threading import Thread
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopePairs, RopeTable, RowNorm
from rocm_attn.kernels.launch import (
    FixedLaunch,
    Launch,
    does_only_launch,
    launch,
    note_launches,
    only_launches,
    run_as_launch,
)
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.kv_pool import HybridKVPool
from rocm_attn.problem import Problem
from rocm_attn.step import prepared
from rocm_attn.step.head_weights import HeadWeights, LayerHeadWeights
from rocm_attn.step.prepared import AddressedCall, LayerForms, PreparedCalls, forms_alike

STREAM = 77
NOTHING_PREPARED = PreparedCalls()


@dataclass
class Kernel:
    """A jitted function that records the runs of its variants. Parameters in upper case are constexpr."""

    arg_names: tuple[str, ...]
    ran: list[tuple[object, ...]] = field(default_factory=list)
    by_triton: int = 0

    @property
    def params(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(is_constexpr=name.isupper()) for name in self.arg_names]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            self.by_triton += 1
            return SimpleNamespace(run=self._run, function="function", packed_metadata="metadata")

        return run

    def _run(self, *args: object) -> None:
        self.ran.append(args)


def stream() -> int:
    return STREAM


def calls_after(
    make: Callable[[], object], *tensors: Tensor, memory: object = (), form: Hashable = "form"
) -> tuple[PreparedCalls, AddressedCall]:
    calls = PreparedCalls()
    call = AddressedCall(form, tuple(tensor.data_ptr() for tensor in tensors), len(tensors))
    with calls.noting(call, memory):
        make()
    return calls, call


def made_again(calls: PreparedCalls, call: AddressedCall) -> bool:
    """Makes a call if one of its form was prepared. True if it was made."""
    prepared = calls.by_form.get(call.form)
    if prepared is not None:
        for run, arguments in prepared.launches(STREAM, call.addresses):
            run(*arguments)
    return prepared is not None


def rows(count: int = 4) -> Tensor:
    return torch.zeros(count, 8)


def test_a_prepared_call_runs_the_same_variants_with_its_own_addresses() -> None:
    kernel, q, out, table = Kernel(("q", "out", "table", "scale", "lse", "G")), rows(), rows(), rows()
    calls, _ = calls_after(
        lambda: launch(kernel, (3, 2), q, out, table, 0.5, None, G=("any", 1)), q, out, memory=(table,)
    )
    assert kernel.by_triton == 1
    other_q, other_out = rows(), rows()
    assert made_again(calls, AddressedCall("form", (other_q.data_ptr(), other_out.data_ptr()), 2))
    handles = "function", "metadata", None, None, None
    own = other_q.data_ptr(), other_out.data_ptr(), table.data_ptr(), 0.5, None, ("any", 1)
    assert kernel.ran == [(3, 2, 1, STREAM, *handles, *own)]
    assert kernel.by_triton == 1


def test_launches_of_a_call_come_in_their_order() -> None:
    q, kernel = rows(), Kernel(("q",))

    def launches() -> None:
        for programs in (1, 2, 3):
            launch(kernel, (programs,), q)

    calls, call = calls_after(launches, q)
    assert made_again(calls, call)
    assert [ran[0] for ran in kernel.ran] == [1, 2, 3]


@pytest.mark.parametrize(
    "hidden",
    [lambda q: torch.zeros(4), lambda q: SimpleNamespace(base=q), lambda q: q[1:]],
    ids=["memory that is not the call's nor the step's", "memory within an argument", "a part of the call's memory"],
)
def test_an_argument_whose_memory_is_not_known_is_not_prepared(hidden: Callable[[Tensor], object]) -> None:
    q, kernel = rows(), Kernel(("q", "other"))
    calls, call = calls_after(lambda: launch(kernel, (1,), q, hidden(q)), q)
    assert not made_again(calls, call)


def test_a_part_of_the_steps_memory_stays_where_it_is() -> None:
    q, kernel, workspace = rows(), Kernel(("q", "scratch")), torch.zeros(64)
    calls, call = calls_after(lambda: launch(kernel, (1,), q, workspace[32:]), q, memory={"workspace": workspace})
    assert made_again(calls, call)
    assert kernel.ran[0][-1] == workspace[32:].data_ptr()


def test_a_call_that_does_other_work_is_not_prepared() -> None:
    q, kernel = rows(), Kernel(("q",))
    fixed = FixedLaunch(Kernel(("first", "second")), q.device, (1, 1, 1), q)
    for other_work in (lambda: run_as_launch(q.zero_), lambda: fixed(q)):

        def make(other_work: Callable[[], object] = other_work) -> None:
            launch(kernel, (1,), q)
            other_work()

        calls, call = calls_after(make, q)
        assert not made_again(calls, call)


def test_nothing_that_runs_under_an_interpreter_is_prepared() -> None:
    q = rows()

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: None

    calls, call = calls_after(lambda: launch(Interpreted(), (1,), q), q)
    assert not made_again(calls, call)


def test_a_call_that_raises_is_not_prepared() -> None:
    q, kernel, calls = rows(), Kernel(("q",)), PreparedCalls()
    call = AddressedCall("form", (q.data_ptr(),), 1)
    try:
        with calls.noting(call, ()):
            launch(kernel, (1,), q)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not made_again(calls, call)


def test_tensors_that_begin_between_multiples_of_16_bytes_are_left_to_triton() -> None:
    memory, kernel = torch.zeros(64), Kernel(("q",))
    odd, even = memory[1:5], memory[4:8]
    calls, call = calls_after(lambda: launch(kernel, (1,), odd), odd)
    assert not made_again(calls, call), "prepared by an odd address"
    calls, call = calls_after(lambda: launch(kernel, (1,), even), even)
    assert made_again(calls, call)


@pytest.mark.parametrize("odd_one", range(5))
def test_a_prepared_form_is_not_used_for_tensors_that_begin_elsewhere(odd_one: int) -> None:
    """Makes the layer's calls of a prepared form, with one tensor at an odd address, and with none."""
    forms, *_ = forms_of(PLAIN)
    kernel, calls = Kernel(("first",)), PreparedCalls()

    def given(odd: bool) -> list[Tensor]:
        sizes = [(4, 2, 16), (4, 2, 16), (4, 8, 16), (4, 8, 16), (4, 8)]
        return [rows_at(1 if odd and at == odd_one else 0, *size) for at, size in enumerate(sizes)]

    def made(tensors: list[Tensor]) -> list[AddressedCall | None]:
        k, v, q, out, lse = tensors
        roped = forms.rope_and_store(calls, 0, Projected(q, k, v, out), QkvWork())
        return [forms.store(calls, 0, k, v), roped, forms.attend(calls, 0, q, out, lse)]

    for call in made(given(odd=False)):
        assert call is not None
        with calls.noting(call, ()):
            launch(kernel, (1,), 1)
    assert made(given(odd=False)) == [None] * 3
    assert len(kernel.ran) == 3
    has_it = [odd_one < 2, odd_one < 4, odd_one >= 2]
    assert [call is not None for call in made(given(odd=True))] == has_it


@pytest.mark.parametrize("is_after", [False, True])
def test_a_prepared_form_is_not_used_for_tensors_that_share_memory(is_after: bool) -> None:
    """The checks of a call see it; a form that is prepared makes none of them."""
    forms, *_ = forms_of(PLAIN)
    kernel, calls, memory = Kernel(("first",)), PreparedCalls(), torch.zeros(4096)

    def at(first: int, heads: int) -> Tensor:
        return memory[first:].as_strided((4, heads, 16), (128, 16, 1))

    def made(q: int, out: int) -> list[AddressedCall | None]:
        k, v, sides = at(2048, 2), at(2080, 2), (at(q, 8), at(out, 8))
        roped = forms.rope_and_store(calls, 0, Projected(sides[0], k, v, sides[1]), QkvWork())
        lse = torch.zeros(4, 8)
        with_lse = [
            forms.attend(calls, 0, *sides, lse),
            forms.store_and_attend(calls, 0, sides[0], k, v, sides[1], lse),
        ]
        without = [
            forms.attend(calls, 0, *sides, None),
            forms.store_and_attend(calls, 0, sides[0], k, v, sides[1], None),
        ]
        return [roped, *with_lse, *without]

    for call in made(0, 512):
        assert call is not None
        with calls.noting(call, ()):
            launch(kernel, (1,), 1)
    assert made(0, 512) == made(1024, 1536) == made(1024, 512) == [None] * 5
    assert None not in (made(1024, 1532) if is_after else made(1024, 516))


def test_a_layer_that_lets_go_of_its_pages_keeps_its_forms_alone() -> None:
    forms, *_ = forms_of(PLAIN)
    kernel, calls, tensors = Kernel(("q",)), PreparedCalls(), q_and_out()
    with calls.noting(attend(forms, 0, *tensors, None), ()):
        launch(kernel, (1,), 1)
    for _ in range(2):  # launches are kept from the second time on
        assert forms.attend(calls, 0, *tensors, None) is None
    assert calls.attended[0].owners[0] is forms._memories["attend", 0].owners[0]
    forms.let_go(calls, 0)
    assert not calls.attended
    assert not forms._memories
    assert forms.attend(calls, 0, *tensors, None) is None
    assert len(kernel.ran) == 3


def rows_at(first: int, *sizes: int) -> Tensor:
    """Returns a contiguous tensor that begins `first` elements after a multiple of 16 bytes."""
    return torch.zeros(prod(sizes) + first)[first:].view(sizes)


def test_a_tensor_that_is_also_the_layers_is_not_prepared() -> None:
    q, kernel = rows(), Kernel(("q", "pages"))
    calls = PreparedCalls()
    call = AddressedCall("form", (q.data_ptr(), q.data_ptr()), 1)
    with calls.noting(call, ()):
        launch(kernel, (1,), q, q)
    assert not made_again(calls, call)


def test_a_step_remembers_a_limited_number_of_forms() -> None:
    q, kernel, calls = rows(), Kernel(("q",)), PreparedCalls()
    made = []
    for form in range(100):
        call = AddressedCall(form, (q.data_ptr(),), 1)
        with calls.noting(call, ()):
            launch(kernel, (1,), q)
        made.append(made_again(calls, call))
    assert 16 <= sum(made) <= 64


def test_launches_of_another_thread_are_not_noted() -> None:
    kernel, q = Kernel(("q",)), rows()
    with note_launches() as notes:
        other = Thread(target=lambda: launch(kernel, (1,), q))
        other.start()
        other.join()
        launch(kernel, (2,), q)
    assert [noted.grid for noted in notes.launches] == [(2,)]
    assert isinstance(notes.launches[0], Launch)


def test_what_is_wrapped_around_a_launcher_has_to_say_for_itself_that_it_only_launches() -> None:
    @only_launches
    def launcher() -> None:
        pass

    def wrapped() -> None:
        launcher()

    wrapped.__dict__.update(launcher.__dict__)
    assert does_only_launch(launcher)
    assert not does_only_launch(wrapped)


CPU = torch.device("cpu")
PLAIN = Problem(8, 2, 16, torch.float32, 16, v_head_dim=16, scale=0.25)
WITH_SINKS = replace(PLAIN, has_sinks=True)


def forms_of(*problems: Problem) -> tuple[LayerForms, HybridKVPool, LayerHeadWeights]:
    pool = HybridKVPool(problems, [Space.FULL] * len(problems), num_pages={Space.FULL: 4}, device=CPU)
    weights = LayerHeadWeights(problems, CPU)
    kinds = sorted(set(problems), key=problems.index)
    return LayerForms([kinds.index(problem) for problem in problems], pool, weights, stream), pool, weights


def test_a_call_without_a_tensor_is_left_to_its_checks() -> None:
    forms, _, _ = forms_of(PLAIN)
    call, nothing = AddressedCall(None, (), 0), cast(Tensor, None)
    assert forms.store(NOTHING_PREPARED, 0, *kv()) != call
    assert forms.store(NOTHING_PREPARED, 0, kv()[0], nothing) == call
    assert forms.attend(NOTHING_PREPARED, 0, nothing, q_and_out()[1], None) == call
    assert not forms.both_again(NOTHING_PREPARED, 0, q_and_out()[0], nothing, kv()[1], q_and_out()[1])
    for layer in (-1, 1):
        with pytest.raises(BadTensor, match=f"layer {layer} does not exist; the runtime has layers 0 to 0"):
            forms.both_again(NOTHING_PREPARED, layer, q_and_out()[0], *kv(), q_and_out()[1])


def kv(tokens: int = 4) -> tuple[Tensor, Tensor]:
    return torch.zeros(tokens, 2, 16), torch.zeros(tokens, 2, 16)


def q_and_out(tokens: int = 4) -> tuple[Tensor, Tensor]:
    return torch.zeros(tokens, 8, 16), torch.zeros(tokens, 8, 16)


def store(forms: LayerForms, layer: int, k: Tensor, v: Tensor) -> AddressedCall:
    call = forms.store(NOTHING_PREPARED, layer, k, v)
    assert call is not None
    return call


def rope_and_store(forms: LayerForms, layer: int, given: Projected, work: QkvWork) -> AddressedCall:
    call = forms.rope_and_store(NOTHING_PREPARED, layer, given, work)
    assert call is not None
    return call


def attend(forms: LayerForms, layer: int, q: Tensor, out: Tensor, lse: Tensor | None) -> AddressedCall:
    call = forms.attend(NOTHING_PREPARED, layer, q, out, lse)
    assert call is not None
    return call


def test_tensors_of_other_sizes_strides_or_dtypes_make_another_form() -> None:
    forms, *_ = forms_of(PLAIN)
    q, out = q_and_out()
    others = [
        (torch.zeros(5, 8, 16), out, None),
        (torch.zeros(4, 16, 16)[:, :8], out, None),
        (torch.zeros(8, 4, 16).transpose(0, 1), out, None),
        (q.bfloat16(), out, None),
        (q, torch.zeros(4, 9, 16)[:, :8], None),
        (q, out.half(), None),
        (q, q, None),
        (q, out, torch.zeros(4, 8)),
        (q, out, torch.zeros(8, 4).T),
        (q.to("meta"), out, None),
    ]
    known = {attend(forms, 0, q, out, None).form, *(attend(forms, 0, *other).form for other in others)}
    assert len(known) == 1 + len(others)
    k, v = kv()
    stores = [(k, v), (k, k), (torch.zeros(4, 4, 16)[:, :2], v), (k, torch.zeros(4, 4, 16)[:, :2]), (k.half(), v)]
    assert len({store(forms, 0, *each).form for each in stores}) == len(stores)


def test_another_norm_or_rope_makes_another_form_and_its_weights_are_used() -> None:
    forms, *_ = forms_of(PLAIN)
    q, out = q_and_out()
    given = Projected(q, *kv(), out)
    table = torch.ones(8, 16)
    works = [
        QkvWork(),
        QkvWork(rope=RopeTable(table)),
        QkvWork(rope=RopeTable(table, RopePairs.NEIGHBOURS)),
        QkvWork(rope=RopeTable(torch.ones(8, 8))),
        QkvWork(rope=RopeTable(torch.ones(8, 8), at_end=True)),
        QkvWork(q_norm=RowNorm(torch.ones(16), 1e-6)),
        QkvWork(q_norm=RowNorm(torch.ones(16), 1e-5)),
        QkvWork(q_norm=RowNorm(torch.ones(16), 1e-6, 1.0)),
        QkvWork(k_norm=RowNorm(torch.ones(16), 1e-6)),
    ]
    assert len({rope_and_store(forms, 0, given, work).form for work in works}) == len(works)
    again = QkvWork(rope=RopeTable(table.clone()))
    call = rope_and_store(forms, 0, given, again)
    assert call.form == rope_and_store(forms, 0, given, works[1]).form
    assert again.rope is not None
    assert again.rope.cos_sin.data_ptr() in call.addresses
    in_place = rope_and_store(forms, 0, given._replace(q_out=q), again)
    assert in_place.form != call.form


def test_what_was_prepared_by_aligned_memory_is_not_used_for_a_layer_whose_memory_is_not() -> None:
    forms, pool, _ = forms_of(PLAIN, PLAIN)
    given = Projected(torch.zeros(4, 8, 16), *kv(), torch.zeros(4, 8, 16))
    aligned, odd = (QkvWork(q_norm=RowNorm(rows_at(first, 16), 1e-6)) for first in (0, 1))
    assert rope_and_store(forms, 0, given, aligned).form != rope_and_store(forms, 0, given, odd).form
    before = store(forms, 1, *kv()).form
    pages = pool.layer(1)
    pool.take(1, LayerPages.plain(*(rows_at(2, *side.shape) for side in (pages.k, pages.v))))
    assert store(forms, 1, *kv()).form != before


def test_a_variant_that_is_launched_again_stays_loaded() -> None:
    """Triton unloads variants without a holder."""

    class Variant(SimpleNamespace):
        pass

    class Compiled:
        """A jitted function that does not keep its variants."""

        params = (SimpleNamespace(is_constexpr=False),)
        arg_names = ("q",)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def run(*args: object, **options: object) -> object:
                made = Variant(run=lambda *args: None, function="function", packed_metadata="metadata")
                variants.append(weakref.ref(made))
                return made

            return run

    variants: list[weakref.ref[Variant]] = []
    q = rows()
    calls, call = calls_after(lambda: launch(Compiled(), (1,), q), q)
    assert made_again(calls, call)
    assert variants[0]() is not None
    del calls, call
    gc.collect(1)
    assert variants[0]() is None


def test_a_fixed_launch_hands_over_what_it_is_given_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps launch data by stream and addresses, and never more than a few."""
    handle = [STREAM]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: handle[0], raising=False)
    kernel, to = Kernel(("slot", "counts", "to", "N")), rows()
    publish = FixedLaunch(kernel, torch.device("cuda", 0), (2, 1, 1), to, 7, num_warps=4)
    slots = [rows() for _ in range(70)]
    publish(slots[0], to)
    assert kernel.by_triton == 1
    handles = "function", "metadata", None, None, None
    for slot in (slots[0], slots[1], slots[0], *slots):
        for handle[0] in (STREAM, STREAM + 1):
            publish(slot, to)
            expected = (2, 1, 1, handle[0], *handles, slot.data_ptr(), to.data_ptr(), to.data_ptr(), 7)
            assert kernel.ran[-1] == expected
    assert (kernel.by_triton, len(kernel.ran)) == (1, 2 * 73)
    assert 0 < len(publish._handed) <= 64


def test_a_layer_that_stores_and_attends_again_in_one_call_launches_what_it_is_given_now() -> None:
    pool = HybridKVPool([WITH_SINKS], [Space.FULL], num_pages={Space.FULL: 4}, device=CPU)
    weights = LayerHeadWeights([WITH_SINKS], CPU, renew=lambda owned, given: given.clone())
    weights.set(0, HeadWeights(sinks=torch.zeros(8)))
    streams, calls = [STREAM], PreparedCalls()
    forms = LayerForms([0], pool, weights, lambda: streams[-1])
    kernel = Kernel(("one", "other", "pages", "sinks"))

    def make(k: Tensor, v: Tensor, q: Tensor, out: Tensor) -> bool:
        """True if both were made at once."""
        by_triton, before = kernel.by_triton, len(kernel.ran)
        at_once = forms.both_again(calls, 0, q, k, v, out)
        if not at_once:
            stored, attended = forms.store(calls, 0, k, v), forms.attend(calls, 0, q, out, None)
            if stored is not None:
                with calls.noting(stored, ()):
                    launch(kernel, (1,), k, v, pool.layer(0).raw_k, None)
            if attended is not None:
                with calls.noting(attended, ()):
                    launch(kernel, (1,), q, out, pool.layer(0).raw_k, weights.of(0).sinks)
            forms.join(calls, layer=0)
        if kernel.by_triton == by_triton:
            assert len(kernel.ran) == before + 2
            sinks = weights.of(0).sinks
            assert sinks is not None
            pages, on = pool.layer(0).raw_k.data_ptr(), streams[-1]
            for ran, one, other, last in zip(kernel.ran[-2:], (k, q), (v, out), (None, sinks.data_ptr()), strict=True):
                assert (ran[3], *ran[-4:]) == (on, one.data_ptr(), other.data_ptr(), pages, last)
        return at_once

    (k, v), (q, out), (other_k, other_v), (other_q, other_out) = kv(), q_and_out(), kv(), q_and_out()
    made = [make(k, v, q, out) for _ in range(5)]
    assert made == [False, False, False, True, True]
    for changed in ((other_k, v, q, out), (k, other_v, q, out), (k, v, other_q, out), (k, v, q, other_out)):
        assert not make(*changed)
        assert [make(k, v, q, out) for _ in range(2)] == [False, True]
    assert not make(k[:3], v[:3], q[:3], out[:3])
    streams.append(STREAM + 1)
    assert [make(k, v, q, out) for _ in range(2)] == [False, True]
    weights.set(0, HeadWeights(sinks=torch.ones(8)))
    assert [make(k, v, q, out) for _ in range(2)] == [False, True]
    pages = pool.layer(0)
    pool.take(0, LayerPages.plain(pages.k.clone(), pages.v.clone()))
    assert [make(k, v, q, out) for _ in range(2)] == [False, True]


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
