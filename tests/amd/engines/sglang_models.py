"""Hybrid models for SGLang: those of vllm_models, as SGLang reads them."""

import shutil
from functools import partial
from pathlib import Path

import torch

from tests.amd.engines.models import add_to_config, model, weights_of, write_weights, written_once
from tests.amd.engines.vllm_models import vllm_model


def hybrid_model(name: str, cache: Path) -> Path:
    """Returns the folder of delta_net or mamba, after writing it if necessary."""
    return written_once(f"sglang_{name}", partial(_write, name, cache), cache)


def drafted_model(cache: Path) -> Path:
    """Returns the folder of a delta_net whose next token depends on the last one more than on earlier ones."""
    return written_once("sglang_drafted", partial(_write_drafted, cache), cache)


def drafting_model(cache: Path) -> Path:
    """Returns the folder of a Llama with the embeddings of drafted_model, so that many of its drafts agree."""
    return written_once("sglang_drafting", partial(_write_drafting, cache), cache)


def _write_drafted(cache: Path, folder: Path) -> None:
    shutil.copytree(hybrid_model("delta_net", cache), folder, dirs_exist_ok=True)
    random, weights = torch.Generator().manual_seed(3), weights_of(folder)
    for name, each in weights.items():
        if "embed_tokens" in name:
            each.normal_(0, 1, generator=random)
        elif each.dim() > 1 and "lm_head" not in name:
            each.mul_(0.25)
    write_weights(folder, weights)


def _write_drafting(cache: Path, folder: Path) -> None:
    shutil.copytree(model("eagle_target", cache), folder, dirs_exist_ok=True)
    weights, others = map(weights_of, (folder, drafted_model(cache)))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert weights[name].shape == others[name].shape
        weights[name] = others[name].clone()
    write_weights(folder, weights)


def _write(name: str, cache: Path, folder: Path) -> None:
    """SGLang reads which layers attend from a name that transformers does not write: one in four."""
    shutil.copytree(vllm_model(name, cache), folder, dirs_exist_ok=True)
    add_to_config(folder, {"full_attention_interval": 4})
