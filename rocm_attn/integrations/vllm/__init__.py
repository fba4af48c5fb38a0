"""Our attention as a backend of vLLM's: docs/vllm.md.

register() is what vLLM calls in each of its processes. It names classes and imports none of them.
"""

from __future__ import annotations

from rocm_attn.integrations.plugins import VLLM, load

_PACKAGE = "rocm_attn.integrations.vllm"
GQA_BACKEND = f"{_PACKAGE}.backend.RocmAttnBackend"
MLA_BACKEND = f"{_PACKAGE}.mla.RocmAttnMLABackend"
SPARSE_MLA_BACKEND = f"{_PACKAGE}.sparse_mla.RocmAttnSparseMLABackend"
# Where vLLM takes new names, from 0.32 on: the backends of MLA layers have ones of their own.
MLA_NAME = "ROCM_ATTN_RT_MLA"
SPARSE_MLA_NAME = "ROCM_ATTN_RT_MLA_SPARSE"


def register() -> None:
    """Register CUSTOM, and the backends of vLLM's whose place ours is to take. Raises nothing: see plugins.load."""
    load(VLLM, _register_names)


def _register_names() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, GQA_BACKEND)
    for name, backend in ((MLA_NAME, MLA_BACKEND), (SPARSE_MLA_NAME, SPARSE_MLA_BACKEND)):
        if hasattr(AttentionBackendEnum, "register") and name not in AttentionBackendEnum.__members__:
            register_backend(name, backend)
    for name in VLLM.taken():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], _backend_for(name))


def _backend_for(name: str) -> str:
    """Ours for the layers that a backend of vLLM's serves, by its name."""
    if "MLA_SPARSE" in name:
        return SPARSE_MLA_BACKEND
    return MLA_BACKEND if "MLA" in name else GQA_BACKEND
