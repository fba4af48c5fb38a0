"""Refuses ranks that were given different models or options: their collectives would hang, or add up wrong numbers."""

from dataclasses import fields
from zlib import crc32

import torch

from rocm_attn.errors import BadSetting
from rocm_attn.machine.settings import DISABLE_GUARDS, settings
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions

# Options of single ranks: the others do not depend on them, or take the least memory of all.
_OF_ONE_RANK = ("flight_record", "evidence", "hang_after", "gpu_memory_share")
# Rows of the embedding that are compared: all take seconds.
_NUM_ROWS = 64
_LONGEST_VALUE = 60


def require_alike(loaded: LoadedModel, options: EngineOptions) -> None:
    """Compares what the ranks of one model were given; all of them call this at the same time.

    Raises BadSetting on every rank if options, configs, tokenizers, dtypes or rows of the embeddings differ.
    """
    if loaded.ranks.shard.num_ranks == 1:
        return
    given, agree = _given(loaded, options), loaded.ranks.agree
    differ = [name for name, value in agree(given).items() if value != given.get(name)]
    if differ:
        rank, mine = loaded.ranks.shard.rank, ", ".join(f"{name} {given.get(name)}" for name in differ)
        of_ranks = "; ".join(agree({str(rank): mine}).values())
        raise BadSetting(f"ranks that share a model must have the same files and options; {of_ranks}")


def _given(loaded: LoadedModel, options: EngineOptions) -> dict[str, str]:
    """The properties that ranks have in common, in words."""
    given = {each.name: getattr(options, each.name) for each in fields(options) if each.name not in _OF_ONE_RANK}
    given |= {f"config.{each.name}": getattr(loaded.config, each.name) for each in fields(loaded.config)}
    embedding = loaded.weights.embedding
    rows = embedding[:: max(1, len(embedding) // _NUM_ROWS)].contiguous().cpu().flatten()
    given |= {"dtype": embedding.dtype, "embedding": _checksum(rows.view(torch.uint8).numpy().tobytes())}
    given[DISABLE_GUARDS] = ",".join(settings().disable_guards)
    given["tokenizer"] = None if loaded.tokenizer is None else loaded.tokenizer.backend.to_str()
    return {name: _in_words(str(value)) for name, value in given.items()}


def _in_words(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else _checksum(value.encode(errors="surrogatepass"))


def _checksum(data: bytes) -> str:
    return f"with the checksum {crc32(data):08x}"
