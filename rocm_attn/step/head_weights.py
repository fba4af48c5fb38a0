"""HeadWeights: what a model has learned for each query head's softmax, beside q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.problem import Problem


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One layer's; [q_heads] each, or None where the layer's problem has none.

    Of any floating dtype, strides and device where they are given to a runtime; what it owns is float32, contiguous.

    sinks:        a logit that every softmax of the head has in its denominator
    alibi_slopes: what the head's logits lose for each token of distance
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @classmethod
    def random(cls, problem: Problem, generator: torch.Generator) -> HeadWeights:
        """Weights of the problem for tests and probes, on the generator's device."""

        def draw(is_there: bool) -> Tensor | None:
            return torch.rand(problem.num_q_heads, generator=generator, device=generator.device) if is_there else None

        return cls(draw(problem.has_sinks), draw(problem.has_alibi_slopes))

    def to(self, device: torch.device) -> HeadWeights:
        """The same weights elsewhere."""
        return HeadWeights(*(None if w is None else w.to(device) for w in (self.sinks, self.alibi_slopes)))


NO_HEAD_WEIGHTS = HeadWeights()


def written_in_place(owned: Tensor, given: Tensor) -> Tensor:
    """What a layer reads from now on, after other weights were given: the memory that there is, with other values."""
    return owned.copy_(given)


# what a layer has, what it is given -> what it has from now on
NewHeadWeights = Callable[[Tensor, Tensor], Tensor]


class _OfLayers(dict[int, HeadWeights]):
    """Layer -> its weights, of layers that want none or were given theirs. Raises WrongState for others."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__((layer, NO_HEAD_WEIGHTS) for layer, problem in enumerate(problems) if not _names(problem))
        self._problems = problems

    def __missing__(self, layer: int) -> NoReturn:
        names = " and ".join(_names(self._problems[layer]))
        raise WrongState(f"layer {layer} has {names} that were never given; call head_weights.set() before a step")


class LayerHeadWeights:
    """The head weights of every layer, in memory of the runtime: what is given is copied, and is the caller's.

    Graphs read that memory. It stays where it is once a layer has it, and new values are written into it.

    renew: how a layer that has weights gets others
    of:    layer -> what it was given. Raises WrongState while it wants something
    """

    def __init__(
        self, problems: Sequence[Problem], device: torch.device, renew: NewHeadWeights = written_in_place
    ) -> None:
        self._problems = tuple(problems)
        self._device = device
        self._renew = renew
        self._weights = _OfLayers(self._problems)
        # A dict's own look-up: each layer of each step asks.
        self.of: Callable[[int], HeadWeights] = self._weights.__getitem__

    def set(self, layer: int, weights: HeadWeights) -> None:
        """Give a layer what its problem says that it has, all at once. Steps that come later use it, graphs too.

        The values are copied, on the current stream: to change them, call set() again, as writing into the tensors that
        were given does nothing. Raises BadTensor; nothing has changed then.
        """
        if not 0 <= layer < len(self._problems):
            raise BadTensor(f"layer {layer} does not exist; the runtime has layers 0 to {len(self._problems) - 1}")
        problem = self._problems[layer]
        for name in ("sinks", "alibi_slopes"):
            tensor = getattr(weights, name)
            if tensor is None:
                if name in _names(problem):
                    raise BadTensor(f"layer {layer} has {name} and none were given; give them in its HeadWeights")
                continue
            if name not in _names(problem):
                raise BadTensor(f"{name} were given to layer {layer}, whose problem has none; leave them out")
            self._check(name, tensor, problem)
        owned = self._weights.get(layer, NO_HEAD_WEIGHTS)
        self._weights[layer] = HeadWeights(
            self._owned(owned.sinks, weights.sinks), self._owned(owned.alibi_slopes, weights.alibi_slopes)
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor, for what graphs read."""
        return {
            f"{name}_{layer}": tensor
            for layer, weights in sorted(self._weights.items())
            for name, tensor in (("sinks", weights.sinks), ("alibi_slopes", weights.alibi_slopes))
            if tensor is not None
        }

    def _check(self, name: str, tensor: Tensor, problem: Problem) -> None:
        if tensor.shape != (problem.num_q_heads,):
            raise BadTensor(
                f"{name} has shape {list(tensor.shape)}; the layer needs [{problem.num_q_heads}], one a query head"
            )
        if not tensor.is_floating_point():
            raise BadTensor(f"{name} is {tensor.dtype}; it must be floating point")
        if tensor.is_meta:
            raise BadTensor(f"{name} is on meta, where tensors have no values; load it first")

    def _owned(self, owned: Tensor | None, given: Tensor | None) -> Tensor | None:
        """The values that are given, in memory of the runtime: that which there is, if there is some."""
        if given is None:
            return None
        given = given.detach()
        if owned is not None:
            return self._renew(owned, given)
        with torch.inference_mode(False):  # what is made in that mode cannot be written outside of it
            owned = torch.empty(given.shape, dtype=torch.float32, device=self._device)
        return owned.copy_(given)


def _names(problem: Problem) -> tuple[str, ...]:
    """What a layer of the problem must be given."""
    names = (("sinks", problem.has_sinks), ("alibi_slopes", problem.has_alibi_slopes))
    return tuple(name for name, is_there in names if is_there)
