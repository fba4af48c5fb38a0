"""Sequences with states in slots, taken from step to step: memory that a step may not read is NaN before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rocm_attn.kernels.states.arguments import (
    BEGINS,
    LEFT_OUT,
    ConvolutionSlots,
    ConvolutionWeights,
    RecurArgs,
    RecurrentSlots,
    RecurrentTokens,
    StatePlaces,
)
from rocm_attn.recurrence import Recurrence, rule_of
from tests.amd.kernels.attention_cases import ints
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.recurrent import Drawn, recurrent

Launch = Callable[..., None]
NAN = float("nan")
# No slot and no number of kept tokens: a step may not use it.
UNUSED = 1 << 30
PADS = 2


@dataclass
class New:
    """A sequence's part of a step.

    seq:      its number; None if it is a pad, or refused
    q_len:    its new tokens
    accepted: those of them that the next step builds on; None: all
    """

    seq: int | None
    q_len: int
    accepted: int | None = None


@dataclass
class Place:
    """A sequence between two steps: its slot, and how many of its tokens lie before it, kept ones included."""

    slot: int = BEGINS
    tokens: int = 0
    pending: int = 0


@dataclass
class Step:
    """A step: its sequences, where they are, their target slots, the launch's places, and each one's first token."""

    news: tuple[New, ...]
    taken: list[Place]
    targets: list[int]
    places: StatePlaces
    firsts: list[int]

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Rows of tokens, for each sequence."""
        return [rows[first : first + new.q_len].cpu() for new, first in zip(self.news, self.firsts, strict=False)]


@dataclass
class Sequences:
    """The places of sequences in slots that hold the last most_kept tokens of a step."""

    num_seqs: int
    most_kept: int
    device: torch.device
    places: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [Place() for _ in range(self.num_seqs)]

    @property
    def num_slots(self) -> int:
        return 2 * self.num_seqs + 1

    def begin(self, news: tuple[New, ...], max_q_len: int | None) -> Step:
        """A step of these sequences, and a bound on their new tokens; None is the most of them."""
        free = iter(sorted(set(range(self.num_slots)) - {place.slot for place in self.places}, reverse=True))
        taken = [Place(LEFT_OUT, 0, UNUSED) if new.seq is None else self.places[new.seq] for new in news]
        targets = [UNUSED if new.seq is None else next(free) for new in news]
        firsts = [0]
        for new in news:
            firsts.append(firsts[-1] + new.q_len)

        places = StatePlaces(
            ints([place.slot for place in taken], self.device),
            ints(targets, self.device),
            ints([place.pending for place in taken], self.device),
            ints(firsts, self.device),
            firsts[-1] + PADS,
            max_q_len or max(1, *(new.q_len for new in news)),
        )
        return Step(news, taken, targets, places, firsts)

    def end(self, step: Step) -> None:
        """Notes where the sequences are after a step."""
        for new, place, target in zip(step.news, step.taken, step.targets, strict=True):
            if new.seq is not None:
                accepted = new.q_len if new.accepted is None else new.accepted
                is_kept = new.q_len <= self.most_kept
                assert is_kept or accepted == new.q_len
                place.slot, place.tokens, place.pending = target, place.tokens + accepted, accepted * is_kept


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device, gap: int = 3) -> Tensor:
    """NaN, in rows that do not follow each other at once. gap: elements between them"""
    return torch.full((*shape[:-1], shape[-1] + gap), NAN, dtype=dtype, device=device)[..., : shape[-1]]


def gapped(values: Tensor, device: torch.device, gap: int = 3) -> Tensor:
    """The same values, in memory where NaN follows each row."""
    rows = poisoned(*values.shape, dtype=values.dtype, device=device, gap=gap)
    rows.copy_(values)
    return rows


def rows_of_step(step: Step, rows: list[Tensor]) -> Tensor:
    """The rows of a step's tokens. rows: those of each sequence. Those of pads, and of refused sequences, are NaN"""
    parts = [
        torch.full_like(rows[0][:1], NAN).repeat_interleave(new.q_len, 0)
        if new.seq is None
        else rows[new.seq][place.tokens : place.tokens + new.q_len]
        for new, place in zip(step.news, step.taken, strict=True)
    ]
    return torch.cat([*parts, torch.full_like(rows[0][:1], NAN).repeat_interleave(PADS, 0)])


def run_twice(step: Step, slots: list[Tensor], out: Tensor, launch: Callable[[], None]) -> list[Tensor]:
    """Each sequence's rows of out. Checks that a step can run again, and that it writes targets alone.

    Pads and sequences that are left out must get 0.
    """
    targets = [slot for slot in step.targets if slot != UNUSED]
    others = [slot for slot in range(slots[0].shape[0]) if slot not in targets]
    for side in slots:
        side[targets] = NAN
    before = [side[others].nan_to_num(UNUSED) for side in slots]
    results = []
    for _ in range(2):
        out.fill_(NAN)
        launch()
        results.append([out.clone(), *(side[targets].nan_to_num(UNUSED) for side in slots)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other), "a step gives another result when it runs again"
    for was, side in zip(before, slots, strict=True):
        assert torch.equal(was, side[others].nan_to_num(UNUSED)), "a slot that is no target was written"
    assert not out[step.firsts[-1] :].any(), "a pad got an output"
    outs = step.parts(out)
    for new, rows in zip(step.news, outs, strict=True):
        assert new.seq is not None or not rows.any(), "a sequence that is left out got an output"
    return outs


@dataclass
class StateRun(Sequences):
    """Sequences of a layer with a recurrence.

    tokens: the inputs of each sequence
    gap:    elements between rows
    """

    recur: Launch
    layer: Recurrence
    tokens: list[Drawn]
    deterministic: bool = False
    gap: int = 3
    slots: RecurrentSlots = field(init=False)

    @classmethod
    def of(
        cls,
        recur: Launch,
        layer: Recurrence,
        tokens: list[Drawn],
        most_kept: int,
        device: torch.device,
        *,
        deterministic: bool = False,
    ) -> StateRun:
        """A run in poisoned slots."""
        return cls(len(tokens), most_kept, device, recur, layer, tokens, deterministic)

    def __post_init__(self) -> None:
        super().__post_init__()
        layer, lead = self.layer, (self.num_slots, self.most_kept)
        channels = (layer.k_dim,) * layer.channel_decay

        def side(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
            return poisoned(*shape, dtype=of, device=self.device, gap=self.gap)

        self.slots = RecurrentSlots(
            side(self.num_slots, layer.num_heads, layer.k_dim, layer.v_dim, of=layer.state_dtype),
            side(*lead, layer.num_k_heads, layer.k_dim, of=layer.dtype),
            side(*lead, layer.num_heads, layer.v_dim),
            side(*lead, layer.num_heads, *channels),
        )

    def step(self, *news: New, max_q_len: int | None = None) -> list[Tensor]:
        """Each sequence's outputs."""
        step = self.begin(news, max_q_len)
        q, k, v, decay, beta = (
            gapped(rows_of_step(step, [getattr(drawn, name) for drawn in self.tokens]), self.device, self.gap)
            for name in ("q", "k", "v", "decay", "beta")
        )
        out = torch.empty_like(v)
        rule, places = rule_of(self.layer), step.places
        words = self.slots.workspace_words(rule, places.num_tokens, places.num_seqs)
        workspace = torch.full((words + 64,), NAN, device=self.device)
        slots = self.slots

        def launch() -> None:
            tokens = RecurrentTokens(q, k, v, decay, beta, out)
            args = RecurArgs(tokens, rule, slots, places, workspace[:words])
            self.recur(args, deterministic=self.deterministic)

        outs = run_twice(step, [slots.state, *slots.kept], out, launch)
        assert workspace[words:].isnan().all(), "memory past the workspace was written"
        self.end(step)
        return outs

    def state_of(self, seq: int) -> Tensor:
        """The state in a sequence's slot, of its tokens without the kept ones."""
        return self.slots.state[self.places[seq].slot].cpu()


@dataclass
class ConvolutionRun(Sequences):
    """Sequences of a layer's convolution. rows: the inputs of each sequence"""

    convolve: Launch
    convolution: ConvolutionWeights
    rows: list[Tensor]
    slots: ConvolutionSlots = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        channels, width = self.convolution.weight.shape
        rows = width - 1 + self.most_kept
        self.slots = ConvolutionSlots(
            poisoned(self.num_slots, rows, channels, dtype=self.rows[0].dtype, device=self.device)
        )

    def step(self, *news: New, max_q_len: int | None = None) -> list[Tensor]:
        """Each sequence's outputs."""
        step = self.begin(news, max_q_len)
        x = gapped(rows_of_step(step, self.rows), self.device)
        out = torch.empty_like(x)

        def launch() -> None:
            self.convolve(x, out, self.convolution, self.slots, step.places)

        outs = run_twice(step, [self.slots.inputs], out, launch)
        self.end(step)
        return outs


def steps_of(run: StateRun | ConvolutionRun, *steps: tuple[New, ...]) -> list[Tensor]:
    """Runs steps. Returns, for each sequence, the outputs of those of its tokens that were accepted."""
    outs: list[list[Tensor]] = [[] for _ in range(run.num_seqs)]
    for news in steps:
        for new, rows in zip(news, run.step(*news), strict=True):
            if new.seq is not None:
                outs[new.seq].append(rows if new.accepted is None else rows[: new.accepted])
    return [torch.cat(rows) for rows in outs]


def assert_states(run: StateRun, outs: list[Tensor]) -> None:
    """Compares the outputs and the states of all sequences with float64."""
    dtype = run.layer.dtype
    for seq, (rows, tokens, place) in enumerate(zip(outs, run.tokens, run.places, strict=True)):
        want, states = recurrent(run.layer, tokens.cut(0, len(rows)))
        assert_attention_close(rows, want, dtype)
        assert_attention_close(run.state_of(seq), states[place.tokens - place.pending], dtype)
