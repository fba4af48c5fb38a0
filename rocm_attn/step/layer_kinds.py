"""LayerKinds: groups of equal layers of a model, with the kernels of each group and the space of its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import Limits
from rocm_attn.providers.select import Selection
from rocm_attn.step.selections import SelectingLayers


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The layers of a model by kind. Layers of one kind have equal problems and live in one space.

    selections: per kind, its kernels
    spaces:     per kind, the space that its layers live in
    of_layer:   layer -> its kind
    """

    selections: tuple[Selection, ...]
    spaces: tuple[Space, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def of(cls, problems: Sequence[Problem], spaces: Sequence[Space], selections: Sequence[Selection]) -> LayerKinds:
        """One kind for each distinct pair of a problem and a space, in order of appearance.

        problems, spaces: one for each layer
        selections:       one for each distinct problem, in any order
        """
        of_problem = {selection.problem: selection for selection in selections}
        layers = list(zip(problems, spaces, strict=True))
        kinds = list(dict.fromkeys(layers))
        return cls(
            selections=tuple(of_problem[problem] for problem, _ in kinds),
            spaces=tuple(space for _, space in kinds),
            of_layer=tuple(kinds.index(layer) for layer in layers),
        )

    @property
    def deterministic(self) -> bool:
        """True if a sequence's results are bitwise the same in any batch, in every layer."""
        return all(selection.deterministic for selection in self.selections)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(self.selections[kind].problem for kind in self.of_layer)

    @property
    def spaces_of_layers(self) -> tuple[Space, ...]:
        return tuple(self.spaces[kind] for kind in self.of_layer)

    def reading_alone(self, what: Callable[[Limits], bool]) -> dict[int, str]:
        """Layer -> a kernel whose limits require `what` of K and V, for layers that have such a kernel."""
        of_kind = []
        for selection in self.selections:
            limits = [(kernel.entry.name, kernel.entry.limits) for kernel in selection.kernels.values()]
            if selection.sparse is not None:
                limits.append((selection.sparse.entries[0], selection.sparse.entry.limits))
            of_kind.append([name for name, each in limits if what(each)])
        return {layer: of_kind[kind][0] for layer, kind in enumerate(self.of_layer) if of_kind[kind]}

    @property
    def selecting(self) -> SelectingLayers:
        """The layers that select keys, and the selection that each layer attends to. Raises BadProblem."""
        return SelectingLayers.of(self.problems)

    def of_kernels(self, change: Callable[[Selection], Selection]) -> LayerKinds:
        """The same layers with the kernels changed."""
        return replace(self, selections=tuple(change(selection) for selection in self.selections))
