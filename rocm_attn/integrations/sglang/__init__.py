"""Our attention in SGLang, under the name rocm_attn. Installing the package is enough; SGLang calls register()."""

from rocm_attn.integrations.plugins import SGLANG, load


def register() -> None:
    """Registers our names. The entry point of sglang.srt.plugins, called in every process of SGLang. Raises nothing."""
    load(SGLANG, _register)


def _register() -> None:
    # Imported here, since it imports SGLang.
    from rocm_attn.integrations.sglang.registration import register_names

    register_names()
