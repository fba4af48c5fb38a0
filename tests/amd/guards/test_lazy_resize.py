"""Every buffer grows by itself, to the padded batch, and keeps its dtype, its pad and its name."""

import pytest
import torch

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.metadata.step_tensors import Need, Unit
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.buffers import BufferSpec, StepBuffers, TableSizes
from tests.amd.guards.ways import PROVIDERS
from tests.amd.worlds.world import World

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
