"""Sampling: from logits to token ids, on the device of the logits and without waiting for it.

A request's draws depend on its own logits, its seed and the place of the token, never on the batch, nor on how often a
step was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rocm_attn.errors import BadLogits, BadRequest
from rocm_attn.step.host_ring import Fence, NoFence

# Rows are drawn from so many logits at a time, in float64: about 120 MB.
_LOGITS_AT_ONCE = 1 << 21
# Uniform numbers are made so many at a time.
_NUMBERS_AT_ONCE = 16


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


class Draw(NamedTuple):
    """How one token is drawn.

    uniform: a number of [0, 1) that decides
    """

    temperature: float
    top_p: float
    uniform: float


class Sampler:
    """One request's source of tokens: one uniform number for each, known before any token is picked."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._uniform: list[float] = []
        self._next = 0

    def next_draw(self) -> Draw:
        """How the token is drawn that comes after the one of the call before, from the first one on."""
        self._next += 1
        return self.draw(self._next - 1)

    def draw(self, place: int) -> Draw:
        """How the request's new token number `place`, from 0 on, is drawn."""
        while place >= len(self._uniform):
            self._uniform += self._random.random(_NUMBERS_AT_ONCE).tolist()
        return Draw(self.sampling.temperature, self.sampling.top_p, self._uniform[place])


class Found(NamedTuple):
    """What was found in the rows of some logits.

    ids:    int32 or int64 [rows]   the token that was picked; some token id where none can be
    best:   of a float dtype [rows] the largest logit
    is_any: bool [rows]             whether any logit is not 0
    """

    ids: Tensor
    best: Tensor
    is_any: Tensor

    def on_host(self) -> list[int | BadLogits]:
        """One token id for each row; for a row that none can be picked from, why."""
        found = zip(self.ids.tolist(), self.best.tolist(), self.is_any.tolist(), strict=True)
        # A row that holds NaN has NaN as its largest. A norm whose squares overflow gives 0, and so does all after it.
        return [token if is_any and math.isfinite(best) else _bad_logits(best) for token, best, is_any in found]


class PickedTokens:
    """The tokens of one step, on their way to the host. done: after which they are in found"""

    __slots__ = ("_done", "_found")

    def __init__(self, found: Found, done: Fence) -> None:
        self._found, self._done = found, done

    def read(self) -> list[int | BadLogits]:
        """Wait for them. One token id for each row; for a row that none can be picked from, why."""
        self._done.synchronize()
        return self._found.on_host()


class _HostMemory(NamedTuple):
    """What is found is copied to, and the fence after the copies."""

    found: Found
    done: Fence


class TokenPicker:
    """Picks the tokens of an engine's steps where the logits are, and sends them to the host.

    A step that was picked from is read before the second step after it is.

    tokens: int32 [most_rows], row -> the token that was picked last: what a step reads whose tokens the host does not
            know yet. A row that no token can be picked from has one that may be looked up
    """

    @torch.inference_mode(False)  # memory that is made in that mode cannot be written outside of it
    def __init__(self, device: torch.device, most_rows: int) -> None:
        self.tokens = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._on_gpu = device.type == "cuda"
        self._next = 0
        self._host = [self._new_host_memory() for _ in range(2)]

    def pick(self, logits: Tensor, draws: Mapping[int, Draw]) -> PickedTokens:
        """Pick a token for each row.

        logits: [rows, vocab], most_rows at most; may change when the launches that were made here have run
        draws:  row -> how its token is drawn; of the others the likeliest is taken
        """
        rows = len(logits)
        if not rows:
            return PickedTokens(Found(*(each[:0] for each in self._host[0].found)), NoFence())
        found = _found(logits, draws)
        self.tokens[:rows].copy_(found.ids)
        host, self._next = self._host[self._next], 1 - self._next
        on_host = Found(*(each[:rows] for each in host.found))
        for there, here in zip(on_host, (self.tokens[:rows], found.best, found.is_any), strict=True):
            there.copy_(here, non_blocking=True)
        host.done.record()
        return PickedTokens(on_host, host.done)

    def _new_host_memory(self) -> _HostMemory:
        kinds = (torch.int32, torch.float64, torch.bool)
        tensors = [torch.empty(len(self.tokens), dtype=kind, pin_memory=self._on_gpu) for kind in kinds]
        return _HostMemory(Found(*tensors), torch.Event(self.tokens.device) if self._on_gpu else NoFence())


def pick_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | BadLogits]:
    """One token id for each row, by its sampler's next draw; for a row that none can be picked from, why.

    logits: [rows, vocab]. It is waited for
    """
    draws = [sampler.next_draw() for sampler in samplers]
    return _found(logits, {row: draw for row, draw in enumerate(draws) if draw.temperature > 0}).on_host()


def draw_tokens(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: a token for each row, drawn among the likeliest of its tokens.

    The tokens are put in order, the likeliest first, equals by their ids. Those up to the one with which the sum of the
    probabilities reaches top_p are kept; of these the first one is taken whose sum is above `uniform` of the whole.

    logits:                     [rows, vocab]; -inf rules a token out. What is drawn of a row that holds NaN, or nothing
                                but -inf, is a token id and nothing else is known of it
    temperature, top_p, uniform: float64 [rows, 1]
    """
    exact = logits.double()
    # The best one is 0 whatever it is divided by; where the temperature is tiny, all others are -inf.
    weights = exact.sub_(exact.amax(-1, keepdim=True)).div_(temperature).exp_()
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    mass = ordered.cumsum(-1)
    last = mass.shape[-1] - 1
    kept = torch.searchsorted(mass, top_p * mass[:, -1:]).clamp_(max=last)  # the token that reaches the sum is still in
    chosen = torch.searchsorted(mass, uniform * mass.gather(-1, kept), right=True)
    return order.gather(-1, torch.minimum(chosen, kept)).squeeze(-1)


def draw_all(logits: Tensor) -> None:
    """Draw a token for every row: the largest thing that picking tokens takes of a device."""
    _found(logits, dict.fromkeys(range(len(logits)), Draw(1.0, 0.5, 0.5)))


def _found(logits: Tensor, draws: Mapping[int, Draw]) -> Found:
    """draws: row -> how its token is drawn; of the others the likeliest is taken"""
    best, ids = logits.max(-1)
    if draws:
        _put_drawn(logits, draws, ids)
    return Found(ids, best, logits.any(-1))


def _put_drawn(logits: Tensor, draws: Mapping[int, Draw], tokens: Tensor) -> None:
    """Replace tokens, int64 [rows], in the rows that draw."""
    at_once = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    terms = torch.tensor([(row, *draw) for row, draw in draws.items()], dtype=torch.float64)
    if logits.is_cuda:
        terms = terms.pin_memory().to(logits.device, non_blocking=True)
    for some in torch.split(terms, at_once):
        row = some[:, 0].long()
        temperature, top_p, uniform = (some[:, column : column + 1].contiguous() for column in (1, 2, 3))
        tokens.index_copy_(0, row, draw_tokens(logits.index_select(0, row), temperature, top_p, uniform))


def _bad_logits(best: float) -> BadLogits:
    """best: the largest logit of a row; 0 where all of them are"""
    what = f"the largest logit of the next token is {best}" if best else "every logit of the next token is 0"
    return BadLogits(
        f"{what}, so no token can be picked; look for weights that are too large for the dtype, or run in a wider one "
        "(float32)"
    )
