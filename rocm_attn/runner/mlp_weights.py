"""The weights of a layer's MLP, dense or of experts, out of the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.runner.config import DenseMlp, ExpertMlp, ExpertTensors
from rocm_attn.runner.shards import Span
from rocm_attn.runner.tensors import Piece, Shape, TensorReader

Named = Iterator[tuple[str, Shape]]


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """One layer's, or a rank's part of it. A matrix is [out, in]; what the model has not is None.

    Experts are one wide MLP: elements 0 to intermediate_size - 1 of `inner` belong to expert 0, and so on. Of a dense
    MLP, inner is intermediate_size.

    gate_up:     [2 * inner, hidden]; rows of gate, then up
    down:        [hidden, inner]
    down_bias:   [hidden]; of experts [num_experts, hidden]
    router:      [num_experts, hidden]; None: a dense MLP
    router_bias: [num_experts]
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    router: Tensor | None = None
    router_bias: Tensor | None = None


def mlp_shapes(mlp: DenseMlp | ExpertMlp, hidden: int) -> Named:
    """Name within a layer and shape of every tensor of an MLP. hidden: elements of a token"""
    if isinstance(mlp, DenseMlp):
        yield from _dense_shapes("mlp.", mlp.intermediate_size, hidden, mlp.has_bias)
    elif mlp.tensors is ExpertTensors.EACH:
        yield "mlp.gate.weight", (mlp.num_experts, hidden)
        for expert in range(mlp.num_experts):
            yield from _dense_shapes(f"mlp.experts.{expert}.", mlp.intermediate_size, hidden, False)
    else:
        experts, inner = mlp.num_experts, mlp.intermediate_size
        yield from with_bias("mlp.router", (experts, hidden), True)
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
        yield "mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
        yield "mlp.experts.down_proj", (experts, inner, hidden)
        yield "mlp.experts.down_proj_bias", (experts, hidden)


def with_bias(name: str, shape: Shape, has_bias: bool) -> Named:
    """A matrix, and the bias that it may have. shape: [out, in]"""
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]


def _dense_shapes(prefix: str, inner: int, hidden: int, has_bias: bool) -> Named:
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        yield from with_bias(prefix + name, shape, has_bias)


def read_mlp(reader: TensorReader, mlp: DenseMlp | ExpertMlp, prefix: str, inner: Span) -> MlpWeights:
    """The MLP whose tensors' names start with a layer's prefix. Raises BadModel.

    mlp:   of the whole model
    inner: what is read of its intermediate_size elements, of each expert alike
    """
    if isinstance(mlp, DenseMlp):
        return _read_dense(reader, mlp, f"{prefix}mlp.", inner)
    if mlp.tensors is ExpertTensors.EACH:
        return _read_each(reader, mlp, f"{prefix}mlp.", inner)
    return _read_stacked(reader, mlp, f"{prefix}mlp.", inner)


def _read_dense(reader: TensorReader, mlp: DenseMlp, prefix: str, inner: Span) -> MlpWeights:
    gate_up, down = [f"{prefix}gate_proj", f"{prefix}up_proj"], f"{prefix}down_proj"
    hidden = Span.whole(reader.shapes[f"{down}.weight"][0])
    return MlpWeights(
        gate_up=reader.join(*(Piece(f"{name}.weight", (inner,)) for name in gate_up)),
        gate_up_bias=reader.join(*(Piece(f"{name}.bias", (inner,)) for name in gate_up)) if mlp.has_bias else None,
        down=reader.join(Piece(f"{down}.weight", (hidden, inner))),
        down_bias=reader.join(Piece(f"{down}.bias")) if mlp.has_bias else None,
    )


def _read_each(reader: TensorReader, mlp: ExpertMlp, prefix: str, inner: Span) -> MlpWeights:
    experts = [f"{prefix}experts.{expert}." for expert in range(mlp.num_experts)]
    hidden = reader.shapes[f"{prefix}gate.weight"][1]
    down = torch.empty(hidden, mlp.num_experts, inner.size, dtype=reader.dtype, device=reader.device)
    for number, expert in enumerate(experts):
        reader.copy_into(down[:, number], Piece(f"{expert}down_proj.weight", (Span.whole(hidden), inner)))
    gate_up = [Piece(f"{expert}{name}_proj.weight", (inner,)) for name in ("gate", "up") for expert in experts]
    return MlpWeights(
        gate_up=reader.join(*gate_up),
        gate_up_bias=None,
        down=down.flatten(1),
        down_bias=None,
        router=reader.join(Piece(f"{prefix}gate.weight")),
    )


def _read_stacked(reader: TensorReader, mlp: ExpertMlp, prefix: str, inner: Span) -> MlpWeights:
    experts, hidden = reader.shapes[f"{prefix}router.weight"]
    every, pairs = Span.whole(experts), inner.of_elements(2)
    gate_up = reader.join(Piece(f"{prefix}experts.gate_up_proj", (every, Span.whole(hidden), pairs)))
    gate_up_bias = reader.join(Piece(f"{prefix}experts.gate_up_proj_bias", (every, pairs)))
    down = reader.join(Piece(f"{prefix}experts.down_proj", (every, inner)))
    return MlpWeights(
        gate_up=gate_up.view(experts, hidden, inner.size, 2).permute(3, 0, 2, 1).reshape(-1, hidden),
        gate_up_bias=gate_up_bias.view(experts, inner.size, 2).permute(2, 0, 1).flatten(),
        down=down.view(-1, hidden).t(),
        down_bias=reader.join(Piece(f"{prefix}experts.down_proj_bias")),
        router=reader.join(Piece(f"{prefix}router.weight")),
        router_bias=reader.join(Piece(f"{prefix}router.bias")),
    )
