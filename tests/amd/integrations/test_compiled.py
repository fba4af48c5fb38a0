"""Layer calls as operations of torch.library: their declarations, and equality of compiled and eager steps."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.record_guard import RecordGuard
from rocm_attn.integrations import compiled
from rocm_attn.integrations.compiled import SPLITTING_OPS, CompiledLayers, compile_forward, compiled_layers
from rocm_attn.kernels.cache.row_work import QkvWork, RopePairs, RopeTable, RowNorm
from rocm_attn.problem import PoolKind
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.step import Part
from tests.amd.external.engines import SGLang
from tests.amd.graphs.small_models import Requests, Tiny, same, serve
from tests.amd.worlds.problems import small_problem

OPS = torch.ops.rocm_attn
INDUCTOR = pytest.param("inductor", marks=pytest.mark.nightly)  # compiles C++ on a CPU
DIM = 16
# Prompts, then decode steps; each shape is compiled.
SHORT = [[5, 2], [1, 1], [1, 1]]

# Inductor's own warnings, when it is imported and when it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Resets compiled code and switches off gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def work_of(device: torch.device) -> QkvWork:
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], device=device)
    table = RopeTable.of_frequencies(frequencies, 128, pairs=RopePairs.NEIGHBOURS)
    return QkvWork(table, q_norm=RowNorm(torch.linspace(0.5, 2, DIM, device=device), 1e-6, offset=1.0))


def forward_of(model: Tiny, calls_of: Callable[[Part], LayerCalls], work: QkvWork) -> Callable[[Part], Tensor]:
    """Returns a forward whose first layer stores plain rows; the second normalises and rotates them, and has a gate."""
    embedding, (first, second) = model.embedding, model.projections

    def forward(step: Part) -> Tensor:
        calls = calls_of(step)
        hidden = embedding[step.token_ids] * (1 + step.positions[:, None] / 100)
        kv = (hidden @ first).view(-1, 4, DIM)
        out = torch.empty_like(hidden).view(-1, 6, DIM)
        lse = torch.empty_like(out[..., 0])
        calls.store_and_attend(0, hidden.view(-1, 6, DIM), kv[:, :2], kv[:, 2:], out, lse)
        hidden = hidden + out.flatten(1)
        kv, q = (hidden @ second).view(-1, 4, DIM), hidden.clone().view(-1, 6, DIM)
        calls.rope_and_store(1, q, kv[:, :2], kv[:, 2:], q, work)
        out = torch.empty_like(q)
        calls.attend(1, q, out)
        calls.finish(1, out, gate=lse)
        return (hidden + out.flatten(1))[step.last_token_of_seq]

    return forward


def eager_forward(model: Tiny, work: QkvWork) -> Callable[[Part], Tensor]:
    return forward_of(model, lambda step: step.layers, work)


def compilable(model: Tiny, work: QkvWork) -> Callable[[Part], Tensor]:
    return forward_of(model, compiled_layers(model.runtime).of, work)


@pytest.mark.fast(1)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphed"])
def test_a_compiled_forward_gives_the_bits_of_the_eager_one(
    backend: str, graphs: bool, provider: str, device: torch.device
) -> None:
    model, work = Tiny.build(device, provider, layers=2), work_of(device)
    eager = serve(StepRunner(model.runtime, eager_forward(model, work), None), model.runtime, SHORT)
    recorder = recorder_for(device) if graphs else None
    runner = StepRunner(model.runtime, compile_forward(compilable(model, work), backend=backend), recorder)
    assert same(eager, serve(runner, model.runtime, SHORT))
    assert (runner.counters.replays > 0) == graphs


def operations_of(forward: Callable[..., Any], *args: Any) -> list[str]:
    """Returns this project's operations that compiled code calls, in order, after removal of ineffective ones."""
    found: list[str] = []

    def look(graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            names = [str(node.target), str(node.args[0]) if node.args else ""]
            found.extend(name.split(".")[1] for name in names if name.startswith("rocm_attn."))
        return graph.forward

    torch.compile(forward, fullgraph=True, backend=aot_autograd(fw_compiler=look))(*args)
    return found


def running(model: Tiny) -> tuple[Part, CompiledLayers]:
    requests = Requests(model.runtime)
    requests.admit(2)
    step = model.runtime.step(requests.batch([3, 2])).parts[0]
    return step, compiled_layers(model.runtime)


def rows(step: Part, heads: int) -> Tensor:
    count = step.token_ids.shape[0]
    return torch.randn(count, heads, DIM, generator=torch.Generator().manual_seed(1)).to(step.token_ids.device)


def test_a_part_of_a_table_is_not_taken_for_all_of_it(provider: str, device: torch.device) -> None:
    """Both begin at one address."""
    model, work = Tiny.build(device, provider, layers=2), work_of(device)
    step, calls = running(model)
    q, whole = rows(step, 6), work.rope
    assert whole is not None
    calls.rope_queries(1, q, torch.empty_like(q), work)
    with pytest.raises(BadTensor, match=r"1 positions, and sequences may have 128 .* lower max_kv_len, or kv_len of B"):
        calls.rope_queries(1, q, torch.empty_like(q), replace(work, rope=replace(whole, cos_sin=whole.cos_sin[:1])))


def test_compiled_code_keeps_every_operation_in_its_order(provider: str, device: torch.device) -> None:
    model, work = Tiny.build(device, provider, layers=2), work_of(device)
    step, _ = running(model)
    found = operations_of(compilable(model, work), step)
    assert found == ["store", "attend", "rope_and_store", "attend", "finish"]


def test_what_fill_writes_is_read_after_it(provider: str, device: torch.device) -> None:
    """This includes compiled code, which could otherwise read the tokens of the previous step."""
    model = Tiny.build(device, provider, layers=2)
    requests, calls = Requests(model.runtime), compiled_layers(model.runtime)
    requests.admit(2)

    def body(step: Part) -> tuple[Tensor, Tensor]:
        calls.fill(step.positions, step.token_ids)
        return step.token_ids + 1, step.positions * 2

    both = compile_forward(body, backend="aot_eager")
    for q_len in ([3, 2], [1, 1], [1, 1]):
        batch = requests.batch(q_len)
        step = model.runtime.stage(batch).parts[0]
        ids, positions = both(step)
        assert torch.equal(ids, step.token_ids + 1)
        assert torch.equal(positions, step.positions * 2)
        assert ids[: batch.num_tokens].tolist() == [int(each) + 1 for each in batch.token_ids]
        model.runtime.end_step()
        model.runtime.table.mark_stored(batch.rows, batch.kv_len)


def checked(operation: Any, *args: Any) -> None:
    """Runs torch's checks of a declaration: writes and aliases, the fake kernel, and the path through AOT autograd."""
    torch.library.opcheck(operation.default, args)


def test_what_is_declared_of_operations_holds(provider: str, device: torch.device) -> None:
    model = Tiny.build(device, provider, layers=2)
    step, calls = running(model)
    q, k, v, out = rows(step, 6), rows(step, 2), rows(step, 2) * 2, torch.zeros_like(rows(step, 6))
    lse, end = torch.zeros_like(q[..., 0]), (calls.number, 0, 1)
    work = work_of(device)
    flat = *compiled._flat(work), *compiled._flat_rope(work.rope)
    checked(OPS.fill, calls.state, [step.positions, step.token_ids], None, calls.number)
    checked(OPS.store, calls.state, k, v, *end)
    checked(OPS.attend, calls.state, q, out, lse, *end)
    checked(OPS.attend, calls.state, q, out, None, *end)
    checked(OPS.rope_and_store, calls.state, q, k, v, out, *flat, *end)
    checked(OPS.rope_queries, calls.state, q, out, *flat, *end)
    checked(OPS.finish, calls.state, out, lse, *flat[4:], *end)


def test_graphs_are_cut_at_every_operation_that_there_is() -> None:
    names = torch._C._dispatch_get_all_op_names()
    assert sorted(SPLITTING_OPS) == sorted({name for name in names if name.startswith("rocm_attn::")})


def test_what_lies_between_the_cuts_asks_no_runtime_for_anything(provider: str, device: torch.device) -> None:
    """Cut as engines cut it, the pieces equal the whole."""
    model, work = Tiny.build(device, provider, layers=2), work_of(device)
    step, _ = running(model)
    want = eager_forward(model, work)(step)
    kinds: list[bool] = []

    def cut(graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        piece, was_cut = 0, True
        pieces: dict[torch.fx.Node, int] = {}
        for node in graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                cuts = str(node.target).replace(".", "::", 1) in SPLITTING_OPS
                piece += cuts or was_cut
                was_cut, pieces[node] = cuts, piece
        split = torch.fx.passes.split_module.split_module(graph, graph, pieces.__getitem__, keep_original_order=True)
        for child in split.children():
            assert isinstance(child, GraphModule)
            called = [str(node.target) for node in child.graph.nodes if node.op == "call_function"]
            of_runtime = [name for name in called if name.startswith("rocm_attn.")]
            assert not of_runtime or called == of_runtime
            kinds.append(bool(of_runtime))
        return split.forward

    got = torch.compile(compilable(model, work), fullgraph=True, backend=cut)(step)
    assert torch.equal(got, want)
    assert kinds.count(True) == 5
    assert kinds.count(False) >= 3


def test_a_runtime_that_has_ended_is_refused_and_its_memory_is_free(provider: str, device: torch.device) -> None:
    model = Tiny.build(device, provider, layers=2)
    step, calls = running(model)
    forward = compile_forward(lambda k: calls.store(0, k, k), backend="eager")
    k = rows(step, 2)
    forward(k)
    number = calls.number
    del step, model
    gc.collect()
    assert number not in compiled._called
    with pytest.raises(WrongState, match=f"runtime {number} is not of this process, or has ended"):
        forward(k)


def test_calls_out_of_order_are_refused_as_those_of_a_step_are(provider: str, device: torch.device) -> None:
    model = Tiny.build(device, provider, layers=2)
    step, calls = running(model)
    q, k = rows(step, 6), rows(step, 2)
    missing: Any = None
    for layer in (2, -1, missing):
        with pytest.raises(BadTensor, match=f"layer {layer} does not exist"):
            calls.store(layer, k, k)
    with pytest.raises(BadTensor, match="v is a NoneType; give a tensor"):
        calls.store(0, k, missing)  # K was stored as V
    with pytest.raises(BadTensor, match="v is a NoneType; give a tensor"):
        calls.rope_and_store(0, q, k, missing, q, work_of(device))
    with pytest.raises(WrongState, match="there is no part 1"):
        OPS.attend(calls.state, q, q.clone(), None, calls.number, 1, 0)
    with pytest.raises(BadTensor, match="slots were given"):
        calls.fill(slots=torch.zeros(5, dtype=torch.int32, device=device))
    model.runtime.end_step()
    with pytest.raises(WrongState, match=r"call runtime.step\(\)"):
        calls.store(0, k, k)


def test_a_table_of_angles_that_grows_where_it_lies_is_read_whole(device: torch.device) -> None:
    model, work = Tiny.build(device, "torch", layers=2), work_of(device)
    assert work.rope is not None
    called = compiled._called[compiled_layers(model.runtime).number]
    norms, (cos_sin, *of_table) = compiled._flat(work), compiled._flat_rope(work.rope)
    assert cos_sin is not None
    half, whole = (called.work(0, norms, (part, of_table[0], of_table[1])) for part in (cos_sin[:64], cos_sin))
    assert [len(each.rope.cos_sin) for each in (half, whole) if each.rope is not None] == [64, len(cos_sin)]
    assert called.work(0, norms, (cos_sin, of_table[0], of_table[1])) is whole


def test_a_latent_layers_v_stays_part_of_k(device: torch.device) -> None:
    """Compiled code may copy a part of a tensor; the operation takes it from k itself."""
    problem = replace(small_problem(num_kv_heads=1, head_dim=24, v_head_dim=16), pool=PoolKind.LATENT)
    options = RuntimeOptions(num_pages=16, max_num_seqs=2, max_kv_len=16, provider="torch")
    runtime = build_runtime([problem], options, device=device)
    row = runtime.table.admit()
    runtime.table.reserve(row, 5)
    step, calls = runtime.step(StepBatch([row], [5], [5], NO_TOKEN_IDS)).parts[0], compiled_layers(runtime)
    q, k = (torch.randn(5, heads, 24, device=device) for heads in (6, 1))

    def attend(calls: LayerCalls, q: Tensor, k: Tensor) -> Tensor:
        rows, out = k * 2, torch.empty_like(q[..., :16])
        calls.store_and_attend(0, q, rows, rows[..., :16] if calls is step.layers else rows[..., :16].clone(), out)
        return out

    want = attend(step.layers, q, k)
    assert torch.equal(compile_forward(partial(attend, calls), backend="aot_eager")(q, k), want)


class CompiledEngine(SGLang):
    """An engine with layer calls, and fill, as operations."""

    def calls(self) -> LayerCalls:
        return compiled_layers(self.attention)


def test_an_engines_own_pages_are_served_by_operations(provider: str, device: torch.device) -> None:
    engine = CompiledEngine(4, device=device, provider=provider)
    requests = [engine.admit(), engine.admit()]
    engine.run(requests, [7, 3])
    engine.run(requests, [1, 1], pads=1)
    calls = compiled_layers(engine.attention)
    slots = torch.zeros(3, dtype=torch.int32, device=device)
    checked(OPS.fill, calls.state, [], slots, calls.number)
    engine.attention.seal()
    graph = engine.capture(4)
    for _ in range(2):
        graph.run(requests)


def test_on_a_device_the_guard_of_a_capture_steps_aside_for_compiled_code() -> None:
    """torch runs no compiled code while a guard inspects operations, and would capture the plain forward."""
    ran: list[str] = []

    def backend(graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append("compiled")
            return graph.forward(*args)

        return run

    def forward(x: Tensor) -> Tensor:
        return x + 1

    double = compile_forward(forward, backend=backend)
    x = torch.ones(3)
    assert double(x).sum() == 6
    ran.clear()
    with RecordGuard(torch.device("cuda")):
        assert double(x).sum() == 6
        assert ran == ["compiled"]
        with pytest.raises(RecordingRefused):
            torch.cuda.synchronize()
    ran.clear()
    with RecordGuard(torch.device("cpu")):
        double(x)
    assert ran == []
