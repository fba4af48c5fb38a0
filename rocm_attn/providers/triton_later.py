"""The launches of Triton's kernels, imported when the first one is used: choosing a kernel needs no Triton."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Later:
    """A module that is imported when one of its names is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._name), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    from rocm_attn.providers import cdna_launches as cdna_launches
    from rocm_attn.providers import hopper_launches as hopper_launches
    from rocm_attn.providers import triton_launches as triton_launches
else:
    triton_launches = _Later("rocm_attn.providers.triton_launches")
    cdna_launches = _Later("rocm_attn.providers.cdna_launches")
    hopper_launches = _Later("rocm_attn.providers.hopper_launches")
