"""A model's weights as the forward pass wants them, and how they are put together from a file's tensors.

Files name and split the matrices in many ways. A TensorSource gives them Hugging Face's names and shapes; here the
matrices that meet the same input are joined, so that a layer makes four matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.runner.config import ModelConfig

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a model file, under Hugging Face's names."""

    @property
    def name(self) -> str:
        """What a message calls the file."""

    def shapes(self) -> Mapping[str, Shape]:
        """name -> shape of every tensor in the file."""

    def read(self, name: str) -> Tensor:
        """One tensor, of any floating dtype, on the CPU. Raises BadModel."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. A matrix is [out, in]; a bias or norm that the model has not is None.

    qkv:     [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden]; rows of q, then k, then v
    out:     [hidden, num_q_heads * head_dim]
    gate_up: [2 * intermediate, hidden]; rows of gate, then up
    down:    [hidden, intermediate]
    q_norm, k_norm: [head_dim]
    """

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """All weights of a model, of one dtype on one device.

    embedding: [vocab, hidden]
    head:      [vocab, hidden]; the embedding itself where the model ties them
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of every weight, and of the arithmetic."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where every weight lies."""
        return self.embedding.device


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Hugging Face's name -> shape of every tensor that the model needs."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in _layer_shapes(config))
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    attention, hidden, intermediate = config.attention, config.hidden_size, config.intermediate_size
    q_size = attention.num_q_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    matrices = (
        ("self_attn.q_proj", (q_size, hidden), config.qkv_bias),
        ("self_attn.k_proj", (kv_size, hidden), config.qkv_bias),
        ("self_attn.v_proj", (kv_size, hidden), config.qkv_bias),
        ("self_attn.o_proj", (hidden, q_size), config.out_bias),
        ("mlp.gate_proj", (intermediate, hidden), config.mlp_bias),
        ("mlp.up_proj", (intermediate, hidden), config.mlp_bias),
        ("mlp.down_proj", (hidden, intermediate), config.mlp_bias),
    )
    for name, shape, has_bias in matrices:
        yield f"{name}.weight", shape
        if has_bias:
            yield f"{name}.bias", shape[:1]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (hidden,)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield f"self_attn.{name}.weight", (attention.head_dim,)


def load_weights(
    source: TensorSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Every weight of the model, read one tensor at a time.

    Raises BadModel for a tensor that is missing, not expected, of another shape, or not finite.
    """
    _check_shapes(source, config)
    assembly = _Assembly(source, expected_shapes(config), dtype, device)
    embedding = assembly.join("model.embed_tokens.weight")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(assembly, config, f"model.layers.{layer}.") for layer in range(config.num_layers)),
        final_norm=assembly.join("model.norm.weight"),
        head=embedding if config.tied_embeddings else assembly.join("lm_head.weight"),
    )


def _check_shapes(source: TensorSource, config: ModelConfig) -> None:
    expected, found = expected_shapes(config), source.shapes()
    missing = [name for name in expected if name not in found]
    if missing:
        raise BadModel(f"{source.name} lacks {_some(missing)}; the file is not complete or not of this model")
    unexpected = [name for name in found if name not in expected and not _may_be_ignored(name)]
    if unexpected:
        raise BadModel(f"{source.name} has {_some(unexpected)}, which {config.architecture} does not use")
    for name, shape in expected.items():
        if found[name] != shape:
            raise BadModel(
                f"{source.name}: {name} has shape {list(found[name])}; the model's config asks for {list(shape)}"
            )


def _may_be_ignored(name: str) -> bool:
    # a tied head may be stored again, and old files keep a table that follows from the config
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def _layer(assembly: _Assembly, config: ModelConfig, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = [f"{attention}{name}_proj" for name in "qkv"]
    gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
    return LayerWeights(
        attention_norm=assembly.join(f"{prefix}input_layernorm.weight"),
        qkv=assembly.join(*(f"{name}.weight" for name in qkv)),
        qkv_bias=assembly.join(*(f"{name}.bias" for name in qkv)) if config.qkv_bias else None,
        q_norm=assembly.join(f"{attention}q_norm.weight") if config.qk_norm else None,
        k_norm=assembly.join(f"{attention}k_norm.weight") if config.qk_norm else None,
        out=assembly.join(f"{attention}o_proj.weight"),
        out_bias=assembly.join(f"{attention}o_proj.bias") if config.out_bias else None,
        mlp_norm=assembly.join(f"{prefix}post_attention_layernorm.weight"),
        gate_up=assembly.join(*(f"{name}.weight" for name in gate_up)),
        gate_up_bias=assembly.join(*(f"{name}.bias" for name in gate_up)) if config.mlp_bias else None,
        down=assembly.join(f"{mlp}down_proj.weight"),
        down_bias=assembly.join(f"{mlp}down_proj.bias") if config.mlp_bias else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Assembly:
    """Reads tensors into joined ones, so that no more than one tensor exists twice."""

    source: TensorSource
    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    device: torch.device

    def join(self, *names: str) -> Tensor:
        """The named tensors below each other."""
        rows = [self.shapes[name][0] for name in names]
        joined = torch.empty((sum(rows), *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        end = 0
        for name, num_rows in zip(names, rows, strict=True):
            end += num_rows
            joined[end - num_rows : end] = self.source.read(name)
        if not torch.isfinite(joined).all():
            raise BadModel(
                f"{self.source.name}: {' or '.join(names)} holds NaN or infinity as {self.dtype}; "
                "the file is damaged, or the dtype too narrow for it"
            )
        return joined
