"""What the process in front and the ranks' processes send each other."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rocm_attn.errors import RocmAttnError
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.ranks import Ranks


class Loader(Protocol):
    """Loads a rank's part of a model, in its process: load_model with a path and dtype, or a function of a module."""

    def __call__(self, *, device: torch.device, ranks: Ranks) -> LoadedModel: ...


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank begins with.

    store:       a file by which the ranks find each other
    device_type: "cpu", or "cuda" for the GPU with the rank's number
    num_threads: of torch's operations on a CPU
    """

    rank: int
    num_ranks: int
    load: Loader
    options: EngineOptions
    device_type: str
    num_threads: int
    store: str


@dataclass(frozen=True, slots=True)
class Command:
    """A method of the engine, to be called on every rank."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Progressed:
    """What a method tells its progress callback."""

    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """A rank waits for the others although something went wrong on it; reason: what, empty: it waits no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """A method has ended well.

    value:    what it returned; None on all ranks but rank 0
    has_work: the engine's, afterwards
    """

    value: Any
    has_work: bool


@dataclass(frozen=True, slots=True)
class Raised:
    """A method has raised, and the engine goes on."""

    error: BaseException
    has_work: bool


class RankError(RocmAttnError, RuntimeError):
    """An exception of a rank that cannot be sent as it is; in words."""


def sendable(error: BaseException) -> BaseException:
    """The error, or its words where it does not survive being pickled."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a library's exception does there
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return RankError(in_words(error))


def in_words(error: BaseException) -> str:
    """The error's type and its first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# Called with what a rank says of its progress.
OnProgress = Callable[..., None]
