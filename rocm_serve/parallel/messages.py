"""The messages between the front process and the ranks' processes."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rocm_attn.errors import BadRequest, BadSetting, RocmAttnError
from rocm_serve.options import EngineOptions

if TYPE_CHECKING:  # a server's front imports no torch
    import torch

    from rocm_serve.models.loading import LoadedModel
    from rocm_serve.ranks import Ranks

E = TypeVar("E", bound=BaseException)


class ModelLoader(Protocol):
    """Loads a rank's part of a model in its process: load_model with a path and dtype, or a function of a module."""

    def __call__(self, *, device: torch.device, ranks: Ranks) -> LoadedModel: ...


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The setup of a rank.

    store:       a file through which the ranks find each other
    device_type: "cpu", or "cuda" for the GPU with the rank's number
    num_threads: of torch's operations on a CPU
    """

    rank: int
    num_ranks: int
    load: ModelLoader
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
    """The arguments of a method's call of its progress callback."""

    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RankWaits:
    """A rank waits for the others although it had an error; reason: the error, empty: it waits no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """A method has returned.

    value:    its result; None on all ranks except rank 0, unless it is a bool
    has_work: of the engine, afterwards
    """

    value: Any
    has_work: bool


@dataclass(frozen=True, slots=True)
class Raised:
    """A method has raised, and the engine goes on."""

    error: BaseException
    has_work: bool


class RankError(RocmAttnError, RuntimeError):
    """Stands for an exception of a rank that cannot be pickled; its message is that exception's text."""


def sendable(error: E) -> E | RankError:
    """Returns the error, or its words in a RankError if it does not survive pickling."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # a library's exception may raise anything there
        copy = None
    if type(copy) is type(error) and str(copy) == str(error):
        return error
    return RankError(in_words(error))


def pickled(command: object) -> bytes:
    """Returns a command to another process as bytes. Raises BadRequest if its request cannot be sent."""
    try:
        return pickle.dumps(command)
    except Exception as error:  # a class's own methods may raise anything
        raise unsendable(error) from error


def require_sendable(name: str, function: Callable[..., object]) -> None:
    """Raises BadSetting for a function that another process cannot be given. name: of the argument that it is"""
    try:
        pickle.dumps(function)
    except Exception as error:  # a class's own methods may raise anything
        raise BadSetting(
            f"{name} cannot be sent to another process ({error}); give a function of a module, or a partial of one"
        ) from error
    if not callable(function):
        raise BadSetting(f"{name} is {function!r}; give a function of a module, or a partial of one")


def unsendable(error: Exception) -> BadRequest:
    """Returns the refusal of a request that one process cannot pickle, or another cannot unpickle."""
    return BadRequest(
        f"the request cannot be sent to the engine's process ({error}); give each field a value of the type that "
        "Request names, not of a class derived from it"
    )


def in_words(error: BaseException) -> str:
    """The error's type and its first line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def how_it_ended(code: int | None) -> str:
    """How a process that has closed its pipe has ended. code: its exit code; None: it has not ended"""
    if code is None:
        return "has closed its pipe"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


# Called with the arguments of a Progressed.
OnProgress = Callable[..., None]
