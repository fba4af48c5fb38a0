"""Gemma 3n's attention, at its published geometry, is transformers': twenty layers keep K and V, the others read them.

The runner does not have the rest of the model. Each layer gets its own hidden states, so that one layer's error does
not hide in another's. Our results and transformers' are both compared with float64, by a bound that grows with the
scores: Gemma's scale is 1, so scores reach 90, and two libraries, or one on two CPUs, differ by float32's rounding
error at that size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.gemma3n import modeling_gemma3n as hf

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.models.families import attention_geometry
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.paging.index_spaces import Space
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.runner.test_published_configs import GEMMA3N_E4B
from tests.amd.tolerances import assert_as_close_as_float32, attention_rounding

HIDDEN_SIZE = 32
# Past the window of 512, in chunks that do not end where pages do; the last tokens are decoded.
CHUNKS = (300, 225, 20, 1, 1, 1)
NUM_TOKENS = sum(CHUNKS)
PAGE_SIZE = 16


class Reference:
    """transformers' attention modules of random weights, with their inputs and outputs for one sequence.

    q, out, exact, rounding: per layer, [tokens, q_heads, head_dim]; as attention takes and gives them, see
                             attention_rounding for the last two
    k, v:                    per storing layer, [tokens, kv_heads, head_dim]
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
        self.exact: list[Tensor] = []
        self.rounding: list[Tensor] = []
        for number, kind in enumerate(config.layer_types):
            layer: Any = hf.Gemma3nTextAttention(config, number)
            layer.o_proj = torch.nn.Identity()
            hidden = torch.randn(1, NUM_TOKENS, HIDDEN_SIZE)
            seen = config.sliding_window if kind == "sliding_attention" else NUM_TOKENS
            is_hidden = (distance < 0) | (distance >= seen)
            mask = torch.zeros(distance.shape).masked_fill(is_hidden, float("-inf"))
            with torch.no_grad(), given_to_attention() as given:
                out = layer(hidden, rope(hidden, positions, kind), mask, shared_kv_states=shared)[0]
            ((q, k, v, scale),) = given
            self.out.append(out.view(NUM_TOKENS, -1, config.head_dim))
            self.q.append(q.transpose(0, 1))
            if number < geometry.num_storing:
                self.k.append(k.transpose(0, 1))
                self.v.append(v.transpose(0, 1))
            ratio = len(q) // len(k)
            exact, rounding = attention_rounding(
                q, k.repeat_interleave(ratio, 0), v.repeat_interleave(ratio, 0), is_hidden, scale
            )
            self.exact.append(exact.transpose(0, 1))
            self.rounding.append(rounding.transpose(0, 1))


@contextmanager
def given_to_attention() -> Iterator[list[tuple[Tensor, Tensor, Tensor, float]]]:
    """Collects the arguments of transformers' attention: q, k, v of [heads, tokens, head_dim], and the scale."""
    given = []
    attend = hf.eager_attention_forward

    def noted(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        given.append((q[0], k[0], v[0], options["scaling"]))
        return attend(module, q, k, v, mask, **options)

    with patch.object(hf, "eager_attention_forward", noted):
        yield given


@pytest.mark.parametrize(
    ("published", "swa_pages"),
    [pytest.param(GEMMA3N_E4B, swa_pages, marks=pytest.mark.nightly) for swa_pages in (0, 60)],
)
def test_layers_that_read_anothers_k_and_v_attend_as_transformers_do(published: dict[str, Any], swa_pages: int) -> None:
    geometry = attention_geometry(published)
    wanted = Reference(published["text_config"], geometry)
    runtime = build_runtime(
        geometry.problems(dtype=torch.float32, page_size=PAGE_SIZE),
        RuntimeOptions(num_pages=50, swa_pages=swa_pages, max_num_seqs=2, max_kv_len=NUM_TOKENS, provider="torch"),
        device=torch.device("cpu"),
    )
    table, kv_len = runtime.table, 0
    row = table.admit()
    for chunk in CHUNKS:
        new, kv_len = slice(kv_len, kv_len + chunk), kv_len + chunk
        lengths = np.array([kv_len], np.int32)
        table.evict(np.array([row], np.int32), lengths - chunk)
        table.reserve(row, kv_len)
        batch = StepBatch(np.array([row], np.int32), lengths, np.array([chunk], np.int32), NO_TOKEN_IDS)
        step = runtime.step(batch, runtime.plan(batch, PadTo(1))).parts[0]
        for layer, read in enumerate(geometry.reads):
            if layer < geometry.num_storing:
                step.layers.store(layer, wanted.k[layer][new], wanted.v[layer][new])
            out = torch.full_like(wanted.q[layer][new], float("nan"))
            step.layers.attend(read, wanted.q[layer][new], out)
            for one in (out, wanted.out[layer][new]):
                assert_as_close_as_float32(one, wanted.exact[layer][new], wanted.rounding[layer][new])
        runtime.end_step()
    runtime.check_device()
    if swa_pages:
        assert table.num_held(row, Space.SWA) < table.num_held(row), "pages have left the window"
