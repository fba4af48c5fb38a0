"""hook_once: an engine's method with ours around it."""

from collections.abc import Callable
from typing import Any

_HOOKED = "_rocm_attn_hooked"


def hook_once(owner: Any, name: str, hook: Callable[[Any], Any]) -> None:
    """Replaces an attribute of a class, once in a process. hook: of the attribute before, returns the one after"""
    before = getattr(owner, name)
    if not getattr(before, _HOOKED, False):
        after = hook(before)
        setattr(getattr(after, "__func__", after), _HOOKED, True)
        setattr(owner, name, after)
