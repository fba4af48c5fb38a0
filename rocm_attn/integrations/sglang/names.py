"""The names of our backend in SGLang."""

from rocm_attn.integrations.plugins import SGLANG

NAME = "rocm_attn"


def ours() -> tuple[str, ...]:
    """Returns the names that mean our backend."""
    return (NAME, *SGLANG.taken())
