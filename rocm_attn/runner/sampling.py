"""Sampling: from logits to token ids. A request's draws depend on its own logits and seed, never on the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.errors import BadLogits, BadRequest

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request picks its tokens.

    temperature: 0 takes the likeliest token; above, logits are divided by it before a token is drawn
    top_p:       tokens are drawn among the likeliest whose probabilities reach this sum, (0, 1]
    seed:        of this request's draws

    Raises BadRequest.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadRequest(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise BadRequest(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.seed < 0:
            raise BadRequest(f"seed is {self.seed}; it must not be negative")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0


class Sampler:
    """One request's source of tokens: one uniform number per token."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def draw(self, logits: Float32Array) -> int:
        """A token id.

        logits: [vocab]; -inf rules a token out
        Raises BadLogits where they hold NaN or infinity, or rule every token out.
        """
        best = float(logits.max())
        if not math.isfinite(best):
            raise _bad_logits(best)
        # The best one is 0 whatever it is divided by; where the temperature is tiny, all others are -inf.
        with np.errstate(over="ignore"):
            scaled = (logits.astype(np.float64) - best) / self.sampling.temperature
        weights = np.exp(scaled)
        order = np.argsort(-weights, kind="stable")
        mass = np.cumsum(weights[order])
        # the token that reaches the sum is still in
        kept = int(np.searchsorted(mass, self.sampling.top_p * mass[-1])) + 1
        mass = mass[:kept]
        chosen = int(np.searchsorted(mass, self._random.random() * mass[-1], side="right"))
        return int(order[min(chosen, len(mass) - 1)])


def pick_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | BadLogits]:
    """One token id for each row; for a row that none can be picked from, why. The other rows do not depend on it.

    logits: [rows, vocab]; the likeliest tokens are found on the device, only rows that draw come to the host
    """
    # A row that holds NaN has NaN as its largest; one copy brings ids and values, and float64 holds both exactly.
    ids = logits.argmax(-1, keepdim=True)
    found = torch.cat((ids.double(), logits.gather(-1, ids).double()), 1).tolist()
    picks: list[int | BadLogits] = [int(token) if math.isfinite(best) else _bad_logits(best) for token, best in found]
    for row, (_, best) in enumerate(found):
        # A norm whose squares overflow gives 0, and so does everything after it.
        if best == 0 and not logits[row].any():
            picks[row] = _bad_logits(best)
    drawing = [
        row
        for row, (pick, sampler) in enumerate(zip(picks, samplers, strict=True))
        if not (sampler.sampling.is_greedy or isinstance(pick, BadLogits))
    ]
    if drawing:
        index = torch.tensor(drawing, device=logits.device)
        rows = in_float32(logits.index_select(0, index)).cpu().numpy()
        for row, values in zip(drawing, rows, strict=True):
            picks[row] = samplers[row].draw(values)
    return picks


def in_float32(logits: Tensor) -> Tensor:
    """The rows that draw, as they come to the host; on a GPU that is the largest thing that picking tokens takes."""
    return logits.float()


def _bad_logits(best: float) -> BadLogits:
    """best: the largest logit of a row; 0 where all of them are"""
    what = f"the largest logit of the next token is {best}" if best else "every logit of the next token is 0"
    return BadLogits(
        f"{what}, so no token can be picked; look for weights that are too large for the dtype, or run in a wider one "
        "(float32)"
    )
