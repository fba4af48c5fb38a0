"""Hybrid models for SGLang: those of vllm_models, as SGLang reads them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

from tests.amd.engines.models import written_once
from tests.amd.engines.vllm_models import vllm_model


def hybrid_model(name: str, cache: Path) -> Path:
    """Returns the folder of delta_net or mamba, after writing it if necessary."""
    return written_once(f"sglang_{name}", partial(_write, name, cache), cache)


def _write(name: str, cache: Path, folder: Path) -> None:
    """SGLang reads which layers attend from a name that transformers does not write: one in four."""
    shutil.copytree(vllm_model(name, cache), folder, dirs_exist_ok=True)
    fields = json.loads((folder / "config.json").read_text())
    fields["full_attention_interval"] = 4
    (folder / "config.json").write_text(json.dumps(fields))
