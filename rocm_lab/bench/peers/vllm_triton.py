"""vLLM's attention in Triton, which is the fallback of its ROCm users: set up the same way as in its backend."""

import importlib
from typing import Any

import torch

from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind
from rocm_lab.bench.contestant import LayerLaunch, NotServed, require_no_mask
from rocm_lab.bench.step_data import StepData

# Values of vLLM's backend: segments of a decode; the most sequences for which it is split, rounded to captured sizes.
_SEGMENTS, _MOST_SPLIT = 16, 128
_CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


class VllmTriton:
    """The attention of the installed vLLM, 0.11 or later."""

    def prepare(self, data: StepData) -> LayerLaunch:
        """Does the same as Contestant.prepare."""
        problem, step = data.problem, data.step
        require_no_mask(problem)
        if problem.pool is not PoolKind.SPLIT or problem.kv_encoding is not KVEncoding.LIKE_Q or not problem.causal:
            raise NotServed("it is measured with K and V pages in q's dtype and causal attention")
        if problem.has_alibi_slopes or problem.chunk:
            raise NotServed("it is measured without ALiBi slopes and chunks")
        if not data.q.is_cuda:
            raise NotServed("it needs a GPU")
        try:
            module: Any = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
        except ImportError as error:
            raise NotServed(f"vLLM cannot be imported ({error})") from error
        threshold = min(_CAPTURED, key=lambda size: abs(size - _MOST_SPLIT // problem.num_kv_heads))
        sizes = threshold, problem.num_q_heads, _SEGMENTS

        def scratch(*more: int) -> torch.Tensor:
            return torch.empty(*sizes, *more, dtype=torch.float32, device=data.device)

        segments = scratch(problem.v_head_dim), scratch(), scratch()
        one = torch.ones(1, dtype=torch.float32, device=data.device)
        window = (-1, -1) if problem.window_left == UNLIMITED_WINDOW else (problem.window_left, 0)
        longest = max(data.batch.q_len), max(data.batch.kv_len)

        def run() -> None:
            module.unified_attention(
                q=data.q,
                k=data.pages.k,
                v=data.pages.v,
                out=data.out,
                cu_seqlens_q=step.q_indptr,
                max_seqlen_q=longest[0],
                seqused_k=step.kv_len,
                max_seqlen_k=longest[1],
                softmax_scale=problem.scale,
                causal=True,
                window_size=window,
                block_table=step.table,
                softcap=problem.logits_soft_cap,
                q_descale=None,
                k_descale=one,
                v_descale=one,
                sinks=data.weights.sinks,
                seq_threshold_3D=threshold,
                num_par_softmax_segments=_SEGMENTS,
                softmax_segm_output=segments[0],
                softmax_segm_max=segments[1],
                softmax_segm_expsum=segments[2],
            )

        return LayerLaunch(run, lambda: data.out, "unified_attention of vLLM")
