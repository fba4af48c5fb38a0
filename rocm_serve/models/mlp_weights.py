"""The weights of a layer's MLP, dense or of experts, read from the tensors of a file."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from rocm_attn.models.mlp_config import DenseAndExperts, DenseMlp, ExpertMlp, ExpertTensors, Mlp, NoMlp
from rocm_attn.models.shards import Shard, ShardRange
from rocm_attn.models.tensors import TensorReader
from rocm_serve.models.layer_tensors import LayerTensors

# Kernels for a few rows, and those with one order of sums, take blocks of rows of a matrix.
_ROUTER_ROWS = 64


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

    A shared MLP of an expert's size is an expert, the first one, which every token takes: its blocks take longest, and
    are computed first.

    router:       [num_experts, hidden]; float32 if the product is computed in it. If a shared expert has a share by a
                  logit, its row comes after the others', and on a GPU rows of zeros fill the last block
    router_bias:  [num_experts]
    correction:   float32 [num_experts]; see Routing.choose
    share_scale:  float32 [num_experts]; factor on an expert's shares
    gate_up:      [all experts, 2 * inner, hidden]; rows of gate, then up; without a gate inner rows
    gate_up_bias: [num_experts, 2 * inner]
    down:         [all experts, hidden, inner]
    down_bias:    [num_experts, hidden]; only on one rank, because ranks sum the outputs of experts
    shared:       of the dense MLP next to them; None: there is none, or it is an expert
    shared_share: [1, hidden]; the logit of a token's share of that MLP, unless it is an expert
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
    """Weights of a dense MLP and of experts next to it. dense_out_norm, experts_norm, experts_out_norm: [hidden]"""

    dense: DenseWeights
    dense_out_norm: Tensor
    experts: ExpertWeights
    experts_norm: Tensor
    experts_out_norm: Tensor


MlpWeights = DenseWeights | ExpertWeights | DenseAndExpertWeights


_NORMS_OF_BOTH = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def read_mlp(reader: TensorReader, mlp: Mlp, prefix: str, shard: Shard, hidden: int) -> MlpWeights | None:
    """Reads a rank's part of the MLP whose tensor names start with a layer's prefix. Raises BadModel.

    mlp:    of the whole model
    hidden: elements of a token
    """
    if isinstance(mlp, NoMlp):
        return None
    of_layer = _OfMlp(reader, f"{prefix}mlp.", shard, hidden)
    if isinstance(mlp, DenseMlp):
        return of_layer.dense(mlp)
    if isinstance(mlp, DenseAndExperts):
        beside = replace(of_layer, prefix=prefix)
        norms = (beside.join(f"{name}.weight", (hidden,)) for name in _NORMS_OF_BOTH)
        dense_out_norm, experts_norm, experts_out_norm = norms
        return DenseAndExpertWeights(
            dense=of_layer.dense(mlp.dense),
            dense_out_norm=dense_out_norm,
            experts=beside.joined(mlp.experts, beside.router_beside_dense(mlp.experts.routing.num_experts)),
            experts_norm=experts_norm,
            experts_out_norm=experts_out_norm,
        )
    if mlp.tensors is ExpertTensors.STACKED:
        return of_layer.stacked(mlp)
    router = of_layer.gate(mlp)
    return of_layer.joined(mlp, router) if mlp.tensors is ExpertTensors.JOINED else of_layer.each(mlp, router)


def _shared_is_expert(mlp: ExpertMlp) -> bool:
    """True if the shared MLP of a whole model is one more expert. Its logit is in the router's dtype."""
    by_logit = mlp.has_shared_share and mlp.routing.in_float32
    return mlp.shared_size == mlp.intermediate_size and not (mlp.latent_size or mlp.has_bias or by_logit)


class _Router(NamedTuple):
    """The router's fields of ExpertWeights."""

    matrix: Tensor
    correction: Tensor | None
    share_scale: Tensor | None


class _OfMlp(LayerTensors):
    """The tensors of an MLP that a rank holds."""

    def dense(self, mlp: DenseMlp) -> DenseWeights:
        """A dense MLP."""
        size, hidden = mlp.intermediate_size, self.hidden
        inner = self.shard.span(size)
        rows = [(product, size, inner) for product in mlp.gate.PRODUCTS]
        if mlp.is_joined:
            rows = [("gate_up_proj", 2 * size, span) for span in (inner, inner.after(size))]
        weights = [self.piece(f"{name}.weight", (of_all, hidden), span) for name, of_all, span in rows]
        biases = [self.piece(f"{name}.bias", (of_all,), span) for name, of_all, span in rows if mlp.has_bias]
        return DenseWeights(
            gate_up=self.reader.join(*weights),
            gate_up_bias=self.reader.join(*biases) if biases else None,
            down=self.out("down_proj.weight", size, inner),
            down_bias=self.join("down_proj.bias", (hidden,)) if mlp.has_bias else None,
        )

    def each(self, mlp: ExpertMlp, router: _Router) -> ExpertWeights:
        """Experts with tensors of their own."""
        reader, size, experts = self.reader, mlp.intermediate_size, mlp.routing.num_experts
        inner, hidden = self.shard.span(size), mlp.latent_size or self.hidden
        gate_up, down = self._empty(mlp)
        for expert in range(experts):
            name, place = f"experts.{expert}.", expert - experts
            for number, product in enumerate(mlp.gate.PRODUCTS):
                part = self.piece(f"{name}{product}.weight", (size, hidden), inner)
                reader.copy_into(gate_up[place, number], part)
            part = self.piece(f"{name}down_proj.weight", (hidden, size), ShardRange.whole(hidden), inner)
            reader.copy_into(down[place], part)
        of_experts = self._experts(mlp, router, gate_up, down)
        if not mlp.latent_size:
            return of_experts
        return replace(
            of_experts,
            latent_in=self.join("fc1_latent_proj.weight", (mlp.latent_size, self.hidden)),
            latent_out=self.join("fc2_latent_proj.weight", (self.hidden, mlp.latent_size)),
        )

    def joined(self, mlp: ExpertMlp, router: _Router) -> ExpertWeights:
        """Experts whose matrices are joined."""
        size, hidden, experts = mlp.intermediate_size, self.hidden, mlp.routing.num_experts
        inner, every = self.shard.span(size), ShardRange.whole(experts)
        gate_up, down = self._empty(mlp)
        for number, span in enumerate((inner, inner.after(size))):
            part = self.piece("experts.gate_up_proj", (experts, 2 * size, hidden), every, span)
            self.reader.copy_into(gate_up[-experts:, number], part)
        part = self.piece("experts.down_proj", (experts, hidden, size), every, ShardRange.whole(hidden), inner)
        self.reader.copy_into(down[-experts:], part)
        return self._experts(mlp, router, gate_up, down)

    def _empty(self, mlp: ExpertMlp) -> tuple[Tensor, Tensor]:
        """Room for the matrices of all experts: [experts, products, inner, hidden] and [experts, hidden, inner]."""
        reader, experts = self.reader, mlp.routing.num_experts + int(_shared_is_expert(mlp))
        inner, hidden = self.shard.span(mlp.intermediate_size).size, mlp.latent_size or self.hidden
        gate_up = reader.empty((experts, len(mlp.gate.PRODUCTS), inner, hidden), reader.dtype)
        return gate_up, reader.empty((experts, hidden, inner), reader.dtype)

    def stacked(self, mlp: ExpertMlp) -> ExpertWeights:
        """Experts whose matrices are joined, [in, out], with rows of gate and up in turn, and with biases."""
        size, hidden, experts = mlp.intermediate_size, self.hidden, mlp.routing.num_experts
        inner, every, whole = self.shard.span(size), ShardRange.whole(experts), ShardRange.whole(hidden)
        pairs = inner.of_elements(2)
        gate_up = self.join("experts.gate_up_proj", (experts, hidden, 2 * size), every, whole, pairs)
        gate_up_bias = self.join("experts.gate_up_proj_bias", (experts, 2 * size), every, pairs)
        down = self.join("experts.down_proj", (experts, size, hidden), every, inner)
        return ExpertWeights(
            router=self.join("router.weight", (experts, hidden)),
            router_bias=self.join("router.bias", (experts,)),
            gate_up=gate_up.view(experts, hidden, inner.size, 2).permute(0, 3, 2, 1).reshape(experts, -1, hidden),
            gate_up_bias=gate_up_bias.view(experts, inner.size, 2).transpose(1, 2).flatten(1),
            down=down.transpose(1, 2).contiguous(),
            down_bias=self.join("experts.down_proj_bias", (experts, hidden)) if self.shard.rank == 0 else None,
        )

    def _with_share(self, router: Tensor, share: Tensor) -> Tensor:
        """The router with the row of a shared expert's logit, and on a GPU rows of zeros that fill the last block."""
        num_rows = len(router) + 1
        num_added = 0 if router.device.type == "cpu" else -num_rows % _ROUTER_ROWS
        rows = self.reader.empty((num_rows + num_added, self.hidden), router.dtype)
        rows[: num_rows - 1].copy_(router)
        rows[num_rows - 1].copy_(share[0])
        rows[num_rows:].zero_()
        return rows

    def gate(self, mlp: ExpertMlp) -> _Router:
        """The router of experts alone."""
        routing, experts = mlp.routing, mlp.routing.num_experts
        matrix = (self.in_float32 if routing.in_float32 else self.join)("gate.weight", (experts, self.hidden))
        if not routing.has_correction:
            return _Router(matrix, None, None)
        return _Router(matrix, self.in_float32("gate.e_score_correction_bias", (experts,)), None)

    def router_beside_dense(self, num_experts: int) -> _Router:
        """A router whose input has a scale for each element, and one for all of them."""
        matrix = self.in_float32("router.proj.weight", (num_experts, self.hidden))
        scale = self.in_float32("router.scale", (self.hidden,))
        scaled = self.reader.computed(lambda read: read * scale * self.hidden**-0.5, matrix)
        return _Router(scaled.to(self.reader.dtype), None, self.in_float32("router.per_expert_scale", (num_experts,)))

    def _experts(self, mlp: ExpertMlp, router: _Router, gate_up: Tensor, down: Tensor) -> ExpertWeights:
        """gate_up, down: of _empty(), with all experts but the shared one"""
        has_share = mlp.has_shared_share
        beside = replace(self, prefix=f"{self.prefix}{'shared_expert' if has_share else 'shared_experts'}.")
        shared = beside.dense(mlp.shared) if mlp.shared_size else None
        share = self.join("shared_expert_gate.weight", (1, self.hidden)) if has_share else None
        matrix = router.matrix
        if shared is not None and _shared_is_expert(mlp):
            gate_up[0].flatten(0, 1).copy_(shared.gate_up)
            down[0].copy_(shared.down)
            if share is not None:
                matrix = self._with_share(matrix, share)
            shared = share = None
        return ExpertWeights(
            router=matrix,
            correction=router.correction,
            share_scale=router.share_scale,
            gate_up=gate_up.flatten(1, 2),
            down=down,
            shared=shared,
            shared_share=share,
        )
