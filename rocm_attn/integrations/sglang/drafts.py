"""The steps of a draft model: one attention backend per step, and the block table of each branch of drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.errors import NeverFits
from rocm_attn.integrations.sglang.hooks import AttentionHooks, Serving
from rocm_attn.integrations.sglang.seen import PAD_KV_LEN, ForwardBatchView, KVPoolView, Runner


def create_draft_steps(runner: Runner, topk: int, num_steps: int) -> DraftSteps:
    """Makes the steps of a draft model's runner. Raises Unsupported."""
    from rocm_attn.integrations.sglang.backend import RocmAttnBackend, serving_of

    return DraftSteps(runner, topk, num_steps, serving_of(runner), RocmAttnBackend)


class BranchTable:
    """The slots that each branch of drafts sees: those of its request, then those of its own drafts.

    SGLang keeps the slots of all branches in the request's row, after the request's own: num_steps slots per branch,
    one branch after the other, at page size 1. At larger page sizes each branch has its own pages, and the first of
    them begins with the tokens of the request's last page.

    entries: int32 [branches, width], slots; row seq * topk + b is branch b of sequence seq
    """

    def __init__(self, requests: Tensor, *, topk: int, num_steps: int, page_size: int) -> None:
        self._requests, self._topk, self._steps, self._page_size = requests, topk, num_steps, page_size
        width, device = requests.shape[1], requests.device
        with torch.inference_mode(False):
            self.entries = torch.zeros((requests.shape[0] * topk, width), dtype=torch.int32, device=device)
            self._step = torch.arange(num_steps, device=device)
            self._branch = torch.arange(topk, device=device)[None, :, None]

    def grow(self, num_seqs: int) -> None:
        """Makes room for this many sequences. Call it before the first capture."""
        if num_seqs * self._topk > self.entries.shape[0]:
            with torch.inference_mode(False):
                self.entries = self.entries.new_zeros((num_seqs * self._topk, self.entries.shape[1]))

    def write(self, rows: Tensor, kv_len: Tensor) -> None:
        """Writes the entries of sequences in these rows of SGLang's table. May be captured.

        A row is copied unchanged. Then the slots of the branch's own drafts are put after those of the request.
        kv_len: tokens of each sequence before its drafts
        """
        count = rows.shape[0] * self._topk
        if count > self.entries.shape[0]:
            raise NeverFits(f"{count} branches of drafts do not fit a table of {self.entries.shape[0]}")
        entries, width = self.entries[:count], self.entries.shape[1]
        row_of = rows.repeat_interleave(self._topk)
        torch.index_select(self._requests, 0, row_of, out=entries)
        page_size = self._page_size
        # At page size 1 the distance is num_steps.
        apart = (kv_len % page_size + self._steps + page_size - 1) // page_size * page_size
        columns = (kv_len[:, None] + self._step)[:, None, :]  # [S, 1, num_steps]
        there = columns + self._branch * apart[:, None, None]
        columns = columns.expand_as(there).flatten(0, 1).clamp(max=width - 1)
        slots = self._requests[row_of[:, None], there.flatten(0, 1).clamp(max=width - 1)]
        entries.scatter_(1, columns.long(), slots)


class DraftSteps:
    """The attention backends of a draft model's steps, in the form that SGLang's workers use.

    topk:          branches per sequence
    num_steps:     drafted tokens per branch; the last one needs no step of its own
    attn_backends: one per step
    """

    needs_cpu_seq_lens = False
    prefill_attention_backend_str: str | None = None
    decode_attention_backend_str: str | None = None
    kv_index_translator: object = None

    def __init__(
        self, runner: Runner, topk: int, num_steps: int, serving: Serving, backend_type: type[AttentionHooks]
    ) -> None:
        self.topk, self.speculative_num_steps = topk, num_steps
        self.token_to_kv_pool: KVPoolView = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        requests = self.req_to_token_pool.req_to_token
        self._branches = (
            BranchTable(requests, topk=topk, num_steps=num_steps, page_size=runner.page_size) if topk > 1 else None
        )
        table, page_size = (None, None) if self._branches is None else (self._branches.entries, 1)
        self.attn_backends = [
            backend_type(runner, serving, table=table, page_size=page_size) for _ in range(num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatchView) -> None:
        """Begins all steps eagerly."""
        self._write_branches(forward_batch)
        for number, backend in enumerate(self.attn_backends):
            backend.begin(backend.branch_step(forward_batch, number, self.topk, captured=False), None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Fixes the memory that graphs read. max_bs: sequences; each has topk branches"""
        if self._branches is not None:
            self._branches.grow(max_bs)
        for backend in self.attn_backends:
            if self._branches is not None:
                backend.use_own_table(self._branches.entries)
            backend.init_cuda_graph_state(max_bs * self.topk, max(max_bs * self.topk, max_num_tokens))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Does the same as AttentionHooks.get_cuda_graph_seq_len_fill_value."""
        return PAD_KV_LEN

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatchView, in_capture: bool = False) -> None:
        """Begins all steps before a capture and before each replay of their graph."""
        for number, backend in enumerate(self.attn_backends):
            backend.begin_graphed(backend.branch_step(forward_batch, number, self.topk, captured=True))

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatchView) -> None:
        """Fills all steps; captured before the first step. The batch's rows and lengths do not move between replays."""
        self._write_branches(forward_batch)
        for backend in self.attn_backends:
            backend.fill(None)

    def _write_branches(self, batch: ForwardBatchView) -> None:
        if self._branches is not None:
            count = batch.batch_size
            self._branches.write(batch.req_pool_indices[:count], batch.seq_lens[:count])
