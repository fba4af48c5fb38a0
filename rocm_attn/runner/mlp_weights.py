"""The weights of a layer's MLP, dense or of experts, out of the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.runner.config import DenseMlp, ExpertMlp, ExpertTensors
from rocm_attn.runner.tensors import Shape, TensorReader

Named = Iterator[tuple[str, Shape]]


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """One layer's. A matrix is [out, in]; what the model has not is None.

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


def read_mlp(reader: TensorReader, mlp: DenseMlp | ExpertMlp, prefix: str) -> MlpWeights:
    """The MLP whose tensors' names start with a layer's prefix. Raises BadModel."""
    if isinstance(mlp, DenseMlp):
        return _read_dense(reader, mlp, f"{prefix}mlp.")
    if mlp.tensors is ExpertTensors.EACH:
        return _read_each(reader, mlp, f"{prefix}mlp.")
    return _read_stacked(reader, mlp, f"{prefix}mlp.")


def _read_dense(reader: TensorReader, mlp: DenseMlp, prefix: str) -> MlpWeights:
    gate_up = [f"{prefix}gate_proj", f"{prefix}up_proj"]
    return MlpWeights(
        gate_up=reader.join(*(f"{name}.weight" for name in gate_up)),
        gate_up_bias=reader.join(*(f"{name}.bias" for name in gate_up)) if mlp.has_bias else None,
        down=reader.join(f"{prefix}down_proj.weight"),
        down_bias=reader.join(f"{prefix}down_proj.bias") if mlp.has_bias else None,
    )


def _read_each(reader: TensorReader, mlp: ExpertMlp, prefix: str) -> MlpWeights:
    experts = [f"{prefix}experts.{expert}." for expert in range(mlp.num_experts)]
    hidden = reader.shapes[f"{prefix}gate.weight"][1]
    down = torch.empty(hidden, mlp.num_experts, mlp.intermediate_size, dtype=reader.dtype, device=reader.device)
    for number, expert in enumerate(experts):
        reader.copy_into(down[:, number], f"{expert}down_proj.weight")
    return MlpWeights(
        gate_up=reader.join(*(f"{expert}{name}_proj.weight" for name in ("gate", "up") for expert in experts)),
        gate_up_bias=None,
        down=down.flatten(1),
        down_bias=None,
        router=reader.join(f"{prefix}gate.weight"),
    )


def _read_stacked(reader: TensorReader, mlp: ExpertMlp, prefix: str) -> MlpWeights:
    experts, inner = mlp.num_experts, mlp.intermediate_size
    hidden = reader.shapes[f"{prefix}router.weight"][1]
    gate_up = reader.join(f"{prefix}experts.gate_up_proj").view(experts, hidden, inner, 2)
    gate_up_bias = reader.join(f"{prefix}experts.gate_up_proj_bias").view(experts, inner, 2)
    down = reader.join(f"{prefix}experts.down_proj").view(experts * inner, hidden)
    return MlpWeights(
        gate_up=gate_up.permute(3, 0, 2, 1).reshape(2 * experts * inner, hidden),
        gate_up_bias=gate_up_bias.permute(2, 0, 1).flatten(),
        down=down.t(),
        down_bias=reader.join(f"{prefix}experts.down_proj_bias"),
        router=reader.join(f"{prefix}router.weight"),
        router_bias=reader.join(f"{prefix}router.bias"),
    )
