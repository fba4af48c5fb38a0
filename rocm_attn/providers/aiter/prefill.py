"""aiter.mha_batch_prefill_func for extend steps over the pool, aiter.flash_attn_varlen_func if nothing is cached."""

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.cache.page_rows import PageRows
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.eight_bits import ScaleOfOne, query_codes, query_parts
from rocm_attn.providers.aiter.kernel import AiterKernel
from rocm_attn.providers.aiter.scores import refuse_assembled, refuse_composable, window_size
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.scratch import ScratchTensor, cut, rows_of_heads


class BatchPrefill(AiterKernel):
    """Any number of new tokens in each sequence, through a CSR page list."""

    name = "mha_batch_prefill_func"
    refuses = (refuse_composable,)

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        result = library.mha_batch_prefill_func()(q=args.q, **_paged_arguments(self.problem, args, step, bounds))
        _keep_lse(result, args.lse)


class EightBitBatchPrefill(AiterKernel):
    """Like `BatchPrefill`, but over pages in eight bits, with q in eight bits too."""

    name = "mha_batch_prefill_func"
    refuses = (refuse_composable,)

    @property
    def schedule(self) -> ScaleOfOne:
        return ScaleOfOne()

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        return query_parts(self.problem, shape.num_tokens, self.problem.num_q_heads)

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        rows = cut(args.workspace, self.room(bounds.shape))
        library.mha_batch_prefill_func()(
            q=query_codes(args.q, rows),
            q_descale=args.schedule[:1].view(torch.float32),
            k_descale=args.pages.k_scale,
            v_descale=args.pages.v_scale,
            **_paged_arguments(self.problem, args, step, bounds),
        )


def _paged_arguments(problem: Problem, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> dict[str, object]:
    """Arguments of mha_batch_prefill_func apart from q and scales."""
    one_token_pages = problem.page_size == 1
    return {
        # Pages of one token have no page dimension.
        "k": args.pages.k[:, 0] if one_token_pages else args.pages.k,
        "v": args.pages.v[:, 0] if one_token_pages else args.pages.v,
        "cu_seqlens_q": step.q_indptr,
        "kv_indptr": step.page_indptr,
        "kv_page_indices": step.page_list,
        "max_seqlen_q": bounds.max_q_len,
        "max_seqlen_k": bounds.max_kv_len,
        "dropout_p": 0.0,
        "softmax_scale": problem.scale,
        "logits_soft_cap": problem.logits_soft_cap,
        "causal": problem.causal,
        "window_size": window_size(problem),
        "alibi_slopes": args.slopes,
        "return_lse": args.lse is not None,
        "out": args.out,
        "kv_last_page_lens": step.last_page_len,
        "sink_ptr": args.sinks,
    }


class VarlenPrefill(AiterKernel):
    """New tokens of sequences that have nothing in the cache, over packed K and V.

    K and V are gathered from the slots that the store has just written, so they are what a later step would read.
    """

    name = "flash_attn_varlen_func"
    refuses = (refuse_composable, refuse_assembled)

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        k, v = cut(args.workspace, self.room(bounds.shape))
        page, offset = step.slot_of_token // self.problem.page_size, step.slot_of_token % self.problem.page_size
        pages = args.pages
        for rows, side, scale_values in ((k, pages.keys, pages.k_scale), (v, pages.values, pages.v_scale)):
            _gather(side, page, offset, pages.format.encoding, scale_values, rows)
        result = library.flash_attn_varlen_func()(
            q=args.q,
            k=k,
            v=v,
            cu_seqlens_q=step.q_indptr,
            cu_seqlens_k=step.q_indptr,
            max_seqlen_q=bounds.max_q_len,
            max_seqlen_k=bounds.max_q_len,
            alibi_slopes=args.slopes,
            return_lse=args.lse is not None,
            out=args.out,
            sink_ptr=args.sinks,
            **varlen_scores(self.problem),
        )
        _keep_lse(result, args.lse)

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        return rows_of_heads(self.problem, shape.num_tokens, self.problem.num_kv_heads)


def varlen_scores(problem: Problem) -> dict[str, object]:
    """Arguments of flash_attn_varlen_func for a problem's scores, apart from sinks and slopes."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": problem.scale,
        "logits_soft_cap": problem.logits_soft_cap,
        "causal": problem.causal,
        # The third number is the first tokens that every query sees, which are not the sinks of this package.
        "window_size": (*window_size(problem), 0),
    }


def _gather(
    side: PageRows, page: Tensor, offset: Tensor, encoding: Encoding, scale_values: Tensor | None, rows: Tensor
) -> None:
    """Gathers rows [n, kv_heads, dim] of tokens; codes of eight-bit pages are decoded."""
    if scale_values is None:
        side.read_tokens(page, offset, rows)
        return
    codes = rows.new_empty(rows.shape, dtype=side.cells.dtype)
    side.read_tokens(page, offset, codes)
    torch.mul(codes.view(encoding.dtype).to(rows.dtype), scale_values[:, None], out=rows)


def _keep_lse(result: Tensor | tuple[Tensor, Tensor], lse: Tensor | None) -> None:
    """Copies the log-sum-exp. Both functions return out alone, or out and a log-sum-exp [q_heads, T]."""
    if lse is not None:
        assert isinstance(result, tuple)
        lse.copy_(result[1].t())
