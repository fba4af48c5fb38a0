"""The attention backend that SGLang makes for a runner."""

import os
from copy import copy
from functools import partial
from typing import Any

import torch
from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import (
    attention_backends,
    get_disagg,
    get_exec,
    get_flags,
    get_memory,
    get_parallel,
    get_schedule,
    get_spec,
)
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from rocm_attn.capture.engine_kernels import log_run_ahead
from rocm_attn.errors import Unsupported
from rocm_attn.integrations.engine_settings import fault_policy, provider
from rocm_attn.integrations.plugins import SGLANG
from rocm_attn.integrations.sglang.encoded import EncodedHooks
from rocm_attn.integrations.sglang.hooks import AttentionHooks, Serving
from rocm_attn.integrations.sglang.names import ours
from rocm_attn.machine.agreement import alone, among
from rocm_attn.problem import KVEncoding
from rocm_attn.truth.adopted import log_truth


class RocmAttnBackend(AttentionHooks, AttentionBackend):
    """SGLang's AttentionBackend."""

    def __init__(self, runner: Any, serving: Serving, **more: Any) -> None:
        super().__init__(runner, serving, **more)
        self._mask: VerifyMask | None = None
        drafts = serving.draft_tokens
        if drafts and not serving.with_trees:
            # The mask of a chain is not read, but SGLang writes one. This has the fewest cells that SGLang can write.
            num_seqs = self.attention.bounds.num_seqs
            with torch.inference_mode(False):
                cells = torch.zeros(num_seqs * drafts**2, dtype=torch.bool, device=self._device)
            self._mask = VerifyMask(cells, TreeMaskMode.QLEN_ONLY, num_seqs, is_read=False)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The memory into which SGLang writes the mask of drafts to verify. None: SGLang uses its own in each step.

        A tree's mask has a cell for each token of the longest sequence. Its memory is made once graphs set the number
        of sequences.
        """
        return self._mask

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Does the same as AttentionHooks.init_forward_metadata.

        Where SGLang captures the parts of prompts between attention, all sequences of its dummy batch count as padding.
        """
        if get_flags().dp.capturing_prefill_graph:
            forward_batch = copy(forward_batch)
            forward_batch.num_padding = forward_batch.batch_size
        super().init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *more: object, **named: object) -> None:
        """Does the same as AttentionHooks.init_cuda_graph_state, and makes room for tree masks. Raises NeverFits."""
        super().init_cuda_graph_state(max_bs, max_num_tokens, *more, **named)
        cells = self.mask_cells
        if self._mask is None and cells is not None and self._serving.draft_tokens:
            self._mask = VerifyMask(cells, TreeMaskMode.FULL_MASK, max_bs)

    def update_verify_buffers_to_fill_after_draft(self, *_: object) -> None:
        """Does nothing: with SGLANG_ENABLE_OVERLAP_PLAN_STREAM too, a step that verifies drafts begins after them."""

    def shared_read_ends(self, fm: Any) -> Any:
        """Returns when SGLang may write its table again: after the step, because layers may read the table in place."""
        return SharedReadEnds.POST_REPLAY if fm.is_decode() or fm.is_target_verify() else SharedReadEnds.UNKNOWN


class EncodedRocmAttnBackend(EncodedHooks, RocmAttnBackend):
    """SGLang's AttentionBackend for a model with an encoder."""


def create(runner: Any) -> RocmAttnBackend:
    """Makes the backend of a runner. Raises Unsupported for a release, a pool or a model that is not served."""
    SGLANG.require_served()
    backend = EncodedRocmAttnBackend if runner.model_config.is_encoder_decoder else RocmAttnBackend
    return backend(runner, serving_of(runner))


def serving_of(runner: Any) -> Serving:
    """Returns the settings that the server's arguments ask for. Raises Unsupported."""
    parallel = get_parallel()
    if parallel.attn_dcp_size > 1:
        raise Unsupported("decode context parallelism is not served in SGLang; use --dcp-size 1")
    if parallel.enable_prefill_cp:
        raise Unsupported(
            "prefill context parallelism is not served in SGLang, because a rank gets only a part of a step's tokens; "
            "leave --enable-prefill-cp out"
        )
    if runner.kv_index_translator.is_translating:
        raise Unsupported("a unified KV pool is not served, because its table holds virtual slots")
    if runner.use_mla_backend:
        _check_latent(runner)
    if hasattr(runner.token_to_kv_pool, "get_index_k_with_scale_buffer"):
        _check_sparse(runner)
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        raise Unsupported(
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH is set, with which SGLang replays its preparations of a step from a "
            "graph, and ours are made on the host: no step would be begun; leave it out"
        )
    if get_exec().dllm.dllm_algorithm is not None:
        raise Unsupported("diffusion models, which rewrite a block of tokens, are not served (--dllm-algorithm)")
    if runner.is_draft_worker and runner.spec_algorithm.is_frozen_kv_mtp():
        raise Unsupported(
            "a draft model that reads the target's K and V (FROZEN_KV_MTP: Gemma 4's assistants) is not served: its "
            "backend is made before it has the target's pool; use --speculative-draft-attention-backend triton"
        )
    # Models that draft blocks get K and V of a prompt from the target's layers, and see none of their own.
    is_whole = get_schedule().chunked_prefill_size == -1 and get_memory().disable_radix_cache
    is_alone, spec = parallel.attn_tp_size == 1, get_spec()
    return Serving(
        RadixAttention,
        provider=provider(os.environ),
        deterministic=get_exec().deterministic.enable_deterministic_inference,
        with_trees=(spec.speculative_eagle_topk or 0) > 1 or runner.spec_algorithm.is_ngram(),
        whole_prompts=runner.is_draft_worker or is_whole,
        draft_tokens=0 if runner.is_draft_worker else spec.speculative_num_draft_tokens or 0,
        index_encoding=KVEncoding.E4M3FNUZ if is_fp8_fnuz() else KVEncoding.E4M3FN,
        on_fault=fault_policy(os.environ, SGLANG.log),
        agree=alone if is_alone else among(parallel.attn_tp_group.cpu_group),
        tried=partial(log_truth, SGLANG.log),
        ran_ahead=partial(log_run_ahead, SGLANG.log),
    )


def _check_latent(runner: Any) -> None:
    """Raises Unsupported if others would store latent rows with scales, which are read without here.

    SGLang's models do so by AITER's fused rotation, and its own backends if the checkpoint has scales.
    """
    from sglang.srt.models.deepseek_common.utils import _use_aiter_gfx95

    scales = {getattr(module, "k_scale_float", None) or 1.0 for module in runner.model.modules()}
    if scales != {1.0} and get_disagg().disaggregation_mode != "null":
        raise Unsupported(
            "the checkpoint has scales of latent rows, by which another server's backend may divide them, and they are "
            "not read here; serve it without --disaggregation-mode"
        )
    if scales != {1.0} and not set(attention_backends()) <= {*ours()}:
        raise Unsupported(
            f"the backends for prompts and decode, {attention_backends()}, differ, and the checkpoint has scales of "
            "latent rows, which only SGLang's own divide by; use one --attention-backend"
        )
    named = {*attention_backends(), get_spec().speculative_draft_attention_backend}
    if _use_aiter_gfx95 and "aiter" in named and runner.kv_cache_dtype.itemsize == 1:
        raise Unsupported(
            "on gfx95 SGLang's models store latent rows in FP8 themselves for a backend named aiter, with a scale that "
            "is not read here, and give it queries in FP8; use --attention-backend rocm_attn, or set SGLANG_USE_AITER=0"
        )


def _check_sparse(runner: Any) -> None:
    """Raises Unsupported if others would read or write index keys, or if selections would be kept between steps."""
    if not set(attention_backends()) <= {*ours()}:
        raise Unsupported(
            f"the backends for prompts and decode, {attention_backends()}, differ, and index keys are scaled by "
            "one; use one --attention-backend"
        )
    if get_memory().enable_hisparse:
        raise Unsupported("index keys that move to the host are not served; leave --enable-hisparse out")
    if get_exec().features.enable_return_indexer_topk:
        raise Unsupported(
            "selected keys stay in memory of our own, and are not returned with an answer; leave "
            "--enable-return-indexer-topk out"
        )
    if get_disagg().disaggregation_mode != "null":
        raise Unsupported(
            "index keys of another server may be scaled differently; serve models with indexers without "
            "--disaggregation-mode"
        )
    if runner.is_draft_worker and getattr(runner.model_config.hf_config, "index_share_for_mtp_iteration", False):
        raise Unsupported(
            "the draft model attends to keys that were selected in an earlier step, and a selection is kept for "
            "one step; set index_share_for_mtp_iteration to false (--json-model-override-args)"
        )
