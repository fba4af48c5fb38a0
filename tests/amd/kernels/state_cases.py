"""Sequences with recurrent states that are run step by step, in poisoned slots, and what float64 says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.kernels.states.arguments import (
    BEGINS,
    LEFT_OUT,
    Recurrence,
    RecurrentSlots,
    RecurrentTokens,
    StatePlaces,
)
from tests.amd.worlds.recurrent import Drawn, Layer

Recur = Callable[..., None]
NAN = float("nan")


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, gap: int = 3) -> Tensor:
    """NaN, with rows that do not follow each other at once."""
    return torch.full((*shape[:-1], shape[-1] + gap), NAN, dtype=dtype)[..., : shape[-1]]


@dataclass
class New:
    """A sequence's part of a step.

    seq:      which sequence; None is a pad, or a refused one, whose tokens are drawn anew
    q_len:    its new tokens
    accepted: those of them that later steps count; all if they are not kept
    """

    seq: int | None
    q_len: int
    accepted: int | None = None


@dataclass
class Place:
    """A sequence between steps: its slot, its tokens that are in the state or kept, and the kept ones among them."""

    slot: int = BEGINS
    tokens: int = 0
    pending: int = 0


def places_of(
    steps: Sequence[tuple[New, Place, int]], pads: int, max_q_len: int | None, device: torch.device
) -> tuple[StatePlaces, list[int]]:
    """The places of a step, and each sequence's first token. steps: sequence, where it is, and its target slot"""
    firsts = [0]
    for new, *_ in steps:
        firsts.append(firsts[-1] + new.q_len)

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    source = [LEFT_OUT if new.seq is None else place.slot for new, place, _ in steps]
    # Values that nothing may read are no slots.
    target = [1 << 30 if new.seq is None else slot for new, _, slot in steps]
    pending = [1 << 30 if new.seq is None else place.pending for new, place, _ in steps]
    longest = max(new.q_len for new, *_ in steps)
    places = StatePlaces(
        int32(source), int32(target), int32(pending), int32(firsts), firsts[-1] + pads, max(1, max_q_len or longest)
    )
    return places, firsts


@dataclass
class StateRun:
    """Sequences of a layer that one launch takes from step to step; each step's slots are poisoned before.

    tokens:    inputs of each sequence
    most_kept: D
    """

    recur: Recur
    layer: Layer
    tokens: list[Drawn]
    most_kept: int
    dtype: torch.dtype
    device: torch.device
    state_dtype: torch.dtype = torch.float32
    deterministic: bool = False
    places: list[Place] = field(init=False)
    slots: RecurrentSlots = field(init=False)

    def __post_init__(self) -> None:
        self.places = [Place() for _ in self.tokens]
        self.slots = self.poisoned_slots(2 * len(self.tokens) + 1)

    def poisoned_slots(self, num_slots: int) -> RecurrentSlots:
        layer, lead = self.layer, (num_slots, self.most_kept)
        channels = (layer.dk,) * layer.channels
        return RecurrentSlots(
            poisoned(num_slots, layer.heads, layer.dk, layer.dv, dtype=self.state_dtype).to(self.device),
            poisoned(*lead, layer.k_heads, layer.dk, dtype=self.dtype).to(self.device),
            poisoned(*lead, layer.heads, layer.dv, dtype=self.dtype).to(self.device),
            poisoned(*lead, layer.heads, *channels).to(self.device),
            poisoned(*lead, layer.heads).to(self.device),
        )

    def step(self, *news: New, pads: int = 2, max_q_len: int | None = None) -> list[Tensor]:
        """Each sequence's outputs. Checks that pads get 0 and that nothing but target slots is written."""
        free = iter(set(range(self.slots.state.shape[0])) - {place.slot for place in self.places})
        taken = [Place() if new.seq is None else self.places[new.seq] for new in news]
        targets = [next(free) if new.seq is not None else -1 for new in news]
        for slot in targets:
            if slot >= 0:
                for side in sides_of(self.slots):
                    side[slot] = NAN
        places, firsts = places_of(list(zip(news, taken, targets, strict=True)), pads, max_q_len, self.device)
        given = self.given(news, taken, pads)
        before = [side.clone() for side in sides_of(self.slots)]
        words = self.slots.workspace_words(places.num_tokens, places.num_seqs)
        fence = 64
        workspace = torch.full((words + fence,), NAN, device=self.device)
        form = Recurrence(self.layer.delta, self.layer.scale, self.layer.normalises)
        for _ in range(2):  # a step may run twice
            given.out.fill_(NAN)
            self.recur(given, form, self.slots, places, workspace[:words], deterministic=self.deterministic)
        assert workspace[words:].isnan().all(), "the workspace is too small"
        others = [slot for slot in range(self.slots.state.shape[0]) if slot not in targets]
        for was, side in zip(before, sides_of(self.slots), strict=True):
            assert torch.equal(was[others].nan_to_num(7e4), side[others].nan_to_num(7e4)), "a source was written"
        assert not given.out[firsts[-1] :].any(), "a pad got an output"
        outs = [given.out[first : first + new.q_len].cpu() for first, new in zip(firsts, news, strict=False)]
        for new, out, place, target in zip(news, outs, taken, targets, strict=True):
            if new.seq is None:
                assert not out.any(), "a sequence that is left out got an output"
                continue
            is_kept = new.q_len <= self.most_kept
            place.tokens += new.q_len if new.accepted is None else new.accepted
            place.pending = (new.q_len if new.accepted is None else new.accepted) if is_kept else 0
            place.slot = target
        return outs

    def given(self, news: Sequence[New], taken: Sequence[Place], pads: int) -> RecurrentTokens:
        """The step's tokens; those of pads are NaN, and so are those of sequences that are left out."""
        parts = []
        for new, place in zip(news, taken, strict=True):
            if new.seq is None:
                part = Drawn(*(torch.full_like(side, NAN) for side in vars(self.nothing(new.q_len)).values()))
            else:
                part = self.tokens[new.seq].cut(place.tokens, place.tokens + new.q_len)
                assert len(part.q) == new.q_len
            parts.append(part)
        parts.append(Drawn(*(torch.full_like(side, NAN) for side in vars(self.nothing(pads)).values())))
        sides = []
        for name in ("q", "k", "v", "decay", "beta"):
            values = torch.cat([getattr(part, name) for part in parts])
            side = poisoned(*values.shape, dtype=values.dtype)
            side.copy_(values)
            sides.append(side.to(self.device))
        q, k, v, decay, beta = sides
        out = poisoned(*v.shape, dtype=self.dtype).to(self.device)
        return RecurrentTokens(q, k, v, decay, beta, out)

    def nothing(self, num_tokens: int) -> Drawn:
        return Drawn.of(self.layer, num_tokens, self.dtype, torch.Generator().manual_seed(1))

    def state_of(self, seq: int) -> Tensor:
        """The state in a sequence's slot: of its tokens without the kept ones."""
        return self.slots.state[self.places[seq].slot].cpu()


def sides_of(slots: RecurrentSlots) -> list[Tensor]:
    """The tensors of slots."""
    return [slots.state, slots.k, slots.v, slots.decay, slots.beta]
