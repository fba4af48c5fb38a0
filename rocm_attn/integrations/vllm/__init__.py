"""Our attention as a backend of vLLM's: docs/vllm.md.

register() is what vLLM calls in each of its processes. It names classes and imports none of them.
"""

from __future__ import annotations

from rocm_attn.integrations.plugins import VLLM, load

_PACKAGE = "rocm_attn.integrations.vllm"
GQA_BACKEND = f"{_PACKAGE}.backend.RocmAttnBackend"
MLA_BACKEND = f"{_PACKAGE}.mla.RocmAttnMLABackend"
# Where vLLM takes new names, from 0.32 on: the MLA layers' backend has one of its own.
MLA_NAME = "ROCM_ATTN_RT_MLA"


def register() -> None:
    """Register CUSTOM, and the backends of vLLM's whose place ours is to take. Raises nothing: see plugins.load."""
    load(VLLM, _register_names)


def _register_names() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, GQA_BACKEND)
    if hasattr(AttentionBackendEnum, "register") and MLA_NAME not in AttentionBackendEnum.__members__:
        register_backend(MLA_NAME, MLA_BACKEND)
    for name in VLLM.taken():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], MLA_BACKEND if "MLA" in name else GQA_BACKEND)
