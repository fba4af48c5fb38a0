"""The output of `rocm-attn explain` for twenty models on two archs, and for two of them with 8-bit K and V.

`python -m tests.amd.aiter.explained` writes it again.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path

from rocm_attn.cli import main

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
ARCHS = ("gfx942", "gfx950")

_EIGHT_BITS = ("--kv-dtype", "fp8", "--kv-scales", "layer")

# Model, which may have ".eight-bits" after it -> the options that it is served with.
MODELS: Mapping[str, tuple[str, ...]] = {
    "llama-3-8b": (),
    "llama-3-70b": ("--tp", "8"),
    "qwen3-30b-a3b": (),
    "gpt-oss-120b": (),
    "gemma-3-27b": (),
    "gemma-3n-e4b": (),
    "deepseek-v2-lite": (),
    "deepseek-v3": ("--tp", "8"),
    "deepseek-v3.2": ("--tp", "8"),
    "deepseek-v4-flash": ("--tp", "8"),
    "deepseek-v4.1-flash": ("--tp", "8"),
    "gemma-4": (),
    "glm-5.3-flash": ("--tp", "8"),
    "kimi-k3": ("--tp", "8"),
    "minimax-m2": (),
    "minimax-m3": (),
    "qwen3.5-397b-a17b": ("--tp", "8"),
    "qwen3.8-27b": (),
    "qwen3.8-flash-next": (),
    "llama-3-70b.eight-bits": ("--tp", "8", *_EIGHT_BITS),
    "deepseek-v3.eight-bits": ("--tp", "8", *_EIGHT_BITS),
}


def explained(model: str, arch: str) -> str:
    """Returns stdout and stderr of the command, and its exit code, without the config's path."""
    config = HERE / "configs" / f"{model.removesuffix('.eight-bits')}.json"
    printed, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
        code = main(["explain", str(config), "--arch", arch, "--page-size", "auto", "--pool", "auto", *MODELS[model]])
    text = printed.getvalue() + complaints.getvalue() + f"exit code {code}\n"
    return text.replace(str(config), f"{model} {' '.join(MODELS[model])}".strip())


def place(model: str, arch: str) -> Path:
    """Returns the path of the golden file."""
    return GOLDEN / f"{model}.{arch}.txt"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in MODELS:
        for on in ARCHS:
            place(each, on).write_text(explained(each, on))
