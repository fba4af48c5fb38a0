"""EngineScene: an engine with pages, tables and graphs of its own over ExternalAttention, and the oracle beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.external import Bounds, ExternalAttention, ExternalOptions, LayerSource
from rocm_attn.guards.registry import Guards
from rocm_attn.integrations.compiled import compiled_layers
from rocm_attn.problem import Problem
from rocm_attn.step.external_step import ONE_EACH, Boundaries, ExternalStep, NewLengths
from rocm_lab.soak.calls import Calls
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.model import Model
from rocm_lab.soak.movers import Movers, Sent
from rocm_lab.soak.oracle import UNKNOWN, Oracle
from rocm_lab.soak.scene import make_exact
from rocm_lab.soak.seq import Seq
from tests.amd.random_calls.engine_tables import NUM_PAGES, PAGE, ROWS, WIDTH, EngineTables

ENGINE_KINDS = ("in place", "gathered", "slots", "lists", "watched")
MOST_SEQS, MOST_TOKENS = 4, 16


@dataclass(slots=True)
class Graph:
    """A captured decode step of MOST_SEQS sequences, and the tensors that it reads."""

    step: ExternalStep
    kv_len: Tensor
    rows: Tensor
    entries: Tensor
    recording: Any
    outs: list[Tensor]


class EngineScene(Calls):
    """One ExternalAttention and what its engine owns.

    begun:  the step that has begun, with its tokens; None: what was begun is over, or wrong
    unsure: rows whose last tokens the engine itself gave away
    """

    def __init__(self, kind: str, seed: int, device: torch.device, guards: Guards | None) -> None:
        super().__init__(seed)
        self.kind, self.device = kind, device
        dim = 64 if device.type == "cuda" else 4
        base: dict[str, Any] = {
            "num_q_heads": 2,
            "num_kv_heads": 1,
            "head_dim": dim,
            "dtype": torch.float32,
            "page_size": PAGE,
            "scale": 0.3,
            "custom_mask": True,
        }
        problems = [Problem(**base), Problem(**base, has_sinks=True)]
        self.tables = EngineTables(kind, device)
        options = ExternalOptions(
            provider="torch" if device.type == "cpu" else "auto", watches_pages=kind == "watched", unaligned_rows=True
        )
        self.attention = ExternalAttention(
            [LayerSource(problem) for problem in problems],
            self.tables.source(),
            device=device,
            bounds=Bounds(num_seqs=MOST_SEQS, num_tokens=MOST_TOKENS, kv_len=WIDTH * PAGE, num_pages=NUM_PAGES),
            options=options,
            guards=guards,
        )
        self.model = Model(problems, seed, device)
        make_exact(self.model)
        self.oracle = Oracle([])
        self.kv = [self.fresh_kv(dim) for _ in problems]
        self.attention.pages.bind_all(self.kv, "kv page token head dim")
        self.set_weights()
        self.recorder = recorder_for(device)
        self.compiled = compiled_layers(self.attention)
        self.renew_movers()
        self.rng.shuffle(self.tables.free)
        self.begun: tuple[ExternalStep, list[Seq]] | None = None
        self.stored_in: set[int] = set()
        self.is_filled = self.is_sealed = False
        self.graph: Graph | None = None
        self.fills: list[tuple[ExternalStep, Any]] = []
        self.sent: list[Sent] = []

    def renew_movers(self) -> None:
        """Makes the exporter and the importer of the pages that are bound now."""
        self.movers = Movers.of(self.attention, len(self.model.layers))

    def fresh_kv(self, dim: int) -> Tensor:
        """Pages of a layer in which everything is NaN, but page 0 where it belongs to no one."""
        kv = torch.full((2, NUM_PAGES, PAGE, 1, dim), float("nan"), device=self.device)
        if self.tables.null_page:
            kv[:, 0] = 0
        return kv

    # Requests

    @property
    def rows(self) -> list[int]:
        """Live requests."""
        return list(self.oracle.kv)

    def length(self, row: int) -> int:
        return len(self.oracle.kv.get(row, ()))

    def admit(self) -> int | None:
        """A row without tokens, if one is free."""
        row = next((row for row in range(ROWS) if row not in self.tables.pages), None)
        if row is not None:
            self.tables.pages[row] = []
            self.oracle.admit(row)
            if self.kind == "watched":
                self.attention.forget(torch.tensor([row], device=self.device))
        return row

    def release(self, row: int) -> None:
        """A request goes; its pages are free, unless others read them too."""
        self.oracle.free(row)
        self.tables.release(row)

    def give_up(self, rows: Sequence[int]) -> None:
        """Forgets all that is known about these rows' tokens."""
        for row in rows:
            if row in self.oracle.kv:
                self.release(row)

    def set_weights(self) -> None:
        """New sinks."""
        self.oracle.layers = self.model.renew_weights(self.rng, self.attention.set_head_weights)

    # Steps

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """On the device."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def seqs(self, most: int = 3, count: int | None = None) -> list[Seq]:
        """New tokens for some rows that have room."""
        live = [row for row in self.rows if self.length(row) < WIDTH * PAGE - 8]
        self.rng.shuffle(live)
        rows = live[: self.rng.randint(1, MOST_SEQS)]
        seqs = []
        for row in rows:
            tokens = self.rng.randint(1, most) if count is None else count
            seqs.append(Seq(row, self.length(row), [self.rng.randint(1, 11) for _ in range(tokens)]))
        for seq in seqs:
            self.tables.reserve(seq.row, seq.end)
        seqs = [seq for seq in seqs if len(self.tables.pages[seq.row]) * PAGE >= seq.end]
        self.tables.write()
        return seqs

    def step(self, seqs: Sequence[Seq], **changed: Any) -> ExternalStep:
        """Returns the step as the engine describes it. changed: fields that it describes otherwise"""
        new = [len(seq.ids) for seq in seqs]
        decodes = set(new) <= {1}
        total = sum(new)
        pads = 0 if self.rng.random() < 0.5 or len(seqs) == MOST_SEQS else 1
        ends = [seq.end for seq in seqs]
        q: Any = ONE_EACH
        if not decodes and self.rng.random() < 0.5:
            q = NewLengths(self.ints([*new, *[0] * pads]))
        elif not decodes:
            q = Boundaries(self.ints([0, *np.cumsum(new).tolist(), *[total] * pads]))
        said = {
            "num_seqs": len(seqs),
            "padded_seqs": len(seqs) + pads,
            "padded_tokens": len(seqs) + pads if decodes else total + pads,
            "kv_len": self.ints([*ends, *[0] * pads]),
            "q": q,
            "rows": self.ints([*[seq.row for seq in seqs], *[0] * pads]),
            "min_q_len": 1 if decodes else min(new),
            "max_q_len": max(new),
            "max_kv_len": max(ends),
        }
        return ExternalStep(**{**said, **changed})

    def entries_of(self, seqs: Sequence[Seq], padded: int) -> Tensor:
        """Returns the entries that the tokens of a step look up; its pads look up NaN."""
        entries = [entry for seq in seqs for entry in seq.stored]
        return self.ints([*entries, *[0] * (padded - len(entries))], torch.int64)

    def forward(self, seqs: Sequence[Seq], padded: int, layers: Any) -> list[Tensor]:
        """Store and attend in every layer."""
        return self.forward_of(self.entries_of(seqs, padded), layers)

    def forward_of(self, entries: Tensor, layers: Any) -> list[Tensor]:
        """The same by what tokens look up, which a graph reads."""
        outs = []
        for number, layer in enumerate(self.model.layers):
            q, k, v = layer.of(entries)
            out, _ = layer.room(q)
            layers.store(number, k, v)
            layers.attend(number, q, out)
            outs.append(out)
        return outs

    def stored(self, seqs: Sequence[Seq]) -> None:
        """A step has stored its tokens."""
        for seq in seqs:
            if seq.row in self.oracle.kv:
                self.oracle.truncate(seq.row, seq.begin)
                self.oracle.store(seq.row, seq.begin, seq.stored)

    def compare(self, what: str, seqs: Sequence[Seq], outs: Sequence[Tensor]) -> None:
        """Every token of a step has what the oracle says, and pads have 0."""
        for number, (layer, out) in enumerate(zip(self.oracle.layers, outs, strict=True)):
            given, at = out.double().cpu().numpy(), 0
            for seq in seqs:
                answer = self.oracle.answer(layer, seq.row, seq.tokens())
                off = np.abs(given[at : at + len(seq.ids)] - answer.out)[answer.known]
                if not (off <= answer.out_bound[answer.known]).all():
                    raise Finding(f"{what}: layer {number} of row {seq.row} is off by {off.max():.2g}")
                at += len(seq.ids)
                self.counts["compared"] += len(seq.ids)
            if (given[at:] != 0).any():
                raise Finding(f"{what}: layer {number} gives pads something else than 0")

    # Comparisons

    def check_device(self) -> None:
        self.attention.check_device()

    def state(self) -> object:
        """A refused call may change nothing of these: all else is the engine's own."""
        return self.attention.tables.rows.num, self.attention.tables.changes, self.is_sealed

    def compare_pool(self, what: str) -> None:
        """Every token of every request lies in its page."""
        for number, layer in enumerate(self.model.layers):
            at = [
                (self.tables.pages[row][place // PAGE], place % PAGE, entry, row)
                for row, kv in self.oracle.kv.items()
                for place, entry in enumerate(kv)
                if entry != UNKNOWN
            ]
            if not at:
                return
            page, offset, entry, _ = torch.tensor(at, device=self.device).unbind(1)
            _, k, v = layer.of(entry)
            same = (self.kv[number][0, page, offset] == k) & (self.kv[number][1, page, offset] == v)
            self.counts["compared"] += len(at)
            wrong = torch.nonzero(~same.flatten(1).all(1)).flatten().tolist()
            if wrong:
                raise Finding(f"after {what}: layer {number} holds something else of rows {[at[w][3] for w in wrong]}")
            null = self.kv[number][:, 0]
            if self.tables.null_page and bool((null != 0).any()):
                raise Finding(f"after {what}: layer {number} has something in page 0, which belongs to no one")
