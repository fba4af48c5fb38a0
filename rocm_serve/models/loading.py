"""load_model: reads a model's config, weights and tokenizer."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from rocm_attn.errors import BadModel, BadSetting
from rocm_attn.machine.devices import device_of, require_there
from rocm_attn.models.config import ModelConfig, RowFactors
from rocm_attn.models.cut import cost_of_cut
from rocm_attn.models.families import DECODERS
from rocm_attn.models.fields import Fields, read_json, read_text
from rocm_attn.models.gguf_config import config_from_gguf
from rocm_attn.models.gguf_file import GGUFFile
from rocm_attn.models.hf_config import config_from_json
from rocm_attn.models.tensors import Shape, TensorSource
from rocm_attn.problem import DTYPES
from rocm_serve.models.places import find_model
from rocm_serve.models.renamed_tensors import RenamedTensors, replaced_name, text_name
from rocm_serve.models.safetensors_file import SafetensorsFiles
from rocm_serve.models.weights import ModelWeights, load_weights
from rocm_serve.ranks import ONE_RANK, Ranks
from rocm_serve.text.added_tokens import add_tokens, special_texts, text_of
from rocm_serve.text.chat_template import template_of
from rocm_serve.text.gguf_tokenizer import tokenizer_from_gguf
from rocm_serve.text.tokenizer import Tokenizer

_ADAPTER = "adapter_config.json"


class ScaledTensors:
    """A TensorSource over another. factors: on rows of tensors whose names end so"""

    def __init__(self, whole: TensorSource, factors: RowFactors) -> None:
        self.name = whole.name
        self._whole, self._factors, self._shapes = whole, factors, whole.shapes()

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read; in float32 if there are factors, so that the product is rounded once."""
        part = self._whole.read(name, *where)
        factors = next((factors for end, factors in self._factors.items() if name.endswith(end)), {})
        if not factors:
            return part
        of_row = torch.empty(self._shapes[name][0])
        for first, factor in factors.items():
            of_row[first:] = factor
        return part.float() * of_row[where[:1]].view(-1, *[1] * (part.dim() - 1))


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run, or a rank's part of it.

    config:    of the part
    tokenizer: None if a directory has none: prompts must then be token ids
    ranks:     that share the model
    cost:      of dividing the model over ranks, in sentences
    seconds:   for which its weights were read
    """

    config: ModelConfig
    weights: ModelWeights
    tokenizer: Tokenizer | None
    ranks: Ranks = ONE_RANK
    cost: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """A model whose weights were not read yet. tokenizer: see LoadedModel"""

    config: ModelConfig
    source: TensorSource
    tokenizer: Tokenizer | None


def load_model(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, ranks: Ranks = ONE_RANK
) -> LoadedModel:
    """Loads the model at `path`: a directory with config.json and safetensors, a .gguf file, a hub id, or "smollm2".

    dtype: dtype of all weights: float32, float16 or bfloat16
    ranks: tensor-parallel ranks; each reads its own part
    Raises BadModel for a missing, damaged or unknown model, BadSetting for an unsupported dtype or device, and
    Unsupported for a number of ranks that the model is not divided over.
    """
    started = time.perf_counter()
    if dtype not in DTYPES:
        raise BadSetting(f"dtype {dtype!r} is not one of {', '.join(map(str, DTYPES))}")
    device = device_of(device)
    require_there(device)
    files, num_ranks = open_model(path), ranks.shard.num_ranks
    part, cost = files.config.on_one_of(num_ranks), cost_of_cut(files.config, num_ranks)
    weights = load_weights(files.source, files.config, dtype=dtype, device=device, shard=ranks.shard)
    return LoadedModel(part, weights, files.tokenizer, ranks, cost, time.perf_counter() - started)


def open_model(path: str | Path) -> ModelFiles:
    """Opens the model at `path` without its weights; see load_model. Raises BadModel."""
    place = find_model(path)
    if place.is_dir():
        return _open_directory(place)
    file = GGUFFile(place)
    return ModelFiles(config_from_gguf(file), file, _tokenizer_of_gguf(file))


def default_dtype(path: str | Path, device_type: str) -> torch.dtype:
    """The dtype that the model at `path` runs in by default. It is not opened. Raises BadModel if there is none.

    A CPU computes in float32. On a GPU a GGUF model runs in float16, whose 10 bits of mantissa hold a quantised weight
    more closely than bfloat16's 7: those flip near-ties of SmolLM2's logits, and the text becomes meaningless. Models
    from safetensors run in bfloat16, the dtype that most are published in, which does not overflow.
    """
    is_gguf = not find_model(path).is_dir()
    if device_type == "cpu":
        return torch.float32
    return torch.float16 if is_gguf else torch.bfloat16


def load_tokenizer(place: Path) -> Tokenizer | None:
    """The tokenizer of a directory or .gguf file; None for a directory without tokenizer.json. Raises BadModel."""
    if place.is_dir():
        return _tokenizer_of_directory(place, _options_of_tokenizer(place))
    return _tokenizer_of_gguf(GGUFFile(place))


def _open_directory(directory: Path) -> ModelFiles:
    if (directory / _ADAPTER).is_file():  # transformers adds it to the weights
        raise BadModel(
            f"{directory} has {_ADAPTER}, and adapters (LoRA) are not served; merge it into the model and save that "
            "elsewhere, or remove the file if the weights have it already"
        )
    if not (directory / "config.json").is_file():
        raise BadModel(f"{directory} has no config.json; give the directory of a Hugging Face model")
    json, options = read_json(directory / "config.json"), _options_of_tokenizer(directory)
    config, tokenizer = config_from_json(json), _tokenizer_of_directory(directory, options)
    generation = Fields(_json_if_there(directory / "generation_config.json"), "generation_config.json")
    of_tokenizer = (token for token in _ends_of(tokenizer, options) if token < config.vocab_size)
    ends = dict.fromkeys((*config.eos_token_ids, *generation.ids("eos_token_id"), *of_tokenizer))
    config = replace(config, eos_token_ids=tuple(ends))
    source: TensorSource = SafetensorsFiles(directory)
    if json.get("text_config") is not None:  # the text model is one part of several
        source = RenamedTensors(source, text_name)
    if renamed := DECODERS[config.architecture].renamed:
        source = RenamedTensors(source, partial(replaced_name, renamed))
    if config.factors:
        source = ScaledTensors(source, config.factors)
    return ModelFiles(config, source, tokenizer)


def _tokenizer_of_gguf(file: GGUFFile) -> Tokenizer:
    fields = Fields(file.metadata, file.name)
    backend = tokenizer_from_gguf(fields)
    # Without this field, files of SentencePiece and of Llama 3 mean "yes". Most of Llama 3 lack it.
    is_llama3 = fields.text("tokenizer.ggml.pre", "") == "llama-bpe" and fields.has("tokenizer.ggml.bos_token_id")
    adds_bos = fields.flag("tokenizer.ggml.add_bos_token", is_llama3 or fields.text("tokenizer.ggml.model") == "llama")
    template = None
    if fields.has("tokenizer.chat_template"):
        tokens = {f"{n}_token": _special(backend, fields, f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos")}
        named = {"default": fields.text("tokenizer.chat_template")}
        if fields.has("tokenizer.chat_template.tool_use"):
            named["tool_use"] = fields.text("tokenizer.chat_template.tool_use")
        template = template_of(named, tokens)
    bos_token_id = _token_id(backend, fields, "tokenizer.ggml.bos_token_id") if adds_bos else None
    return Tokenizer(backend=backend, bos_token_id=bos_token_id, chat_template=template)


def _special(backend: tokenizers.Tokenizer, fields: Fields, name: str) -> str:
    """The text of the token whose id the file gives under `name`; "" if it gives none. Raises BadModel."""
    if not fields.has(name):
        return ""
    return str(backend.id_to_token(_token_id(backend, fields, name)))


def _token_id(backend: tokenizers.Tokenizer, fields: Fields, name: str) -> int:
    """The id of a token under `name`. Raises BadModel if there is no such token."""
    token_id, num_tokens = fields.whole(name), backend.get_vocab_size()
    if not 0 <= token_id < num_tokens:
        raise BadModel(f"{fields.source}: {name} is {token_id}; the vocabulary has tokens 0 to {num_tokens - 1}")
    return token_id


def _tokenizer_of_directory(directory: Path, options: Mapping[str, object]) -> Tokenizer | None:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise BadModel(f"{path} is not a tokenizer ({error})") from error
    if Fields(options, "tokenizer_config.json").flag("split_special_tokens", False):
        raise BadModel(
            "tokenizer_config.json: split_special_tokens is true, by which the marks of a conversation would be no "
            "tokens of their own; set it to false"
        )
    # In transformers, too, tokenizer_config.json takes the place of the file that older versions wrote.
    older = {} if "added_tokens_decoder" in options else _json_if_there(directory / "added_tokens.json")
    add_tokens(backend, options, older)
    template_file = directory / "chat_template.jinja"
    named: object = options.get("chat_template")
    if template_file.is_file():
        others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        named = {"default": read_text(template_file), **{each.stem: read_text(each) for each in others}}
    return Tokenizer(backend=backend, bos_token_id=None, chat_template=template_of(named, special_texts(options)))


def _ends_of(tokenizer: Tokenizer | None, options: Mapping[str, object]) -> tuple[int, ...]:
    """The end token of tokenizer_config.json, if it is there. Some fine-tuned models name that of their turns nowhere
    else.
    """
    text = text_of(options.get("eos_token"))
    token = tokenizer.backend.token_to_id(text) if tokenizer is not None and text else None
    return () if token is None else (token,)


def _options_of_tokenizer(directory: Path) -> Mapping[str, object]:
    options = _json_if_there(directory / "tokenizer_config.json")
    # Older versions of transformers wrote the special tokens into a file of their own.
    older = {} if "added_tokens_decoder" in options else _json_if_there(directory / "special_tokens_map.json")
    return {**options, **older}


def _json_if_there(path: Path) -> Mapping[str, object]:
    return read_json(path) if path.is_file() else {}
