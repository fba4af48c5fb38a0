"""The oracle: dense attention in float64, written from the formula. It knows no page, no batch and no torch. The layers
of recurrences.py are its layers too.

A token with query q sees some of the keys k_j of its sequence. In each query head, over its group's KV head:

    s_j = scale * q . k_j                       a cap c makes it c * tanh(s_j / c)
    s_j = s_j - slope * (place - j)             with ALiBi
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink))
    lse = log(sum_j exp(s_j) + exp(sink))

A token that sees no key gets 0 and an LSE of -inf, whatever its sink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

UNKNOWN = -1  # in the place of a key that was never stored, or that a failed step may have overwritten
FLOAT32_ROUNDING = 2.0**-24
# Relative error of `tanh.approx.f32`: PTX ISA 8.7, "Floating Point Instructions: tanh".
TANH_ERROR = 2.0**-11


@dataclass(slots=True)
class Layer:
    """One layer of the model.

    queries, keys, values: float64 [entries, heads, dim], by what a token looks up
    sinks, slopes:         float64 [q_heads]; -inf and 0 where the layer has none
    rounding:              unit roundoff of the layer's dtype
    """

    queries: Floats
    keys: Floats
    values: Floats
    scale: float
    window_left: int
    window_right: int
    cap: float
    takes_masks: bool
    sinks: Floats
    slopes: Floats
    rounding: float

    @property
    def shape(self) -> tuple[int, int]:
        """The heads and dim of an output."""
        return self.queries.shape[1], self.values.shape[2]

    def answer(self, stored: Sequence[int], tokens: Tokens) -> Answer:
        """Returns the layer's results for new tokens. stored: what each token looks up, the new ones included"""
        kv = np.array(stored, np.int64)
        q = self.queries[np.array(tokens.looked_up, np.int64)]
        group = q.shape[1] // self.keys.shape[1]
        k, v = (np.repeat(table[kv], group, axis=1) for table in (self.keys, self.values))
        sees = visible(self, tokens)
        bad_keys = ~(np.isfinite(k).all((1, 2)) & np.isfinite(v).all((1, 2)))
        known: Bools = np.logical_not((sees & (kv == UNKNOWN)).any(1))
        sound: Bools = np.logical_not((sees & bad_keys).any(1))
        # Keys that no token sees may hold anything, and a token that sees such a key is not compared.
        unusable = bad_keys | (kv == UNKNOWN)
        k[unusable], v[unusable] = 0, 0
        return Answer(*_attention(self, q, k, v, sees, tokens.kv_len - len(q)), known, sound)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The new tokens of one sequence of a step.

    looked_up: what each looks up in the tables of queries
    kv_len:    of the sequence, these included
    positions: of each
    shows:     bool [tokens, kv_len] what the step's mask shows; None in a step without one
    is_tree:   whether they are one of drafts: then a window counts along a token's own branch
    """

    looked_up: Sequence[int]
    kv_len: int
    positions: Sequence[int]
    shows: Bools | None
    is_tree: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The results of a layer for the new tokens of a sequence, and the error that a float32 kernel may have.

    out:   [tokens, q_heads, dim]     lse: [tokens, q_heads]
    known: bool [tokens], whether every key that the token sees was stored
    sound: bool [tokens], whether every key and value that the token sees is finite
    """

    out: Floats
    lse: Floats
    out_bound: Floats
    lse_bound: Floats
    known: Bools
    sound: Bools


class OracleLayer(Protocol):
    """A layer as the oracle knows it. shape: heads and dim of an output; slopes: of ALiBi, 0 where there are none"""

    slopes: Floats

    @property
    def shape(self) -> tuple[int, int]: ...

    def answer(self, stored: Sequence[int], tokens: Tokens) -> Answer: ...


@dataclass(slots=True)
class Oracle:
    """The requests, and what lies in the KV of each: request -> for each place, what its token looked up."""

    layers: Sequence[OracleLayer]
    kv: dict[int, list[int]] = field(default_factory=dict)

    def admit(self, request: int) -> None:
        """A request without KV."""
        self.kv[request] = []

    def fork(self, request: int, child: int, num_tokens: int) -> None:
        """A request that begins with the first tokens of another."""
        self.kv[child] = self.kv[request][:num_tokens]

    def begin(self, request: int, looked_up: Sequence[int]) -> None:
        """A request whose first tokens are stored already."""
        self.kv[request] = list(looked_up)

    def page(self, request: int, page_no: int, page_size: int) -> list[int]:
        """Returns the entries that the tokens of one page looked up."""
        found = self.kv[request][page_no * page_size : (page_no + 1) * page_size]
        return found + [UNKNOWN] * (page_size - len(found))

    def free(self, request: int) -> None:
        """The request is gone."""
        del self.kv[request]

    def store(self, request: int, begin: int, looked_up: Sequence[int]) -> None:
        """New tokens from a place on; what lies after them stays."""
        kv = self.kv[request]
        kv.extend([UNKNOWN] * (begin + len(looked_up) - len(kv)))
        kv[begin : begin + len(looked_up)] = looked_up

    def truncate(self, request: int, num_tokens: int) -> None:
        """The request keeps its first tokens alone."""
        del self.kv[request][num_tokens:]

    def answer(self, layer: OracleLayer, request: int, tokens: Tokens) -> Answer:
        """Returns a layer's results for the new tokens, which are stored already."""
        return layer.answer(self.kv[request][: tokens.kv_len], tokens)


def visible(layer: Layer, tokens: Tokens) -> Bools:
    """bool [tokens, kv_len]: which keys each new token sees."""
    num_tokens, kv_len = len(tokens.looked_up), tokens.kv_len
    first = kv_len - num_tokens
    key, place = np.arange(kv_len), first + np.arange(num_tokens)[:, None]
    if layer.takes_masks and tokens.shows is not None:
        positions = np.array(tokens.positions, np.int64)
        sees, counted_from = tokens.shows, np.maximum(positions, first)[:, None]
        key = np.concatenate([key[:first], positions]) if tokens.is_tree else key
    else:
        last = kv_len if layer.window_right < 0 else place + layer.window_right
        sees, counted_from = np.broadcast_to(key <= last, (num_tokens, kv_len)), place
    if layer.window_left >= 0:
        sees = sees & (key >= counted_from - layer.window_left)
    return sees


def _attention(
    layer: Layer, q: Floats, k: Floats, v: Floats, sees: Bools, first: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """out, lse and their bounds; k, v: [kv_len, q_heads, dim], one each query head."""
    shown = sees[None]
    q, k, v = q.transpose(1, 0, 2), k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    scores = layer.scale * (q @ k)
    sizes = layer.scale * (np.abs(q) @ np.abs(k))
    if layer.cap:
        scores = layer.cap * np.tanh(scores / layer.cap)
    if layer.slopes.any():
        distance = first + np.arange(q.shape[1])[:, None] - np.arange(k.shape[2])
        bias = layer.slopes[:, None, None] * distance
        scores, sizes = scores - bias, sizes + np.abs(bias)
    scores, sizes = np.where(shown, scores, -math.inf), np.where(shown, sizes, 0.0)
    sinks = layer.sinks[:, None]
    top = np.maximum(scores.max(2, initial=-math.inf), sinks)
    base = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - base[:, :, None])
    total = weights.sum(2) + np.exp(sinks - base)
    with np.errstate(divide="ignore"):
        lse = np.where(shown.any(2), np.log(total) + base, -math.inf)
    out = weights @ v / np.where(total, total, 1.0)[:, :, None]
    largest = np.where(shown[..., None], np.abs(v)[:, None], 0.0).max(2, initial=0.0)
    out_bound, lse_bound = bounds(
        layer, q.shape[2], k.shape[2], sizes.max(2, initial=0.0), np.abs(base), largest, np.abs(out)
    )
    return out.transpose(1, 0, 2), lse.T, out_bound.transpose(1, 0, 2), lse_bound.T


def bounds(
    layer: Layer, head_dim: int, num_keys: int, sizes: Floats, top: Floats, values: Floats, out: Floats
) -> tuple[Floats, Floats]:
    """How far a kernel that computes in float32, in any order, may be off.

    sizes:  the largest sum of |q_i k_i| * scale + |bias| of a token and head; top: its largest score, without sign
    values: the largest |v| that it sees; out: its result, without sign

    A score is a sum of head_dim products: its error is at most head_dim + 8 roundings of the sum of their sizes,
    the 8 for scale, cap, bias and the base of the exponential. It moves the score's weight by as much, relatively.
    Numerator and denominator both move, and their sums add a rounding a key. exp and log are good to 4 roundings of
    their result, and log's base to one of the score. A kernel may round its weights to the layer's dtype before it
    multiplies them by V, and rounds its result to it. In a dtype of 16 bits it may cap scores by an instruction
    that is less exact.
    """
    of_score = (head_dim + 8) * FLOAT32_ROUNDING * np.maximum(sizes, top)
    if layer.rounding > FLOAT32_ROUNDING:
        of_score = of_score + layer.cap * TANH_ERROR
    of_sums = (num_keys + 16) * FLOAT32_ROUNDING
    half = layer.rounding if layer.rounding > FLOAT32_ROUNDING else 0.0
    of_weights = (2 * of_score + of_sums + half)[:, :, None]
    return of_weights * values + 2 * layer.rounding * out + 1e-7 * half, of_score + of_sums + 2 * FLOAT32_ROUNDING * top
