"""StatePool: the memory of recurrent layers' states, in slots. RecurrentLayers: the recurrent layers of a model.

Every row of the request table has two slots, 2 * row and 2 * row + 1: a step reads one and writes the other. The slots
of checkpoints, for a prefix cache, come after these. A slot holds the states of all layers in contiguous memory, so one
copy copies them. Row 0's slots belong to no request, and nothing is written there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.states.arguments import HEADER_WORDS, ConvolutionSlots, RecurrentSlots
from rocm_attn.machine.settings import whole_number
from rocm_attn.recurrence import Recurrence, TensorForm, rule_of, tensors_of

# The two parts of a layer that a step stores.
CONVOLUTION, STATE = "convolution", "state"
# Slots of a row.
SLOTS_OF_ROW = 2
# Parts of a slot begin at whole vectors, so that kernels load them with the widest loads.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """The recurrent layers of a model, numbered from 0, and how many of their states are kept.

    layers:      one for each layer
    kept:        the most new tokens per sequence that a step stores next to the state instead of folding them into it.
                 A sequence can be rolled back to any of these, so verify steps need at least the number of draft tokens
                 plus one
    checkpoints: states that can be kept with kept pages, see KeptPages.keep()
    spacing:     checkpoints are taken after multiples of this many tokens, a multiple of the page size; 0: after any
                 whole page

    Raises BadSetting.
    """

    layers: Sequence[Recurrence] = ()
    kept: int = 1
    checkpoints: int = 0
    spacing: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence) or not all(isinstance(each, Recurrence) for each in self.layers):
            raise BadSetting(f"layers are {self.layers!r}; give a list with a Recurrence for each recurrent layer")
        object.__setattr__(self, "layers", tuple(self.layers))
        for name, least in (("kept", 1), ("checkpoints", 0), ("spacing", 0)):
            value = whole_number(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if value < least:
                raise BadSetting(f"{name} of recurrent layers is {value}; it must be {least} or more")


NO_RECURRENT_LAYERS = RecurrentLayers()


def _parts_of(layer: Recurrence, kept: int) -> list[TensorForm]:
    """The tensors of a layer's slot: its convolution's inputs, its state, and the kept k, changes and decays."""
    convolution, of_token = layer.convolution, tensors_of(layer)
    return [
        TensorForm((convolution.width - 1 + kept, convolution.channels), layer.dtype),
        TensorForm((layer.num_heads, layer.k_dim, layer.v_dim), layer.state_dtype),
        TensorForm((kept, *of_token["k"].shape), of_token["k"].dtype),
        TensorForm((kept, *of_token["v"].shape), torch.float32),
        TensorForm((kept, *of_token["decay"].shape), of_token["decay"].dtype),
    ]


def _bytes_of(part: TensorForm) -> int:
    return -(-math.prod(part.shape) * part.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def slot_bytes(recurrent: RecurrentLayers) -> int:
    """Bytes of a slot, over all layers."""
    return sum(_bytes_of(part) for layer in recurrent.layers for part in _parts_of(layer, recurrent.kept))


class StatePool:
    """The slots of all recurrent layers.

    recurrent: the layers
    headers:   int32 [slots, 4]: whose state a slot holds, and of which tokens; see kernels/states/places.py
    tags:      int32 [rows, 1], the request that each row belongs to; 0: none
    memory:    uint8 [slots, slot_bytes]
    is_empty:  True if there are no recurrent layers
    convolution, state: per layer, the slots of its convolution's inputs, and of its state and kept tokens
    """

    def __init__(self, recurrent: RecurrentLayers, *, num_rows: int, device: torch.device) -> None:
        self.recurrent, self.device = recurrent, device
        self.is_empty = not recurrent.layers  # a field, because each step reads it
        num_slots = SLOTS_OF_ROW * num_rows + recurrent.checkpoints if recurrent.layers else 0
        self.tags = torch.zeros(num_rows, 1, dtype=torch.int32, device=device)
        self.headers = torch.zeros(num_slots, HEADER_WORDS, dtype=torch.int32, device=device)
        # Not torch.zeros, because nothing may depend on the content of a slot that no step has written.
        self.memory = torch.empty(num_slots, slot_bytes(recurrent), dtype=torch.uint8, device=device)
        self.memory[:SLOTS_OF_ROW].zero_()
        begin = 0
        self.convolution, self.state = list[ConvolutionSlots](), list[RecurrentSlots]()
        for layer in recurrent.layers:
            views = list[Tensor]()
            for part in _parts_of(layer, recurrent.kept):
                cells = self.memory[:, begin : begin + math.prod(part.shape) * part.dtype.itemsize]
                views.append(cells.view(part.dtype).view(num_slots, *part.shape))
                begin += _bytes_of(part)
            self.convolution.append(ConvolutionSlots(views[0]))
            self.state.append(RecurrentSlots(*views[1:]))

    @classmethod
    def none(cls, device: torch.device) -> StatePool:
        """The pool of a model without recurrent layers."""
        return cls(NO_RECURRENT_LAYERS, num_rows=0, device=device)

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    @property
    def stored(self) -> tuple[tuple[int, str], ...]:
        """Layer and part of all that a step stores, in order."""
        of_layers = enumerate(self.recurrent.layers)
        return tuple(
            (number, part)
            for number, layer in of_layers
            for part in ((CONVOLUTION, STATE) if layer.convolution.channels else (STATE,))
        )

    def workspace_words(self, shape: PaddedShape) -> int:
        """float32 words of workspace that the layers of a step of this shape need, one layer after the other."""
        return max(
            (
                slots.workspace_words(rule_of(layer), shape.num_tokens, shape.num_seqs)
                for layer, slots in zip(self.recurrent.layers, self.state, strict=True)
            ),
            default=0,
        )

    def before_kept_tokens(self) -> Iterator[Tensor]:
        """The tensors [slots, ...] of every layer that say all of a sequence which has no kept tokens."""
        for convolution, state in zip(self.convolution, self.state, strict=True):
            yield convolution.inputs
            yield state.state

    def copy(self, copy: StateCopy) -> None:
        """Copies a state. It may run again until another copy has written to its source.

        A target whose source has not the state that is asked for gets no state: the step that needs it is refused.
        """
        found = self.slot_with(copy.source)
        # Copied to itself, the target keeps what it has, and its header says that there is no state.
        source = torch.where(found >= 0, found, copy.target)
        self.memory[copy.target].copy_(self.memory.index_select(0, source)[0])
        header = self.headers.index_select(0, source)[0]
        made = torch.stack([header.new_full((), copy.tag), header.new_full((), -1), header[2], header[3]])
        made[3].fill_(copy.source.tokens)
        self.headers[copy.target].copy_(torch.where(found >= 0, made, 0))

    def slot_with(self, source: StateSource) -> Tensor:
        """int64 [1]: the slot that a step would read to go on from a state; -1 if none has it. Waits for nothing.

        A slot that was written from the last of the tokens on is left out: its step may not have come to its end.
        """
        headers = self.headers[source.slot : source.slot + source.num_slots]
        tag, start, first, end = headers.unbind(1)
        is_earlier = (tag == source.tag) & (start < source.tokens)
        serves = is_earlier & (first <= source.tokens) & (source.tokens <= end)
        # Tokens after the first one of a newer step were stored anew.
        serves &= start >= torch.where(is_earlier, start, -2).max()
        newest = torch.where(serves, start, -2).argmax().reshape(1)
        return torch.where(serves.any(), newest + source.slot, -1)


@dataclass(frozen=True, slots=True)
class StateSource:
    """The state of a request after some of its tokens, and where it may lie.

    slot:   the first slot that may hold it, of num_slots
    tag:    the request that it must belong to
    tokens: tokens of the sequence that are folded or kept in it
    """

    slot: int
    num_slots: int
    tag: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A state that is copied to another slot.

    target: the slot that is written: a checkpoint's, or the first one of a row. The row's other slot has another tag
    tag:    the request that the copy belongs to, which no step has had yet
    """

    target: int
    tag: int
    source: StateSource
