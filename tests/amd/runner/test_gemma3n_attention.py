"""Gemma 3n's attention, at its published geometry, is transformers': twenty layers keep K and V, the others read them.

The runner has not got the rest of the model. Each layer gets hidden states of its own, so that no layer's error hides
in another's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.gemma3n import modeling_gemma3n as hf

from rocm_attn.index_spaces import Space
from rocm_attn.runner.geometry import AttentionGeometry, attention_geometry
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step_batch import StepBatch
from tests.amd.runner.test_published_configs import GEMMA3N_E2B, GEMMA3N_E4B
from tests.amd.tolerances import assert_attention_close

HIDDEN_SIZE = 32
# Past the window of 512, in chunks that do not end where pages do; the last tokens are decoded.
CHUNKS = (300, 225, 20, 1, 1, 1)
NUM_TOKENS = sum(CHUNKS)
PAGE_SIZE = 16


class Reference:
    """transformers' attention modules of random weights, and what they make of random hidden states of one sequence.

    q, out: per layer, [tokens, q_heads, head_dim]; as attention takes and gives them
    k, v:   per storing layer, [tokens, kv_heads, head_dim]
    """

    def __init__(self, text_config: dict[str, Any], geometry: AttentionGeometry) -> None:
        torch.manual_seed(0)
        shapes = {name: text_config[name] for name in ("num_hidden_layers", "num_kv_shared_layers", "layer_types")}
        config: Any = transformers.Gemma3nTextConfig(
            **shapes,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=8,
            head_dim=text_config["head_dim"],
            num_attention_heads=text_config["num_attention_heads"],
            num_key_value_heads=text_config["num_key_value_heads"],
            sliding_window=text_config["sliding_window"],
            activation_sparsity_pattern=None,
        )
        config._attn_implementation = "eager"
        rope, positions = hf.Gemma3nRotaryEmbedding(config), torch.arange(NUM_TOKENS)[None]
        distance = positions[0][:, None] - positions[0]
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        self.q: list[Tensor] = []
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.out: list[Tensor] = []
        for number, kind in enumerate(config.layer_types):
            layer: Any = hf.Gemma3nTextAttention(config, number)
            layer.o_proj = torch.nn.Identity()
            hidden = torch.randn(1, NUM_TOKENS, HIDDEN_SIZE)
            cos_sin = rope(hidden, positions, kind)
            seen = config.sliding_window if kind == "sliding_attention" else NUM_TOKENS
            mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= seen), float("-inf"))
            heads = (1, NUM_TOKENS, -1, config.head_dim)
            with torch.no_grad():
                self.out.append(layer(hidden, cos_sin, mask, shared_kv_states=shared)[0].view(heads)[0])
                self.q.append(_turned(layer.q_norm(layer.q_proj(hidden).view(heads)), cos_sin))
                if number < geometry.num_storing:
                    self.k.append(_turned(layer.k_norm(layer.k_proj(hidden).view(heads)), cos_sin))
                    self.v.append(layer.v_norm(layer.v_proj(hidden).view(heads))[0])


def _turned(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    turned: Tensor = hf.apply_rotary_pos_emb(x, *cos_sin, unsqueeze_dim=2)[0]
    return turned


@pytest.mark.parametrize(("published", "swa_pages"), [(GEMMA3N_E2B, 0), (GEMMA3N_E4B, 60)], ids=["E2B", "E4B"])
def test_layers_that_read_anothers_k_and_v_attend_as_transformers_do(published: dict[str, Any], swa_pages: int) -> None:
    geometry = attention_geometry(published)
    wanted = Reference(published["text_config"], geometry)
    runtime = AttentionRuntime(
        geometry.problems(dtype=torch.float32, page_size=PAGE_SIZE),
        device=torch.device("cpu"),
        num_pages=50,
        swa_pages=swa_pages,
        max_num_seqs=2,
        max_kv_len=NUM_TOKENS,
        provider="torch",
    )
    table, kv_len = runtime.table, 0
    row = table.admit()
    for chunk in CHUNKS:
        new, kv_len = slice(kv_len, kv_len + chunk), kv_len + chunk
        lengths = np.array([kv_len], np.int32)
        table.evict(np.array([row], np.int32), lengths - chunk)
        table.reserve(row, kv_len)
        runtime.begin_step(StepBatch(np.array([row], np.int32), lengths, np.array([chunk], np.int32)), pad_to=1)
        for layer, read in enumerate(geometry.reads):
            if layer < geometry.num_storing:
                runtime.store(layer, wanted.k[layer][new], wanted.v[layer][new])
            out = torch.full_like(wanted.q[layer][new], float("nan"))
            runtime.attend(read, wanted.q[layer][new], out)
            assert_attention_close(out, wanted.out[layer][new].double(), torch.float32)
        runtime.end_step()
    runtime.check_device()
    if swa_pages:
        assert table.num_held(row, Space.SWA) < table.num_held(row), "pages have left the window"
