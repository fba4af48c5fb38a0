"""What several commands make of their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.page_choice import PageChoice, choose_pages, open_page_sizes, open_pools
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import Selection
from rocm_attn.runner.fields import read_json

_POOLS: Mapping[str, PoolKind | Literal["auto"]] = {
    "linear": PoolKind.SPLIT,
    "vectorized": PoolKind.VECTORIZED,
    "auto": "auto",
}


def device_named(name: str | None) -> torch.device:
    """The torch device of --device; not given: a GPU if there is one, else the CPU. Raises BadSetting."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise BadSetting(f"device {name!r} is not known; use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadSetting(f"device {str(device)!r} is not there: torch sees {torch.cuda.device_count()} GPUs; use 'cpu'")
    return device


def pool_named(name: str) -> PoolKind | Literal["auto"]:
    """What --pool names."""
    return _POOLS[name]


def page_choice(
    options: argparse.Namespace, problems: Sequence[Problem], choose: Callable[[Problem], Selection]
) -> PageChoice:
    """The pages of --page-size and --pool; see choose_pages. Raises Unsupported."""
    return choose_pages(problems, choose, open_page_sizes(options.page_size), open_pools(pool_named(options.pool)))


def pages_as_json(pages: PageChoice) -> dict[str, object]:
    """The page size and the name of the layout."""
    (pool,) = (name for name, pool in _POOLS.items() if pool is pages.pool)
    return {"page_size": pages.page_size, "pool": pool}


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
