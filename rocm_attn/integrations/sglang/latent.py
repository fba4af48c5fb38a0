"""How models with latent attention call us: always over latent rows, which is what the pool has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod


def attend_over_latent_rows(names: Sequence[str]) -> None:
    """Let models ask backends of these names for attention over latent rows, in every step."""
    for name in names:
        AttentionBackendRegistry.register(name, _method)


def _method(attention: Any, batch: Any) -> Any:
    return AttnForwardMethod.MLA
