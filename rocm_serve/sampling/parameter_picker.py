"""ParameterPicker: samples the tokens of steps in which some rows have penalties, masks, top_k, min_p or logprobs.

All rows go through TokenPicker, whose launch is the same in every step: it finds invalid logits, and samples the rows
without these parameters. The logits of rows with penalties, biases, a mask, top_k or min_p are then changed in a
separate float32 buffer, and the same kernel samples from it. Logprobs are computed from the model's raw logits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import BadLogits
from rocm_attn.kernels.sampling import parameter_columns as columns
from rocm_attn.machine.sending import coming, sent
from rocm_attn.providers.launches import StepOps
from rocm_attn.step.host_ring import Fence, NoFence
from rocm_serve.sampling.logprobs import NO_LOGPROBS, TokenLogprobs, logprobs_of
from rocm_serve.sampling.sampling import (
    GREEDY,
    NOTHING_LEFT,
    Draw,
    NothingAllowed,
    PickedRows,
    PickedTokens,
    TokenPicker,
    terms_of,
)
from rocm_serve.sampling.token_counts import CountedText, TokenCounts

Biases = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
NO_BIASES: Biases = (np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class RowShape:
    """How a row of logits is changed before its token is picked; see Sampling.

    penalties: repetition, presence, frequency
    counted:   the text so far, for a row with penalties
    biases:    token ids, each once, and the values added to their logits
    mask:      int32 [at least vocab / 32], a bit for each token that may be picked; None: all may
    depth:     how far below the best logit one may be; 0 or less
    why_none:  the reason why no token is left, if it is known beforehand
    """

    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    counted: CountedText | None = None
    biases: Biases = NO_BIASES
    mask: Int32Array | None = None
    top_k: int = 0
    depth: float = -math.inf
    why_none: str = ""


class RowParameters(NamedTuple):
    """The request of a row.

    shape:         None: the row is picked from unchanged
    num_likeliest: see Request.logprobs
    """

    shape: RowShape | None
    num_likeliest: int


class TokensWithLogprobs:
    """The tokens of one step, and the logprobs that its rows asked for, on their way to the host."""

    def __init__(
        self,
        picked: PickedTokens,
        shaped: tuple[Mapping[int, RowShape], Tensor],
        emitted: tuple[Mapping[int, int], Tensor],
        done: Fence,
    ) -> None:
        """shaped: row -> its shape, and results of these rows; emitted: row -> number of likeliest tokens, and these"""
        self._picked, self._shaped, self._emitted, self._done = picked, shaped, emitted, done

    def read(self) -> list[int | BadLogits]:
        """Like PickedTokens.read."""
        picks = self._picked.read()
        self._done.synchronize()
        shapes, found = self._shaped
        for row, pick in zip(shapes, PickedTokens(PickedRows.of(found.numpy()), NoFence()).read(), strict=True):
            if not isinstance(picks[row], BadLogits):
                picks[row] = pick if isinstance(pick, int) else NothingAllowed(shapes[row].why_none or NOTHING_LEFT)
        return picks

    def logprobs(self, picks: Sequence[int | BadLogits]) -> dict[int, TokenLogprobs]:
        """Returns row -> the logprobs it asked for, for rows that a token was picked from. picks: returned by read()"""
        nums, found = self._emitted
        emitted: dict[int, TokenLogprobs] = {}
        for (row, num), ids, bits in zip(nums.items(), found.tolist(), found.view(torch.float32).tolist(), strict=True):
            token = picks[row]
            if not isinstance(token, BadLogits):
                emitted[row] = logprobs_of(token, ids, bits, num)
        return emitted


class ParameterPicker:
    """Picks tokens of steps in which some rows ask for more.

    plain: picks for rows that ask for nothing else; its tokens hold the picks of all rows
    vocab: of the model
    most:  most texts with penalties in a step
    """

    def __init__(self, plain: TokenPicker, ops: StepOps, vocab: int, most: int) -> None:
        self.plain, self.ops, self.vocab = plain, ops, vocab
        self._device = plain.tokens.device
        self.counts = TokenCounts(self._device, vocab, most)

    def pick(
        self, logits: Tensor, draws: Mapping[int, Draw], parameters: Mapping[int, RowParameters]
    ) -> TokensWithLogprobs:
        """Does the same as TokenPicker.pick. parameters: of the rows that ask for anything"""
        shapes = {row: ask.shape for row, ask in parameters.items() if ask.shape is not None}
        nums = {row: ask.num_likeliest for row, ask in parameters.items() if ask.num_likeliest != NO_LOGPROBS}
        texts = [shape.counted for shape in shapes.values() if shape.counted is not None]
        # Counts come first: the plain pick overwrites the tokens that were picked last.
        counts = iter(self.counts.rows(texts, self.plain.tokens) if texts else ())
        picked = self.plain.pick(logits, {row: draw for row, draw in draws.items() if row not in shapes})
        found = torch.empty(0, 2, dtype=torch.int32)
        if shapes:
            counted = [next(counts) if shape.counted is not None else columns.NONE for shape in shapes.values()]
            found = self._pick_shaped(logits, shapes, counted, [draws.get(row, GREEDY) for row in shapes])
        done: Fence = torch.Event(self._device) if self._device.type != "cpu" else NoFence()
        emitted = coming(self._likeliest(logits, nums))
        done.record()
        return TokensWithLogprobs(picked, (shapes, found), (nums, emitted), done)

    def _pick_shaped(
        self, logits: Tensor, shapes: Mapping[int, RowShape], counted: Sequence[int], draws: Sequence[Draw]
    ) -> Tensor:
        """int32 [rows, 2], on its way to the host: the result of each shaped row."""
        device, num = self._device, len(shapes)
        masks = [shape.mask for shape in shapes.values() if shape.mask is not None]
        requested = sent(_table_of(shapes, counted), device)
        masks_there = sent(np.stack(masks), device) if masks else torch.empty(0, 1, dtype=torch.int32, device=device)
        shaped = torch.empty(num, self.vocab, dtype=torch.float32, device=device)
        self.ops.shape_rows(logits, requested, self.counts.table, masks_there, shaped)
        biased = [place * self.vocab + shape.biases[0] for place, shape in enumerate(shapes.values())]
        at = np.concatenate(biased)
        if len(at):
            biases = np.concatenate([shape.biases[1] for shape in shapes.values()])
            shaped.view(-1).index_add_(0, sent(at, device), sent(biases, device))
        if any(shape.top_k or shape.depth > -math.inf for shape in shapes.values()):
            self.ops.cut_rows(requested, shaped)
        tokens = torch.empty(num, dtype=torch.int32, device=device)
        found = torch.empty(num, 2, dtype=torch.int32, device=device)
        num_drawing = sum(draw.temperature > 0 for draw in draws)
        self.ops.pick_rows(shaped, sent(terms_of(draws), device), tokens, found, num_drawing=num_drawing)
        self.plain.tokens.index_copy_(0, requested[:, columns.ROW].long(), tokens)
        return coming(found)

    def _likeliest(self, logits: Tensor, nums: Mapping[int, int]) -> Tensor:
        """int32 [rows, any]; see launch_likeliest."""
        words = 1 + 2 * min(max(nums.values(), default=0), self.vocab)
        found = torch.empty(len(nums), words, dtype=torch.int32, device=self._device)
        if nums:
            requested = sent(np.array(list(nums.items()), np.int32), self._device)
            self.ops.likeliest(logits, requested, self.plain.tokens, found)
        return found


def _table_of(shapes: Mapping[int, RowShape], counted: Sequence[int]) -> Int32Array:
    """int32 [rows, NUM_COLUMNS]; see launch_shape_rows and launch_cut_rows."""
    table = np.empty((len(shapes), columns.NUM_COLUMNS), np.int32)
    numbers, num_masks = table.view(np.float32), 0
    for line, number, counts, (row, shape) in zip(table, numbers, counted, shapes.items(), strict=True):
        mask = columns.NONE
        if shape.mask is not None:
            mask, num_masks = num_masks, num_masks + 1
        line[: columns.REPETITION] = row, counts, mask
        number[columns.REPETITION : columns.TOP_K] = shape.penalties
        line[columns.TOP_K], number[columns.DEPTH] = min(shape.top_k, 2**31 - 1), shape.depth
    return table
