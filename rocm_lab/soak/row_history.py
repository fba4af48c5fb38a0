"""RowHistory: what has happened to each row of a runtime, and the tokens that it must hold since."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rocm_attn.step.step import Step
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.going_on import GoingOn
from rocm_lab.soak.oracle import UNKNOWN, Oracle
from rocm_lab.soak.seq import Seq


@dataclass(slots=True)
class Begun:
    """A step that was begun by hand, and is open. done: layers that were stored; lives: of its rows"""

    step: Step
    seqs: list[Seq]
    lives: dict[int, int]
    changes: dict[int, int]
    done: set[int] = field(default_factory=set)


class RowHistory:
    """The rows of a runtime. Numbers that no row has are allowed, as are those of freed rows.

    oracle.kv: row -> what its stored tokens look up
    going_on:  after which tokens rows with recurrent states must go on
    unsure:    rows whose next step may be refused: they were cut, or share room without tokens
    lives:     row -> admissions so far; changes: row -> what has happened to it since
    freed:     rows that were freed, and not handed out since
    """

    def __init__(self, oracle: Oracle, going_on: GoingOn, max_num_rows: int) -> None:
        self.oracle, self.going_on = oracle, going_on
        self.unsure: set[int] = set()
        self.lives = dict.fromkeys(range(-2, max_num_rows + 2), 0)
        self.changes = dict(self.lives)
        self.freed: list[int] = []

    def length(self, row: int) -> int:
        """Tokens of a row that are stored, as far as the tester knows."""
        return len(self.oracle.kv.get(row, ()))

    def only_device_knows(self, row: int) -> bool:
        """True if the device may refuse a step after a row's tokens that the host takes."""
        return self.going_on.only_device_knows(row, self.length(row))

    def surely_goes_on(self, row: int) -> bool:
        """True if a step after a row's tokens must be taken."""
        return row not in self.unsure and self.going_on.surely(row, self.length(row))

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

    def cut(self, row: int, kv_len: int) -> None:
        """A row keeps its first tokens alone."""
        if row in self.oracle.kv:
            self.oracle.truncate(row, kv_len)

    def give_up(self, rows: Sequence[int]) -> None:
        """Forgets the tokens of these rows, which were reported or may be wrong."""
        for row in rows:
            self.cut(row, 0)
            self.unsure.add(row)

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
