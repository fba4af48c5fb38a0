"""torch's scaled_dot_product_attention over packed K and V: the cost of attention without pages, not equal work."""

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_lab.bench.contestant import LayerLaunch, NotServed, require_no_mask
from rocm_lab.bench.step_data import StepData


class TorchSdpa:
    """Attention over copies of K and V, made before timing, [sequences, heads, tokens, dim]: lengths must be equal."""

    def prepare(self, data: StepData) -> LayerLaunch:
        """Does the same as Contestant.prepare."""
        problem, batch = data.problem, data.batch
        require_no_mask(problem)
        reason = _refusal(problem, data)
        if reason:
            raise NotServed(reason)
        num_seqs, q_len, kv_len = batch.num_seqs, batch.q_len[0], batch.kv_len[0]
        sides = [data.pages.read(pages) for pages in data.pages_of_seq]
        k, v = (
            torch.stack([side.flatten(0, 1)[:kv_len] for side in of_seqs])
            .transpose(1, 2)
            .to(problem.dtype)
            .contiguous()
            for of_seqs in zip(*sides, strict=True)
        )
        q = data.q.view(num_seqs, q_len, problem.num_q_heads, problem.head_dim).transpose(1, 2)
        out = data.out.view(num_seqs, q_len, problem.num_q_heads, problem.v_head_dim)
        # causal_lower_right selects the fast kernels if they have the mask. A single query needs no mask.
        mask = causal_lower_right(q_len, kv_len) if 1 < q_len < kv_len else None
        is_causal = q_len == kv_len and q_len > 1

        def run() -> None:
            found = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=problem.scale, enable_gqa=problem.gqa_ratio > 1
            )
            out.copy_(found.transpose(1, 2))

        return LayerLaunch(
            run, lambda: data.out, f"torch {torch.__version__} scaled_dot_product_attention, K and V packed"
        )


def _refusal(problem: Problem, data: StepData) -> str:
    """Returns why it does not serve the step; empty if it does."""
    if problem.pool is not PoolKind.SPLIT:
        return f"it has no {problem.pool.value}"
    if problem.window_left != UNLIMITED_WINDOW:
        return "it has no windows"
    if problem.logits_soft_cap or problem.has_sinks or problem.has_alibi_slopes:
        return "it has no soft caps, sinks or ALiBi slopes"
    if not problem.causal:
        return "it is measured with causal attention"
    if len(set(data.batch.kv_len)) > 1 or len(set(data.batch.q_len)) > 1:
        return "it needs sequences of equal lengths"
    return ""
