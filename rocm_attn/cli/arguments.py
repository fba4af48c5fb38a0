"""What several commands make of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.runner.fields import read_json


def device_named(name: str | None) -> torch.device:
    """The torch device of --device; not given: a GPU if there is one, else the CPU. Raises BadSetting."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise BadSetting(f"device {name!r} is not known; use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadSetting(f"device {str(device)!r} is not there: torch sees {torch.cuda.device_count()} GPUs; use 'cpu'")
    return device


def model_config(place: str) -> Mapping[str, object]:
    """The config.json at `place`, a file or the directory that holds it. Raises BadModel."""
    path = Path(place)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise BadModel(f"there is no file {path}; give a model's config.json, or the directory that holds it")
    return read_json(path)


def context_len(config: Mapping[str, object]) -> int:
    """Tokens of a model's context, by its config.json. Raises BadSetting."""
    text = config.get("text_config")
    length = (text if isinstance(text, Mapping) else config).get("max_position_embeddings")
    if not isinstance(length, int) or length < 1:
        raise BadSetting(f"config.json: max_position_embeddings is {length!r}; give --max-kv-len")
    return length
