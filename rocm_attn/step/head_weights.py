"""HeadWeights: learned parameters of each query head's softmax: attention sinks and ALiBi slopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor, WrongState, no_such_layer
from rocm_attn.machine.devices import require_tensor
from rocm_attn.machine.settings import require_kind
from rocm_attn.problem import Problem


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Sinks and ALiBi slopes of one layer's query heads; [q_heads] each, or None if the layer's problem has none.

    A runtime takes any floating dtype, strides and device; its own copies are float32 and contiguous.

    sinks:        a logit that is added to the denominator of each softmax of the head
    alibi_slopes: decrease of the head's logits per token by which a key is earlier; see Problem
    """

    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @classmethod
    def random(cls, problem: Problem, generator: torch.Generator) -> HeadWeights:
        """Random weights of the problem for tests and probes, on the generator's device."""

        size, device = problem.num_q_heads, generator.device
        return cls(**{name: torch.rand(size, generator=generator, device=device) for name in _names(problem)})

    def to(self, device: torch.device) -> HeadWeights:
        return HeadWeights(*(None if w is None else w.to(device) for w in (self.sinks, self.alibi_slopes)))


NO_HEAD_WEIGHTS = HeadWeights()


def written_in_place(owned: Tensor, given: Tensor) -> Tensor:
    """Writes new weights into the layer's memory and returns it."""
    return owned.copy_(given)


# current weights of a layer, new weights -> the tensor that it uses from now on
NewHeadWeights = Callable[[Tensor, Tensor], Tensor]
_Written = TypeVar("_Written")


def finished(write: Callable[[], _Written]) -> _Written:
    """Calls a function that writes several tensors. If it raises, calls it again, so that no old tensor stays next to
    new ones, and raises the first exception.
    """
    try:
        return write()
    except BaseException:
        write()
        raise


class _Given(dict[int, HeadWeights]):
    """Layer -> its weights. A layer that needs weights has no entry until it has them."""

    def __init__(self, wanted: Sequence[tuple[str, ...]]) -> None:
        super().__init__({layer: NO_HEAD_WEIGHTS for layer, names in enumerate(wanted) if not names})
        self._wanted = wanted

    def __missing__(self, layer: int) -> HeadWeights:
        if layer not in range(len(self._wanted)):
            raise no_such_layer(layer, len(self._wanted))
        names = " and ".join(self._wanted[layer])
        raise WrongState(f"layer {layer} has {names} that were never given; call head_weights.set() before a step")


class LayerHeadWeights:
    """The head weights of every layer, in memory of the runtime: copies of the caller's tensors.

    Graphs read that memory. It stays where it is once a layer has it, and new values are written into it.

    renew: how a layer that has weights gets new ones
    of:    a layer -> its weights; raises WrongState while it lacks weights
    """

    def __init__(
        self, problems: Sequence[Problem], device: torch.device, renew: NewHeadWeights = written_in_place
    ) -> None:
        self._problems, self._device, self._renew = tuple(problems), device, renew
        self._wanted = tuple(map(_names, problems))
        self._given = _Given(self._wanted)
        # The dict's own method, because each layer of each step calls it.
        self.of: Callable[[int], HeadWeights] = self._given.__getitem__

    def set(self, layer: int, weights: HeadWeights) -> None:
        """Sets all weights that a layer's problem has. Later steps use them, captured graphs too.

        The values are copied, on the current stream. To change them, call set() again: writing to the given tensors has
        no effect. Raises BadTensor; nothing has changed then.
        """
        if layer not in range(len(self._problems)):
            raise no_such_layer(layer, len(self._problems))
        require_kind(f"head weights of layer {layer}", weights, HeadWeights, BadTensor)
        for name, tensor in (("sinks", weights.sinks), ("alibi_slopes", weights.alibi_slopes)):
            is_wanted = name in self._wanted[layer]
            if is_wanted and tensor is None:
                raise BadTensor(f"layer {layer} has {name} and got none; give them in its HeadWeights")
            if tensor is not None and not is_wanted:
                raise BadTensor(f"{name} were given to layer {layer}, whose problem has none; leave them out")
            if tensor is not None:
                self._check(name, tensor, self._problems[layer])
        # Memory may run out here, and nothing has changed then.
        new = HeadWeights(*map(self._converted, (weights.sinks, weights.alibi_slopes)))
        owned = self._given.get(layer)
        self._given[layer] = self._copied(new) if owned is None else finished(partial(self._renewed, owned, new))

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor, for the tensors that graphs read."""
        return {
            f"{name}_{layer}": tensor
            for layer, weights in self._given.items()
            for name, tensor in (("sinks", weights.sinks), ("alibi_slopes", weights.alibi_slopes))
            if tensor is not None
        }

    def _check(self, name: str, tensor: Tensor, problem: Problem) -> None:
        require_tensor(name, tensor)
        if tensor.shape != (problem.num_q_heads,):
            raise BadTensor(
                f"{name} has shape {list(tensor.shape)}; the layer needs [{problem.num_q_heads}], one per query head"
            )
        if not tensor.is_floating_point():
            raise BadTensor(f"{name} is {tensor.dtype}; it must be floating point")
        if tensor.is_meta:
            raise BadTensor(f"{name} is on the meta device, whose tensors have no values; load it first")

    def _converted(self, given: Tensor | None) -> Tensor | None:
        return None if given is None else given.detach().to(self._device, torch.float32)

    @torch.inference_mode(False)  # memory that is made in that mode cannot be written outside of it
    def _copied(self, new: HeadWeights) -> HeadWeights:
        """The same values in memory of the runtime."""
        copies = (None if given is None else torch.empty_like(given) for given in (new.sinks, new.alibi_slopes))
        return self._renewed(HeadWeights(*copies), new)

    def _renewed(self, owned: HeadWeights, new: HeadWeights) -> HeadWeights:
        """The layer's memory with new values."""
        pairs = (owned.sinks, new.sinks), (owned.alibi_slopes, new.alibi_slopes)
        return HeadWeights(*(old if old is None or to is None else self._renew(old, to) for old, to in pairs))


def _names(problem: Problem) -> tuple[str, ...]:
    """The weights that a layer of the problem needs."""
    names = (("sinks", problem.has_sinks), ("alibi_slopes", problem.has_alibi_slopes))
    return tuple(name for name, is_there in names if is_there)
