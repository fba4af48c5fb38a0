"""Choosers: select the keys for a needle test of a sparse layer.

ByIndexer runs the layer's own indexer on needles. ByEngine stands for an engine's indexer, which passes its selection
as positions of keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.problem import Indexer, Problem, Scales
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.truth.needles import IndexHaystack, Pointed, check_indexer


class Chooser:
    """Chooses nothing: the base of those that do, and that of layers without an indexer.

    pointed: of each sequence of the step, the keys that are chosen for certain, and those that are not
    """

    def __init__(self) -> None:
        self.pointed: list[Pointed] = []

    def point(self, seq: int, here: slice, there: slice) -> None:
        """Sets the inputs of a sequence's new tokens. here: places in the step; there: in the sequence"""

    def also(self, seq: int) -> Sequence[Tensor]:
        """Returns the index keys of a sequence that fold() makes, if it makes some."""
        return ()

    def take(self, folded: Tensor) -> None:
        """Takes index keys that fold() has made. May be captured."""

    def choose(self, layers: LayerCalls, number: int, num_tokens: int) -> None:
        """Chooses the keys of the step's tokens in a layer. May be captured."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenLayer:
    """A layer whose keys are chosen, in the terms of NeedleLayer. indexer: the problem's"""

    problem: Problem
    indexer: Indexer
    kv_len: Sequence[int]
    num_tokens: int
    generator: torch.Generator


# Makes the chooser of a layer. Raises BadProblem if too few keys would be chosen.
NewChooser = Callable[[ChosenLayer], Chooser]


class ByIndexer(Chooser):
    """Sends needles through the layer's indexer, with inputs at fixed addresses. Raises BadProblem.

    size: of the elements of index keys
    """

    def __init__(self, layer: ChosenLayer, size: float = 1.0) -> None:
        super().__init__()
        problem, indexer, generator = layer.problem, layer.indexer, layer.generator
        check_indexer(indexer, max(layer.kv_len))
        self._layer, self._size = layer, size
        self._keys = [IndexHaystack.random(problem, indexer, length, generator) for length in layer.kv_len]

        def rows(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
            return torch.zeros(layer.num_tokens, *shape, dtype=dtype, device=generator.device)

        self._k, self._q = rows(indexer.head_dim), rows(indexer.num_heads, indexer.head_dim)
        self._weights = rows(indexer.num_heads, dtype=torch.float32)
        self._weights += 0.75 + 0.5 * torch.rand(indexer.num_heads, generator=generator, device=generator.device)

    def point(self, seq: int, here: slice, there: slice) -> None:
        layer, keys = self._layer, self._keys[seq]
        pointed = Pointed.of(layer.problem, layer.indexer, there.start, there.stop, layer.generator)
        self.pointed.append(pointed)
        self._k[here] = keys.stored(there, layer.indexer.indexing) * self._size
        self._q[here] = keys.queries(pointed, layer.problem, layer.indexer)

    def also(self, seq: int) -> Sequence[Tensor]:
        return (self._keys[seq].k,)

    def take(self, folded: Tensor) -> None:
        self._k[: len(folded)].copy_(folded)

    def choose(self, layers: LayerCalls, number: int, num_tokens: int) -> None:
        layers.store_index(number, self._k[:num_tokens])
        layers.select(number, self._q[:num_tokens], self._weights[:num_tokens])


class GiveChosen(Protocol):
    """Gives a layer the keys that an engine has chosen, the way that the engine's choices go.

    chosen: int32 [T, top], positions in the token's sequence in any order, each once; negative ones are none
    """

    def __call__(self, layers: LayerCalls, number: int, chosen: Tensor) -> None: ...


class ByEngine(Chooser):
    """Chooses for each token half of the keys that it sees, at random, those that are asked for among them."""

    def __init__(self, layer: ChosenLayer, give: GiveChosen) -> None:
        super().__init__()
        indexing, device = layer.indexer.indexing, layer.generator.device
        assert indexing.unit_tokens == indexing.sets == 1
        self._layer, self._give = layer, give
        self._chosen = torch.full((layer.num_tokens, indexing.top), -1, dtype=torch.int32, device=device)

    def point(self, seq: int, here: slice, there: slice) -> None:
        layer, generator, chosen = self._layer, self._layer.generator, self._chosen[here]
        pointed = Pointed.of(layer.problem, layer.indexer, there.start, there.stop, generator)
        token = torch.arange(there.start, there.stop, device=chosen.device)[:, None]

        def share(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=chosen.device)

        key = pointed.key[:, 0]
        away = (share(len(token), 1) * (token + 1)).long()
        is_asked_for = (away == key).any(-1, keepdim=True)
        # Wanted keys come first, and no key comes that the token does not see or turns away from.
        order = share(len(token), there.stop).scatter(1, key, 2.0)
        order.masked_fill_(torch.arange(there.stop, device=chosen.device) > token, -1.0)
        order.scatter_(1, away, torch.where(is_asked_for, order.gather(1, away), -1.0))
        width = min(there.stop, chosen.shape[1])
        place = order.topk(width, dim=1)
        rank = torch.arange(width, device=chosen.device)
        is_left_out = (place.values < 0) | (rank >= (token + 1) // 2 + key.shape[1])
        chosen.fill_(-1)
        chosen[:, :width] = place.indices.masked_fill(is_left_out, -1)
        chosen.copy_(chosen.gather(1, share(*chosen.shape).argsort(1)))
        self.pointed.append(replace(pointed, away=away.masked_fill(is_asked_for, -1)))

    def choose(self, layers: LayerCalls, number: int, num_tokens: int) -> None:
        self._give(layers, number, self._chosen[:num_tokens])


class PagesOfLayers(Protocol):
    """The pages of a model's layers, and those of their index keys."""

    def layer(self, layer: int, /) -> LayerPages: ...

    def index(self, layer: int, /) -> LayerPages: ...


class Choosers:
    """The makers of choosers, for a model's layers that have an indexer. Those of this base choose by the layer's."""

    def check(self, indexer: Indexer, kv_len: int) -> None:
        """Raises BadProblem if the keys that needles ask for may not be chosen."""
        check_indexer(indexer, kv_len)

    def of(self, pages: PagesOfLayers, layer: int) -> NewChooser:
        """Returns a layer's, whose index keys fit the layer's scale, if it is fixed. pages: of the layers"""
        index = pages.index(layer)
        if index.format.scales is not Scales.LAYER or index.k_scale is None:
            return ByIndexer
        return partial(ByIndexer, size=float(index.k_scale))


class ByEngines(Choosers):
    """An engine chooses. give: see GiveChosen"""

    def __init__(self, give: GiveChosen) -> None:
        self._give = give

    def check(self, indexer: Indexer, kv_len: int) -> None:
        """Any keys may be chosen."""

    def of(self, pages: PagesOfLayers, layer: int) -> NewChooser:
        return partial(ByEngine, give=self._give)


BY_INDEXERS = Choosers()
