"""Environment variables that configure our backend inside engines, which have no options for a backend's settings."""

import logging
from collections.abc import Mapping

from rocm_attn.external import FaultPolicy, LogAndCount, raise_fault
from rocm_attn.machine.settings import CHOICES, ON_FAULT, PROVIDER


def provider(environment: Mapping[str, str]) -> str:
    """Returns the provider whose kernels serve. Raises BadSetting."""
    return CHOICES[PROVIDER].word(environment)


def fault_policy(environment: Mapping[str, str], log: logging.Logger) -> FaultPolicy:
    """Returns the policy for faults. log: the engine's logger, whose output it shows. Raises BadSetting.

    A fault that harms only the sequence that it comes from is logged in any case: an engine would end all requests.
    """
    logs = LogAndCount(log)
    if CHOICES[ON_FAULT].word(environment) == "log":
        return logs
    return lambda fault: logs(fault) if fault.is_contained else raise_fault(fault)
