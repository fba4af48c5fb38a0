"""Buffers have room for the padded batch beyond the request pool, for each half apart, and do not move under graphs."""

import re

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadTensor, CapacityExceeded
from rocm_attn.guards.registry import Guards
from rocm_attn.hip_graphs.size_ladder import default_ladder
from rocm_attn.kernels.metadata.step_tensors import Need, Unit
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.buffers import BufferSpec, StepBuffers, TableSizes
from rocm_attn.step.head_weights import HeadWeights
from tests.amd.guards.ways import DEVICE_FAULT, PROVIDERS, in_each_way, run_elsewhere
from tests.amd.worlds.bounds import run_within_bounds
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import ALL_ON, Request, World, is_right


@pytest.mark.fast
@pytest.mark.parametrize("alignment", [8, 16])
@in_each_way
def test_a_batch_padded_beyond_the_pool_keeps_all_of_its_sequences(
    provider: str, alignment: int, graphs: bool, device: torch.device
) -> None:
    """Seed 004: a pool of 5 rows, and batches padded to a multiple of 8 or 16 for the ranks."""
    ladder = default_ladder(5, alignment)
    assert ladder.sizes == (alignment,)
    serving = World.one_layer(device, ALL_ON, graphs=graphs, provider=provider, capture_sizes=ladder.sizes)
    requests = serving.admit_all(5)
    for request, length in zip(requests, [5, 1, 9, 4, 3], strict=True):
        serving.step([request], [length])
    serving.step(requests, [1] * 5)
    serving.step(requests[:2], [1, 1])

    serving = World.one_layer(
        device, Guards().without("capacity"), graphs=graphs, provider=provider, capture_sizes=ladder.sizes
    )
    if provider == "csr":
        # The report's own error: a size of the padded batch meets a size of the pool.
        with pytest.raises(RuntimeError, match=rf"size of tensor a \({alignment}\) must match .* b \(5\)"):
            serving.run(serving.admit_all(1), [5])
        return
    requests = serving.admit_all(5)
    with pytest.raises(BadTensor, match=f"5 rows for {alignment} padded sequences"):
        serving.run(requests, [1] * 5)
    # No step has written the results of padded sequences beyond the pool.
    assert torch.isfinite(serving.rows[0].out[:5]).all()
    assert serving.rows[0].out[5:alignment].isnan().all()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_sealed_buffers_do_not_move_under_a_graph(provider: str, device: torch.device) -> None:
    larger = PaddedShape(StepKind.DECODE, 64, 64)

    serving = World.one_layer(device, ALL_ON, graphs=True, provider=provider)
    requests = serving.admit_all(2)
    serving.run(requests, [4, 3])
    serving.step(requests, [1, 1])
    sealed = serving.runtime.core.memory._sealed
    with pytest.raises(CapacityExceeded, match="raise the largest of capture_sizes"):
        sealed.ensure(larger)
    serving.step(requests, [1, 1])

    if device.type == "cuda":
        return  # with the guard off, the graph reads freed memory, which ends the process
    serving = World.one_layer(device, Guards().without("sealed_growth"), graphs=True, provider=provider)
    requests = serving.admit_all(2)
    serving.run(requests, [4, 3])
    serving.step(requests, [1, 1])
    serving.runtime.core.memory._sealed.ensure(larger)
    run_within_bounds(serving, requests, [1, 1])
    # The new step was published to the new buffers; the graph has repeated the previous step from the old ones.
    assert not is_right(serving, requests, [1, 1])
    page = serving.runtime.table.pages_of(requests[0].row)[1]
    assert torch.equal(serving.runtime.pool.layer(0).k[page, 0], requests[0].k[0][5])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_head_weights_are_not_replaced_under_a_graph(provider: str, device: torch.device) -> None:
    def served(guards: Guards) -> tuple[World, list[Request]]:
        """Returns a request that decodes through a graph of a layer with sinks."""
        serving = World.one_layer(device, guards, graphs=True, provider=provider, problem=small_problem(has_sinks=True))
        requests = serving.begun(1)
        serving.step(requests, [1])
        assert serving.runner.counters.replays == 2
        return serving, requests

    serving, requests = served(ALL_ON)
    weights = serving.runtime.head_weights
    others = HeadWeights(torch.full_like(serving.rows[0].lse[0], 5.0))
    before = weights.of(0).sinks
    weights.set(0, others)
    assert weights.of(0).sinks is before
    serving.step(requests, [1])
    serving.step(requests, [1])
    assert serving.runner.counters.replays == 4

    serving, requests = served(Guards().without("head_weights"))
    serving.runtime.head_weights.set(0, others)
    serving.run(requests, [1])
    assert not is_right(serving, requests, [1])


LENGTHS = [5, 1, 9, 4, 3]


def prefilled(device: torch.device, guards: Guards, provider: str, *, graphs: bool) -> World:
    """Returns five requests whose next steps may be split."""
    serving = World.one_layer(device, guards, graphs=graphs, provider=provider, split_steps=True)
    for request, length in zip(serving.admit_all(5), LENGTHS, strict=True):
        serving.step([request], [length])
    return serving


@in_each_way
def test_each_half_of_a_step_has_memory_of_its_own(provider: str, graphs: bool, device: torch.device) -> None:
    sound = prefilled(device, ALL_ON, provider, graphs=graphs)
    sound.step(sound.requests, [1] * 5, halves=True)

    # The echo would report that one half has overwritten the other's counts.
    off = run_elsewhere(
        "import torch\nfrom tests.amd.guards.test_capacity import *\nfrom tests.amd.worlds.world import is_right\n"
        'guards = Guards().without("child_ranges").without("echo_check", "last_steps")\n'
        f"shared = prefilled(torch.device({device.type!r}), guards, {provider!r}, graphs={graphs})\n"
        "requests = shared.requests\nshared.run(requests, [1] * 5, halves=True)\n"
        "print('right' if is_right(shared, requests, [1] * 5) else 'wrong')"
    )
    assert off.stdout == "wrong\n" or re.search(DEVICE_FAULT, off.stderr), off.stdout + off.stderr


WIDTH = 3
# One more buffer of each dtype, with a pad that no other one has.
SPECS = (
    *TableSizes(WIDTH, 0, WIDTH, 8 * WIDTH, 0).buffers({Space.FULL: list(Need)}, {Space.FULL: list(Need)}),
    BufferSpec("wide_indptr", Unit.SEQ_BOUNDARY, torch.int64, lambda shape: 5 * shape.num_seqs + 1, pad=-9),
    BufferSpec("schedule", Unit.WORD, torch.int32, lambda shape: 7 + 2 * shape.num_seqs, pad=4),
    BufferSpec("workspace", Unit.WORD, torch.float32, lambda shape: 11 * shape.num_seqs, pad=0, exact=True),
)


def using(spec: BufferSpec, num_seqs: int) -> PaddedShape:
    """Returns a step that uses a buffer: a masked step and one that shares prefixes use all buffers between them."""
    shapes = [PaddedShape(kind, num_seqs, num_seqs) for kind in (StepKind.MASKED, StepKind.SHARED)]
    return next(shape for shape in shapes if spec.elements(shape))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_short_buffer_grows_whatever_the_others_hold(spec: BufferSpec) -> None:
    """SGLang's H1: one large buffer from outside kept three others from growing."""
    buffers = StepBuffers(SPECS, torch.device("cpu"))
    buffers.ensure(using(spec, 5))
    for other in SPECS:
        if other.name != spec.name:
            buffers._tensors[other.name] = torch.full((4096,), 77, dtype=other.dtype)
    before = {name: tensor.data_ptr() for name, tensor in buffers.tensors().items()}
    epoch, held = buffers.epoch, buffers.tensors()[spec.name].numel()
    larger = using(spec, 40)
    buffers.ensure(larger)

    moved = {name for name, tensor in buffers.tensors().items() if tensor.data_ptr() != before[name]}
    grows = spec.elements(larger) > held
    assert grows == (spec.name != "counts")
    assert moved == ({spec.name} if grows else set())
    assert buffers.epoch == epoch + grows
    view = buffers.step_view(spec.name, larger)
    assert view.dtype == spec.dtype
    assert view.numel() == spec.elements(larger)
    assert (view == spec.pad).all()


def test_lengths_stay_64_bit_when_they_grow(device: torch.device) -> None:
    serving = World.one_layer(device, graphs=False, provider="csr", capture_sizes=(2,))
    requests = serving.admit_all(5)
    for count in (1, 3, 5):
        serving.step(requests[:count], [4] * count)
        for buffers in (serving.runtime.core.memory._sealed, serving.runtime.core.memory._open):
            dtypes = {name: tensor.dtype for name, tensor in buffers.tensors().items() if name != "workspace"}
            assert [dtypes.pop(name) for name in ("kv_len_int64", "mask_indptr")] == [torch.int64] * 2
            assert set(dtypes.values()) == {torch.int32}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_steps_above_the_largest_graph_grow_buffers_of_their_own(provider: str, device: torch.device) -> None:
    serving = World.one_layer(device, graphs=True, provider=provider, capture_sizes=(2,), num_pages=100)
    requests = serving.admit_all(5)
    serving.step(requests[:2], [3, 2])
    serving.step(requests[:2], [1, 1])
    sealed = {name: tensor.data_ptr() for name, tensor in serving.runtime.seals.tensors().items()}
    for count, pad_to in ((3, None), (5, None), (5, 33), (4, 70)):
        serving.step(requests[:count], [1] * count, pad_to)
        serving.step(requests[:2], [1, 1])
    assert {name: tensor.data_ptr() for name, tensor in serving.runtime.seals.tensors().items()} == sealed
    assert serving.runner.counters.replays == 5
    assert serving.runtime.core.memory._open.tensors()["kv_len"].numel() >= 70
