"""Our attention in SGLang, under the name rocm_attn. Installing the package is all; SGLang calls register()."""

from __future__ import annotations

from rocm_attn.integrations.plugins import SGLANG, load


def register() -> None:
    """The entry point of sglang.srt.plugins. Called in each of SGLang's processes; raises nothing."""
    load(SGLANG, _register)


def _register() -> None:
    # Here, since it imports SGLang.
    from rocm_attn.integrations.sglang.registration import register_names

    register_names()
