"""The attention layers of popular models, described by the properties that a kernel depends on."""

from collections.abc import Callable

import torch

from rocm_attn.problem import Problem

Measured = Callable[[str, object], None]

# name -> query heads, KV heads, head_dim
HEADS = {
    "Llama-3-8B": (32, 8, 128),
    "Llama-3-70B on one of 8 GPUs": (8, 1, 128),
    "Qwen3-30B-A3B": (32, 4, 128),
    "gpt-oss-120b": (64, 8, 64),
    "Gemma-3-27B": (32, 16, 128),
    "Gemma-3-4B": (8, 4, 256),
}


def layer(model: str, dtype: torch.dtype = torch.bfloat16, page_size: int = 16) -> Problem:
    num_q_heads, num_kv_heads, head_dim = HEADS[model]
    return Problem(num_q_heads, num_kv_heads, head_dim, dtype, page_size, v_head_dim=head_dim, scale=head_dim**-0.5)
