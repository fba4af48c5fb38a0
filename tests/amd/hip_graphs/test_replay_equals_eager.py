"""Replays with new inputs equal, bit for bit, the function itself with those inputs."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.kernels.launch import observe_launches
from tests.amd.hip_graphs.recorders import Lab, same_bits

ROWS, COLUMNS = 4, 6


class Block:
    """One transformer block with a rotary embedding, causal attention over a written cache and a gated MLP."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).div(shape[-1] ** 0.5).to(device, dtype)

        self.heads, self.head_dim, self.seen = 3, 8, 16
        width = self.heads * self.head_dim
        self.norm = weight(1, width)[0]
        self.qkv, self.bias = weight(3 * width, width), weight(1, 3 * width)[0]
        self.gate_up, self.down = weight(4 * width, width), weight(width, 2 * width)
        self.cache = weight(self.seen, 2, self.heads, self.head_dim)
        self.angles = torch.rand(self.seen, self.head_dim // 2, generator=draw).to(device)
        self.x = weight(5, width)
        self.places = torch.arange(5, device=device)
        self.length = torch.full((1,), 5, device=device)

    def __call__(self) -> Tensor:
        x = self.x + self.attention(F.rms_norm(self.x, self.norm.shape, self.norm))
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return (x + F.linear(F.silu(gate) * up, self.down)).float()

    def attention(self, x: Tensor) -> Tensor:
        qkv = F.linear(x, self.qkv, self.bias).view(len(x), 3, self.heads, self.head_dim)
        q, k, v = qkv.unbind(1)
        self.cache.index_copy_(0, self.places, torch.stack((self.rotated(k), v), dim=1))
        keys, values = self.cache.unbind(1)
        scores = torch.einsum("qhd,khd->hqk", self.rotated(q).float(), keys.float()) * self.head_dim**-0.5
        hidden = torch.arange(self.seen, device=x.device) > self.places[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values.float()).to(x.dtype)
        alive = torch.arange(len(x), device=x.device)[:, None] < self.length
        return torch.where(alive, mixed.reshape(len(x), -1), 0.0)

    def rotated(self, x: Tensor) -> Tensor:
        angles = self.angles.index_select(0, self.places)[:, None]
        low, high = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(x.dtype)

    def change(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=draw))
        self.places.copy_(torch.randperm(self.seen, generator=draw)[:5])
        self.length.fill_(seed % 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_block_replays_with_new_inputs_as_it_runs(lab: Lab, dtype: torch.dtype) -> None:
    block, twin = Block(lab.device, dtype), Block(lab.device, dtype)
    recording, out = lab.recorder.record(block)
    twin.cache.copy_(block.cache)
    for seed in range(1, 6):
        block.change(seed)
        twin.change(seed)
        recording.replay()
        with torch.no_grad():
            wanted = twin()
        assert same_bits(out, wanted)
        assert same_bits(block.cache, twin.cache)


# Each takes two matrices [ROWS, COLUMNS] and returns one; some write to the first. No result depends on the order of a
# sum that the backend may choose freely.
OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + y,
    lambda x, y: x - 0.5 * y,
    lambda x, y: x * y,
    lambda x, y: -x,
    lambda x, y: 1 / (1 + y.abs()) + x,
    lambda x, y: F.silu(x),
    lambda x, y: torch.softmax(x, dim=-1),
    lambda x, y: torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * x,
    lambda x, y: (x @ y.t()) @ y * 0.1,
    lambda x, y: torch.addmm(y, x, torch.ones(COLUMNS, COLUMNS)) * 0.1,
    lambda x, y: torch.baddbmm(x[None], y[None, :, :ROWS], x[None])[0] * 0.1,
    lambda x, y: torch.cat((x[:, 3:], y[:, :3]), dim=1),
    lambda x, y: torch.stack((x, y)).sum(0),
    lambda x, y: x.t().contiguous().view(ROWS, COLUMNS),
    lambda x, y: x.flip(0)[:, torch.arange(COLUMNS - 1, -1, -1)],
    lambda x, y: x.index_select(0, (y[:, 0] > 0).long()),
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.where(x > 0, x, 0.25),
    lambda x, y: x.masked_fill(y < 0, 0.5),
    lambda x, y: x.sort(dim=1).values + y.argmax(dim=1, keepdim=True),
    lambda x, y: x.topk(3, dim=1)[0].repeat(1, 2),
    lambda x, y: x.to(torch.float64).cumsum(1).float(),
    lambda x, y: x.to(torch.bfloat16).float(),
    lambda x, y: F.layer_norm(x, (COLUMNS,)),
    lambda x, y: x.clamp(-1, 1).exp(),
    lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()) + x,
    lambda x, y: torch.linalg.qr(x.t()).R @ y,
    lambda x, y: x.add_(y, alpha=0.5),
    lambda x, y: x.mul_(0.5),
    lambda x, y: x.copy_(y.flip(1)),
    lambda x, y: x.index_copy_(0, torch.arange(2), y[:2].clone()),
    lambda x, y: x.t_().t_(),
    lambda x, y: torch.maximum(x, y, out=torch.empty(ROWS, COLUMNS)),
    lambda x, y: torch.mul(x, y, out=torch.empty(0)).add_(x),
    lambda x, y: torch.empty_like(x).copy_(x).div_(1 + y.square()),
    lambda x, y: x.clone().view(-1)[::2].repeat(2).view(ROWS, COLUMNS),
    lambda x, y: x.unsqueeze(0).expand(2, -1, -1).amax(0) + x.new_zeros(COLUMNS),
)

Program = list[tuple[int, int, int]]
numbers = st.integers(0, 1000)
programs = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), numbers, numbers), min_size=1, max_size=12)


class Machine:
    """Runs a program over two inputs; later steps may use any earlier result, views included."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inputs = [torch.empty(ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)]
        self.load(0)

    def load(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for tensor in self.inputs:
            tensor.copy_(torch.randn(ROWS, COLUMNS, generator=draw))

    def __call__(self) -> list[Tensor]:
        values = list(self.inputs)
        for operation, first, second in self.program:
            values.append(OPERATIONS[operation](values[first % len(values)], values[second % len(values)]))
        return values


@settings(max_examples=60, derandomize=True)
@given(programs)
def test_any_sequence_of_operations_replays_as_it_runs(program: Program) -> None:
    recorded, eager = Machine(program), Machine(program)
    recording, values = FakeRecorder(observe_launches).record(recorded)
    for seed in (7, 8):
        recorded.load(seed)
        eager.load(seed)
        recording.replay()
        with torch.no_grad():
            wanted = eager()
        for value, want in zip(values, wanted, strict=True):
            assert same_bits(value, want)


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_each_operation_alone_replays_as_it_runs(fake: FakeRecorder, number: int) -> None:
    recorded, eager = Machine([(number, 0, 1)]), Machine([(number, 0, 1)])
    recording, values = fake.record(recorded)
    recorded.load(5)
    eager.load(5)
    recording.replay()
    assert all(same_bits(value, want) for value, want in zip(values, eager(), strict=True))


def test_a_recording_keeps_its_function_and_what_the_function_reads_alive(lab: Lab) -> None:
    class Weights:
        def __init__(self) -> None:
            self.w = torch.full((3,), 4.0, device=lab.device)

        def __call__(self) -> Tensor:
            return self.w * 2

    weights = Weights()
    alive = weakref.ref(weights)
    recording, out = lab.recorder.record(weights)
    del weights
    gc.collect()
    assert alive() is not None
    recording.replay()
    assert out.tolist() == [8.0] * 3


def test_weights_that_autocast_has_cast_before_a_recording_are_cast_in_each_replay(lab: Lab) -> None:
    weights = torch.nn.Parameter(torch.ones(4, 4, device=lab.device))
    x = torch.ones(2, 4, device=lab.device)
    with torch.autocast(lab.device.type, torch.bfloat16):
        x @ weights
        recording, out = lab.recorder.record(lambda: x @ weights)
        assert torch.is_autocast_cache_enabled()
    with torch.no_grad():
        weights.mul_(3)
    recording.replay()
    assert out.tolist() == [[12.0] * 4] * 2
