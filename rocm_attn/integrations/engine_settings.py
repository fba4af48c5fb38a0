"""Environment variables that configure our backend inside engines, which have no options for a backend's settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rocm_attn.errors import BadSetting
from rocm_attn.external import FaultPolicy, LogAndCount, raise_fault
from rocm_attn.machine.settings import ON_FAULT, PROVIDER, VARIABLES

_WORDS = {variable.name: variable.words for variable in VARIABLES}


def provider(environment: Mapping[str, str]) -> str:
    """Returns the provider whose kernels serve. Raises BadSetting."""
    return _one_of(environment, PROVIDER)


def fault_policy(environment: Mapping[str, str], log: logging.Logger) -> FaultPolicy:
    """Returns the policy for faults. log: the engine's logger, whose output it shows. Raises BadSetting.

    A fault that harms only the sequence that it comes from is logged in any case: an engine would end all requests.
    """
    logs = LogAndCount(log)
    if _one_of(environment, ON_FAULT) == "log":
        return logs
    return lambda fault: logs(fault) if fault.is_contained else raise_fault(fault)


def _one_of(environment: Mapping[str, str], variable: str) -> str:
    """Returns the value of a variable, or the first of its words if it is not set."""
    allowed = _WORDS[variable]
    value = environment.get(variable, "").strip() or allowed[0]
    if value not in allowed:
        raise BadSetting(f"{variable} is {value!r}; it must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    return value
