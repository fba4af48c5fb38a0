"""Non-absorbed attention of a latent layer: latents are expanded to keys and values of every head, chunk by chunk.

    k, v = expand(latents)        out = softmax(scale * q . k) v        over the new tokens, and over the cached prefix

Absorbed attention takes head_dim + v_head_dim products for each query, key and head, 576 + 512 in DeepSeek-V3, and
reads no key twice; expanded attention takes 192 + 128, and expands each key once a step. So it is for prefills: many
new tokens. The prefix is read, expanded and attended to in chunks of as many tokens as memory allows, and the chunks
are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.mask import NO_MASK
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadProblem, BadTensor
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.machine.devices import on_device
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.scores import scores_of
from rocm_attn.step.merging import merge_into
from rocm_attn.step.packed import Lengths, PackedAttention

# latents [tokens, head_dim] -> keys [tokens, heads, dim of q] and values [tokens, heads, dim of out]
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedPrefill:
    """Expanded attention of one latent layer, eagerly; its latents are stored as for absorbed attention.

    problem: the layer's, latent, causal and without a window
    pages:   of the layer
    table:   int32 [rows, width], row, page_no -> page
    packed:  attention over what latents are expanded to
    running_batch: the batch of the step that runs; raises WrongState where none does
    """

    problem: Problem
    pages: LayerPages
    table: Tensor
    packed: PackedAttention
    running_batch: Callable[[], StepBatch]

    def __post_init__(self) -> None:
        problem = self.problem
        if problem.pool is not PoolKind.LATENT:
            raise BadProblem(f"only latents are expanded, and this layer has {problem.pool.value}")
        if not problem.causal or scores_of(problem).windowed:
            raise BadProblem("expanded attention is causal and has no window; attend to this layer absorbed")

    def attend(
        self, q: Tensor, latents: Tensor, expand: Expand, *, chunk_tokens: int = 1 << 15
    ) -> tuple[Tensor, Tensor]:
        """out [T, heads, v_dim] in q's dtype and lse float32 [T, heads] of the running step's tokens, without pads.

        q:            [T, heads, dim]
        latents:      [T, head_dim], the step's own, as they were given to the store
        expand:       gets latents of new tokens and of chunks; k and v have q's dtype and the same v_dim each time
        chunk_tokens: tokens of the prefixes that are expanded at a time, of all sequences together; at least 1

        The scale, cap and sinks are the layer's: q . k has the value that absorbed products have.
        Raises BadTensor; WrongState unless a step runs; BadBatch for a round of drafts, and for a step with a mask or
        with lengths that only the device knows.
        """
        batch = self.running_batch()
        if not batch.inputs.lengths_on_host or batch.mask is not NO_MASK or batch.drafts is not NO_DRAFTS:
            raise BadBatch(
                "expanded attention takes a step whose lengths the host knows, without a mask and drafts; attend to "
                "this layer absorbed in this step"
            )
        num_tokens = int(batch.q_len.sum())
        dims = {"q": (q, 3), "latents": (latents, 2)}
        for name, (tensor, dim) in dims.items():
            if tensor.dim() != dim or tensor.shape[0] != num_tokens:
                raise BadTensor(
                    f"{name} has shape {list(tensor.shape)}; its {dim} dimensions begin with the step's "
                    f"{num_tokens} tokens, padded ones left out"
                )
        if latents.shape[1] != self.problem.head_dim or chunk_tokens < 1:
            raise BadTensor(
                f"latents have {latents.shape[1]} elements and chunks {chunk_tokens} tokens; this layer's latents have "
                f"{self.problem.head_dim}, and a chunk has at least 1 token"
            )
        with on_device(q.device):
            k, v = self._expanded(expand, latents, q)
            out, lse = self.packed.attend(q, k, v, Lengths(batch.q_len, batch.q_len), causal=True)
            for first, lengths in _chunks(batch.kv_len - batch.q_len, chunk_tokens):
                k, v = self._expanded(expand, self._read(batch.rows, first, lengths), q)
                side, side_lse = self.packed.attend(q, k, v, Lengths(batch.q_len, lengths), causal=False)
                merge_into(out, lse, side, side_lse, out, lse)
        return out.to(q.dtype), lse

    def _expanded(self, expand: Expand, latents: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latents, checked."""
        k, v = expand(latents)
        tokens, heads = latents.shape[0], q.shape[1]
        if k.shape != (tokens, heads, q.shape[2]) or v.shape[:2] != (tokens, heads) or v.dim() != 3:
            raise BadTensor(
                f"expand gave keys of shape {list(k.shape)} and values of shape {list(v.shape)} for {tokens} latents; "
                f"they must be {[tokens, heads, q.shape[2]]} and {[tokens, heads, 'v_dim']}"
            )
        if not k.dtype == v.dtype == q.dtype:
            raise BadTensor(f"expand gave {k.dtype} and {v.dtype}; q is {q.dtype}")
        return k.contiguous(), v.contiguous()

    def _read(self, rows: np.ndarray, first: int, lengths: np.ndarray) -> Tensor:
        """Latents [tokens, head_dim] of KV [first, first + length) of each row, in the problem's dtype."""
        device, page_size = self.table.device, self.problem.page_size
        counts = torch.from_numpy(lengths.astype(np.int64)).to(device)
        row = torch.from_numpy(rows.astype(np.int64)).to(device).repeat_interleave(counts)
        place = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts).repeat_interleave(counts) + first
        page = self.table[row, place // page_size].long()
        return self.pages.read_keys(page, place % page_size)[:, 0].to(self.problem.dtype)


def _chunks(prefix_len: np.ndarray, chunk_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """First place, and tokens of each sequence from it on, of chunks of up to chunk_tokens in all; none is empty.

    A chunk has the same places of every sequence; one token a sequence at least.
    """
    step = max(1, chunk_tokens // max(1, int((prefix_len > 0).sum())))
    for first in range(0, int(prefix_len.max(initial=0)), step):
        yield first, np.clip(prefix_len - first, 0, step)
