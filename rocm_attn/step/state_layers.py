"""StateLayers: the layer calls of recurrent layers in a forward: checks their tensors and launches their kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import MOST_TOKEN_STRIDE, RecurrentTokens
from rocm_attn.machine.devices import on_device
from rocm_attn.paging.state_pool import CONVOLUTION, STATE, StatePool
from rocm_attn.paging.stored_tokens import Sides, StepStores
from rocm_attn.providers.launches import StepOps
from rocm_attn.recurrence import Recurrence, rule_of, tensors_of
from rocm_attn.step.memory import DeviceStep
from rocm_attn.step.tensor_checks import TensorChecks, require_apart


class StateCalls(Protocol):
    """The calls of a model's forward in each recurrent layer, for T padded tokens.

    Layers have the numbers of RecurrentLayers.layers. A step has stored once each layer has convolved, if it has a
    convolution, and has recurred. A call reads the state before the step and writes the one after it in other memory,
    so it may be repeated. The state of a row that the device refuses is left as it is, and its outputs are 0.

    Each raises BadTensor for tensors that do not fit, WrongState unless its step runs, and BadBatch for a step that may
    not store.
    """

    __slots__ = ()

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Convolves each channel with the last inputs of its sequence: out[t] = act(bias + sum of weight * x).

        x, out: [T, channels], different memory; last stride 1, others free. Padded tokens of out become 0
        weight: [channels, width], its last column for the token itself; bias: [channels]
        """

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, out: Tensor) -> None:
        """Folds tokens into the states of their sequences, and reads the states with q; see Update.

        q, k:   [T, k_heads, k_dim]; v, out: [T, heads, v_dim]; last stride 1, others free. out shares memory with no
                other one; its padded tokens become 0
        decay:  float32 [T, heads], or [T, heads, k_dim] with decays of channels: natural logarithms, at most 0
        beta:   float32 [T, heads]
        """


class StateLayers(TensorChecks):
    """The recurrent layers of a model over their slots. deterministic: True if no bit depends on batch or chunks"""

    def __init__(self, states: StatePool, ops: StepOps, sides: Sides, *, deterministic: bool) -> None:
        super().__init__(states.device)
        self._states, self._ops, self._sides, self._deterministic = states, ops, sides, deterministic
        self._layers = states.recurrent.layers
        self._tokens = [tensors_of(layer) for layer in self._layers]
        self._rules = [rule_of(layer) for layer in self._layers]

    def of(self, layer: int) -> Recurrence:
        """A layer's recurrence. Raises BadTensor for a layer that does not exist."""
        if layer not in range(len(self._layers)):
            there = f"0 to {len(self._layers) - 1}" if self._layers else "none"
            raise BadTensor(f"recurrent layer {layer!r} does not exist; the runtime has {there}")
        return self._layers[layer]

    def number(self, layer: int, part: str) -> int:
        """The number of a layer's state, or of its convolution's, among all that a step stores."""
        return self._sides.recurrent(layer, part)

    def convolve(
        self, step: DeviceStep, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        layout, dtype = self._layers[layer].convolution, self._layers[layer].dtype
        tokens = step.states.num_tokens, layout.channels
        self._check("x", x, tokens, dtype)
        self._check_written("out", out, tokens, dtype)
        require_apart("out", out, "x", x)
        self._check("weight", weight, (layout.channels, layout.width), dtype)
        if bias is not None:
            self._check("bias", bias, (layout.channels,), dtype)
        convolution = arguments.ConvolutionWeights(weight.contiguous(), bias, layout.silu)
        with on_device(self._device):
            self._ops.convolve(x, out, convolution, self._states.convolution[layer], step.states)

    def recur(self, step: DeviceStep, layer: int, tokens: RecurrentTokens) -> None:
        num_tokens = step.states.num_tokens
        for (name, (shape, dtype)), tensor in zip(self._tokens[layer].items(), tokens, strict=True):
            check = self._check_written if name == "out" else self._check
            check(name, tensor, (num_tokens, *shape), dtype)
        for name in ("q", "k", "v", "decay", "beta"):
            read: Tensor = getattr(tokens, name)
            require_apart("out", tokens.out, name, read)
            if num_tokens > 1 and read.stride(0) > MOST_TOKEN_STRIDE:
                raise BadTensor(
                    f"{name} has stride {read.stride(0)} between tokens; at most {MOST_TOKEN_STRIDE} is read, so give "
                    "tokens that are nearer"
                )
        slots, workspace = self._states.state[layer], step.workspace
        args = arguments.RecurArgs(tokens, self._rules[layer], slots, step.states, workspace)
        with on_device(self._device):
            self._ops.recur(args, deterministic=self._deterministic)


@dataclass(slots=True, eq=False)
class StepStates(StateCalls):
    """The calls of recurrent layers in a part of a step, for as long as that step runs; see StepLayers."""

    _layers: StateLayers
    _step: DeviceStep
    _require_running: Callable[[], None]
    _stores: StepStores
    _part: int

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self._require_running()
        if not self._layers.of(layer).convolution.channels:
            raise BadTensor(f"recurrent layer {layer} has no convolution; give its Recurrence one with channels")
        number = self._layers.number(layer, CONVOLUTION)
        self._stores.before_store(self._part, number)
        self._layers.convolve(self._step, layer, x, weight, bias, out)
        self._stores.after_store(self._part, number)

    def recur(self, layer: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, out: Tensor) -> None:
        self._require_running()
        self._layers.of(layer)
        number = self._layers.number(layer, STATE)
        self._stores.before_store(self._part, number)
        self._layers.recur(self._step, layer, RecurrentTokens(q, k, v, decay, beta, out))
        self._stores.after_store(self._part, number)
