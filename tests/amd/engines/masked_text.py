"""Greedy text of transformers' Gemma 3 under masks that are written out, key by key: a reference for images in vLLM."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.amd.engines.vllm_images import IMAGE_SPANS, KEEPS_WINDOWS


def texts_with_images(folder: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Returns the continuations of prompts, with images where the model's config says."""
    from transformers import Gemma3ForCausalLM

    model: Any = Gemma3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return [_text(model, json.loads((folder / "config.json").read_text()), prompt, new_tokens) for prompt in prompts]


def _text(model: Any, config: dict[str, Any], prompt: Sequence[int], new_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new_tokens):
        window = config["sliding_window"]
        spans = [(first, length) for first, length in config[IMAGE_SPANS] if first + length <= len(prompt)]
        shown = {
            "full_attention": _shown(len(ids), len(ids), spans, keeps_window=False),
            "sliding_attention": _shown(len(ids), window, spans, keeps_window=bool(config.get(KEEPS_WINDOWS))),
        }
        hidden = {kind: torch.where(each, 0.0, torch.finfo(torch.float32).min) for kind, each in shown.items()}
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=hidden, use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _shown(length: int, window: int, spans: Sequence[tuple[int, int]], *, keeps_window: bool) -> Tensor:
    """bool [1, 1, length, length]: whether a token sees a key. spans: first places and lengths"""
    token, key = torch.arange(length)[:, None], torch.arange(length)
    is_near = token - key < window
    shown = (key <= token) & is_near
    for first, size in spans:
        of_span = (token >= first) & (token < first + size) & (key >= first) & (key < first + size)
        shown |= of_span & is_near if keeps_window else of_span
    return shown[None, None]
