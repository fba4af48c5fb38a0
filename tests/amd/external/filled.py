"""Sequences whose KV is in an engine's pages, and the reference of their attention."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.paging.adopted import CsrSource, TableSource
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import (
    ExternalStep,
    NewLengths,
)
from tests.amd.external.engines import DIM, KV_HEADS, Q_HEADS, SCALE, V_DIM
from tests.amd.integrations.oracle import Scores, attention

PAGE = 16
Cells = npt.NDArray[Any]
BOUNDS = Bounds(num_seqs=8, num_tokens=64, kv_len=64, num_pages=20)


def problem(**features: object) -> Problem:
    given = {"num_q_heads": Q_HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": V_DIM, "scale": SCALE}
    return Problem(**{**given, "dtype": torch.float32, "page_size": PAGE, **features})  # type: ignore[arg-type]


def near(before: int, after: int, at: Cells, keys: Cells) -> Cells:
    """Returns whether tokens at these places see keys: at most `before` of them before, and `after` of them after."""
    return (keys >= at - before) & (keys <= at + after)


class Filled:
    """Four sequences of KV in existing pages, and a table of them of any type and stride."""

    kv_len = (5, 33, 64, 1)

    def __init__(self, device: torch.device, provider: str, *, options: object = None, **features: object) -> None:
        self.device, self.random = device, np.random.default_rng(0)
        pages = self.random.permutation(np.arange(1, BOUNDS.num_pages))
        self.table = np.zeros((4, 4), np.int64)
        self.k, self.v = (
            torch.full((BOUNDS.num_pages, PAGE, KV_HEADS, dim), float("nan"), device=device) for dim in (DIM, V_DIM)
        )
        self.stored = []
        first = itertools.count()
        for seq, length in enumerate(self.kv_len):
            k, v = self.rows(length, KV_HEADS, DIM), self.rows(length, KV_HEADS, V_DIM)
            self.stored.append((k.double().cpu().numpy(), v.double().cpu().numpy()))
            for page_no in range(-(-length // PAGE)):
                page = self.table[seq, page_no] = pages[next(first)]
                here = slice(page_no * PAGE, min((page_no + 1) * PAGE, length))
                self.k[page, : here.stop - here.start] = k[here]
                self.v[page, : here.stop - here.start] = v[here]
        self.options = options if isinstance(options, ExternalOptions) else ExternalOptions(provider=provider)
        self.problem = problem(**features)
        self.source = TableSource(torch.from_numpy(self.table).to(device))
        self.attention = self.build(self.source)

    def build(self, source: TableSource | CsrSource) -> ExternalAttention:
        made = ExternalAttention(
            [LayerSource(self.problem)], {Space.FULL: source}, device=self.device, bounds=BOUNDS, options=self.options
        )
        made.pages.bind(0, self.k, self.v)
        return made

    def rows(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.random.standard_normal(shape)).float().to(self.device)

    def attend(self, q_len: Sequence[int], step: ExternalStep, q: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.full((len(q), Q_HEADS, V_DIM), 7.0, device=self.device)
        lse = torch.full((len(q), Q_HEADS), 7.0, device=self.device)
        self.attention.begin(step)
        self.attention.fill()
        self.attention.layers.attend(0, q, out, lse)
        return out, lse

    def step(self, q_len: Sequence[int], kv_len: Sequence[int] | None = None, **others: object) -> ExternalStep:
        kv = self.kv_len[: len(q_len)] if kv_len is None else kv_len
        given = {"min_q_len": 0, "max_q_len": max(1, *q_len), "max_kv_len": 64, **others}
        q = NewLengths(torch.tensor(list(q_len), device=self.device))
        lengths = torch.tensor(list(kv), device=self.device)
        return ExternalStep(len(q_len), len(q_len), sum(q_len), lengths, q, None, **given)  # type: ignore[arg-type]

    def assert_right(
        self,
        q_len: Sequence[int],
        found: tuple[Tensor, Tensor],
        q: Tensor,
        *,
        causal: bool = True,
        kv_len: Sequence[int] = kv_len,
        shown: Sequence[Cells | None] = (None,) * 4,
    ) -> None:
        """shown: bool [new, tokens] per sequence: what new tokens see in place of what `causal` says"""
        first = 0
        for (k, v), new, length, seen in zip(self.stored, q_len, kv_len, shown, strict=False):
            rows = q[first : first + new].double().cpu().numpy()
            cells = None if seen is None else seen.astype(np.float64)
            out, lse = attention(rows, k[:length], v[:length], Scores(SCALE, causal, shown=cells))
            here = slice(first, first + new)
            assert np.allclose(found[0][here].cpu(), out, atol=2e-5)
            assert np.allclose(found[1][here].cpu(), lse * np.log(2), atol=2e-5)
            first += new

    def cells(self, q_len: Sequence[int], see: Callable[[Cells, Cells], Cells]) -> list[Cells]:
        """Returns what each sequence's new tokens see. see: of their places [new, 1] and those of keys [tokens]"""
        lengths = zip(q_len, self.kv_len, strict=True)
        return [see(np.arange(length - new, length)[:, None], np.arange(length)) for new, length in lengths]
