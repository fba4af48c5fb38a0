"""Scene: one small runtime, its oracle, and what every call that was taken must have left there.

Its rules are the API's: any call may come at any time, with any value. A call that is refused changes nothing; one that
must be refused is refused, or its rows are reported; whatever else is taken leaves each live request, each kept page
and each fork with the KV that the oracle has for it.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import NO_CHECK, CaptureCheck
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import Unsupported
from rocm_attn.guards.registry import Guards
from rocm_attn.integrations.compiled import compiled_layers
from rocm_attn.paging.index_spaces import Space
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.step import Step
from rocm_lab.soak.calls import Calls
from rocm_lab.soak.draft_forward import DraftForward
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.going_on import GoingOn
from rocm_lab.soak.judge import Played, WrongStep, judge
from rocm_lab.soak.model import NOT_FINITE_ID, PLACES, VOCABULARY, Model
from rocm_lab.soak.movers import Movers, Sent
from rocm_lab.soak.oracle import UNKNOWN, Oracle
from rocm_lab.soak.row_history import Begun, RowHistory
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.setting import DRAWN, MAX_SEQS, Setting, setting_of


@dataclass(slots=True)
class Kept:
    """A kept page: where it was in its sequence, and what its tokens look up.

    before:   what the tokens before them look up
    state:    whether the state after its last token is kept: the runtime says so; and whether only the device knows
    """

    page_no: int
    stored: list[int]
    before: list[int] = field(default_factory=list)
    has_state: bool = False
    only_device_knows: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """The last step of trees. paths: the nodes of each that are accepted; changes: of its rows, up to it"""

    seqs: list[Seq]
    paths: list[list[int]]
    changes: dict[int, int]
    is_moved: bool = False


class Scene(Calls):
    """One runtime of a kind and its requests.

    unjudged:  steps that were run and must be judged; worst_error: of those that were, as a fraction of the allowed
    checks:    what must be so of a step that the oracle agrees with: each says what is wrong, or nothing
    turn:      of who makes the calls, counted by it
    """

    def __init__(
        self,
        kind: str,
        seed: int,
        device: torch.device,
        guards: Guards | None,
        settings: Callable[[str, random.Random, torch.device], Setting] = setting_of,
    ) -> None:
        super().__init__(seed)
        self.kind, self.device = kind, device
        self.setting, self.runtime = self._served(guards, settings)
        self.options, problems = self.setting.options, self.setting.problems
        recurrent = self.setting.recurrent
        self.spacing = recurrent.spacing or self.runtime.table.page_size
        self.model = Model(problems, seed, device, recurrent.layers)
        make_exact(self.model)
        self.oracle = Oracle([])
        going_on = GoingOn(recurrent.kept if recurrent.layers else 0)
        self.history = RowHistory(self.oracle, going_on, self.options.max_num_rows)
        self.drafts = DraftForward(self.model, device)
        recorder = recorder_for(device) if self.setting.has_graphs else None
        checks = kind == DRAWN and self.rng.random() < 0.2
        check = CaptureCheck(vocabulary=VOCABULARY, seed=seed) if checks else NO_CHECK
        self.runner = StepRunner(self.runtime, self.model.forward, recorder, draft=self.drafts.rounds, check=check)
        self.without_drafts = StepRunner(self.runtime, self.model.forward, None)
        self.compiled = compiled_layers(self.runtime)
        self.renew_movers()
        self.kept: dict[int, Kept] = {}
        self.dropped: list[int] = []
        self.sent: list[Sent] = []
        self.last_draft = torch.zeros(0, 0)
        self.open: Begun | None = None
        self.over: Step | None = None
        self.last: tuple[StepBatch, list[Seq], dict[int, int]] | None = None
        self.verified: Verified | None = None
        self.unjudged: list[Played] = []
        self.checks: list[Callable[[Played], str]] = []
        self.turn = 0
        self.worst_error = 0.0
        self.set_weights()

    def _served(
        self, guards: Guards | None, settings: Callable[[str, random.Random, torch.device], Setting]
    ) -> tuple[Setting, AttentionRuntime]:
        """Returns a setting and its runtime. Raises Unsupported for a kind that no kernel serves."""
        for _ in range(50 if self.kind == DRAWN else 0):
            setting = settings(self.kind, self.rng, self.device)
            with suppress(Unsupported):
                return setting, _built(setting, self.device, guards)
        setting = settings(self.kind, self.rng, self.device)
        return setting, _built(setting, self.device, guards)

    def renew_movers(self) -> None:
        """Makes the exporter and the importer, with the present scales."""
        self.movers = Movers.of(self.runtime, len(self.model.layers))

    # Rows and lengths

    @property
    def rows(self) -> list[int]:
        """Live requests."""
        return list(self.oracle.kv)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.runtime.table.page_size

    @property
    def is_latent(self) -> bool:
        """True if layers keep latents."""
        return self.kind == "latent"

    def a_row(self) -> int:
        """A live row; seldom one that was freed, or none at all."""
        strange = [*self.history.freed, 0, -1, self.options.max_num_rows + 1]
        live = self.rows
        return self.rng.choice(live) if live and self.rng.random() < 0.85 else self.rng.choice(strange)

    def some(self, most: int = MAX_SEQS) -> list[int]:
        """Some live rows that have room for a token, in any order."""
        live = [
            row
            for row in self.rows
            if self.history.length(row) < self.options.max_kv_len - 6 and not self.history.only_device_knows(row)
        ]
        self.rng.shuffle(live)
        return live[: self.rng.randint(1, most)]

    def ids(self, count: int) -> list[int]:
        """Token ids."""
        return [self.rng.randint(1, VOCABULARY - 1) for _ in range(count)]

    # State that refused calls keep

    def check_device(self) -> None:
        """Checks the device of the runtime, or lets a step without sequences report what came before it."""
        # Seldom, because such a step also writes what a wrong plan of the next one would read.
        if self.open is None and self.rng.random() < 0.1:
            self.last = self.verified = None
            self.runner.run(self.batch([]))
        self.runtime.check_device()

    def state(self) -> tuple[object, ...]:
        """Returns the state that a refused call must leave unchanged."""
        table = self.runtime.table
        rows = np.array([row for row in self.rows if table.is_admitted(row)], np.int32)
        held = {row: tuple(int(page) for page in table.pages_of(row)) for row in rows.tolist()}
        free = tuple(each.num_free_pages for each in table.spaces if each.space is Space.FULL)
        return (
            table.num_free_rows,
            free,
            held,
            tuple(table.room(rows).tolist()),
            tuple(table.tokens.stored_len[rows].tolist()) if len(rows) else (),
            tuple(table.kept.ids().tolist()),
            (table.kept.num_free_states, tuple(table.kept.have_states(table.kept.ids()).tolist())),
            self.runtime.seals.number,
        )

    # Requests

    def end(self, row: int) -> None:
        """Frees a row."""
        self.call(f"free row {row}", partial(self.runtime.table.free, row), right=True)
        self.history.gone(row)

    def drop_all(self) -> None:
        """Drops all kept pages."""
        self.call("drop_all", self.runtime.table.kept.drop_all, right=True)
        self.dropped += self.kept
        self.kept.clear()

    def room(self, row: int) -> int:
        """Tokens that a row has room for; -1: none."""
        return int(self.runtime.table.room([row])[0]) if 0 <= row <= self.options.max_num_rows else -1

    def set_weights(self) -> None:
        """Give every layer that has sinks new ones."""
        self.oracle.layers = self.model.renew_weights(self.rng, self.runtime.head_weights.set)

    def ints(self, values: Any) -> Tensor:
        """int32, on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # Steps

    def batch(self, seqs: Sequence[Seq], **more: Any) -> StepBatch:
        """For the runtime."""
        ids = [token_id for seq in seqs for token_id in seq.ids]
        rows, ends, new = [seq.row for seq in seqs], [seq.end for seq in seqs], [len(seq.ids) for seq in seqs]
        return StepBatch(rows, ends, new, ids, **more)

    def staged(self, batch: StepBatch, seqs: Sequence[Seq]) -> None:
        """A whole step was staged, which may run again."""
        self.last = batch, list(seqs), {seq.row: self.history.changes[seq.row] for seq in seqs}

    # Comparisons

    def played(self, step: Played) -> None:
        """A step was run that must be judged, now or after a few more."""
        self.unjudged.append(step)
        if len(self.unjudged) >= self.setting.most_unjudged:
            self.judge_all()

    def judge_all(self) -> None:
        """Judge the steps that were run since the last time. Raises Finding."""
        for step in self.unjudged:
            verdict = judge(step)
            wrong = verdict.wrong or next(filter(None, (check(step) for check in self.checks)), "")
            if wrong:
                raise WrongStep(step, wrong)
            self.worst_error = max(self.worst_error, verdict.worst)
            self.counts["compared"] += step.num_new * len(step.layers)
        self.unjudged.clear()

    def compare_pool(self, what: str) -> None:
        """Every token of every live request, and of every kept page, lies in its page as it was stored."""
        for number, layer in enumerate(self.model.layers):
            space = self.runtime.pool.space_of_layer(number)
            table = self.runtime.table
            copies = table.space(space).pending.copies
            at: list[tuple[int, int, int, str]] = []
            for row, kv in self.oracle.kv.items():
                if not table.is_admitted(row):
                    raise Finding(f"after {what}: row {row} is no longer admitted")
                pages = table.pages_of(row, space).tolist()
                at += _tokens(kv, [copies.get(page, page) for page in pages], self.page_size, f"row {row}")
            if self.kept:
                ids = list(self.kept)
                for id_, page in zip(ids, table.kept.pages(ids, space).tolist(), strict=True):
                    at += _tokens(self.kept[id_].stored, [page], self.page_size, f"kept page {id_}")
            if not at:
                continue
            index = torch.tensor([each[:3] for each in at], device=self.device)
            k, v = self.runtime.pool.layer(number).read_tokens(index[:, 0], index[:, 1])
            _, wanted_k, wanted_v = layer.of(index[:, 2])
            same = (k.float() == wanted_k.float()).flatten(1).all(1) & (v.float() == wanted_v.float()).flatten(1).all(1)
            self.counts["compared"] += len(at)
            if not bool(same.all()):
                where = [f"{at[place][3]}" for place in torch.nonzero(~same).flatten().tolist()[:4]]
                raise Finding(f"after {what}: layer {number} holds something else in {', '.join(where)}")


def _built(setting: Setting, device: torch.device, guards: Guards | None) -> AttentionRuntime:
    """A runtime whose states that no step has written are NaN."""
    runtime = build_runtime(setting.problems, setting.options, setting.recurrent, device=device, guards=guards)
    runtime.states.memory[2:].fill_(0xFF)
    return runtime


def _tokens(kv: Sequence[int], pages: Sequence[int], page_size: int, what: str) -> list[tuple[int, int, int, str]]:
    """(page, offset, what it looks up, where) of stored tokens that have a page."""
    found = []
    for place, entry in enumerate(kv):
        page_no = place // page_size
        if page_no >= len(pages):
            raise Finding(f"{what} has {len(pages)} pages, and {len(kv)} tokens are stored")
        if entry != UNKNOWN and pages[page_no]:
            found.append((pages[page_no], place % page_size, entry, f"{what} place {place}"))
    return found


def make_exact(model: Model) -> None:
    """K and V are halves of small numbers, which eight bits hold too."""
    for layer in model.layers:
        for side in (layer.q, layer.k, layer.v):
            some = side[PLACES : NOT_FINITE_ID * PLACES]
            some.copy_((some * 2).round().clamp(-8, 8) / 2)
