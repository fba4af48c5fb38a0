"""The tiny model with a recurrent layer before its attention layers, so that K and V follow from states too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

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
from tests.amd.runner.tiny_model import CONFIG, tiny_model, with_windows

LAYER = RecurrentLayer(Rule.GATED_DELTA, num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8, conv_width=4)
_V_ROW = LAYER.num_value_heads * LAYER.value_dim


@dataclass(frozen=True)
class RecurrentTiny(ModelConfig):
    """A config of the tiny model that names LAYER."""

    @property
    def attention(self) -> AttentionGeometry:
        """The attention layers, and the recurrent one."""
        layers = tuple(layer.attention for layer in self.attending)
        return replace(AttentionGeometry.of(layers), recurrent=((0, LAYER),))


class RecurrentModel(Model):
    """The tiny model; its embeddings pass the recurrent layer first."""

    _step: Part

    def hidden_and_inputs(self, step: StepInputs, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Like Model.hidden_and_inputs."""
        assert isinstance(step, Part)
        self._step = step
        return super().hidden_and_inputs(step, layers)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden]: embeddings, and the recurrent layer's output added to them. token_ids: integer [T]"""
        rows, states = super().embed(token_ids), self._step.states
        random = torch.Generator().manual_seed(5)

        def projected(x: Tensor, size: int) -> Tensor:
            return x @ (torch.randn(x.shape[1], size, generator=random) * 0.4).to(x)

        num_tokens, key = len(rows), LAYER.num_key_heads * LAYER.key_dim
        x = projected(rows, LAYER.conv_channels)
        weight = (torch.randn(LAYER.conv_channels, LAYER.conv_width, generator=random) * 0.5).to(x)
        mixed = torch.empty_like(x)
        states.convolve(0, x, weight, None, mixed)
        q, k, v = mixed.split([key, key, _V_ROW], 1)
        decay, beta = -F.softplus(projected(rows, LAYER.num_value_heads)), projected(rows, LAYER.num_value_heads)
        out = x.new_empty(num_tokens, LAYER.num_value_heads, LAYER.value_dim)
        heads = num_tokens, LAYER.num_key_heads, LAYER.key_dim
        states.recur(0, q.view(heads), k.view(heads), v.view(out.shape), decay.float(), beta.sigmoid().float(), out)
        return rows + projected(out.flatten(1), rows.shape[1]) * 2


def recurrent_model(patch: pytest.MonkeyPatch, *window_left: int, device: torch.device | None = None) -> LoadedModel:
    """The model with these windows, if any. Until the patch is undone, engines make a RecurrentModel of it."""
    patch.setattr(engine_runtime, "Model", RecurrentModel)
    base = with_windows(CONFIG, *window_left) if window_left else CONFIG
    config = RecurrentTiny(**{each.name: getattr(base, each.name) for each in fields(base)})
    return tiny_model(base=config, device=device)
