"""Lets the drafters of vLLM's runner V1 take our metadata on ROCm.

There they compare the class of a step's metadata with a list of vLLM's own classes, if they draft several tokens, and
an error ends the engine at the first drafts.
"""

from typing import Any

_CLASSES = "allowed_attn_types"


class DraftMetadata:
    """A base of our classes of metadata, which drafters take."""


def let_drafters_take_ours(vllm_config: Any) -> None:
    """Adds our classes to the list of each drafter, made or not, if there are drafters and they have a list."""
    from vllm.platforms import current_platform

    if getattr(vllm_config, "speculative_config", None) is None or not current_platform.is_rocm():
        return
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    def classes(drafter: Any) -> Any:
        own = vars(drafter)[_CLASSES]
        return own if own is None else (*own, DraftMetadata)

    def keep(drafter: Any, own: Any) -> None:
        vars(drafter)[_CLASSES] = own

    setattr(SpecDecodeBaseProposer, _CLASSES, property(classes, keep))
