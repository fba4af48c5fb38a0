"""Verify steps for functions that give every sequence the same number of new tokens.

Sequences of a verify step may differ in their new tokens, and padded ones have none: only the device knows. So each
sequence gets FEW_TOKENS rows, and its tokens the last of these. A row's place in the sequence then follows from the KV
length, as the function assumes. The rows before them are computed and dropped: they see fewer keys, or none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import FEW_TOKENS
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import StepBounds


@dataclass(frozen=True, slots=True)
class RowStarts:
    """Schedule: where the rows of each sequence begin, int32 [num_seqs + 1]."""

    def words(self, shape: PaddedShape) -> int:
        return shape.num_seqs + 1

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        torch.arange(0, len(words) * FEW_TOKENS, FEW_TOKENS, out=words)


@dataclass(frozen=True, slots=True)
class LastRows:
    """Schedule: for each row of each sequence the token that is copied into it, and for each token its row."""

    def words(self, shape: PaddedShape) -> int:
        return shape.num_seqs * FEW_TOKENS + shape.num_tokens

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        num_seqs, num_tokens = bounds.shape.num_seqs, bounds.shape.num_tokens
        token_of_row, row_of_token = self._cut(words, num_seqs)
        place, ends = torch.arange(max(FEW_TOKENS, num_tokens), device=words.device), step.q_indptr[1:]
        before_first = ends - FEW_TOKENS
        rows = before_first[:, None] + place[:FEW_TOKENS]
        # A row without a token of its sequence gets another one; a token of no sequence gets a row that is dropped.
        token_of_row.view(num_seqs, FEW_TOKENS).copy_(rows.clamp(0, num_tokens - 1))
        seq = step.seq_of_token
        row_of_token[:num_tokens].copy_(
            (seq * FEW_TOKENS + place[:num_tokens] - before_first[seq]).clamp(0, num_seqs * FEW_TOKENS - 1)
        )

    def spread(self, tokens: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        """Copies q [T, heads, dim] into rows [S * FEW_TOKENS, heads or more, dim]; further heads are zero."""
        num_heads = tokens.shape[1]
        token_of_row, _ = self._cut(words, rows.shape[0] // FEW_TOKENS)
        if num_heads == rows.shape[1]:
            return torch.index_select(tokens, 0, token_of_row, out=rows)
        rows[:, :num_heads].copy_(tokens.index_select(0, token_of_row))
        rows[:, num_heads:].zero_()
        return rows

    def collect(self, rows: Tensor, tokens: Tensor, words: Tensor) -> None:
        """Copies rows of out back into tokens [T, heads, dim]."""
        _, row_of_token = self._cut(words, rows.shape[0] // FEW_TOKENS)
        torch.index_select(rows[:, : tokens.shape[1]], 0, row_of_token[: len(tokens)], out=tokens)

    def _cut(self, words: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
        return words[: num_seqs * FEW_TOKENS], words[num_seqs * FEW_TOKENS :]
