"""The weights of a layer's MLP, dense or of experts, read from the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.models.mlp_config import DenseAndExperts, DenseMlp, ExpertMlp, ExpertTensors, Mlp, NoMlp
from rocm_attn.models.shards import Shard, ShardRange
from rocm_attn.models.tensors import Shape, TensorPart, TensorReader

Named = Iterator[tuple[str, Shape]]


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """Weights of a dense MLP, or a rank's part of them. A matrix is [out, in]; a weight that the model lacks is None.

    gate_up: [2 * inner, hidden]; rows of gate, then up; without a gate [inner, hidden]
    down:    [hidden, inner]
    """

    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertWeights:
    """Weights of experts, or a rank's part of each of them.

    router:       [num_experts, hidden]; float32 if the product is computed in it
    router_bias:  [num_experts]
    correction:   float32 [num_experts]; see Routing.choose
    share_scale:  float32 [num_experts]; factor on an expert's shares
    gate_up:      [num_experts, 2 * inner, hidden]; rows of gate, then up; without a gate inner rows
    gate_up_bias: [num_experts, 2 * inner]
    down:         [num_experts, hidden, inner]
    down_bias:    [num_experts, hidden]; only on one rank, because ranks sum the outputs of experts
    shared:       of the dense MLP next to them
    shared_share: [1, hidden]; the logit of a token's share of that MLP
    latent_in:    [latent, hidden], latent_out: [hidden, latent]; around the experts, whose hidden is latent then
    """

    router: Tensor
    router_bias: Tensor | None = None
    correction: Tensor | None = None
    share_scale: Tensor | None = None
    gate_up: Tensor
    gate_up_bias: Tensor | None = None
    down: Tensor
    down_bias: Tensor | None = None
    shared: DenseWeights | None = None
    shared_share: Tensor | None = None
    latent_in: Tensor | None = None
    latent_out: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DenseAndExpertWeights:
    """Weights of a dense MLP and of experts next to it.

    dense_out_norm, experts_norm, experts_out_norm: [hidden]
    """

    dense: DenseWeights
    dense_out_norm: Tensor
    experts: ExpertWeights
    experts_norm: Tensor
    experts_out_norm: Tensor


MlpWeights = DenseWeights | ExpertWeights | DenseAndExpertWeights


def mlp_shapes(mlp: Mlp, hidden: int) -> Named:
    """Yields the name within a layer and the shape of every tensor of an MLP. hidden: elements of a token"""
    if isinstance(mlp, DenseMlp):
        yield from _dense_shapes("mlp.", mlp, hidden)
    elif isinstance(mlp, DenseAndExperts):
        yield from _dense_shapes("mlp.", mlp.dense, hidden)
        yield from _joined_shapes("", mlp.experts, hidden)
        yield "router.proj.weight", (mlp.experts.routing.num_experts, hidden)
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (mlp.experts.routing.num_experts,)
        for name in _NORMS_OF_BOTH:
            yield f"{name}.weight", (hidden,)
    elif isinstance(mlp, ExpertMlp):
        yield from _expert_shapes(mlp, hidden)


_NORMS_OF_BOTH = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def _expert_shapes(mlp: ExpertMlp, hidden: int) -> Named:
    experts, inner = mlp.routing.num_experts, mlp.intermediate_size
    if mlp.tensors is ExpertTensors.STACKED:
        yield from with_bias("mlp.router", (experts, hidden), mlp.has_bias)
        yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
        yield "mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
        yield "mlp.experts.down_proj", (experts, inner, hidden)
        yield "mlp.experts.down_proj_bias", (experts, hidden)
        return
    yield "mlp.gate.weight", (experts, hidden)
    if mlp.routing.has_correction:
        yield "mlp.gate.e_score_correction_bias", (experts,)
    if mlp.tensors is ExpertTensors.JOINED:
        yield from _joined_shapes("mlp.", mlp, hidden)
    else:
        for expert in range(experts):
            yield from _dense_shapes(f"mlp.experts.{expert}.", DenseMlp(inner, mlp.gate), mlp.latent_size or hidden)
    if mlp.latent_size:
        yield f"mlp.{_LATENT_IN}", (mlp.latent_size, hidden)
        yield f"mlp.{_LATENT_OUT}", (hidden, mlp.latent_size)
    if mlp.shared_size:
        yield from _dense_shapes(f"mlp.{_shared_name(mlp)}.", mlp.shared, hidden)
    if mlp.has_shared_share:
        yield "mlp.shared_expert_gate.weight", (1, hidden)


_LATENT_IN, _LATENT_OUT = "fc1_latent_proj.weight", "fc2_latent_proj.weight"


def _shared_name(mlp: ExpertMlp) -> str:
    return "shared_expert" if mlp.has_shared_share else "shared_experts"


def _joined_shapes(prefix: str, mlp: ExpertMlp, hidden: int) -> Named:
    experts, inner = mlp.routing.num_experts, mlp.intermediate_size
    yield f"{prefix}experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield f"{prefix}experts.down_proj", (experts, hidden, inner)


def with_bias(name: str, shape: Shape, has_bias: bool) -> Named:
    """Yields a matrix, and its bias if it has one. shape: [out, in]"""
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]


def _dense_shapes(prefix: str, mlp: DenseMlp, hidden: int) -> Named:
    inner = mlp.intermediate_size
    if mlp.is_joined:
        yield f"{prefix}gate_up_proj.weight", (2 * inner, hidden)
        yield f"{prefix}down_proj.weight", (hidden, inner)
        return
    for name in mlp.gate.PRODUCTS:
        yield from with_bias(prefix + name, (inner, hidden), mlp.has_bias)
    yield from with_bias(f"{prefix}down_proj", (hidden, inner), mlp.has_bias)


def read_mlp(reader: TensorReader, mlp: Mlp, prefix: str, shard: Shard) -> MlpWeights | None:
    """Reads a rank's part of the MLP whose tensor names start with a layer's prefix. Raises BadModel.

    mlp: of the whole model
    """
    if isinstance(mlp, NoMlp):
        return None
    if isinstance(mlp, DenseMlp):
        return _read_dense(reader, mlp, f"{prefix}mlp.", shard)
    if isinstance(mlp, DenseAndExperts):
        norms = (reader.join(TensorPart(f"{prefix}{name}.weight")) for name in _NORMS_OF_BOTH)
        dense_out_norm, experts_norm, experts_out_norm = norms
        return DenseAndExpertWeights(
            dense=_read_dense(reader, mlp.dense, f"{prefix}mlp.", shard),
            dense_out_norm=dense_out_norm,
            experts=_read_joined(reader, mlp.experts, prefix, _router_beside_dense(reader, prefix), shard),
            experts_norm=experts_norm,
            experts_out_norm=experts_out_norm,
        )
    if mlp.tensors is ExpertTensors.STACKED:
        return _read_stacked(reader, mlp, f"{prefix}mlp.", shard)
    if mlp.tensors is ExpertTensors.JOINED:
        return _read_joined(reader, mlp, f"{prefix}mlp.", _gate(reader, mlp, f"{prefix}mlp."), shard)
    return _read_each(reader, mlp, f"{prefix}mlp.", shard)


def _read_dense(reader: TensorReader, mlp: DenseMlp, prefix: str, shard: Shard) -> DenseWeights:
    inner, down = shard.span(mlp.intermediate_size), f"{prefix}down_proj"
    gate_up = [(prefix + name, inner) for name in mlp.gate.PRODUCTS]
    if mlp.is_joined:
        joined = f"{prefix}gate_up_proj"
        gate_up = [(joined, inner), (joined, inner.after(mlp.intermediate_size))]
    hidden = ShardRange.whole(reader.shapes[f"{down}.weight"][0])
    return DenseWeights(
        gate_up=reader.join(*(TensorPart(f"{name}.weight", (span,)) for name, span in gate_up)),
        gate_up_bias=reader.join(*(TensorPart(f"{name}.bias", (span,)) for name, span in gate_up))
        if mlp.has_bias
        else None,
        down=reader.join(TensorPart(f"{down}.weight", (hidden, inner))),
        down_bias=reader.join(TensorPart(f"{down}.bias")) if mlp.has_bias else None,
    )


def _read_each(reader: TensorReader, mlp: ExpertMlp, prefix: str, shard: Shard) -> ExpertWeights:
    router, inner = _gate(reader, mlp, prefix), shard.span(mlp.intermediate_size)
    (experts, hidden), products = router.matrix.shape, mlp.gate.PRODUCTS
    hidden = mlp.latent_size or hidden
    gate_up = torch.empty(experts, len(products), inner.size, hidden, dtype=reader.dtype, device=reader.device)
    down = torch.empty(experts, hidden, inner.size, dtype=reader.dtype, device=reader.device)
    for expert in range(experts):
        name = f"{prefix}experts.{expert}."
        for number, product in enumerate(products):
            reader.copy_into(gate_up[expert, number], TensorPart(f"{name}{product}.weight", (inner,)))
        reader.copy_into(down[expert], TensorPart(f"{name}down_proj.weight", (ShardRange.whole(hidden), inner)))
    return ExpertWeights(
        router=router.matrix,
        correction=router.correction,
        share_scale=router.share_scale,
        gate_up=gate_up.flatten(1, 2),
        down=down,
        shared=_read_shared(reader, mlp, prefix, shard),
        shared_share=_read_shared_share(reader, mlp, prefix),
        latent_in=reader.join(TensorPart(prefix + _LATENT_IN)) if mlp.latent_size else None,
        latent_out=reader.join(TensorPart(prefix + _LATENT_OUT)) if mlp.latent_size else None,
    )


def _read_stacked(reader: TensorReader, mlp: ExpertMlp, prefix: str, shard: Shard) -> ExpertWeights:
    inner, (experts, hidden) = shard.span(mlp.intermediate_size), reader.shapes[f"{prefix}router.weight"]
    every, pairs = ShardRange.whole(experts), inner.of_elements(2)
    gate_up = reader.join(TensorPart(f"{prefix}experts.gate_up_proj", (every, ShardRange.whole(hidden), pairs)))
    gate_up_bias = reader.join(TensorPart(f"{prefix}experts.gate_up_proj_bias", (every, pairs)))
    down = reader.join(TensorPart(f"{prefix}experts.down_proj", (every, inner)))
    return ExpertWeights(
        router=reader.join(TensorPart(f"{prefix}router.weight")),
        router_bias=reader.join(TensorPart(f"{prefix}router.bias")),
        gate_up=gate_up.view(experts, hidden, inner.size, 2).permute(0, 3, 2, 1).reshape(experts, -1, hidden),
        gate_up_bias=gate_up_bias.view(experts, inner.size, 2).transpose(1, 2).flatten(1),
        down=down.transpose(1, 2).contiguous(),
        down_bias=reader.join(TensorPart(f"{prefix}experts.down_proj_bias")) if shard.rank == 0 else None,
    )


def _read_shared(reader: TensorReader, mlp: ExpertMlp, prefix: str, shard: Shard) -> DenseWeights | None:
    name = f"{prefix}{_shared_name(mlp)}."
    return _read_dense(reader, mlp.shared, name, shard) if mlp.shared_size else None


def _read_shared_share(reader: TensorReader, mlp: ExpertMlp, prefix: str) -> Tensor | None:
    part = TensorPart(f"{prefix}shared_expert_gate.weight")
    return reader.join(part) if mlp.has_shared_share else None


class _Router(NamedTuple):
    """The router's fields of ExpertWeights."""

    matrix: Tensor
    correction: Tensor | None
    share_scale: Tensor | None


def _gate(reader: TensorReader, mlp: ExpertMlp, prefix: str) -> _Router:
    matrix, correction = TensorPart(f"{prefix}gate.weight"), TensorPart(f"{prefix}gate.e_score_correction_bias")
    return _Router(
        reader.in_float32(matrix) if mlp.routing.in_float32 else reader.join(matrix),
        reader.in_float32(correction) if mlp.routing.has_correction else None,
        None,
    )


def _router_beside_dense(reader: TensorReader, prefix: str) -> _Router:
    """A router whose input has a scale for each element, and one for all of them."""
    matrix, scale = (reader.in_float32(TensorPart(f"{prefix}router.{name}")) for name in ("proj.weight", "scale"))
    scaled = matrix * scale * matrix.shape[1] ** -0.5
    return _Router(scaled.to(reader.dtype), None, reader.in_float32(TensorPart(f"{prefix}router.per_expert_scale")))


def _read_joined(reader: TensorReader, mlp: ExpertMlp, prefix: str, router: _Router, shard: Shard) -> ExpertWeights:
    size, inner = mlp.intermediate_size, shard.span(mlp.intermediate_size)
    name = f"{prefix}experts.gate_up_proj"
    experts, _, hidden = reader.shapes[name]
    every, up = ShardRange.whole(experts), inner.after(size)
    gate_up = torch.empty(experts, 2, inner.size, hidden, dtype=reader.dtype, device=reader.device)
    reader.copy_into(gate_up[:, 0], TensorPart(name, (every, inner)))
    reader.copy_into(gate_up[:, 1], TensorPart(name, (every, up)))
    return ExpertWeights(
        router=router.matrix,
        correction=router.correction,
        share_scale=router.share_scale,
        gate_up=gate_up.flatten(1, 2),
        down=reader.join(TensorPart(f"{prefix}experts.down_proj", (every, ShardRange.whole(hidden), inner))),
        shared=_read_shared(reader, mlp, prefix, shard),
        shared_share=_read_shared_share(reader, mlp, prefix),
    )
