"""`python -m tests.amd.server.tiny_server FLAGS`: `rocm-attn serve` over the tiny seeded model, called "tiny"."""

from __future__ import annotations

import sys
from typing import Any

import torch

import rocm_serve.cli.serve as command
from rocm_attn.cli import main
from rocm_serve.models.loading import LoadedModel
from rocm_serve.ranks import ONE_RANK, Ranks
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.generation_config import OPENAI_DEFAULTS
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer

FLAGS = ("--model", "tiny", "--device", "cpu", "--provider", "torch", "--page-size", "4", "--no-graphs")


def place(path: str) -> str:
    """Replaces `find_model`; there are no files."""
    return path


def load(path: str, *, dtype: torch.dtype, device: torch.device, ranks: Ranks = ONE_RANK) -> LoadedModel:
    """Replaces `load_model`; ignores the path."""
    torch.set_num_threads(1)
    return tiny_model(dtype=dtype, device=device, ranks=ranks, tokenizer=word_tokenizer())


def dtype(*requested: Any) -> torch.dtype:
    """Replaces `dtype_of`; always returns float32."""
    return torch.float32


def defaults(generation_config: str, model: str) -> Sampling:
    """Replaces `defaults_from`; ignores the path."""
    return OPENAI_DEFAULTS


if __name__ == "__main__":
    from tests.amd.server import tiny_server  # ranks import it by this name

    replaced = {"find_model": "place", "load_model": "load", "dtype_of": "dtype"}
    replaced["defaults_from"] = "defaults"
    for name, replacement in replaced.items():
        setattr(command, name, getattr(tiny_server, replacement))
    sys.exit(main(["serve", *FLAGS, *sys.argv[1:]]))
