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

from rocm_attn.batch.drafts import Drafts
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
from rocm_attn.step.step import Series, Step
from rocm_lab.soak.calls import Calls
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.going_on import GoingOn
from rocm_lab.soak.judge import Played, WrongStep, judge
from rocm_lab.soak.model import NOT_FINITE_ID, PLACES, VOCABULARY, Model
from rocm_lab.soak.movers import Movers, Sent
from rocm_lab.soak.oracle import UNKNOWN, Oracle
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.setting import DRAWN, MAX_SEQS, Setting, setting_of


@dataclass(slots=True)
class Begun:
    """A step that was begun by hand, and is open. done: layers that were stored; lives: of its rows"""

    step: Step
    seqs: list[Seq]
    lives: dict[int, int]
    changes: dict[int, int]
    done: set[int] = field(default_factory=set)


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

    oracle.kv: row -> what its stored tokens look up
    unsure:    rows whose next step may be refused: they were cut, or share room without tokens
    lives:     row -> admissions so far; changes: row -> what has happened to it since
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
        self.going_on = GoingOn(recurrent.kept if recurrent.layers else 0)
        self.spacing = recurrent.spacing or self.runtime.table.page_size
        self.model = Model(problems, seed, device, recurrent.layers)
        make_exact(self.model)
        self.oracle = Oracle([])
        recorder = recorder_for(device) if self.setting.has_graphs else None
        checks = kind == DRAWN and self.rng.random() < 0.2
        check = CaptureCheck(vocabulary=VOCABULARY, seed=seed) if checks else NO_CHECK
        self.runner = StepRunner(self.runtime, self.model.forward, recorder, draft=self.draft, check=check)
        self.without_drafts = StepRunner(self.runtime, self.model.forward, None)
        self.compiled = compiled_layers(self.runtime)
        self.renew_movers()
        self.kept: dict[int, Kept] = {}
        self.dropped: list[int] = []
        self.freed: list[int] = []
        self.unsure: set[int] = set()
        self.lives = dict.fromkeys(range(-2, self.options.max_num_rows + 2), 0)
        self.changes = dict(self.lives)
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

    def length(self, row: int) -> int:
        """Tokens of a row that are stored, as far as the tester knows."""
        return len(self.oracle.kv.get(row, ()))

    def a_row(self) -> int:
        """A live row; seldom one that was freed, or none at all."""
        strange = [*self.freed, 0, -1, self.options.max_num_rows + 1]
        live = self.rows
        return self.rng.choice(live) if live and self.rng.random() < 0.85 else self.rng.choice(strange)

    def some(self, most: int = MAX_SEQS) -> list[int]:
        """Some live rows that have room for a token, in any order."""
        live = [
            row
            for row in self.rows
            if self.length(row) < self.options.max_kv_len - 6 and not self.only_device_knows(row)
        ]
        self.rng.shuffle(live)
        return live[: self.rng.randint(1, most)]

    def only_device_knows(self, row: int) -> bool:
        """True if the device may refuse a step after a row's tokens that the host takes."""
        return self.going_on.only_device_knows(row, self.length(row))

    def surely_goes_on(self, row: int) -> bool:
        """True if a step after a row's tokens must be taken."""
        return row not in self.unsure and self.going_on.surely(row, self.length(row))

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

    def changed(self, row: int) -> None:
        """A row was freed, cut or admitted: it is another one. A fork or a keep shows in what is compared."""
        self.changes[row] += 1

    def admitted(self, row: int, stored: Sequence[int] = ()) -> None:
        """A row came."""
        if row in self.oracle.kv:
            raise Finding(f"row {row} was handed out twice")
        self.lives[row] += 1
        self.changed(row)
        self.unsure.discard(row)
        self.oracle.begin(row, list(stored))
        self.going_on.begin(row)
        self.freed = [each for each in self.freed if each != row]

    def gone(self, row: int) -> None:
        """A row was freed."""
        self.changed(row)
        self.oracle.free(row)
        self.unsure.discard(row)
        self.freed.append(row)

    def end(self, row: int) -> None:
        """Frees a row."""
        self.call(f"free row {row}", partial(self.runtime.table.free, row), right=True)
        self.gone(row)

    def drop_all(self) -> None:
        """Drops all kept pages."""
        self.call("drop_all", self.runtime.table.kept.drop_all, right=True)
        self.dropped += self.kept
        self.kept.clear()

    def cut(self, row: int, kv_len: int) -> None:
        """A row keeps its first tokens alone."""
        if row in self.oracle.kv:
            self.oracle.truncate(row, kv_len)

    def give_up(self, rows: Sequence[int]) -> None:
        """Forgets the tokens of these rows, which were reported or may be wrong."""
        for row in rows:
            self.cut(row, 0)
            self.unsure.add(row)

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

    def stored(self, seqs: Sequence[Seq], changes: dict[int, int] | None = None, lives: Any = None) -> None:
        """A step has stored its tokens, in rows that may have changed since it was begun."""
        for seq in seqs:
            if seq.row not in self.oracle.kv or (lives is not None and lives[seq.row] != self.lives[seq.row]):
                continue
            if changes is not None and changes[seq.row] != self.changes[seq.row]:
                self.forget_from(seq)
                self.unsure.add(seq.row)
                self.going_on.broke_off(seq.row, 0)
                continue
            self.cut(seq.row, seq.begin)
            self.oracle.store(seq.row, seq.begin, seq.stored)
            self.going_on.stepped(seq.row, seq.begin, seq.end)

    def stored_in_layer(self, begun: Begun, layer: int) -> None:
        """A layer of an open step has stored: until all have, the tokens that were stored before it may be gone."""
        begun.done.add(layer)
        for seq in begun.seqs:
            if seq.row in self.oracle.kv and begun.lives[seq.row] == self.lives[seq.row]:
                self.forget_from(seq)

    def forget_from(self, seq: Seq) -> None:
        """The tokens of a row from a sequence's new ones on are not known."""
        kv = self.oracle.kv[seq.row]
        kv[seq.begin :] = [UNKNOWN] * len(kv[seq.begin :])

    def broke_off(self, seq: Seq) -> None:
        """A step of a row has not come to its end: what it was to store again is gone."""
        self.cut(seq.row, seq.begin)
        self.unsure.add(seq.row)
        self.going_on.broke_off(seq.row, seq.begin)

    def staged(self, batch: StepBatch, seqs: Sequence[Seq]) -> None:
        """A whole step was staged, which may run again."""
        self.last = batch, list(seqs), {seq.row: self.changes[seq.row] for seq in seqs}

    def compare_rows(self, what: str, seqs: Sequence[Seq], rows: Tensor) -> None:
        """The rows that a step returned are those of each sequence's last token."""
        given, at = rows.double().cpu().numpy(), 0
        for number, layer in enumerate(self.oracle.layers):
            width = layer.shape[0] * layer.shape[1]
            for place, seq in enumerate(seqs):
                if not seq.ids:
                    continue
                answer = self.oracle.answer(layer, seq.row, seq.tokens())
                out = given[place, at : at + width].reshape(answer.out.shape[1:])
                off = np.abs(out - answer.out[-1])
                if answer.known[-1] and not (off <= answer.out_bound[-1]).all():
                    raise Finding(f"{what}: layer {number} of row {seq.row} is off by {off.max():.2g}")
                self.counts["compared"] += 1
            at += width

    def draft(self, parts: Series) -> Tensor:
        """A forward of rounds: branch b of draft step i has an id and a parent that follow from both."""
        rows = []
        for step, part in enumerate(parts):
            if step and part.branches > 1:
                part.set_parents(self.draft_parents(part, step))
            rows.append(self.draft_step(part, step))
        return torch.cat(rows, 1)

    def draft_parents(self, part: Any, step: int) -> Tensor:
        """The branches that those of a draft step continue, int32 [T]."""
        branch = torch.arange(part.token_ids.shape[0], dtype=torch.int32, device=self.device) % part.branches
        parents: Tensor = draft_parent(step, branch, part.branches)
        return parents

    def draft_step(self, part: Any, step: int, calls: Any = None) -> Tensor:
        """One draft step; float32 [S, what all layers gave, branch after branch]."""
        branches = part.branches
        branch = torch.arange(part.token_ids.shape[0], device=self.device) % branches
        entry = draft_id(step, branch) * PLACES + part.positions.remainder(PLACES)
        rows = []
        for number, layer in enumerate(self.model.layers):
            q, k, v = layer.of(entry.long())
            out, lse = layer.room(q)
            (part.layers if calls is None else calls).store_and_attend(number, q, k, v, out, lse)
            rows.append(out.float().reshape(-1, branches, out[0].numel()))
        return torch.cat(rows, 2).flatten(1)

    def compare_draft(
        self,
        seqs: Sequence[Seq],
        drafts: Drafts,
        step: int,
        rows: Tensor,
        parent: Callable[[int, int, int], int],
    ) -> None:
        """A draft step gave what each branch sees: the prefix, its ancestors and itself."""
        if drafts.branches > 1 and any(layer.slopes.any() for layer in self.oracle.layers):
            return  # ALiBi counts places, and the drafts of other branches lie between those of this one
        if bool((rows[len(seqs) :] != 0).any()):
            raise Finding(f"draft step {step} of {drafts} gives pads something else than 0")
        width, kv = sum(layer.shape[0] * layer.shape[1] for layer in self.oracle.layers), self.oracle.kv
        for branch in range(drafts.branches):
            at, ids = branch, list[int]()
            for number in range(step, -1, -1):
                ids.insert(0, draft_id(number, at))
                at = parent(number, at, drafts.branches)
            lines = [Seq(seq.row, seq.begin, ids) for seq in seqs]
            ends = [Seq(seq.row, seq.begin + step, ids[-1:]) for seq in seqs]
            try:
                self.oracle.kv = {line.row: kv[line.row][: line.begin] + line.stored for line in lines}
                of_branch = rows[: len(seqs), branch * width : (branch + 1) * width]
                self.compare_rows(f"branch {branch} of draft step {step} of {drafts}", ends, of_branch)
            finally:
                self.oracle.kv = kv

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


def draft_id(step: int, branch: Any) -> Any:
    """The id that a branch of a draft step has."""
    return (step * 5 + branch * 3) % (VOCABULARY - 1) + 1


def draft_parent(step: int, branch: Any, branches: int) -> Any:
    """The branch of the draft step before that a branch of a draft step continues."""
    return (branch * 3 + step) % branches


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
