"""The attention backend that SGLang makes for a runner."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from rocm_attn.errors import Unsupported
from rocm_attn.integrations.engine_settings import fault_policy, provider
from rocm_attn.integrations.plugins import SGLANG
from rocm_attn.integrations.sglang.hooks import AttentionHooks, Serving
from rocm_attn.machine.agreement import alone, among


class RocmAttnBackend(AttentionHooks, AttentionBackend):
    """SGLang's AttentionBackend."""

    def shared_read_ends(self, fm: Any) -> Any:
        """When SGLang may write into its table again: after the step, since layers may read it where it lies."""
        return SharedReadEnds.POST_REPLAY if fm.is_decode() or fm.is_target_verify() else SharedReadEnds.UNKNOWN


def create(runner: Any) -> RocmAttnBackend:
    """For a runner. Raises Unsupported for a release, a pool or a model that is not served."""
    SGLANG.require_served()
    return RocmAttnBackend(runner, serving_of(runner))


def serving_of(runner: Any) -> Serving:
    """What the server's arguments ask for. Raises Unsupported."""
    parallel = get_parallel()
    if parallel.attn_dcp_size > 1:
        raise Unsupported("decode context parallelism is not served in SGLang; use --dcp-size 1")
    if runner.kv_index_translator.is_translating:
        raise Unsupported("a unified KV pool keeps virtual slots in its table, which is not served")
    is_alone = parallel.attn_tp_size == 1
    return Serving(
        RadixAttention,
        provider=provider(os.environ),
        deterministic=get_exec().deterministic.enable_deterministic_inference,
        with_trees=(get_spec().speculative_eagle_topk or 0) > 1 or runner.spec_algorithm.is_ngram(),
        on_fault=fault_policy(os.environ, SGLANG.log),
        agree=alone if is_alone else among(parallel.attn_tp_group.cpu_group),
    )
