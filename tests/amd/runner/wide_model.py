"""The tiny model with heads of 64 elements, which tell a few hundred keys apart: needles can check its layers."""

from dataclasses import replace
from typing import Any

import torch

from rocm_attn.models.config import AttentionConfig, LayerConfig
from rocm_attn.models.gates import SwiGLU
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.mlp_config import DenseMlp
from rocm_attn.models.rope import Rope
from rocm_serve.models.loading import LoadedModel
from rocm_serve.ranks import ONE_RANK, Ranks
from tests.amd.runner.tiny_model import CONFIG, tiny_model

HEAD = AttentionLayer(num_q_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
CONTEXT = 512


def wide_model(attention: AttentionLayer = HEAD, first: tuple[LayerConfig, ...] = (), **named: Any) -> LoadedModel:
    """Returns two layers of this attention. first: layers before them; named: of tiny_model"""
    mixer = AttentionConfig(attention, Rope(theta=10000.0, head_dim=attention.head_dim))
    layer = LayerConfig((mixer,), DenseMlp(40, SwiGLU()))
    return tiny_model(base=replace(CONFIG, layers=(*first, layer, layer)), context_len=CONTEXT, **named)


def load_wide(*, device: torch.device, ranks: Ranks = ONE_RANK) -> LoadedModel:
    """Loads a rank's part; for RankedEngine."""
    return wide_model(device=device, ranks=ranks)
