"""Non-absorbed MLA prefill: latents are expanded to K and V of every head, chunk by chunk.

    k, v = expand(latents)        out = softmax(scale * q . k) v        over the new tokens, and over the cached prefix

Absorbed attention takes head_dim + v_head_dim products for each query, key and head: 576 + 512 in DeepSeek-V3. Expanded
attention takes 192 + 128, but expands each key once per step. So it pays off in prefill, with many new tokens. The
prefix is read, expanded and attended to in chunks that fit in memory, and the chunks are merged by their log-sum-exps.

Expanded K and V are packed sequence after sequence, without pages. AITER's kernel serves some head dims (packed.py of
its provider), this project's extend kernel all others. Before AITER's kernel serves, its results are compared with this
project's: on the first rows, and again on the first rows that are four times as long. If they differ, or if AITER's
kernel ever raises, it is not used again, and the log says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.mask import NO_MASK
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadProblem, BadTensor
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.refs.attention import paged_extend
from rocm_attn.kernels.tuning.extend_tiles import extend_tiles
from rocm_attn.machine.devices import on_device, require_tensor
from rocm_attn.machine.settings import whole_number
from rocm_attn.machine.target import Target
from rocm_attn.problem import ALL_KEYS, OF_ONE_TOKEN, UNLIMITED_WINDOW, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.packed import PackedRows, PackedVarlen, packed_varlen
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.triton_later import triton_launches
from rocm_attn.step.merging import merge_into

# latents [tokens, head_dim] -> keys [tokens, heads, dim of q] and values [tokens, heads, dim of out]
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedPrefill:
    """Expanded (non-absorbed) prefill of a latent (MLA) layer, eager. Latents are stored as in absorbed attention.

    problem: the layer's: latent, causal, a row for each token, without a window and ALiBi slopes
    pages:   pages of the layer
    table:   int32 [rows, width], row, page_no -> page
    packed:  attention over the expanded keys and values
    running_batch: returns the batch of the step that runs; raises WrongState if none does
    """

    problem: Problem
    pages: LayerPages
    table: Tensor
    packed: PackedAttention
    running_batch: Callable[[], StepBatch]

    def __post_init__(self) -> None:
        problem = self.problem
        if problem.pool is not PoolKind.LATENT:
            raise BadProblem(f"only latent layers can be expanded, and this layer has {problem.pool.value}")
        if not problem.causal or scores_of(problem).visibility.windowed:
            raise BadProblem("expanded attention must be causal and without a window; attend to this layer absorbed")
        if problem.has_alibi_slopes or problem.row != OF_ONE_TOKEN:
            raise BadProblem(
                "expanded attention needs a layer without ALiBi slopes, whose latents have a row for each token; "
                "attend to this layer absorbed"
            )

    def attend(
        self, q: Tensor, latents: Tensor, expand: Expand, *, chunk_tokens: int = 1 << 15
    ) -> tuple[Tensor, Tensor]:
        """Returns out [T, heads, v_dim] in q's dtype, and lse float32 [T, heads], for the step's T tokens, unpadded.

        q:            [T, heads, dim]
        latents:      [T, head_dim], those of the step's tokens, as passed to the store
        expand:       called with latents of new tokens, and of chunks of prefixes; returns k and v in q's dtype
        chunk_tokens: prefix tokens expanded at a time, of all sequences together; at least 1

        The layer's scale, cap and sinks apply: q . k equals the absorbed product.
        Raises BadTensor; BadSetting for a part of a token; WrongState unless a step runs; BadBatch for a round of
        drafts, and for a step with a mask or with lengths that only the device knows.
        """
        batch = self.running_batch()
        if not batch.inputs.lengths_on_host or batch.mask is not NO_MASK or batch.drafts is not NO_DRAFTS:
            raise BadBatch(
                "expanded attention needs the lengths on the host, and no mask and no drafts; attend to this "
                "layer absorbed in this step"
            )
        num_tokens = int(batch.q_len.sum())
        for name, tensor, dim in (("q", q, 3), ("latents", latents, 2)):
            require_tensor(name, tensor)
            if tensor.dim() != dim or tensor.shape[0] != num_tokens:
                raise BadTensor(
                    f"{name} has shape {list(tensor.shape)}; its {dim} dimensions must begin with the step's "
                    f"{num_tokens} tokens, without padded ones"
                )
            if tensor.device != self.table.device:
                raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {self.table.device}")
        chunk_tokens = whole_number("chunk_tokens", chunk_tokens)
        if latents.shape[1] != self.problem.head_dim or chunk_tokens < 1:
            raise BadTensor(
                f"latents have {latents.shape[1]} elements and chunks {chunk_tokens} tokens; this layer's latents "
                f"have {self.problem.head_dim}, and a chunk must have at least 1 token"
            )
        with on_device(q.device):
            k, v = self._expanded(expand, latents, q)
            out, lse = self.packed.attend(q, k, v, ExpandedLengths(batch.q_len, batch.q_len), causal=True)
            for first, lengths in _chunks(batch.start, chunk_tokens):
                k, v = self._expanded(expand, self._read(batch.rows, first, lengths), q)
                side, side_lse = self.packed.attend(q, k, v, ExpandedLengths(batch.q_len, lengths), causal=False)
                merge_into(out, lse, side, side_lse, out, lse)
        return out.to(q.dtype), lse

    def _expanded(self, expand: Expand, latents: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Expands latents to keys and values, and checks their shapes."""
        k, v = expand(latents)
        tokens, heads = latents.shape[0], q.shape[1]
        if k.shape != (tokens, heads, q.shape[2]) or v.shape[:2] != (tokens, heads) or v.dim() != 3:
            raise BadTensor(
                f"expand returned keys of shape {list(k.shape)} and values of shape {list(v.shape)} for {tokens} "
                f"latents; they must be {[tokens, heads, q.shape[2]]} and {[tokens, heads, 'v_dim']}"
            )
        if not k.dtype == v.dtype == q.dtype:
            raise BadTensor(f"expand returned {k.dtype} and {v.dtype}; both must be q's, {q.dtype}")
        return k.contiguous(), v.contiguous()

    def _read(self, rows: np.ndarray, first: int, lengths: np.ndarray) -> Tensor:
        """Reads the latents [tokens, head_dim] of KV [first, first + length) of each row, in the problem's dtype."""
        device, page_size = self.table.device, self.problem.page_size
        counts = torch.from_numpy(lengths.astype(np.int64)).to(device)
        row = torch.from_numpy(rows.astype(np.int64)).to(device).repeat_interleave(counts)
        place = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts).repeat_interleave(counts) + first
        page = self.table[row, place // page_size].long()
        return self.pages.read_keys(page, place % page_size)[:, 0].to(self.problem.dtype)


def _chunks(prefix_len: np.ndarray, chunk_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields chunks of up to chunk_tokens in all: the first place, and the tokens of each sequence from it on.

    No chunk is empty. A chunk has the same places of every sequence, with at least one token per sequence.
    """
    step = max(1, chunk_tokens // max(1, int((prefix_len > 0).sum())))
    for first in range(0, int(prefix_len.max(initial=0)), step):
        yield first, np.clip(prefix_len - first, 0, step)


# Largest difference of two correct kernels, relative to a value's size: both round the weights and the output.
_APART = {torch.bfloat16: 4e-2, torch.float16: 8e-3}
# Largest absolute difference of log-sum-exps: each kernel has its own exponentials.
_LSE_APART = 1e-2
# A function of AITER's and a problem -> keys of the longest sequence for which it was found correct, or _NOT_ASKED.
_RIGHT: dict[tuple[object, Problem], int] = {}
_NOT_ASKED = -1
_TIMES_AS_LONG = 4


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedLengths:
    """Sequences one after the other, on the host: int [S] new tokens of each, and keys of each."""

    q_len: np.ndarray
    kv_len: np.ndarray

    def queries(self, device: torch.device) -> tuple[Queries, Tensor]:
        """Builds the sequences, and a table whose pages are their keys."""
        kv_len = torch.from_numpy(self.kv_len.astype(np.int32)).to(device)
        first = kv_len.cumsum(0) - kv_len
        width = max(int(self.kv_len.max(initial=0)), 1)
        # Entries past a sequence's keys may have any value that is an existing page.
        last = max(int(self.kv_len.sum()) - 1, 0)
        table = (first[:, None] + torch.arange(width, device=device)).clamp(max=last).int()
        queries = Queries(
            row_of_seq=torch.arange(len(self.q_len), dtype=torch.int32, device=device),
            kv_len=kv_len,
            q_indptr=_indptr(self.q_len, device),
            num_tokens=int(self.q_len.sum()),
            max_q_len=int(self.q_len.max(initial=0)),
            max_kv_len=width,
        )
        return queries, table


@dataclass(frozen=True, slots=True, eq=False)
class PackedAttention:
    """Attention of a layer whose query heads all have keys and values of their own.

    problem:  the layer's problem: its scale and cap
    target:   the target whose kernels run
    provider: see RuntimeOptions
    sinks:    sinks of the layer's heads, float32, or None
    """

    problem: Problem
    target: Target
    provider: str
    sinks: Tensor | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: ExpandedLengths, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """out float32 [T, heads, v_dim] and lse float32 [T, heads]; 0 and -inf if a sequence has no keys.

        q:      [T, heads, dim]
        k, v:   [keys, heads, dim | v_dim], contiguous, of q's dtype
        causal: True if the keys are the new tokens' own; if not, each token sees all keys of its sequence, and no sink
        Raises NoTiles.
        """
        seen = (lengths.q_len > 0) & (lengths.kv_len > 0)
        problem = self._problem(q, v, causal)
        longest = int(lengths.kv_len.max(initial=0))
        kernel = packed_varlen(problem, self.target, self.provider, longest) if seen.any() else None
        if kernel is None:
            return self._by_extend(q, k, v, lengths, causal)
        requested = library.flash_attn_varlen_func(), problem
        if longest < _TIMES_AS_LONG * _RIGHT.get(requested, 0):
            theirs = self._tried(kernel, (q, k, v), lengths, seen)
            if theirs is not None:
                return theirs
            _RIGHT[requested] = _NOT_ASKED
        ours = self._by_extend(q, k, v, lengths, causal)
        size = ours[0].abs() + v.float().square().mean().sqrt()
        # Rows of NaN, and rows of only zeros, prove nothing about a kernel; later rows will.
        if _RIGHT.get(requested) != _NOT_ASKED and ours[0].isfinite().all() and (size > 0).all():
            theirs = self._tried(kernel, (q, k, v), lengths, seen)
            is_right = theirs is not None and _agree(kernel, theirs, ours, size, v.dtype)
            _RIGHT[requested] = longest if is_right else _NOT_ASKED
        return ours

    def _problem(self, q: Tensor, v: Tensor, causal: bool) -> Problem:
        """The layer with the keys and values of these rows."""
        return replace(
            self.problem,
            num_q_heads=q.shape[1],
            num_kv_heads=q.shape[1],
            head_dim=q.shape[2],
            v_head_dim=v.shape[2],
            dtype=q.dtype,
            pool=PoolKind.SPLIT,
            kv_encoding=KVEncoding.LIKE_Q,
            kv_scales=Scales.NONE,
            indexer=ALL_KEYS,
            window_right=0 if causal else UNLIMITED_WINDOW,
            has_sinks=causal and self.sinks is not None,
            wants_lse=True,
        )

    def _by_aiter(
        self, kernel: PackedVarlen, rows: tuple[Tensor, Tensor, Tensor], lengths: ExpandedLengths, seen: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Runs AITER's kernel on the sequences that have queries and keys; it is not called for others."""
        q, k, v = rows
        q_len, kv_len = lengths.q_len[seen], lengths.kv_len[seen]
        places = _indptr(q_len, q.device), _indptr(kv_len, q.device), int(q_len.max()), int(kv_len.max())
        sinks = self.sinks if kernel.problem.has_sinks else None
        if seen.all():
            found, found_lse = kernel.attend(PackedRows(q, k, v, *places), sinks)
            return found.float(), found_lse.contiguous()
        token = torch.from_numpy(np.repeat(seen, lengths.q_len)).to(q.device)
        key = torch.from_numpy(np.repeat(seen, lengths.kv_len)).to(q.device)
        found, found_lse = kernel.attend(PackedRows(q[token], k[key], v[key], *places), sinks)
        out = found.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float32)
        lse = found_lse.new_full(q.shape[:2], float("-inf"))
        out[token], lse[token] = found.float(), found_lse
        return out, lse

    def _tried(
        self, kernel: PackedVarlen, rows: tuple[Tensor, Tensor, Tensor], lengths: ExpandedLengths, seen: np.ndarray
    ) -> tuple[Tensor, Tensor] | None:
        """Runs AITER's kernel. None if it raised anything but KeyboardInterrupt."""
        try:
            return self._by_aiter(kernel, rows, lengths, seen)
        except (Exception, SystemExit) as error:  # compilers may exit, see selection/probe_runs.py
            _say(kernel, f"it raised {type(error).__name__}: {error}")
            return None

    def _by_extend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: ExpandedLengths, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Runs the extend kernel over pages of one token, or its twin if Triton does not run here. Raises NoTiles."""
        num_tokens, heads, dim = q.shape
        out = torch.empty(num_tokens, heads, v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(num_tokens, heads, dtype=torch.float32, device=q.device)
        queries, table = lengths.queries(q.device)
        args = AttendArgs(
            q=q,
            pages=LayerPages.plain(k[:, None], v[:, None]),
            table=table,
            queries=queries,
            out=out,
            lse=lse,
            sinks=self.sinks if causal else None,
            slopes=None,
            schedule=torch.empty(0, dtype=torch.int32, device=q.device),
            workspace=torch.empty(0, dtype=torch.float32, device=q.device),
        )
        scores = replace(scores_of(self.problem), visibility=Visibility(window_right=0 if causal else UNLIMITED_WINDOW))
        if q.device.type == "cpu" and not self.target.is_interpreted:
            paged_extend(args, scores=scores)
            return out.float(), lse
        tiles = extend_tiles(
            self.target.arch, gqa_ratio=1, num_kv_heads=heads, head_dim=dim, v_head_dim=v.shape[2], dtype=q.dtype
        )
        # Rows may outnumber the keys of a chunk before them: no sequence has lost its keys then.
        cut = ExtendCut.of(tiles, gqa_ratio=1, causal=causal)
        words = cut.words(num_tokens, queries.num_seqs)
        args = args._replace(schedule=torch.empty(words, dtype=torch.int32, device=q.device))
        triton_launches.launch_extend_schedule(queries, args.schedule, cut)
        triton_launches.launch_paged_extend(args, scores=scores, cut=cut, tiles=tiles)
        return out.float(), lse


def _indptr(lengths: np.ndarray, device: torch.device) -> Tensor:
    """The cumulative sums of lengths, int32 [S + 1], on the device."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


# out and lse
_Side = tuple[Tensor, Tensor]


def _agree(kernel: PackedVarlen, theirs: _Side, ours: _Side, size: Tensor, dtype: torch.dtype) -> bool:
    """True if AITER's kernel and ours agree. size: of each value of out, more than 0"""
    apart = float(((theirs[0] - ours[0]).abs() / size).max()) / _APART[dtype]
    # Equal values agree even if they are infinite.
    apart_lse = float(torch.where(theirs[1] == ours[1], 0.0, (theirs[1] - ours[1]).abs()).max())
    if apart <= 1 and apart_lse <= _LSE_APART:
        return True
    _say(
        kernel, f"out differs from our kernel's by {apart:.3g} times the tolerance, its log-sum-exp by {apart_lse:.3g}"
    )
    return False


def _say(kernel: PackedVarlen, why: str) -> None:
    logging.getLogger(__name__).warning("%s does not serve expanded attention: %s", kernel.describe(), why)
