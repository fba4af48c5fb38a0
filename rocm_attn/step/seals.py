"""Seals: fixes the addresses that captured graphs read, from seal() to unseal()."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from rocm_attn.batch.padding import PaddingPolicy
from rocm_attn.errors import NeverFits
from rocm_attn.machine.agreement import Agree
from rocm_attn.machine.devices import on_device, wait_for_device
from rocm_attn.step.buffers import StepBuffers
from rocm_attn.step.core import StepCore
from rocm_attn.step.gate import StepGate
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.publisher import Publisher


class Seals:
    """The seal of one runtime.

    check:   raises DeviceFault for steps that went wrong; see AttentionRuntime.check_device
    number:  the seal's number; 0 while there is none. Every seal has a new number: graphs that were captured under one
             are void under the next
    users:   users that make graphs of the runtime's steps
    tensors: returns all tensors that a graph reads and the runtime owns, by name: buffers, workspace, table and pages
    """

    def __init__(
        self,
        core: StepCore,
        gate: StepGate,
        publisher: Publisher,
        options: RuntimeOptions,
        agree: Agree,
        check: Callable[[], None],
    ) -> None:
        self._core, self._gate, self._publisher = core, gate, publisher
        self._options, self._agree, self._check = options, agree, check
        self.tensors = core.sealed_tensors
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._num_seals = self.number = 0

    def seal(self) -> None:
        """Fixes the addresses that graphs read, with memory for the largest capture, which cannot grow afterwards."""
        with self._gate.holder.idle("addresses cannot be sealed"), on_device(self._core.device):
            if self.number == 0:
                self._seal()

    def unseal(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """Frees the sealed memory, and sets other capture sizes. Every graph of the runtime is invalid afterwards.

        Raises BadSetting, WrongState, and DeviceFault like check_device(); nothing has changed then.
        """
        with self._gate.holder.idle("addresses cannot be released"), on_device(self._core.device):
            padding = self._padding_for(capture_sizes, capture_tokens)
            self._check()
            self._change(padding, self._core.memory.new_part())

    def give_up(self) -> None:
        """Like unseal() with the same sizes, but does not wait for the device: later steps report its faults."""
        with self._gate.holder.idle("addresses cannot be released"), on_device(self._core.device):
            self._change(self._gate.planner.padding, self._core.memory.new_part())

    def reseal(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """Does unseal(), then seal(); if it raises, neither.

        The new memory is allocated before the old one is freed: if it does not fit, or one of several ranks (agree) has
        no room, nothing has changed. An interrupt may leave the addresses unsealed.
        Raises BadSetting, WrongState, DeviceFault like check_device(), NeverFits for another rank, and the device's
        error if its memory is short.
        """
        with self._gate.holder.idle("addresses cannot be sealed again"), on_device(self._core.device):
            padding = self._padding_for(capture_sizes, capture_tokens)
            try:
                self._check()
                part = self._core.memory.part_for(padding.largest_shapes())
            except BaseException as error:
                self._agree({"reopen": f"{type(error).__name__}: {error}"})
                raise
            found = self._agree({})
            if found:
                raise NeverFits(
                    f"capture sizes were not changed, because a rank could not: {found['reopen']}; keep the "
                    "current sizes, or choose smaller ones on all ranks"
                )
            self._change(padding, part)
            self._seal()

    def _seal(self) -> None:
        self._core.memory.seal(self._gate.planner.padding.largest_shapes())
        # In one statement, and the last one: a half-finished seal has no number.
        self._num_seals, self.number = self._num_seals + 1, self._num_seals + 1

    def _change(self, padding: PaddingPolicy, part: StepBuffers) -> None:
        """Voids every graph, and uses another memory and policy from now on. Allocates no device memory.

        In this order an interrupt leaves no graph, and steps remain right: the memory grows until it is sealed.
        """
        wait_for_device(self._core.device)
        self._publisher.let_go()
        self.number = 0
        self._core.memory.take(part)
        self._gate.start_over(padding)

    def _padding_for(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int]) -> PaddingPolicy:
        options = replace(self._options, capture_sizes=capture_sizes, capture_tokens=capture_tokens)
        return options.padding(self._core.kinds.problems)
