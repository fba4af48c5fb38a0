"""A server for the pages' clients: 127.0.0.1:8000 and smollm2 of a page stand for its address and a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import rocm_attn as ra
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.server.running import NAME, running

ADDRESS = "127.0.0.1:8000"


@contextmanager
def against_a_server(text: str) -> Iterator[str]:
    """The text of a page's block, with the address and the model of a server that runs meanwhile."""
    cpu = torch.device("cpu")
    loaded = tiny_model(context_len=512, dtype=torch.float32, device=cpu, tokenizer=word_tokenizer())
    engine = ra.Engine(loaded, ra.EngineOptions(max_batch_size=4, max_kv_len=256))
    with running(engine) as server:
        yield re.sub(r"\bsmollm2\b", NAME, text.replace(ADDRESS, server.url.removeprefix("http://")))
