"""Attention over one whole sequence without a cache, so that the model's arithmetic can be tested by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.cache.row_work import QkvWork
from rocm_attn.problem import Indexer, PoolKind, Problem
from rocm_attn.recurrence import Recurrence
from rocm_attn.step.head_weights import LayerHeadWeights
from rocm_attn.step.step import Part
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model
from rocm_serve.request import Completion
from tests.amd.kernels.rope_cases import normalised, turned
from tests.amd.worlds.recurrent import Drawn, convolved, recurrent


@dataclass(frozen=True)
class DenseAttention:
    """Replaces a runtime in a step that holds one sequence from its first token on."""

    problems: Sequence[Problem]
    head_weights: LayerHeadWeights
    stored: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    chosen: list[Tensor] = field(default_factory=list)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.stored[layer] = k, v

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        rows = turned(normalised(k, work.k_norm), torch.arange(len(k)), work.rope).to(k.dtype)
        # V of latent rows is a part of the stored rows, not of the given ones.
        is_latent = self.problems[layer].pool is PoolKind.LATENT
        self.store(layer, rows, rows[..., : v.shape[2]] if is_latent else normalised(v, work.v_norm).to(v.dtype))
        self.rope_queries(layer, q, q_out, work)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        q_out.copy_(turned(normalised(q, work.q_norm), torch.arange(len(q)), work.rope))

    def store_index(self, layer: int, k: Tensor) -> None:
        self.index_keys[layer] = k

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Appends the selection to `chosen`: bool [sets, tokens, keys]. Each of several sets has one index head."""
        indexer = self.problems[layer].indexer
        assert isinstance(indexer, Indexer)
        indexing, num_tokens = indexer.indexing, len(q)
        scores = torch.einsum("qhd,kd->hqk", q, self.index_keys[layer]) * indexing.scale
        scores = (scores.relu() if indexing.rectified else scores).float()
        if weights is not None:
            scores = scores * weights.T[..., None]
        if indexing.sets == 1:
            scores = scores.sum(0, keepdim=True)
        scores = scores.masked_fill(torch.ones(num_tokens, num_tokens).triu(1).bool(), float("-inf"))
        unit = indexing.unit_keys
        padded = F.pad(scores, (0, -num_tokens % unit), value=float("-inf"))
        of_units = padded.view(*padded.shape[:2], -1, unit).amax(-1)
        own = torch.arange(num_tokens)[:, None] // unit - torch.arange(of_units.shape[-1])
        of_units = of_units.masked_fill((own >= 0) & (own < indexing.last), float("inf"))
        best = of_units.topk(min(indexing.top, of_units.shape[-1]), -1).indices
        chosen = torch.zeros_like(of_units, dtype=torch.bool).scatter_(-1, best, True)
        self.chosen[:] = [chosen.repeat_interleave(unit, -1)[..., :num_tokens]]

    def attend_selected(self, layer: int, q: Tensor, out: Tensor) -> None:
        chosen = self.chosen[0]
        self._attend(layer, q, out, ~chosen.repeat_interleave(q.shape[1] // len(chosen), 0))

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._attend(layer, q, out, torch.zeros(1, len(q), len(q), dtype=torch.bool))

    def finish(self, layer: int, out: Tensor, *, gate: Tensor) -> None:
        out.copy_(out.double() / (1 + torch.exp(-gate.double())))

    def _attend(self, layer: int, q: Tensor, out: Tensor, left_out: Tensor) -> None:
        problem = self.problems[layer]
        k, v = self.stored[layer]
        k, v = (x.repeat_interleave(problem.gqa_ratio, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * problem.scale
        if problem.logits_soft_cap:
            scores = (scores / problem.logits_soft_cap).tanh() * problem.logits_soft_cap
        index = torch.arange(len(q))
        distance = index[:, None] - index
        hidden = left_out | (distance < 0)
        if problem.window_left >= 0:
            hidden |= distance > problem.window_left
        scores = scores.masked_fill(hidden, float("-inf"))
        sinks = self.head_weights.of(layer).sinks
        if sinks is not None:  # a key whose value is 0
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1).to(scores)), -1)
        out.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v))


@dataclass(frozen=True)
class DenseStates:
    """Replaces a runtime's recurrent layers in such a step, in float64."""

    layers: Sequence[Recurrence]

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(convolved(x, weight, bias, silu=self.layers[layer].convolution.silu))

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, out: Tensor) -> None:
        out.copy_(recurrent(self.layers[layer], Drawn(q, k, v, decay, beta))[0])


@dataclass(frozen=True)
class WholeSequence:
    """A step with one sequence, with logits for all of its tokens."""

    token_ids: Tensor
    positions: Tensor
    last_token_of_seq: Tensor
    layers: Any
    states: DenseStates


def dense_model(loaded: LoadedModel, max_kv_len: int) -> tuple[Model, DenseAttention]:
    """The model for sequences of up to max_kv_len tokens, and the dense attention of its steps."""
    problems = loaded.config.attention.problems(dtype=loaded.weights.dtype, page_size=1)
    attention = DenseAttention(problems, LayerHeadWeights(problems, loaded.weights.device))
    return Model(loaded.config, loaded.weights, attention.head_weights, max_kv_len=max_kv_len), attention


def dense_logits(loaded: LoadedModel, token_ids: Tensor) -> Tensor:
    """Logits [tokens, vocab] at every position of one sequence. token_ids: integer [tokens]"""
    return dense_logits_of(*dense_model(loaded, len(token_ids)), token_ids)


def dense_logits_of(model: Model, attention: DenseAttention, token_ids: Tensor) -> Tensor:
    """Does the same as `dense_logits`, for a model over some attention."""
    index = torch.arange(len(token_ids), dtype=torch.int32)
    with torch.no_grad():
        states = DenseStates(model.config.attention.recurrences(model.weights.dtype))
        step = WholeSequence(token_ids.int(), index, index, attention, states)
        return model.forward(cast(Part, step))  # all of a part that a model reads


def assert_greedy(loaded: LoadedModel, done: Completion, margin: float = 1e-3) -> None:
    """Each new token is the likeliest after those before it, or as likely as that within float32's rounding."""
    prompt, token_ids = done.prompt_token_ids, done.token_ids
    if token_ids:
        wide = replace(loaded, weights=_in_float32(loaded.weights))
        logits = dense_logits(wide, torch.tensor((*prompt, *token_ids[:-1])))[len(prompt) - 1 :]
        short = logits.amax(1) - logits[torch.arange(len(token_ids)), torch.tensor(token_ids)]
        assert short.max() <= margin, f"token {int(short.argmax())} of {list(token_ids)} after {list(prompt)}"


def _in_float32(weights: Any) -> Any:
    """Weights with each tensor in float32, whatever dataclasses and tuples it lies in."""
    if isinstance(weights, tuple):
        return tuple(map(_in_float32, weights))
    if is_dataclass(weights) and not isinstance(weights, type):
        return replace(weights, **{each.name: _in_float32(getattr(weights, each.name)) for each in fields(weights)})
    return weights.float() if isinstance(weights, Tensor) else weights
