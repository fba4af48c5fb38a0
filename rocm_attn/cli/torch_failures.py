"""A torch that is missing, or that cannot be imported, in a sentence."""

from __future__ import annotations

import traceback


def torch_failure(error: BaseException) -> str:
    """The sentence about an error that the import of torch has raised; "" for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "torch is not installed; install the build for your GPU, or for CPUs, and run rocm-attn doctor"
    if not isinstance(error, ImportError | OSError | RuntimeError | AttributeError):
        return ""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>")
    if "torch" not in {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}:
        return ""
    return f"torch cannot be imported ({first_line(error)}); rocm-attn doctor says what is wrong with it"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
