"""Errors of callers: one sentence, nothing corrupted, and the next step runs."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.mask import TokenSpans, spans_of_blocks
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch, draft_batch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, BadProblem, BadSetting, BadTensor, CapacityExceeded, Unsupported, WrongState
from rocm_attn.external import Bounds, ExternalAttention, LayerSource
from rocm_attn.machine.target import known_target
from rocm_attn.paging.adopted import TableSource
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step import buffers
from rocm_attn.step.external_step import BoolCells, DeviceSpans
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.tensor_checks import TensorChecks
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

# Left out under the interpreter by day: no Triton kernel runs here, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)

PROVIDER = "torch"


@pytest.fixture
def world(device: torch.device) -> World:
    built = World.build([small_problem()], device, PROVIDER)
    built.step([built.admit(), built.admit()], [3, 5])
    return built


@pytest.mark.parametrize(
    ("rows", "kv_len", "q_len"),
    [([1], [50], [1]), ([0], [1], [1]), ([7], [1], [1]), ([1, 1], [3, 3], [1, 1]), ([-1], [2], [1])],
)
def test_a_bad_batch_leaves_the_runtime_ready(
    world: World, rows: list[int], kv_len: list[int], q_len: list[int]
) -> None:
    with pytest.raises(BadBatch):
        world.runtime.step(StepBatch(np.array(rows), np.array(kv_len), np.array(q_len), NO_TOKEN_IDS))
    world.step(world.requests, [1, 1])


@pytest.mark.parametrize("given", [None, [1, 2], "x"])
def test_values_of_another_kind_are_named_and_the_next_step_runs(world: World, given: Any) -> None:
    runtime, kept = world.runtime, world.runtime.table.kept
    runner = StepRunner(runtime, lambda part: torch.zeros(0), None)
    calls: dict[str, list[Callable[[], object]]] = {
        "the batch": [partial(call, given) for call in (runtime.step, runtime.stage, runtime.plan, runner.run)],
        "head weights of layer 0": [lambda: runtime.head_weights.set(0, given)],
        "scales of layer 0": [lambda: runtime.set_kv_scales(0, given)],
        "accepted": [lambda: runtime.move_accepted(given)],
        "a layer's problem": [lambda: build_runtime([given], runtime.options, device="cpu")],
        "options": [lambda: build_runtime([small_problem()], given, device="cpu")],
        "recurrent": [lambda: build_runtime([small_problem()], runtime.options, given, device="cpu")],
        "drafts of a round": [lambda: draft_batch([1], [3], given)],
        "spans": [lambda: DeviceSpans(given)],
        "cells of a mask": [lambda: BoolCells(given, torch.zeros(1, dtype=torch.int32))],
    }
    for name, its in calls.items():
        for call in its:
            with pytest.raises((BadBatch, BadSetting, BadTensor), match=f"^{name} is a {type(given).__name__}; "):
                call()
    for groups in (None, [given]):
        with pytest.raises(BadBatch, match=r"groups? is a \w+; it must be of type "):
            SharedPrefixes(groups)  # type: ignore[arg-type]
    readers: dict[str, Callable[[Any], object]] = {
        "ids of kept pages are object of shape": kept.drop,
        "spans are object of shape": lambda values: TokenSpans(values, runtime.device),
        "give whole numbers": lambda values: spans_of_blocks(values, [], 1, runtime.device),
    }
    for message, read in readers.items():
        with pytest.raises(BadBatch, match=message):
            read([[1], [2, 3]])
        with pytest.raises(BadBatch, match="cannot be read as integers on the host: "):
            read(torch.ones(2, device="meta"))
    for spaces in (given, Space.FULL):
        with pytest.raises(BadSetting, match=r"spaces is .*; give a list of Spaces"):
            kept.drop([], spaces)  # type: ignore[arg-type]
    world.step(world.requests, [1, 1])


@pytest.mark.parametrize(
    "sizes",
    [PadTo(2**31), PadTo(2, 10**30), PadTo(2, 0, 2**40), PadTo(2, -1), PadTo(2.0), PadTo("2"), PadTo(True), (2, 8)],  # type: ignore[arg-type]
)
def test_sizes_that_are_no_int32_are_refused(world: World, sizes: PadTo) -> None:
    batch = world.batch(world.requests, [1, 1])
    with pytest.raises(BadBatch, match="pad_to is "):
        world.runtime.plan(batch, sizes)
    with pytest.raises(BadBatch, match=r"plan is .*; give what runtime\.plan\(batch\) returns"):
        world.runtime.stage(batch, sizes)  # type: ignore[arg-type]
    world.step(world.requests, [1, 1])


@pytest.mark.parametrize("sizes", [PadTo(2**31 - 1), PadTo(2, 2**31 - 1)])
def test_a_step_that_the_device_has_no_memory_for_is_refused_before_it_takes_any(
    world: World, sizes: PadTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "memory_of", lambda device: 1 << 33)  # large devices would have enough
    batch = world.batch(world.requests, [1, 1])
    with pytest.raises(CapacityExceeded, match=r"needs \d+ bytes for its lengths and tables, and .*; pad to less"):
        world.runtime.step(batch, world.runtime.plan(batch, sizes))
    world.step(world.requests, [1, 1])


def broken(name: str, tensor: Tensor) -> Any:
    ways: dict[str, Callable[[], Any]] = {
        "shape": lambda: tensor[:-1],
        "heads": lambda: tensor[:, :1],
        "dtype": lambda: tensor.to(torch.float16),
        "strides": lambda: tensor.transpose(1, 2).contiguous().transpose(1, 2),
        "signs": lambda: torch.complex(tensor, tensor).conj().imag,
        "device": lambda: tensor.to("meta"),
        "nothing": lambda: None,
        "list": lambda: tensor.tolist(),
        "array": lambda: tensor.cpu().numpy(),
    }
    return ways[name]()


@pytest.mark.parametrize(
    ("fault", "message", "argument"),
    [
        (*fault, argument)
        for argument in ("q", "k", "v", "out")
        for fault in (
            ("shape", "has shape"),
            ("heads", "has shape"),
            ("dtype", "float16"),
            ("strides", "contiguous"),
            ("signs", "contiguous"),
            ("device", "meta"),
            ("nothing", "is a NoneType; give a tensor"),
            ("list", "is a list; give a tensor"),
            ("array", "is a ndarray; give a tensor"),
        )
    ],
)
def test_a_bad_tensor_is_named_and_the_step_goes_on(world: World, argument: str, fault: str, message: str) -> None:
    requests, q_len = world.requests, [2, 1]
    step = world.runtime.step(world.batch(requests, q_len)).parts[0]
    q, k, v = world.qkv(world.problems[0], step)
    world.remember(0, requests, q_len, k, v)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
    good = {"q": q, "k": k, "v": v, "out": out}
    with pytest.raises(BadTensor, match=rf"^{argument} .*{message}"):
        step.layers.store_and_attend(0, **(good | {argument: broken(fault, good[argument])}))
    step.layers.store_and_attend(0, **good, lse=lse)
    world.check(0, requests, q_len, q, out, lse)
    world.runtime.end_step()


def test_an_lse_that_a_kernel_does_not_return_is_refused(device: torch.device) -> None:
    """It would stay as it is, and a caller would merge by it."""
    problem = small_problem()
    chosen = select(problem, known_target("cpu"), PROVIDER)
    kernels = {
        kind: replace(kernel, entry=replace(kernel.entry, limits=replace(kernel.entry.limits, lse=False)))
        for kind, kernel in chosen.kernels.items()
    }
    world = World.build([problem], device, PROVIDER, selections=[replace(chosen, kernels=kernels)])
    step = world.runtime.step(world.batch([world.admit()], [2])).parts[0]
    q, k, v = world.qkv(problem, step)
    lse = torch.empty(q.shape[:2], device=q.device)
    with pytest.raises(BadTensor, match="returns no lse; build the runtime of problems with wants_lse=True"):
        step.layers.store_and_attend(0, q, k, v, torch.empty_like(q), lse)


def test_rows_of_one_element_are_no_negated_view() -> None:
    negated = torch.ones(2, 3, 1, dtype=torch.complex64).conj().imag
    with pytest.raises(BadTensor, match=r"q is a view whose memory holds the opposite signs; give q\.resolve_neg"):
        TensorChecks(negated.device)._check("q", negated, (2, 3, 1), torch.float32)


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (lambda x: x[0, :6].expand(len(x), 6, 16), None, r"out has strides \[0, 16, 1\].* are the same memory"),
        (lambda x: x.view(-1).as_strided((len(x), 6, 16), (48, 16, 1)), None, "out has strides"),
        (lambda x: x[:, :6], None, "out shares memory with q"),
        (lambda x: x[:, 3:9], None, "out shares memory with q"),
        (lambda x: x[:, 6:], lambda x: x[:, 0, :6], "lse shares memory with q"),
        (lambda x: x[:, 6:], None, ""),  # columns of one tensor
    ],
)
def test_outputs_have_memory_of_their_own(
    world: World, out: Callable[[Tensor], Tensor], lse: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    """Programs write in any order, and some before others have read."""
    step = world.runtime.step(world.batch(world.requests, [3, 1])).parts[0]
    q, k, v = world.qkv(world.problems[0], step)
    both = torch.cat([q, q], 1)
    with pytest.raises(BadTensor, match=message) if message else nullcontext():
        step.layers.store_and_attend(0, both[:, :6], k, v, out(both), None if lse is None else lse(both))
    world.runtime.end_step()


def test_a_layer_that_does_not_exist_is_named(world: World) -> None:
    step = world.runtime.step(world.batch(world.requests, [1, 1])).parts[0]
    _, k, v = world.qkv(world.problems[0], step)
    with pytest.raises(BadTensor, match="layer 1 does not exist"):
        step.layers.store(1, k, v)
    q, *_ = world.qkv(world.problems[0], step)
    for number in (-1, 1, 10**400, None, "0", 0.0, [0]):
        named = re.escape(f"layer {number!r} does not exist; the runtime has layers 0 to 0")
        with pytest.raises(BadTensor, match=named):
            step.layers.store(number, k, v)  # type: ignore[arg-type]
        with pytest.raises(BadTensor, match=named):
            step.layers.attend(number, q, torch.empty_like(q))  # type: ignore[arg-type]
    for number in (-1, 1):
        for of_pages in (world.runtime.pool.layer, world.runtime.pool.format):
            with pytest.raises(BadTensor, match=f"layer {number} does not exist; the runtime has layers 0 to 0"):
                of_pages(number)
    world.runtime.end_step()


def test_a_layer_that_does_not_exist_is_named_in_every_draft_step(device: torch.device) -> None:
    """The steps after the first one raised an IndexError or a TypeError."""
    world = World.build([small_problem()], device, PROVIDER)
    (request,) = world.begun(3)
    world.runtime.table.reserve(request.row, 5)
    with world.runtime.step(draft_batch([request.row], [3], Drafts(1, 2))) as step:
        for part in step.parts:
            _, k, v = world.qkv(world.problems[0], part)
            for number in (1, None, "0", 0.0):
                named = re.escape(f"layer {number!r} does not exist; the runtime has layers 0 to 0")
                with pytest.raises(BadTensor, match=named):
                    part.layers.store(number, k, v)  # type: ignore[arg-type]
            part.layers.store(0, k, v)


def test_calls_out_of_order_are_refused(world: World) -> None:
    rows = torch.empty(1, 2, 16, device=world.runtime.device)
    batch = world.batch(world.requests, [1, 1])
    step = world.runtime.stage(batch).parts[0]
    world.runtime.end_step()
    with pytest.raises(WrongState, match=r"no step was begun; call runtime\.step"):
        step.layers.store(0, rows, rows)
    step = world.runtime.stage(batch).parts[0]
    with pytest.raises(WrongState, match="staged"):
        step.layers.store(0, rows, rows)
    with pytest.raises(WrongState, match="end_step"):
        world.runtime.step(batch)
    with pytest.raises(WrongState, match="end_step"):
        world.runtime.seals.seal()
    world.runtime.end_step()
    with pytest.raises(WrongState, match="no step"):
        world.runtime.gate.fill()
    world.step(world.requests, [1, 1])


def built_of(problems: list[Problem], device: torch.device, **changes: Any) -> AttentionRuntime:
    """Returns a small runtime. changes: of its options"""
    numbers: dict[str, Any] = {"num_pages": 8, "max_num_seqs": 2, "max_kv_len": 16, **changes}
    return build_runtime(problems, RuntimeOptions(provider=PROVIDER, **numbers), device=device)


def test_layers_that_no_pool_can_hold_are_refused(device: torch.device) -> None:
    with pytest.raises(BadProblem, match="no layers"):
        built_of([], device)
    with pytest.raises(BadProblem, match="disagree on the page size"):
        built_of([small_problem(4), small_problem(8)], device)


def test_layers_that_did_not_store_are_named_by_the_next_step(device: torch.device) -> None:
    world = World.build([small_problem()] * 3, device, PROVIDER)
    request = world.admit()
    batch = world.batch([request], [3])
    with world.runtime.step(batch) as step:
        _, k, v = world.qkv(world.problems[1], step.parts[0])
        step.parts[0].layers.store(1, k, v)
    world.runtime.table.reserve(request.row, 4)
    with pytest.raises(
        BadBatch, match=r"0 are stored in every layer \(its last step did not store in layer 0, layer 2\)"
    ):
        world.runtime.step(StepBatch([request.row], [4], [1], NO_TOKEN_IDS))
    world.step([request], [3])
    world.runtime.table.reserve(request.row, 5)
    with pytest.raises(BadBatch, match="of which 3 are stored in every layer; store the others first"):
        world.runtime.step(StepBatch([request.row], [5], [1], NO_TOKEN_IDS))


def test_pages_of_more_tokens_than_a_gpu_serves_are_refused_on_a_cpu_too() -> None:
    with pytest.raises(Unsupported) as caught:
        built_of([small_problem(256)], torch.device("cpu"))
    of_heads = [reason for reason in caught.value.reasons if "it reads latent pages" not in reason]
    assert of_heads
    assert all("page_size 256 is outside 1..128" in reason for reason in of_heads)


def test_triton_on_a_plain_cpu_says_which_archs_it_serves() -> None:
    with pytest.raises(Unsupported, match="arch cpu is not one of gfx942"):
        select(small_problem(), known_target("cpu"), "triton")


def test_auto_on_a_gpu_says_why_aiter_was_not_taken() -> None:
    chosen = select(small_problem(16), known_target("gfx942"), "auto")
    assert chosen.provider == "triton"
    assert any(
        "aiter.pa_decode_gluon" in line and "it reads vectorised pages" in line for line in chosen.refusal_lines()
    )
    assert any("aiter.paged_attention_ragged" in line and "dtype float32" in line for line in chosen.refusal_lines())


@pytest.mark.parametrize("arch", ["gfx90a", None, ["gfx942"]])
def test_an_unknown_arch_is_named(arch: Any) -> None:
    with pytest.raises(BadSetting, match="is not known; choose one of gfx942, gfx950"):
        known_target(arch)


def test_an_unknown_provider_is_named() -> None:
    with pytest.raises(BadSetting, match="cudnn"):
        select(small_problem(), known_target("cpu"), "cudnn")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": "gfx942"}, "target is a str; it must be of type Target"),
        ({"guards": True}, "guards is a bool; it must be of type Guards"),
        ({"device": None}, "device None is not known; use 'cpu'"),
        ({"device": torch.zeros(1)}, "is not known; use 'cpu'"),
        ({"device": "cuda"}, "device 'cuda' does not exist: torch sees 0 GPUs; use 'cpu'"),
    ],
)
def test_arguments_of_another_kind_are_named(
    given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    options = RuntimeOptions(num_pages=8, max_num_seqs=2, max_kv_len=16, provider="torch")
    bounds = Bounds(num_seqs=2, kv_len=16, num_pages=8)
    table = TableSource(torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(BadSetting, match=words):
        build_runtime([small_problem()], options, **{"device": "cpu", **given})
    with pytest.raises(BadSetting, match=words):
        ExternalAttention([LayerSource(small_problem())], table, **{"device": "cpu", "bounds": bounds, **given})
    if "device" in given:
        with pytest.raises(BadSetting, match=words):
            recorder_for(given["device"])


@pytest.mark.parametrize("value", [8.5, 8.0, "8", None, True, float("nan")])
@pytest.mark.parametrize("name", ["num_pages", "max_num_seqs", "max_kv_len", "swa_pages", "swa_kept", "first_swa_page"])
def test_a_number_that_is_none_is_named(name: str, value: object, device: torch.device) -> None:
    with pytest.raises(BadSetting, match=rf"^{name} is {re.escape(repr(value))}; it must be a whole number$"):
        built_of([small_problem()], device, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 1}, "page 0 is reserved"),
        ({"num_pages": 2**31}, "overflow an int32 slot id"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        (
            {"max_kv_len": 2**31},
            "max_kv_len is 2147483648; kernels add a few lengths in 32 bits, so use at most 268435456",
        ),
        ({"max_num_rows": 1}, "max_num_rows is 1 and max_num_seqs is 2"),
        ({"max_num_rows": -1}, "max_num_rows is -1"),
        ({"max_num_rows": 2**31 - 1}, "2147483647 rows were asked for; rows are int32, so use at most 2147483646"),
        ({"verify_tokens": -1}, "verify_tokens is -1"),
        ({"verify_tokens": 2**40}, "verify_tokens is 1099511627776"),
        ({"drafts": Drafts(2, 3)}, "drafts is .*; give a list of Drafts"),
        ({"drafts": [3]}, "drafts is .*; give a list of Drafts"),
        ({"capture_sizes": 4}, "capture_sizes is 4; give a list of sizes"),
        ({"first_swa_page": 0}, "first_swa_page is 0"),
        ({"capture_sizes": (2**31,)}, "capture_sizes goes up to 2147483648; counts are int32"),
        *(
            ({name: sizes}, f"{name} is .*; give a list of sizes")
            for name in ("capture_sizes", "capture_tokens", "prompt_tokens")
            for sizes in (np.array([1, 2]), torch.tensor([1, 2]), False)
        ),
        ({"capture_tokens": None}, "capture_tokens is None; give a list of sizes"),
        *(
            ({name: sizes}, name)
            for name in ("capture_sizes", "capture_tokens")
            for sizes in ((), (0,), (4, 2), (3, 3), (1.5,))
        ),
        *(
            ({name: "no"}, f"{name} is 'no'; it must be True or False")
            for name in ("deterministic", "shared_prefixes", "split_steps")
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], message: str, device: torch.device) -> None:
    with pytest.raises((BadSetting, CapacityExceeded), match=message):
        built_of([small_problem()], device, **changes)


def test_integers_of_numpy_are_numbers(device: torch.device) -> None:
    numbers: dict[str, Any] = {"num_pages": np.int64(8), "max_num_seqs": np.int32(2), "max_kv_len": np.uint8(16)}
    assert built_of([small_problem()], device, **numbers, capture_sizes=(np.int64(2),)).max_kv_len == 16


def test_numbers_of_numpy_name_layers(device: torch.device) -> None:
    """Layers from 63 on were noted in 64 bits: the call raised OverflowError."""
    runtime = built_of([small_problem()] * 65, device)
    row = runtime.table.admit()
    runtime.table.reserve(row, 2)
    q, k = torch.zeros(2, 6, 16, device=device), torch.zeros(2, 2, 16, device=device)
    with runtime.step(StepBatch([row], [2], [2])) as step:
        for layer in np.arange(65):
            step.parts[0].layers.store_and_attend(layer, q, k, k, torch.empty_like(q))  # type: ignore[arg-type]
    assert runtime.table.tokens.stored_len[row] == 2


def test_pages_join_no_graph_of_gradients(world: World) -> None:
    """A forward without no_grad() would keep every step's K, and fail in a later step."""
    for _ in range(2):
        part = world.runtime.step(world.batch(world.requests, [1, 1])).parts[0]
        q, k, v = (rows.requires_grad_() for rows in world.qkv(world.problems[0], part))
        part.layers.store(0, k, v)
        assert not world.runtime.pool.layer(0).k.requires_grad
        with torch.no_grad():
            part.layers.attend(0, q, torch.empty_like(q))
        world.runtime.end_step()
