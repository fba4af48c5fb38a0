"""What the environment says of our backend within engines, which have no channel of their own to a backend.

ROCM_ATTN_PROVIDER  auto, triton, aiter or torch (auto): whose kernels serve
ROCM_ATTN_ON_FAULT  raise or log (raise): what becomes of a fault of the device that is found a step or two later
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rocm_attn.errors import BadSetting
from rocm_attn.external import FaultPolicy, LogAndCount, raise_fault

PROVIDER, ON_FAULT = "ROCM_ATTN_PROVIDER", "ROCM_ATTN_ON_FAULT"
_PROVIDERS = ("auto", "triton", "aiter", "torch")


def provider(environment: Mapping[str, str]) -> str:
    """Whose kernels serve. Raises BadSetting."""
    return _one_of(environment, PROVIDER, _PROVIDERS)


def fault_policy(environment: Mapping[str, str], log: logging.Logger) -> FaultPolicy:
    """What becomes of a fault. log: the engine's, which it shows. Raises BadSetting."""
    return LogAndCount(log) if _one_of(environment, ON_FAULT, ("raise", "log")) == "log" else raise_fault


def _one_of(environment: Mapping[str, str], variable: str, allowed: tuple[str, ...]) -> str:
    """The value of a variable, the first one where it is not set."""
    value = environment.get(variable, "").strip() or allowed[0]
    if value not in allowed:
        raise BadSetting(f"{variable} is {value!r}; it must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    return value
