"""FlashAttention-3 over pages, as vLLM ships it: from a shared library or an installed vLLM."""

import importlib
import math
from typing import Any

import torch

from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem
from rocm_lab.bench.contestant import LayerLaunch, NotServed, require_no_mask
from rocm_lab.bench.step_data import StepData

_MOST_DIM, _DIMS = 256, 8


class FlashAttention3:
    """FlashAttention-3. Its metadata is made before timing, as an engine does.

    library: path of `_vllm_fa3_C.abi3.so`; empty: that of the installed vLLM
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._ops: Any = None

    def prepare(self, data: StepData) -> LayerLaunch:
        """Does the same as Contestant.prepare."""
        problem = data.problem
        require_no_mask(problem)
        reason = _refusal(problem)
        if reason:
            raise NotServed(reason)
        ops = self._loaded()
        windowed = problem.window_left != UNLIMITED_WINDOW
        window = (problem.window_left, problem.window_right) if windowed else (-1, -1)
        longest = max(data.batch.q_len), max(data.batch.kv_len)
        dims = problem.num_q_heads, problem.num_kv_heads, problem.head_dim, problem.v_head_dim
        lengths = data.step.kv_len, data.step.q_indptr, *(None,) * 4
        metadata = ops.get_scheduler_metadata(
            data.batch.num_seqs,
            *longest,
            *dims,
            problem.dtype,
            *lengths,
            problem.page_size,
            0,
            problem.causal,
            *window,
            bool(problem.logits_soft_cap),
            0,
            None,
            0,
        )
        width = -(-max(data.batch.kv_len) // problem.page_size)
        table = data.step.table[:, :width].contiguous()
        kv = data.q, data.pages.k, data.pages.v, None, None, None, data.out
        of_seqs = data.step.q_indptr, None, None, None, data.step.kv_len, *longest, table
        scores = problem.scale, problem.causal, *window, problem.logits_soft_cap
        rest = *scores, True, metadata, 0, None, 0, data.weights.sinks, 1, 0, None
        return LayerLaunch(
            lambda: ops.fwd(*kv, *of_seqs, *(None,) * 8, *rest), lambda: data.out, "FlashAttention-3 of vLLM"
        )

    def _loaded(self) -> Any:
        if self._ops is None:
            try:
                if self._library:
                    torch.ops.load_library(self._library)  # type: ignore[no-untyped-call]
                else:
                    importlib.import_module("vllm.vllm_flash_attn._vllm_fa3_C")
            except (ImportError, OSError) as error:
                raise NotServed(f"it cannot be loaded ({error}); install vLLM, or name a library with --fa3") from error
            self._ops = torch.ops._vllm_fa3_C
        return self._ops


def _refusal(problem: Problem) -> str:
    """Returns why it does not serve the problem; empty if it does."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return "it needs an NVIDIA Hopper GPU"
    if problem.pool is not PoolKind.SPLIT or problem.kv_encoding is not KVEncoding.LIKE_Q:
        return "it is measured with K and V pages in q's dtype"
    if problem.head_dim % _DIMS or max(problem.head_dim, problem.v_head_dim) > _MOST_DIM:
        return f"its heads must be multiples of {_DIMS} up to {_MOST_DIM}"
    if problem.has_alibi_slopes or problem.has_sinks or problem.chunk:
        return "it is measured without ALiBi slopes, sinks and chunks"
    if problem.dtype is torch.float32 or not math.isfinite(problem.scale):
        return "it computes in 16 bits"
    return ""
