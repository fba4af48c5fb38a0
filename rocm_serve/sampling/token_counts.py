"""TokenCounts: how often each text of a step has each token, in a table on the device.

A sequence's row of the table is updated before a token is sampled, with the tokens that were sampled since. The host
need not know the last of these. Counts that were lost in a step with a fault are counted again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.kernels.sampling.parameter_columns import IN_PROMPT
from rocm_attn.machine.sending import sent


class CountedText(NamedTuple):
    """A text whose tokens are counted.

    number:     of its request
    token_ids:  of the prompt and the text, as far as the host knows them
    num_prompt: of these, those of the prompt
    pending_at: place of the next token among the tokens that were picked last; -1: there is none
    """

    number: int
    token_ids: Sequence[int]
    num_prompt: int
    pending_at: int


@dataclass(slots=True)
class _Row:
    """A row of the table. num_counted: tokens of its text, the prompt's included"""

    row: int
    num_counted: int


class TokenCounts:
    """A row for each of up to `most` texts. The rows of texts that were not used lately are reused."""

    def __init__(self, device: torch.device, vocab: int, most: int) -> None:
        self._device, self._vocab, self._most = device, vocab, most
        self._rows: dict[int, _Row] = {}  # by the texts' numbers, the least recently used first
        self.table = self._new_table(0)

    def rows(self, texts: Sequence[CountedText], picked: Tensor) -> list[int]:
        """The row of each text. All of its tokens are counted there when the launches made here have run.

        picked: int32 [any], place -> the token that was picked last
        """
        if len(texts) > len(self.table):
            self._rows.clear()
            self.table = self._new_table(min(self._most, 1 << (len(texts) - 1).bit_length()))
        for text in texts:
            row = self._rows.pop(text.number, None)
            if row is not None:  # makes it the last one
                self._rows[text.number] = row
        new = [text for text in texts if not self._continues(text)]
        self._begin(new)
        self._count(texts, picked)
        return [self._rows[text.number].row for text in texts]

    # Memory made in inference mode cannot be written outside of it.
    @torch.inference_mode(False)
    def _new_table(self, rows: int) -> Tensor:
        return torch.zeros(rows, self._vocab, dtype=torch.int32, device=self._device)

    def _continues(self, text: CountedText) -> bool:
        row = self._rows.get(text.number)
        return row is not None and row.num_counted <= _num_tokens(text)

    def _begin(self, texts: Sequence[CountedText]) -> None:
        """Gives texts rows in which their prompts are noted, and nothing else."""
        if not texts:
            return
        prompts: list[npt.NDArray[np.int64]] = []
        for text in texts:
            self._rows.pop(text.number, None)
            row = self._free_row()
            self._rows[text.number] = _Row(row, text.num_prompt)
            in_prompt = np.bincount(np.array(text.token_ids[: text.num_prompt], np.int64))
            prompts.append(np.flatnonzero(in_prompt) + row * self._vocab)
        rows = np.array([self._rows[text.number].row for text in texts], np.int64)
        self.table.index_fill_(0, sent(rows, self._device), 0)
        self.table.view(-1).index_fill_(0, sent(np.concatenate(prompts), self._device), IN_PROMPT)

    def _free_row(self) -> int:
        """A row that no text has, or that of the least recently used text."""
        if len(self._rows) == len(self.table):
            return self._rows.pop(next(iter(self._rows))).row
        taken = {held.row for held in self._rows.values()}
        return next(row for row in range(len(self.table)) if row not in taken)

    def _count(self, texts: Sequence[CountedText], picked: Tensor) -> None:
        """Counts the tokens that were not counted yet."""
        rows: list[int] = []
        ids: list[int] = []
        for text in texts:
            held = self._rows[text.number]
            new = [*text.token_ids[held.num_counted :], *([~text.pending_at] if text.pending_at >= 0 else [])]
            rows += [held.row] * len(new)
            ids += new
            held.num_counted = _num_tokens(text)
        if not ids:
            return
        row_of, given = sent(np.array([rows, ids], np.int64), self._device)
        known = torch.where(given < 0, picked.index_select(0, (~given).clamp_(min=0)).long(), given)
        at = row_of * self._vocab + known
        self.table.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))


def _num_tokens(text: CountedText) -> int:
    return len(text.token_ids) + (text.pending_at >= 0)
