"""FlashInfer's wrappers over pages. They are planned before timing, as an engine does."""

import importlib
from typing import Any

import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, PoolKind
from rocm_lab.bench.contestant import LayerLaunch, NotServed, require_no_mask
from rocm_lab.bench.step_data import StepData

_WORKSPACE_BYTES = 512 << 20


class FlashInfer:
    """FlashInfer: decode by the tensor-core kernels, extend by the prefill ones."""

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None

    def prepare(self, data: StepData) -> LayerLaunch:
        """Does the same as Contestant.prepare."""
        problem = data.problem
        require_no_mask(problem)
        if problem.pool is not PoolKind.SPLIT or problem.kv_encoding is not KVEncoding.LIKE_Q:
            raise NotServed("it is measured with K and V pages in q's dtype")
        if not problem.causal:
            raise NotServed("it is measured with causal attention")
        if problem.has_alibi_slopes or problem.has_sinks or problem.chunk:
            raise NotServed("it is measured without ALiBi slopes, sinks and chunks")
        if not data.q.is_cuda or torch.version.hip is not None:
            raise NotServed("it needs an NVIDIA GPU")
        try:
            library: Any = importlib.import_module("flashinfer")
        except ImportError as error:
            raise NotServed(f"FlashInfer cannot be imported ({error})") from error
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=data.device)
        wrapper = self._planned(library, data)
        pages = (data.pages.k, data.pages.v)
        return LayerLaunch(
            lambda: wrapper.run(data.q, pages, out=data.out), lambda: data.out, f"FlashInfer {library.__version__}"
        )

    def _planned(self, library: Any, data: StepData) -> Any:
        problem, step = data.problem, data.step
        num_pages = sum(map(len, data.pages_of_seq))
        lists = step.page_indptr.cpu(), step.page_list[:num_pages], step.last_page_len.cpu()
        heads = problem.num_q_heads, problem.num_kv_heads, problem.head_dim
        options: dict[str, Any] = {
            "window_left": -1 if problem.window_left == UNLIMITED_WINDOW else problem.window_left,
            "logits_soft_cap": problem.logits_soft_cap,
            "sm_scale": problem.scale,
            "q_data_type": problem.dtype,
            "kv_data_type": problem.dtype,
        }
        if data.kind is StepKind.DECODE:
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_tensor_cores=True,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=torch.zeros_like(step.page_indptr),
                paged_kv_indices_buffer=torch.zeros_like(step.page_list),
                paged_kv_last_page_len_buffer=torch.ones_like(step.last_page_len),
            )
            wrapper.plan(*lists, *heads, problem.page_size, **options)
            return wrapper
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper.plan(step.q_indptr.cpu(), *lists, *heads, problem.page_size, causal=True, **options)
        return wrapper
