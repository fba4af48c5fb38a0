"""Settings: values of environment variables. Read once; a wrong value raises instead of meaning something else.

ROCM_ATTN_DEBUG           0 or 1 (0): whether options that are only useful for debugging are allowed
ROCM_ATTN_DISABLE_GUARDS  ids of safeguards, separated by commas: they are switched off. Needs ROCM_ATTN_DEBUG=1.
ROCM_ATTN_DISABLE_PLUGINS names of plug-ins (vllm, sglang), separated by commas: engines load them to no effect
ROCM_ATTN_TAKE_BACKENDS   names of engines' own attention backends, separated by commas: ours takes their place
ROCM_ATTN_TUNING          the file of measured tiles (docs/tuning.md), or off (rocm_attn/tuning.json in the cache)
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from rocm_attn.errors import BadSetting

DEBUG = "ROCM_ATTN_DEBUG"
DISABLE_GUARDS = "ROCM_ATTN_DISABLE_GUARDS"
DISABLE_PLUGINS = "ROCM_ATTN_DISABLE_PLUGINS"
TAKE_BACKENDS = "ROCM_ATTN_TAKE_BACKENDS"
TUNING = "ROCM_ATTN_TUNING"

_SWITCH = {"": False, "0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of the environment.

    debug:           True if debugging was requested
    disable_guards:  ids of the safeguards to switch off, as written; none without debug
    disable_plugins: names of the plug-ins to switch off, as written
    take_backends:   names of engines' own backends that ours serves, as written
    tuning:          the file of measured tiles, or "off"; empty: the one in the cache
    """

    debug: bool = False
    disable_guards: tuple[str, ...] = ()
    disable_plugins: tuple[str, ...] = ()
    take_backends: tuple[str, ...] = ()
    tuning: str = ""

    def __post_init__(self) -> None:
        if self.disable_guards and not self.debug:
            raise BadSetting(
                f"{DISABLE_GUARDS}={','.join(self.disable_guards)} switches off safeguards against silent "
                f"corruption, which is for debugging only; set {DEBUG}=1 too, or unset {DISABLE_GUARDS}"
            )


def whole_number(name: str, value: object) -> int:
    """A setting that counts something, as an int. Raises BadSetting for anything but an integer, and for a bool."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # that is what it raises TypeError for
    except TypeError:
        raise BadSetting(f"{name} is {value!r}; it must be a whole number") from None


def read_settings(environment: Mapping[str, str]) -> Settings:
    """The settings in an environment. Raises BadSetting."""
    debug = environment.get(DEBUG, "").strip()
    if debug not in _SWITCH:
        raise BadSetting(f"{DEBUG} is {debug!r}; it must be 0 or 1")
    return Settings(
        debug=_SWITCH[debug],
        disable_guards=_listed(environment, DISABLE_GUARDS),
        disable_plugins=_listed(environment, DISABLE_PLUGINS),
        take_backends=_listed(environment, TAKE_BACKENDS),
        tuning=environment.get(TUNING, "").strip(),
    )


def _listed(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """The entries of a variable, separated by commas."""
    return tuple(entry for entry in map(str.strip, environment.get(variable, "").split(",")) if entry)


@cache
def settings() -> Settings:
    """The settings of this process, read at the first call. Raises BadSetting."""
    return read_settings(os.environ)
