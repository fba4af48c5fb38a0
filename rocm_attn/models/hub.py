"""Models by the ids of Hugging Face's hub, as Qwen/Qwen3-8B: files of its cache, or downloaded into it.

huggingface_hub does both, so its variables count: HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN. The cache is asked
first, and nothing is sent if it has the files. Imports huggingface_hub only for an id.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from rocm_attn.errors import BadModel

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_INDEX, _CONFIG = "model.safetensors.index.json", "config.json"
# A runner reads these; some models have the same weights a second time in other files.
_FILES, _NOT_READ = ("*.json", "*.jinja", "model*.safetensors"), ("original/*", "*.pth", "onnx/*")


def is_hub_id(name: str) -> bool:
    """True for an owner and a name with one slash between them, unless a file or a directory has this path."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def config_of_id(name: str) -> Path:
    """The config.json of a model on the hub, without its weights. Raises BadModel."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    def find() -> str:
        cached = try_to_load_from_cache(name, _CONFIG)
        return cached if isinstance(cached, str) else hf_hub_download(name, _CONFIG)

    return _found(name, find)


def directory_of_id(name: str) -> Path:
    """The directory of a model's config, tokenizer and weights in the hub's cache. Raises BadModel."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    def find() -> str:
        cached = try_to_load_from_cache(name, _CONFIG)
        if isinstance(cached, str) and _has_weights(Path(cached).parent):
            return str(Path(cached).parent)
        return str(snapshot_download(name, allow_patterns=list(_FILES), ignore_patterns=list(_NOT_READ)))

    directory = _found(name, find)
    if not _has_weights(directory):
        raise BadModel(f"{name} has no whole weights in {directory}; run: hf download {name}")
    return directory


def _has_weights(directory: Path) -> bool:
    """True if a directory of the cache, which may hold a part of a model, has all of its weights."""
    try:
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        return all((directory / file).is_file() for file in index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return (directory / "model.safetensors").is_file()


def _found(name: str, find: Callable[[], str]) -> Path:
    try:
        return Path(find())
    except Exception as error:  # the package's errors, and those of its HTTP library, have no common class
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BadModel(
            f"there is no file or directory {name}, and Hugging Face's hub did not give a model of this id "
            f"({reason.strip()}); run: hf download {name}, or give a directory"
        ) from error
