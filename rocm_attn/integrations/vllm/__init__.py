"""Our attention as a backend of vLLM's: docs/vllm.md.

vLLM calls register() in each of its processes. register() names classes and imports none of them.
"""

import os

from rocm_attn.integrations.plugins import VLLM, load
from rocm_attn.machine.settings import read_settings

_PACKAGE = "rocm_attn.integrations.vllm"
GQA_BACKEND = f"{_PACKAGE}.backend.RocmAttnBackend"
MLA_BACKEND = f"{_PACKAGE}.mla.RocmAttnMLABackend"
SPARSE_MLA_BACKEND = f"{_PACKAGE}.sparse_mla.RocmAttnSparseMLABackend"
# From 0.32 on vLLM takes new names. There, the backends of MLA layers have names of their own.
MLA_NAME = "ROCM_ATTN_RT_MLA"
SPARSE_MLA_NAME = "ROCM_ATTN_RT_MLA_SPARSE"


def register() -> None:
    """Registers CUSTOM, and replaces the vLLM backends that settings name. Raises nothing: see plugins.load."""
    load(VLLM, _register_names)


def _register_names() -> None:
    chosen = read_settings(os.environ)
    if chosen.watch_states:
        from rocm_attn.integrations.vllm.state_hooks import add_headers

        add_headers()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from rocm_attn.integrations.vllm.whole_images import keep_images_whole

    keep_images_whole()
    register_backend(AttentionBackendEnum.CUSTOM, GQA_BACKEND)
    for name, backend in ((MLA_NAME, MLA_BACKEND), (SPARSE_MLA_NAME, SPARSE_MLA_BACKEND)):
        if hasattr(AttentionBackendEnum, "register") and name not in AttentionBackendEnum.__members__:
            register_backend(name, backend)
    for name in VLLM.taken():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], _backend_for(name))


def _backend_for(name: str) -> str:
    """Returns our backend for the layers that the named backend of vLLM's serves."""
    if "MLA_SPARSE" in name:
        return SPARSE_MLA_BACKEND
    return MLA_BACKEND if "MLA" in name else GQA_BACKEND
