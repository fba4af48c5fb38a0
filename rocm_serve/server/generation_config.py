"""Defaults of sampling: the model's own, as its authors write them in generation_config.json, or OpenAI's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rocm_attn.errors import BadModel, BadRequest, BadSetting
from rocm_attn.models.fields import Fields, read_json, shown
from rocm_serve.models.places import find_model
from rocm_serve.sampling.sampling_options import LARGEST_BIAS, Sampling

# Values of --generation-config that are not a place.
OF_MODEL, OF_OPENAI = "auto", "none"

# OpenAI's defaults where they differ from those of Sampling.
OPENAI_DEFAULTS = Sampling(temperature=1.0)

_FILE = "generation_config.json"
# Tokens that transformers forces or forbids at one place of an answer.
_AT_PLACES = ("begin_suppress_tokens", "forced_bos_token_id", "forced_decoder_ids", "forced_eos_token_id")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Read here or with the weights, or without a meaning for texts.
_KNOWN = {*_NUMBERS, *_AT_PLACES, "top_k", "suppress_tokens", "bos_token_id", "eos_token_id", "pad_token_id"}
_KNOWN |= {"transformers_version", "_from_model_config", "use_cache", "cache_implementation"}


def defaults_from(generation_config: str, model: str, announce: Callable[[str], None]) -> Sampling:
    """Returns the sampling of requests that do not say how they are sampled.

    generation_config: auto (the model's file, if it has one), none, or a file or its folder
    announce:          gets a line about what the file sets and is not read
    Raises BadSetting if there is no such file, BadModel if it cannot be used.
    """
    if generation_config == OF_OPENAI:
        return OPENAI_DEFAULTS
    if generation_config == OF_MODEL:
        place = find_model(model)
        file = place / _FILE
        return _read(file, announce) if place.is_dir() and file.is_file() else OPENAI_DEFAULTS
    place = Path(generation_config)
    file = place / _FILE if place.is_dir() else place
    if not file.is_file():
        raise BadSetting(
            f"generation_config is {generation_config}, and there is no file {file}; give {OF_MODEL}, {OF_OPENAI}, or "
            f"a {_FILE}"
        )
    return _read(file, announce)


def _read(file: Path, announce: Callable[[str], None]) -> Sampling:
    """Returns the defaults of a file, and OpenAI's for all that it does not say. Raises BadModel."""
    fields = Fields(read_json(file), str(file))
    refused = [name for name in _AT_PLACES if fields.values.get(name) not in (None, [])]
    if refused:
        raise BadModel(
            f"{file} sets {', '.join(refused)}, which forces or forbids tokens at one place of an answer, and is not "
            "served; remove it from the file, or set --generation-config none"
        )
    unread = [
        f"{name} {shown(value)}"
        for name, value in fields.values.items()
        # transformers samples only if the file says so; every other false leaves something out.
        if name not in _KNOWN and value not in (None, [], {}) and (value is False) == (name == "do_sample")
    ]
    if unread:
        announce(
            f"{file} sets {', '.join(unread)}, which the server does not read; requests give temperature, stop and "
            "max_tokens themselves"
        )
    said: dict[str, Any] = {
        name: 0.0 if fields.values[name] == 0 else fields.positive(name) for name in _NUMBERS if fields.has(name)
    }
    if fields.has("top_k"):
        said["top_k"] = max(0, fields.whole("top_k"))
    # Gemma 4 names marks of images and sounds there, which are no text and may be the likeliest tokens all the same.
    said["logit_bias"] = tuple((token, -LARGEST_BIAS) for token in dict.fromkeys(fields.ids("suppress_tokens")))
    try:
        return replace(OPENAI_DEFAULTS, **said)
    except BadRequest as error:
        raise BadModel(f"{file} cannot give defaults of sampling: {error}; set --generation-config none") from error
