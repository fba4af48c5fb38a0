"""Hybrid models for SGLang: those of vllm_models, as SGLang reads them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.amd.engines.models import model, written_once
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
    random, weights = torch.Generator().manual_seed(3), load_file(folder / "model.safetensors")
    for name, each in weights.items():
        if "embed_tokens" in name:
            each.normal_(0, 1, generator=random)
        elif each.dim() > 1 and "lm_head" not in name:
            each.mul_(0.25)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_drafting(cache: Path, folder: Path) -> None:
    shutil.copytree(model("eagle_target", cache), folder, dirs_exist_ok=True)
    weights, others = (load_file(each / "model.safetensors") for each in (folder, drafted_model(cache)))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert weights[name].shape == others[name].shape
        weights[name] = others[name].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write(name: str, cache: Path, folder: Path) -> None:
    """SGLang reads which layers attend from a name that transformers does not write: one in four."""
    shutil.copytree(vllm_model(name, cache), folder, dirs_exist_ok=True)
    fields = json.loads((folder / "config.json").read_text())
    fields["full_attention_interval"] = 4
    (folder / "config.json").write_text(json.dumps(fields))
