"""The tiny model with a recurrent layer before its attention layers, so that K and V follow from states too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.models.config import ModelConfig
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.recurrent import RecurrentLayer, Rule
from rocm_attn.step.step import Part
from rocm_serve import engine_runtime
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model, StepInputs
from rocm_serve.models.weights import ModelWeights
from tests.amd.runner.tiny_model import CONFIG, tiny_model, with_windows

LAYER = RecurrentLayer(Rule.GATED_DELTA, num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8, conv_width=4)


@dataclass(frozen=True)
class RecurrentTiny(ModelConfig):
    """A config of the tiny model that names LAYER."""

    @property
    def attention(self) -> AttentionGeometry:
        """The attention layers, and the recurrent one."""
        layers = tuple(layer.attention for layer in self.layers)
        return replace(AttentionGeometry.of(layers), recurrent=((0, LAYER),))


class RecurrentModel(Model):
    """The tiny model; its embeddings pass the recurrent layer first. Arguments are those of Model."""

    _step: Part

    def __init__(self, config: ModelConfig, weights: ModelWeights, *others: Any, **options: Any) -> None:
        super().__init__(config, weights, *others, **options)
        generator = torch.Generator().manual_seed(5)

        def random(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * 0.4).to(weights.embedding)

        hidden, heads = config.hidden_size, LAYER.num_value_heads
        self._qkv, self._convolution = (
            random(hidden, LAYER.conv_channels),
            random(LAYER.conv_channels, LAYER.conv_width),
        )
        self._decay, self._beta = random(hidden, heads), random(hidden, heads)
        self._out = random(heads * LAYER.value_dim, hidden) * 2

    def hidden_and_inputs(self, step: StepInputs, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Like Model.hidden_and_inputs."""
        assert isinstance(step, Part)
        self._step = step
        return super().hidden_and_inputs(step, layers)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden]: embeddings, and the recurrent layer's output added to them. token_ids: integer [T]"""
        rows, states = super().embed(token_ids), self._step.states
        x = rows @ self._qkv
        mixed, num_tokens = torch.empty_like(x), len(rows)
        states.convolve(0, x, self._convolution, None, mixed)
        key = LAYER.num_key_heads * LAYER.key_dim
        q, k, v = mixed.split([key, key, LAYER.num_value_heads * LAYER.value_dim], 1)
        heads = num_tokens, LAYER.num_key_heads, LAYER.key_dim
        out = x.new_empty(num_tokens, LAYER.num_value_heads, LAYER.value_dim)
        decay, beta = -F.softplus(rows @ self._decay).float(), (rows @ self._beta).sigmoid().float()
        states.recur(0, q.view(heads), k.view(heads), v.view(out.shape), decay, beta, out)
        return rows + out.flatten(1) @ self._out


def recurrent_model(patch: pytest.MonkeyPatch, *window_left: int, device: torch.device | None = None) -> LoadedModel:
    """The model with these windows, if any. Until the patch is undone, engines make a RecurrentModel of it."""
    patch.setattr(engine_runtime, "Model", RecurrentModel)
    base = with_windows(CONFIG, *window_left) if window_left else CONFIG
    config = RecurrentTiny(**{each.name: getattr(base, each.name) for each in fields(base)})
    return tiny_model(base=config, device=device)
