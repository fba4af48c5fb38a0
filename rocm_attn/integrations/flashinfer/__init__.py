"""FlashInfer's attention by its own names: arguments, layouts, defaults and base-2 log-sum-exps of release 0.7.

A program that was written for FlashInfer runs after `import rocm_attn.integrations.flashinfer as flashinfer`. Arguments
and names that are not served raise Unsupported with a reason. docs/flashinfer.md lists the differences.
"""

from typing import Any

from rocm_attn.integrations.flashinfer.names import refuse_name
from rocm_attn.stable_names import StableNames

_NAMES = StableNames(__name__, globals())
__all__ = _NAMES.all
__dir__ = _NAMES.dir


def __getattr__(name: str) -> Any:
    """Imports a served name. Raises NotServed, and NotImportable in an import statement, for FlashInfer's others."""
    refuse_name(name)
    return _NAMES.get(name)
