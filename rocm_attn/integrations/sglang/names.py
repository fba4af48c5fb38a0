"""What our backend is called in SGLang."""

from __future__ import annotations

from rocm_attn.integrations.plugins import SGLANG

NAME = "rocm_attn"


def ours() -> tuple[str, ...]:
    """The names that mean our backend."""
    return (NAME, *SGLANG.taken())
