"""HeadWeights: what a model has learned for each query head's softmax, beside q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, WrongState
from rocm_attn.problem import Problem


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One layer's; float32 [q_heads] each, or None where the layer's problem has none.

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


def refuse_new_weights(layer: int) -> None:
    """Graphs would go on with the old ones. Raises WrongState."""
    raise WrongState(
        f"graphs may read the head weights of layer {layer}, so no others can be set; write the new values into the "
        "tensors that were set, or set others after unseal() and before a StepRunner is made"
    )


class LayerHeadWeights:
    """The head weights of every layer. Graphs read them: from seal() to unseal() they stay where they are.

    refuse: called with the layer that is given others while they are sealed
    """

    def __init__(
        self, problems: Sequence[Problem], device: torch.device, refuse: Callable[[int], None] = refuse_new_weights
    ) -> None:
        self._problems = tuple(problems)
        self._device = device
        self._refuse = refuse
        self._sealed = False
        self._weights = [NO_HEAD_WEIGHTS for _ in problems]
        self._wanting = {layer for layer, problem in enumerate(problems) if _names(problem)}

    def set(self, layer: int, weights: HeadWeights) -> None:
        """Give a layer what its problem says that it has, all at once; contiguous, on the runtime's device.

        Raises BadTensor, and WrongState where a graph may read what the layer has; nothing has changed then.
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
        # What was never given was never read.
        if self._sealed and _names(problem) and layer not in self._wanting:
            self._refuse(layer)
        self._weights[layer] = weights
        self._wanting.discard(layer)

    def seal(self) -> None:
        """Graphs may read the weights from now on."""
        self._sealed = True

    def unseal(self) -> None:
        """No graph reads the weights any more."""
        self._sealed = False

    def of(self, layer: int) -> HeadWeights:
        """What a layer was given. Raises WrongState while it wants something."""
        if layer in self._wanting:
            names = " and ".join(_names(self._problems[layer]))
            raise WrongState(f"layer {layer} has {names} that were never given; call head_weights.set() before a step")
        return self._weights[layer]

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor, for what graphs read."""
        return {
            f"{name}_{layer}": tensor
            for layer, weights in enumerate(self._weights)
            for name, tensor in (("sinks", weights.sinks), ("alibi_slopes", weights.alibi_slopes))
            if tensor is not None
        }

    def _check(self, name: str, tensor: Tensor, problem: Problem) -> None:
        if tensor.shape != (problem.num_q_heads,):
            raise BadTensor(
                f"{name} has shape {list(tensor.shape)}; the layer needs [{problem.num_q_heads}], one a query head"
            )
        if tensor.dtype != torch.float32:
            raise BadTensor(f"{name} is {tensor.dtype}; it must be torch.float32")
        if tensor.device != self._device:
            raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {self._device}")
        if not tensor.is_contiguous():
            raise BadTensor(f"{name} has stride {tensor.stride(0)}; it must be contiguous")


def _names(problem: Problem) -> tuple[str, ...]:
    """What a layer of the problem must be given."""
    names = (("sinks", problem.has_sinks), ("alibi_slopes", problem.has_alibi_slopes))
    return tuple(name for name, is_there in names if is_there)
