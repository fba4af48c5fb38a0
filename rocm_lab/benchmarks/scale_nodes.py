"""Predicted step times of a model on nodes of eight MI300X, never measured; see docs/scale_simulation.md.

    step = layers * (attention + products + sums + rest) + output matrix

attention  of the project's Triton kernels, as rocm_lab/cost/cost.py predicts it: a range
products   max(bytes of weights / stream, operations / matrix_ops), for attention's projections and for the MLP
sums       two all-reduces per layer: latency + 2 (r - 1) / r * bytes / ((r - 1) * link), over a link to each
rest       norms, rotations, gates, residuals

Sources of the numbers, least and most favourable:

stream       3.9 to 4.2 TB/s of reads (rocm_lab/cost/cost.py), of which products over weights reach 0.81 to 0.87:
             measured on an H200 (rocm_lab/benchmarks/results/tensor_parallel_h200.json, one sequence, one rank)
matrix_ops   0.45 of the 1,307 TFLOP/s of the data sheet, the reported rate of MI300X, to 708 TFLOP/s, AMD's own
             measurement (rocm.blogs.amd.com, "Measuring Max-Achievable FLOPs", part 2)
link         48 GB/s of the 64 GB/s that each of a GPU's seven Infinity Fabric links has in a direction, usable
             (rocm.blogs.amd.com, "Understanding RCCL Bandwidth and xGMI Performance on MI300X"); 44 at worst: assumed
latency      of a small all-reduce: 6.3 us by kernels made for it (vllm-project/vllm#39080, on an MI355X), to 28 us,
             NCCL's time over four H200 (the same result file): assumed to be RCCL's too
rest         10 to 40 us per layer: the same result file has 2 to 40
nic          one NIC of 400 Gbit/s for each GPU, as MI300X nodes have it; 0.80 to 0.95 of it: assumed
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from rocm_attn.machine.target import known_target
from rocm_attn.models.geometry import AttentionLayer
from rocm_lab.cost.cost import GPUS, CostShape, predicted

ARCH = "gfx942"
PAGE_SIZE = 16
WEIGHT_BYTES = 2
HBM_BYTES = 192e9
# Share of the memory for weights and KV; the rest is for activations, graphs and libraries.
MEMORY_SHARE = 0.9

End = Literal["low", "middle", "high"]


@dataclass(frozen=True, slots=True)
class NodeGpu:
    """An MI300X in a node of eight, at one end of the assumptions.

    end:         the end of a predicted time of attention that is used
    stream:      bytes of weights that products read per second
    matrix_ops:  operations per second of large products
    link:        bytes per second from a GPU to one other, in one direction
    sum_latency: seconds of an empty all-reduce
    rest:        seconds per layer
    nic:         bytes per second of a GPU to another node
    """

    end: End
    stream: float
    matrix_ops: float
    link: float
    sum_latency: float
    rest: float
    nic: float

    def all_reduce(self, num_bytes: float, ranks: int) -> float:
        """Returns the seconds of a sum over ranks of one node, each of which has num_bytes."""
        if ranks == 1:
            return 0.0
        return self.sum_latency + 2 * num_bytes / (ranks * self.link)


_HBM = GPUS[ARCH].hbm
BEST = NodeGpu("low", 0.87 * _HBM[1], 708e12, 48e9, 6.3e-6, 10e-6, 0.95 * 50e9)
WORST = NodeGpu("high", 0.81 * _HBM[0], 0.45 * GPUS[ARCH].matrix_ops, 44e9, 28e-6, 40e-6, 0.80 * 50e9)
# Geometric means, like the middles of cost.py.
MIDDLE = NodeGpu(
    "middle",
    (BEST.stream * WORST.stream) ** 0.5,
    (BEST.matrix_ops * WORST.matrix_ops) ** 0.5,
    (BEST.link * WORST.link) ** 0.5,
    (BEST.sum_latency * WORST.sum_latency) ** 0.5,
    (BEST.rest * WORST.rest) ** 0.5,
    (BEST.nic * WORST.nic) ** 0.5,
)


@dataclass(frozen=True, slots=True)
class Experts:
    """num experts, of which each token takes top_k."""

    num: int = 1
    top_k: int = 1

    def touched(self, tokens: float) -> float:
        """Returns the share of all experts that a step of that many tokens reads, if routers choose evenly."""
        left: float = (1 - self.top_k / self.num) ** tokens
        return 1 - left


@dataclass(frozen=True, slots=True)
class NodeModel:
    """A model of equal layers in bfloat16. mlp_params: of a layer, all experts"""

    name: str
    num_layers: int
    hidden: int
    attention: AttentionLayer
    mlp_params: float
    vocab: int
    experts: Experts = Experts()

    @property
    def attention_params(self) -> float:
        """Parameters of a layer's projections."""
        of_heads = 2 * self.attention.num_q_heads + 2 * self.attention.num_kv_heads
        return self.hidden * of_heads * self.attention.head_dim

    @property
    def params(self) -> float:
        """All parameters, including the embedding and the output matrix."""
        return self.num_layers * (self.attention_params + self.mlp_params) + 2 * self.vocab * self.hidden


LLAMA_70B = NodeModel("Llama 3.1 70B", 80, 8192, AttentionLayer(64, 8, 128, 128**-0.5), 3 * 8192 * 28672, 128256)
QWEN_235B = NodeModel(
    "Qwen3 235B-A22B",
    94,
    4096,
    AttentionLayer(64, 4, 128, 128**-0.5),
    128 * 3 * 4096 * 1536,
    151936,
    Experts(128, 8),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks share a model.

    ranks:         they share the MLP of each layer, by elements
    own_attention: each rank has whole attention layers and its own sequences (DP attention); else heads are shared
    """

    ranks: int
    own_attention: bool = False

    def of(self, model: NodeModel) -> AttentionLayer:
        """Returns the attention of a rank."""
        return model.attention if self.own_attention else model.attention.on_one_of(self.ranks)


@dataclass(frozen=True, slots=True)
class NodeStep:
    """A step: num_decodes sequences of kv_len tokens, and chunks of prompts: (new tokens, tokens already stored)."""

    num_decodes: int
    kv_len: int
    chunks: tuple[tuple[int, int], ...] = ()


def kv_bytes_of_token(model: NodeModel, layout: Layout) -> float:
    """Returns the bytes on one rank that holds the token."""
    layer = layout.of(model)
    return model.num_layers * 2 * layer.num_kv_heads * layer.head_dim * WEIGHT_BYTES


def kv_tokens(model: NodeModel, layout: Layout) -> int:
    """Returns the number of tokens that all ranks of a layout hold. Raises ValueError if the weights leave no room."""
    attention = model.num_layers * model.attention_params
    shared = model.params - attention
    weights = (attention if layout.own_attention else attention / layout.ranks) + shared / layout.ranks
    room = MEMORY_SHARE * HBM_BYTES - weights * WEIGHT_BYTES
    if room <= 0:
        raise ValueError(f"{model.name} does not fit {layout.ranks} GPUs of {HBM_BYTES / 1e9:.0f} GB")
    tokens = room / kv_bytes_of_token(model, layout)
    return int(tokens * layout.ranks if layout.own_attention else tokens)


@lru_cache(maxsize=200_000)
def attention_seconds(layer: AttentionLayer, shape: CostShape, end: End) -> float:
    """Returns the attention time of one layer on one rank."""
    problem = layer.problem(dtype=torch.bfloat16, page_size=PAGE_SIZE)
    found = predicted(problem, known_target(ARCH), shape)
    if found is None:
        raise ValueError(f"rocm_lab/cost/cost.py has no figures of {layer}")
    return float(getattr(found.seconds, end))


def _products(machine: NodeGpu, read: float, used: float, tokens: float) -> float:
    """Seconds of products of tokens with weights. read: elements read; used: those that one token is multiplied with"""
    return max(read * WEIGHT_BYTES / machine.stream, 2 * used * tokens / machine.matrix_ops)


def step_seconds(model: NodeModel, layout: Layout, machine: NodeGpu, batch: NodeStep) -> float:
    """Returns the time of one step."""
    ranks, layer = layout.ranks, layout.of(model)
    tokens = batch.num_decodes + sum(new for new, _ in batch.chunks)
    of_chunks = [attention_seconds(layer, CostShape(1, cached + new, new), machine.end) for new, cached in batch.chunks]
    if layout.own_attention:  # the rank that has most: the longest chunk, and its part of the decodes
        decodes = -(-batch.num_decodes // ranks)
        own_tokens = decodes + max((new for new, _ in batch.chunks), default=0)
        attention = max(of_chunks, default=0.0)
    else:
        decodes, own_tokens, attention = batch.num_decodes, tokens, sum(of_chunks)
    if decodes:
        attention += attention_seconds(layer, CostShape(decodes, batch.kv_len), machine.end)
    projections = model.attention_params / (1 if layout.own_attention else ranks)
    products = _products(machine, projections, projections, own_tokens)
    mlp, experts = model.mlp_params / ranks, model.experts
    products += _products(machine, mlp * experts.touched(tokens), mlp * experts.top_k / experts.num, tokens)
    num_bytes = tokens * model.hidden * WEIGHT_BYTES
    if layout.own_attention:  # tokens are gathered before the MLP and its sums are scattered after it: one all-reduce
        sums = machine.all_reduce(num_bytes, ranks) + (machine.sum_latency if ranks > 1 else 0.0)
    else:
        sums = 2 * machine.all_reduce(num_bytes, ranks)
    head = model.vocab * model.hidden / ranks
    last = _products(machine, head, head, batch.num_decodes + len(batch.chunks))
    return model.num_layers * (attention + products + sums + machine.rest) + last
