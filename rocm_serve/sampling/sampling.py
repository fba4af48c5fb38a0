"""Sampling: picks token ids from logits, on the device and without waiting for it.

A request's tokens depend on its own logits, its seed and the token's index. They do not depend on the batch, or on how
often a step was run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import BadLogits, BadSetting, BadTensor
from rocm_attn.kernels.sampling.row_results import ALL_ZERO, NONE_LEFT
from rocm_attn.machine.devices import require_tensor
from rocm_attn.providers.launches import PickRows
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.step.host_ring import Fence, NoFence, wait_for_all
from rocm_attn.step.prepared import RepeatedLauncher
from rocm_serve.sampling.sampling_options import Sampling

# Uniform numbers are made in batches of this size.
_NUMBERS_AT_ONCE = 16
# The largest number below 1 that float32 does not round up to it.
_MOST_UNIFORM = 1 - 2**-24
# Float32 holds these; temperatures beyond them have the same effect.
_COLDEST, _HOTTEST = 1e-30, 1e30


class Draw(NamedTuple):
    """How one token is drawn, in numbers that float32 holds; see launch_pick_rows.

    uniform: a number of [0, 1) that decides
    """

    temperature: float
    top_p: float
    uniform: float


# The Draw of a row whose likeliest token is taken.
GREEDY = Draw(0.0, 0.0, 0.0)
# Makes a Draw of its fields, in half the time: Draw(...) is a function of Python.
_new = tuple.__new__


class _Uniforms:
    """Numbers of [0, 1) of a seed, by their places. Float32 rounds none of them up to 1."""

    __slots__ = ("_numbers", "_random", "_seed")

    def __init__(self, seed: int | tuple[int, int]) -> None:
        self._seed = seed
        self._random: np.random.Generator | None = None  # takes longer to make than its first numbers
        self._numbers: list[float] = []

    def at(self, place: int) -> float:
        if place < 0:
            raise BadSetting(f"place is {place}; the new tokens of a request are counted from 0")
        if self._random is None:
            self._random = np.random.default_rng(self._seed)
        while place >= len(self._numbers):
            self._numbers += np.minimum(self._random.random(_NUMBERS_AT_ONCE), _MOST_UNIFORM).tolist()
        return self._numbers[place]


class Sampler:
    """One request's random numbers: a uniform number per new token, fixed by the seed and the token's index.

    Each sampled draft token has two more.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.is_greedy = sampling.is_greedy
        self._temperature = 0.0 if self.is_greedy else min(max(sampling.temperature, _COLDEST), _HOTTEST)
        self._draws, self._draft_numbers, self._accepts = (
            _Uniforms(seed) for seed in (sampling.seed, (sampling.seed, 1), (sampling.seed, 2))
        )
        self._next = 0

    def next_draw(self) -> Draw:
        """Returns the draw of the next token. The first call returns that of the first new token."""
        self._next += 1
        return self.draw(self._next - 1)

    def draw(self, place: int) -> Draw:
        """The draw of the new token with index `place`, counted from 0. Raises BadSetting for a negative one."""
        return _new(Draw, (self._temperature, self.sampling.top_p, self._draws.at(place)))

    def draft_number_at(self, place: int) -> float:
        """The uniform number that samples the draft of the new token with this index."""
        return self._draft_numbers.at(place)

    def accept_at(self, place: int) -> float:
        """The uniform number that decides whether the draft of the new token with this index is accepted."""
        return self._accepts.at(place)


class PickedRows(NamedTuple):
    """The results per row, as the host reads them.

    token_ids: int32 [rows], or ALL_ZERO or NONE_LEFT
    best:      float32 [rows], the largest logit
    """

    token_ids: Int32Array
    best: npt.NDArray[np.float32]

    @classmethod
    def of(cls, found: Int32Array) -> PickedRows:
        """found: int32 [rows, 2]; see launch_pick_rows"""
        return cls(found[:, 0], found.view(np.float32)[:, 1])


class PickedTokens:
    """The tokens of one step, on their way to the host.

    found: written by launch_pick_rows
    done:  found is there after it
    """

    __slots__ = ("_done", "found")

    def __init__(self, found: PickedRows, done: Fence) -> None:
        self.found, self._done = found, done

    def read(self) -> list[int | BadLogits]:
        """Waits for them. Returns one token id per row, or the reason why no token can be picked from a row."""
        self._done.synchronize()
        found, best = self.found
        ids: list[int | BadLogits] = found.tolist()
        # The largest logit of a row with NaN is NaN. A norm whose squares overflow gives 0, and so do all later layers.
        if ALL_ZERO not in ids and np.logical_and.reduce(np.isfinite(best)):
            return ids
        return [
            token if token != ALL_ZERO and math.isfinite(most) else _bad_logits(token, most)
            for token, most in zip(found.tolist(), best.tolist(), strict=True)
        ]


class _Rows(NamedTuple):
    """The tensors of a launch over a number of rows other than the logits, and its results as the host reads them."""

    terms: Tensor
    tokens: Tensor
    found: Tensor
    on_host: PickedRows


class _HostMemory:
    """Memory that the device reads terms from and writes its results to, and the fence after that."""

    def __init__(self, tokens: Tensor) -> None:
        most_rows, pinned = tokens.shape[0], tokens.is_cuda
        self._tokens = tokens
        self._terms = torch.empty(most_rows, 3, dtype=torch.float32, pin_memory=pinned)
        self._found = torch.empty(most_rows, 2, dtype=torch.int32, pin_memory=pinned)
        self._rows: dict[int, _Rows] = {}
        self.done: Fence = torch.Event(tokens.device) if pinned else NoFence()
        # torch knows of no kernel that reads or writes pinned memory, and gives freed pinned memory to the next caller.
        weakref.finalize(self, wait_for_all, [self.done], (self._terms, self._found)).atexit = False

    def rows(self, rows: int) -> _Rows:
        """The first rows."""
        found = self._rows.get(rows)
        if found is None:
            views = self._terms[:rows], self._tokens[:rows], self._found[:rows]
            found = self._rows[rows] = _Rows(*views, PickedRows.of(self._found.numpy()[:rows]))
        return found


class TokenPicker:
    """Picks the tokens of an engine's steps on the device of the logits, and sends them to the host.

    The picks of a step are read before the second step after it is picked from.

    pick_rows: of the runtime's launches
    tokens:    int32 [most_rows], row -> the token that was picked last. A step reads it if the host does not know its
               tokens yet. A row that no token can be picked from has some token of the vocabulary
    """

    @torch.inference_mode(False)  # memory made in inference mode cannot be written outside of it
    def __init__(self, device: torch.device, most_rows: int, pick_rows: PickRows) -> None:
        self.tokens = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._pick_rows = pick_rows
        self._next = 0
        self._host = [_HostMemory(self.tokens) for _ in range(2)]

    def pick(self, logits: Tensor, draws: Mapping[int, Draw]) -> PickedTokens:
        """Picks a token for each row.

        logits: [rows, vocab], at most most_rows; may change when the launches that were made here have run
        draws:  row -> how its token is drawn; the other rows take the likeliest token
        """
        rows = logits.shape[0]
        host, self._next = self._host[self._next], 1 - self._next
        terms, tokens, found, on_host = host.rows(rows)
        if rows:
            if draws:
                host.done.synchronize()  # an unread step may not have read its terms yet
                _put_terms(terms, draws)
            self._pick_rows(logits, terms, tokens, found, num_drawing=len(draws))
            host.done.record()
        return PickedTokens(on_host, host.done)

    def picking(self, logits: Tensor, found: Tensor, stream: Callable[[], int] | None) -> RepeatedLauncher:
        """Picks the likeliest token of each row, repeatedly from the same place.

        found:  int32 [rows, 2], receives the results; see launch_pick_rows
        stream: see RepeatedLauncher
        """
        terms, tokens, *_ = self._host[0].rows(logits.shape[0])  # no row draws, so no terms are read
        return RepeatedLauncher(stream, self._pick_rows, logits, terms, tokens, found, num_drawing=0)


def pick_tokens(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | BadLogits]:
    """Samples one token id per row, by the row's sampler; a BadLogits in place of an id if none can be sampled.

    logits: [rows, vocab]. The host waits for the device
    Raises BadTensor for another number of rows than of samplers.
    """
    require_tensor("logits", logits)
    if logits.dim() != 2 or len(logits) != len(samplers) or not logits.shape[1]:
        raise BadTensor(
            f"logits have shape {list(logits.shape)} and there are {len(samplers)} samplers; give [rows, vocab], with "
            "a row for each sampler"
        )
    draws = [sampler.next_draw() for sampler in samplers]
    return _found(logits, {row: draw for row, draw in enumerate(draws) if draw.temperature > 0}, TORCH.ops().pick_rows)


def draw_all(logits: Tensor, pick_rows: PickRows) -> None:
    """Draws a token for every row, with the device memory that ParameterPicker needs if every row has every option."""
    rows, vocab = logits.shape
    requested = [torch.empty(rows, vocab, dtype=dtype, device=logits.device) for dtype in (torch.float32, torch.int32)]
    _found(logits, dict.fromkeys(range(logits.shape[0]), Draw(1.0, 0.5, 0.5)), pick_rows)
    del requested


def _found(logits: Tensor, draws: Mapping[int, Draw], pick_rows: PickRows) -> list[int | BadLogits]:
    """draws: see TokenPicker.pick"""
    rows = logits.shape[0]
    terms = torch.empty(rows, 3)
    _put_terms(terms, draws)
    tokens, found = (torch.empty(rows, *of_each, dtype=torch.int32, device=logits.device) for of_each in ((), (2,)))
    pick_rows(logits, terms.to(logits.device), tokens, found, num_drawing=len(draws))
    return PickedTokens(PickedRows.of(found.cpu().numpy()), NoFence()).read()


def _put_terms(terms: Tensor, draws: Mapping[int, Draw]) -> None:
    """terms: float32 [rows, 3] of the host; see launch_pick_rows"""
    of_rows = terms.numpy()
    of_rows[:] = GREEDY
    of_rows[list(draws)] = terms_of(draws.values())


def terms_of(draws: Collection[Draw]) -> npt.NDArray[np.float32]:
    """float32 [rows, 3]; see launch_pick_rows."""
    return np.fromiter(chain.from_iterable(draws), np.float32, 3 * len(draws)).reshape(-1, 3)


NOTHING_LEFT = (
    "no token is left that the request allows: its constraint, its biases, allowed_token_ids or min_tokens exclude all "
    "of them; "
    "relax one of them"
)


class NothingAllowed(BadLogits):
    """A request's own options rule every token out that the model gives."""


def _bad_logits(token: int, best: float) -> BadLogits:
    """Why no token is picked from a row. token, best: see PickedRows"""
    if token == NONE_LEFT:
        return NothingAllowed(NOTHING_LEFT)
    what = f"the largest logit of the next token is {best}" if best else "every logit of the next token is 0"
    return BadLogits(
        f"{what}, so no token can be sampled; look for weights that are too large for the dtype, or use a wider "
        "one (float32)"
    )
