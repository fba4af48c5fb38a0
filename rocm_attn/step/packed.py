"""Attention over keys and values that lie one after the other, in no pages: what expanded attention is made of.

AITER's kernel takes rows of some dims (packed.py of its provider), and this project's extend kernel all others. Before
AITER's serves, the first rows that it is asked for are computed by both, and so are the first that are four times as
long: where they are not the same it is not asked again, nor where it ever raises. That is said once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.refs.attention import paged_extend
from rocm_attn.kernels.tuning.extend_tiles import extend_tiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import ALL_KEYS, KVEncoding, PoolKind, Problem
from rocm_attn.problem import Scales as Factors
from rocm_attn.providers.aiter import library
from rocm_attn.providers.aiter.packed import PackedRows, PackedVarlen, packed_varlen
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.triton_later import triton_launches

# How far two kernels that are right may be apart, as a part of a value's size: both round the weights, and the output.
_APART = {torch.bfloat16: 4e-2, torch.float16: 8e-3}
# Of a log-sum-exp, as it is: by exponentials of their own.
_LSE_APART = 1e-2
# Functions of AITER's with the problems that they get wrong; and, with those that they get right, how many keys the
# longest sequence had for which that was seen.
_WRONG: set[tuple[object, Problem]] = set()
_RIGHT: dict[tuple[object, Problem], int] = {}
_TIMES_AS_LONG = 4


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Sequences one after the other, on the host: int [S] new tokens of each, and keys of each."""

    q_len: np.ndarray
    kv_len: np.ndarray

    def queries(self, device: torch.device) -> tuple[Queries, Tensor]:
        """The sequences, and a table whose pages are their keys."""
        kv_len = torch.from_numpy(self.kv_len.astype(np.int32)).to(device)
        first = kv_len.cumsum(0) - kv_len
        width = max(int(self.kv_len.max(initial=0)), 1)
        # Past a sequence's keys a table may say what it likes, but no page that is not there.
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

    problem:  the layer's: its scale and cap
    target:   whose kernels run
    provider: as of RuntimeOptions
    sinks:    of the layer's heads, float32, or None
    """

    problem: Problem
    target: Target
    provider: str
    sinks: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, *, causal: bool) -> tuple[Tensor, Tensor]:
        """out float32 [T, heads, v_dim] and lse float32 [T, heads]; 0 and -inf where a sequence has no keys.

        q:      [T, heads, dim]
        k, v:   [keys, heads, dim | v_dim], contiguous, of q's dtype
        causal: whether the keys are the new tokens' own; else each token sees all keys of its sequence, and no sink
        Raises NoTiles.
        """
        seen = (lengths.q_len > 0) & (lengths.kv_len > 0)
        problem = self._problem(q, v, causal)
        kernel = packed_varlen(problem, self.target, self.provider) if seen.any() else None
        if kernel is None:
            return self._by_extend(q, k, v, lengths, causal)
        asked = library.flash_attn_varlen_func(), problem
        longest = int(lengths.kv_len.max())
        if longest < _TIMES_AS_LONG * _RIGHT.get(asked, 0):
            theirs = self._tried(kernel, (q, k, v), lengths, seen)
            if theirs is not None:
                return theirs
            _refuse(asked)
        ours = self._by_extend(q, k, v, lengths, causal)
        size = ours[0].abs() + v.float().square().mean().sqrt()
        # Rows of NaN, and of zeros alone, say nothing of a kernel; the next ones will.
        if asked not in _WRONG and ours[0].isfinite().all() and (size > 0).all():
            theirs = self._tried(kernel, (q, k, v), lengths, seen)
            if theirs is not None and _agree(kernel, theirs, ours, size, v.dtype):
                _RIGHT[asked] = longest
            else:
                _refuse(asked)
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
            kv_scales=Factors.NONE,
            indexer=ALL_KEYS,
            causal=causal,
            has_sinks=causal and self.sinks is not None,
            wants_lse=True,
        )

    def _by_aiter(
        self, kernel: PackedVarlen, rows: tuple[Tensor, Tensor, Tensor], lengths: Lengths, seen: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Of the sequences that have queries and keys; the kernel is not asked about others."""
        q, k, v = rows
        token = torch.from_numpy(np.repeat(seen, lengths.q_len)).to(q.device)
        q_len, kv_len = lengths.q_len[seen], lengths.kv_len[seen]
        if not seen.all():
            key = torch.from_numpy(np.repeat(seen, lengths.kv_len)).to(q.device)
            k, v = k[key], v[key]
        given = PackedRows(
            q if seen.all() else q[token],
            k,
            v,
            _indptr(q_len, q.device),
            _indptr(kv_len, q.device),
            int(q_len.max()),
            int(kv_len.max()),
        )
        found, found_lse = kernel.attend(given, self.sinks if kernel.problem.has_sinks else None)
        if seen.all():
            return found.float(), found_lse.contiguous()
        out = found.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float32)
        lse = found_lse.new_full(q.shape[:2], float("-inf"))
        out[token], lse[token] = found.float(), found_lse
        return out, lse

    def _tried(
        self, kernel: PackedVarlen, rows: tuple[Tensor, Tensor, Tensor], lengths: Lengths, seen: np.ndarray
    ) -> tuple[Tensor, Tensor] | None:
        """By AITER's kernel. None where it raised whatever but KeyboardInterrupt."""
        try:
            return self._by_aiter(kernel, rows, lengths, seen)
        except (Exception, SystemExit) as error:  # as selection/probe_runs.py has it, of compilers that leave
            _say(kernel, f"it raised {type(error).__name__}: {error}")
            return None

    def _by_extend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool) -> tuple[Tensor, Tensor]:
        """By the extend kernel, over pages of one token."""
        num_tokens, heads, _ = q.shape
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
        self._launch(args, replace(scores_of(self.problem), causal=causal))
        return out.float(), lse

    def _launch(self, args: AttendArgs, scores: Scores) -> None:
        """The extend kernel of the target, or its twin where no Triton runs. Raises NoTiles."""
        num_tokens, heads, dim = args.q.shape
        if args.q.device.type == "cpu" and self.target.arch != "interpreter":
            paged_extend(args, scores=scores)
            return
        tiles = extend_tiles(
            self.target.arch,
            gqa_ratio=1,
            num_kv_heads=heads,
            head_dim=dim,
            v_head_dim=args.out.shape[2],
            dtype=args.q.dtype,
        )
        cut = ExtendCut.of(tiles, gqa_ratio=1)
        words = cut.words(num_tokens, args.queries.num_seqs)
        args = args._replace(schedule=torch.empty(words, dtype=torch.int32, device=args.q.device))
        triton_launches.launch_extend_schedule(args.queries, args.schedule, cut)
        triton_launches.launch_paged_extend(args, scores=scores, cut=cut, tiles=tiles)


def _indptr(lengths: np.ndarray, device: torch.device) -> Tensor:
    """int32 [S + 1] on the device."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


def _agree(
    kernel: PackedVarlen,
    theirs: tuple[Tensor, Tensor],
    ours: tuple[Tensor, Tensor],
    size: Tensor,
    dtype: torch.dtype,
) -> bool:
    """Whether AITER's kernel gave what ours did. size: of each value of out, more than 0"""
    apart = float(((theirs[0] - ours[0]).abs() / size).max()) / _APART[dtype]
    # Equal ones are so where they are infinite too.
    apart_lse = float(torch.where(theirs[1] == ours[1], 0.0, (theirs[1] - ours[1]).abs()).max())
    if apart <= 1 and apart_lse <= _LSE_APART:
        return True
    _say(
        kernel,
        f"out is {apart:.3g} times as far from our kernel's as it may be, its log-sum-exp {apart_lse:.3g} away",
    )
    return False


def _refuse(asked: tuple[object, Problem]) -> None:
    """Not to ask it again."""
    _WRONG.add(asked)
    _RIGHT.pop(asked, None)


def _say(kernel: PackedVarlen, why: str) -> None:
    logging.getLogger(__name__).warning("%s does not serve expanded attention: %s", kernel.describe(), why)
