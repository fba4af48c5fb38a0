"""Settings: values of environment variables. Read once; a wrong value raises instead of meaning something else."""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from numbers import Real
from typing import Any

from rocm_attn.errors import BadSetting, RocmAttnError

PREFIX = "ROCM_ATTN_"
DEBUG = "ROCM_ATTN_DEBUG"
DISABLE_GUARDS = "ROCM_ATTN_DISABLE_GUARDS"
DISABLE_PLUGINS = "ROCM_ATTN_DISABLE_PLUGINS"
TAKE_BACKENDS = "ROCM_ATTN_TAKE_BACKENDS"
UNTESTED_ENGINES = "ROCM_ATTN_UNTESTED_ENGINES"
TUNING = "ROCM_ATTN_TUNING"
PROVIDER = "ROCM_ATTN_PROVIDER"
ON_FAULT = "ROCM_ATTN_ON_FAULT"
WATCH_STATES = "ROCM_ATTN_WATCH_STATES"
API_KEYS = "ROCM_ATTN_API_KEYS"


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of this project.

    read_by: who reads it
    values:  a clause: its allowed values
    unset:   the meaning of a process without it
    effect:  a sentence: its effect
    words:   its allowed values, the first of which it has if it is not set; empty if it takes others
    """

    name: str
    read_by: str
    values: str
    unset: str
    effect: str
    words: tuple[str, ...] = ()

    @classmethod
    def of_words(cls, name: str, read_by: str, words: tuple[str, ...], effect: str) -> Variable:
        """Makes a variable that takes one of some words."""
        quoted = tuple(f"`{word}`" for word in words)
        return cls(name, read_by, _choice(quoted), quoted[0], effect, words)

    def word(self, environment: Mapping[str, str]) -> str:
        """Returns the value in an environment: one of the words, the first if it is not set. Raises BadSetting."""
        value = environment.get(self.name, "").strip() or self.words[0]
        if value not in self.words:
            raise BadSetting(f"{self.name} is {value!r}; it must be {_choice(self.words)}")
        return value


def _choice(words: tuple[str, ...]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


# Every variable that users set, also those of the other distributions.
VARIABLES = (
    Variable.of_words(
        PROVIDER, "plug-ins", ("auto", "triton", "aiter", "torch"), "The provider's kernels serve the layers."
    ),
    Variable.of_words(
        ON_FAULT,
        "plug-ins",
        ("raise", "log"),
        "A device fault ends the step that learns of it, or is logged. K or V that is not finite is always logged.",
    ),
    Variable.of_words(
        WATCH_STATES,
        "plug-ins",
        ("0", "1"),
        "An engine's recurrent states are checked before each step: they must hold the tokens of their request "
        "([in vLLM](vllm.md#recurrent-states), [in SGLang](sglang.md#recurrent-states)).",
    ),
    Variable(
        TAKE_BACKENDS,
        "plug-ins",
        "names of an engine's own backends, separated by commas",
        "none",
        "Ours replaces these backends.",
    ),
    Variable(
        DISABLE_PLUGINS,
        "plug-ins",
        "`vllm`, `sglang`, separated by commas",
        "none",
        "The engine loads the plug-in to no effect.",
    ),
    Variable.of_words(
        UNTESTED_ENGINES,
        "plug-ins",
        ("0", "1"),
        "Releases of engines that would be refused are served ([versions](engines.md#versions)).",
    ),
    Variable(
        TUNING,
        "every process",
        "a file of measured tiles, or `off`",
        "`tuning.json` in the cache's folder of this project",
        "Kernels take their tiles from this file where it has a row ([tiles](tuning.md)).",
    ),
    Variable.of_words(
        DEBUG, "every process", ("0", "1"), "Options for debugging are allowed, and slow checks of inputs run."
    ),
    Variable(
        DISABLE_GUARDS,
        "every process",
        "ids of safeguards, separated by commas",
        "none",
        f"The [safeguards](guards.md) are off. It needs `{DEBUG}=1`.",
    ),
    Variable(
        API_KEYS,
        "`rocm-attn serve`",
        "keys, separated by commas",
        "no keys",
        "Clients must send one of the keys. `--api-key-file` replaces them.",
    ),
)

# Name -> variable, of those that take one of some words.
CHOICES = {each.name: each for each in VARIABLES if each.words}


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of the environment.

    debug:            True if debugging was requested
    disable_guards:   ids of the safeguards to switch off, as written; none without debug
    disable_plugins:  names of the plug-ins to switch off, as written
    take_backends:    names of engines' own backends that ours serves, as written
    tuning:           the file of measured tiles, or "off"; empty: the one in the cache
    watch_states:     True if an engine's recurrent states are to be checked
    untested_engines: True if engines of any release are to be served
    """

    debug: bool = False
    disable_guards: tuple[str, ...] = ()
    disable_plugins: tuple[str, ...] = ()
    take_backends: tuple[str, ...] = ()
    tuning: str = ""
    watch_states: bool = False
    untested_engines: bool = False

    def __post_init__(self) -> None:
        if self.disable_guards and not self.debug:
            raise BadSetting(
                f"{DISABLE_GUARDS}={','.join(self.disable_guards)} switches off safeguards against silent "
                f"corruption, which is for debugging only; set {DEBUG}=1 too, or unset {DISABLE_GUARDS}"
            )


def whole_number(name: str, value: object, error: type[RocmAttnError] = BadSetting, *, least: float = -math.inf) -> int:
    """A value that counts something, as an int. Raises `error` for one that is no integer, for a bool, and for less."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]  # that is what it raises TypeError for
    except TypeError:
        raise error(f"{name} is {value!r}; it must be a whole number") from None
    if number < least:
        raise error(f"{name} is {number}; it must be at least {least}")
    return number


def real_number(name: str, value: object, error: type[RocmAttnError]) -> float:
    """A number as a float, infinity if none is large enough. Raises `error` for anything else, and for a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} is {value!r}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def require_kind(name: str, value: object, kind: type, error: type[RocmAttnError]) -> None:
    """Raises `error` for a value of another kind, such as None."""
    if not isinstance(value, kind):
        raise error(f"{name} is a {type(value).__name__}; it must be of type {kind.__name__}")


def check_fields(given: Any, error: type[RocmAttnError], of: str = "") -> None:
    """Raises `error` for a field of a dataclass that is no int, float, bool or str although its annotation says so.

    Numbers become Python's, because NumPy's wrap around. of: follows the name of a number, as in " of a row"
    """
    for each in fields(given):
        name = each.name
        if each.type not in ("int", "float", "bool", "str"):
            continue
        value = getattr(given, name)
        if each.type == "int":
            object.__setattr__(given, name, whole_number(name + of, value, error))
        elif each.type == "float":
            object.__setattr__(given, name, real_number(name + of, value, error))
        elif each.type == "bool" and not isinstance(value, bool):
            raise error(f"{name} is {value!r}; it must be True or False")
        elif each.type == "str" and not isinstance(value, str):
            raise error(f"{name} is {value!r}; it must be a text")


def read_settings(environment: Mapping[str, str]) -> Settings:
    """The settings in an environment. Raises BadSetting."""
    return Settings(
        debug=CHOICES[DEBUG].word(environment) == "1",
        disable_guards=_listed(environment, DISABLE_GUARDS),
        disable_plugins=_listed(environment, DISABLE_PLUGINS),
        take_backends=_listed(environment, TAKE_BACKENDS),
        tuning=environment.get(TUNING, "").strip(),
        watch_states=CHOICES[WATCH_STATES].word(environment) == "1",
        untested_engines=CHOICES[UNTESTED_ENGINES].word(environment) == "1",
    )


def _listed(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """The entries of a variable, separated by commas."""
    return tuple(entry for entry in map(str.strip, environment.get(variable, "").split(",")) if entry)


def interprets_kernels(environment: Mapping[str, str]) -> bool:
    """True if Triton interprets its kernels on the CPU, in a process with this environment; these are its own words."""
    return environment.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are not read and look like one that is, with the name that was probably meant."""
    known = [variable.name for variable in VARIABLES]
    unknown = [name for name in environment if name.startswith(PREFIX) and name not in known]
    meant = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.85) for name in unknown}
    return {name: close[0] for name, close in meant.items() if close}


@cache
def settings() -> Settings:
    """The settings of this process, read at the first call. Raises BadSetting."""
    return read_settings(os.environ)
