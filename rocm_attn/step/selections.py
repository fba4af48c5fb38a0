"""Selections of sparse attention: checks that no layer uses another layer's selection, or one of an earlier step.

All indexers of a model write to one buffer. So a selection must be used by its own layer, and by those that reuse it,
before the next indexer runs. Eager and captured forwards are checked for this order; a graph then keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rocm_attn.errors import BadProblem, BadTensor, WrongState
from rocm_attn.problem import EarlierSelection, Indexer, Problem

NOTHING = -1


def refuse_stale(layer: int, wanted: int, found: int) -> None:
    """Raises WrongState if a layer attends to the selection of `wanted`, and another one, or NOTHING, is found."""
    if found != wanted:
        there = "nothing was selected in this step" if found == NOTHING else f"layer {found} has selected since"
        raise WrongState(
            f"layer {layer} attends to the selection of layer {wanted}, and {there}; call select({wanted}, ...) "
            "first, and attend_selected() of every layer that shares it before the next select()"
        )


Require = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class SelectingLayers:
    """The layers that select, and the selection that each layer attends to.

    indexed: layers that have an indexer, ascending
    source:  layer -> the layer whose selection it attends to; NOTHING if it attends to all keys
    leaving: layers whose indexer leaves blocks for a later choice
    """

    indexed: tuple[int, ...]
    source: tuple[int, ...]
    leaving: tuple[int, ...] = ()

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> SelectingLayers:
        """The selections of a model's layers, in order. Raises BadProblem for one that no earlier layer makes."""
        source, latest = [], NOTHING
        for layer, problem in enumerate(problems):
            indexer = problem.indexer
            if isinstance(indexer, Indexer):
                latest = layer
            elif isinstance(indexer, EarlierSelection):
                if latest == NOTHING:
                    raise BadProblem(
                        f"layer {layer} attends to an earlier layer's selection, and no layer before it has an Indexer"
                    )
                earlier = problems[latest].indexer
                assert isinstance(earlier, Indexer)
                if earlier.indexing != indexer.indexing:
                    raise BadProblem(
                        f"layer {layer} attends to the selection of layer {latest}, which selects with "
                        f"{earlier.indexing}, and its own problem says {indexer.indexing}; give both the same"
                    )
            source.append(latest if isinstance(indexer, (Indexer, EarlierSelection)) else NOTHING)
        indexers = {layer: each.indexer for layer, each in enumerate(problems) if isinstance(each.indexer, Indexer)}
        leaving = (layer for layer, indexer in indexers.items() if indexer.indexing.candidate_blocks)
        return cls(tuple(indexers), tuple(source), tuple(leaving))

    def place_of(self, layer: int) -> int:
        """The number of layers with an indexer before this one. Raises BadTensor for a layer that has none."""
        if layer not in self.indexed:
            named = ", ".join(map(str, self.indexed)) or "none"
            raise BadTensor(f"layer {layer} has no indexer; the layers with one are {named}")
        return self.indexed.index(layer)


class StepSelections:
    """The current selections of the running step, in each of its halves."""

    __slots__ = ("_found", "_layers", "_left", "_require")

    def __init__(self, layers: SelectingLayers, require: Require) -> None:
        self._layers, self._require, self._found, self._left = layers, require, [NOTHING], [NOTHING]

    def begin(self, num_children: int) -> None:
        """Starts a step: selections in its memory belong to an earlier one."""
        self._found, self._left = [NOTHING] * num_children, [NOTHING] * num_children

    def after_select(self, child: int, layer: int) -> None:
        self._found[child] = layer
        if layer in self._layers.leaving:
            self._left[child] = layer

    def before_select_among(self, child: int, layer: int) -> None:
        """Raises BadTensor for a layer that leaves no blocks, and WrongState for blocks that another one has left."""
        if layer not in self._layers.leaving:
            raise BadTensor(f"layer {layer} leaves no blocks to choose among: its indexing has candidate_blocks=0")
        self._require(layer, layer, self._left[child])

    def after_choice(self, child: int, layer: int) -> None:
        """Notes a layer's selection that leaves no blocks: among those that were left before, or the caller's."""
        self._found[child] = layer

    def before_attend(self, child: int, layer: int) -> None:
        """Raises BadTensor for a layer without a selection, and WrongState for a selection that is not this layer's."""
        wanted = self._layers.source[layer]
        if wanted == NOTHING:
            raise BadTensor(f"layer {layer} attends to all keys: its problem has no indexer; call attend()")
        self._require(layer, wanted, self._found[child])
