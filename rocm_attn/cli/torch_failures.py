"""Failures of torch that are no bugs: one that is missing or cannot be imported, and memory that is full."""

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


def memory_failure(error: BaseException) -> str:
    """The first line of an error for want of memory; "" for any other error."""
    # On a CPU torch has no class for it.
    is_full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    is_full = is_full or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    return first_line(error) if is_full else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
