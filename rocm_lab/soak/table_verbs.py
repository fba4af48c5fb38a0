"""Verbs of rows and kept pages."""

from functools import partial
from typing import Any

import numpy as np

from rocm_attn.paging.index_spaces import Space
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.oracle import Bools
from rocm_lab.soak.scene import Kept, Scene


def admit(scene: Scene) -> None:
    """A row."""
    given = scene.call("admit", scene.runtime.table.admit)
    if given is not REFUSED:
        scene.history.admitted(given)


def reserve(scene: Scene) -> None:
    """Room in a row."""
    row = scene.a_row()
    kv_len = scene.rng.choice((scene.history.length(row) + 2, 12, -3, scene.options.max_kv_len + 1, 2**32 + 4))
    bad = row not in scene.oracle.kv or not 0 <= kv_len <= scene.options.max_kv_len
    scene.call(
        f"reserve {kv_len} in row {row}", lambda: scene.runtime.table.reserve(row, kv_len), wrong="it is bad" * bad
    )


def truncate(scene: Scene) -> None:
    """A row goes back, or is to go on."""
    row = scene.a_row()
    kv_len = scene.rng.choice(
        (scene.history.length(row), max(0, scene.history.length(row) - 3), 0, scene.room(row) + 1)
    )
    bad = row not in scene.oracle.kv or kv_len > scene.room(row)
    given = scene.call(
        f"truncate row {row} to {kv_len}", lambda: scene.runtime.table.truncate(row, kv_len), wrong="it is bad" * bad
    )
    if given is not REFUSED:
        if kv_len < scene.history.length(row):  # else it gives back room alone
            scene.history.changed(row)
            scene.history.unsure.add(row)
        scene.history.cut(row, kv_len)


def free(scene: Scene) -> None:
    """A row goes, or has gone."""
    row = scene.a_row()
    bad = row not in scene.oracle.kv
    given = scene.call(f"free row {row}", lambda: scene.runtime.table.free(row), wrong="it is no request's" * bad)
    if given is not REFUSED:
        scene.history.gone(row)


def fork(scene: Scene) -> None:
    """A row over another's tokens; also over room that has none yet."""
    row = scene.a_row()
    length, room = scene.history.length(row), scene.room(row)
    kv_len = scene.rng.choice((length, length, max(0, length - 3), room, room + 1))
    fork_at(scene, row, kv_len, "bad" * (row not in scene.oracle.kv or kv_len > room))


def fork_at(scene: Scene, row: int, kv_len: int, wrong: str = "") -> int | None:
    """Forks a row after these tokens. Returns the fork, or None if it was refused."""
    child: Any = scene.call(f"fork row {row} at {kv_len}", partial(scene.runtime.table.fork, row, kv_len), wrong=wrong)
    if child is REFUSED:
        return None
    scene.history.admitted(child, scene.oracle.kv[row][:kv_len])
    scene.history.going_on.fork(row, child, kv_len)
    if kv_len > scene.history.length(row) or row in scene.history.unsure:
        scene.history.unsure |= {row, child}
    return int(child)


def keep(scene: Scene) -> None:
    """Full pages of a row stay."""
    row, rng = scene.a_row(), scene.rng
    full = scene.history.length(row) // scene.page_size
    first, last = (0, full) if rng.random() < 0.7 else (rng.randint(0, 1), full + 1)
    bad = row not in scene.oracle.kv or last > full
    # Where a path was moved, the places after it count as stored.
    bad = (
        bad and row not in scene.history.unsure and first < last and stored_len(scene, row) <= scene.history.length(row)
    )
    table = scene.runtime.table.kept
    free, due = table.num_free_states, np.zeros(0, np.bool_)
    if row in scene.oracle.kv:
        due = table.states_due([row] * (last - first), list(range(first, last)))
    if rng.random() < 0.5:
        # Pages that have left the window are kept for the other layers.
        is_full = last * scene.page_size <= scene.history.length(row) and row not in scene.history.unsure
        left = _out_of_windows(scene, row, first, last) if is_full else 0
        ids = scene.call(
            f"keep {first}:{last} of row {row}, {left} of them out of the window",
            lambda: np.concatenate(
                [table.keep(row, first, first + left, [Space.FULL]), table.keep(row, first + left, last)]
            ),
            wrong="bad" * bad,
        )
    else:
        pages = list(range(first, last))
        ids = scene.call(
            f"keep_all {first}:{last} of row {row}",
            lambda: table.keep_all([row] * len(pages), pages),
            wrong="bad" * bad,
        )
    if ids is REFUSED or row not in scene.oracle.kv:
        return
    if last * scene.page_size > scene.history.length(row):
        scene.history.unsure.add(row)  # it may not store in them again
    have = table.have_states(ids)
    _judge_checkpoints(scene, row, first, due, have, free)
    for page_no, id_, has_state in zip(range(first, last), ids.tolist(), have.tolist(), strict=True):
        stored = scene.oracle.page(row, page_no, scene.page_size)
        begin = page_no * scene.page_size
        only_device_knows = scene.history.going_on.only_device_knows(row, begin + scene.page_size)
        scene.kept[id_] = Kept(page_no, stored, scene.oracle.kv[row][:begin], has_state, only_device_knows)


def stored_len(scene: Scene, row: int) -> int:
    """Tokens that count as stored in a row, or 0 if it is none."""
    return int(scene.runtime.table.tokens.stored_len[row]) if row in scene.oracle.kv else 0


def _out_of_windows(scene: Scene, row: int, first: int, last: int) -> int:
    """The first pages of a range that a row has no more in the space of windows."""
    if len(scene.runtime.table.spaces) == 1 or row not in scene.oracle.kv:
        return 0
    held = scene.runtime.table.pages_of(row, Space.SWA)[first:last] > 0
    return int(np.argmax(held)) if held.any() else len(held)


def _judge_checkpoints(scene: Scene, row: int, first: int, due: Bools, have: Bools, free: int) -> None:
    """A page is kept with a state where it is due, as long as one is free.

    It is due where the row must go on, unless the host does not know where that is.
    """
    if not scene.model.recurrent:
        if not have.all():
            raise Finding("a page is kept without a state, and no layer is recurrent")
        return
    wanted = due & (np.cumsum(due) <= free)
    if have.tolist() != wanted.tolist():
        raise Finding(f"states of row {row} were due {due.tolist()} with {free} free, and are kept {have.tolist()}")
    for place, is_due in enumerate([] if row in scene.history.going_on.untracked else due.tolist()):
        end = (first + place + 1) * scene.page_size
        if not is_due and end % scene.spacing == 0 and scene.history.going_on.surely(row, end):
            raise Finding(f"row {row} must go on after {end} tokens, and no state is due there")


def admit_over(scene: Scene) -> None:
    """A row over kept pages, or over such as were dropped, or in another order."""
    ids: list[int] = []
    entries: list[int] = []
    while found := [id_ for id_, kept in scene.kept.items() if _continues(scene, kept, len(ids), entries)]:
        ids.append(scene.rng.choice(found))
        entries += scene.kept[ids[-1]].stored
    wrong = ""
    if scene.rng.random() < 0.2 and len(ids) > 1:
        ids, wrong = ids[::-1], "the pages are in another order"
    if scene.dropped and scene.rng.random() < 0.3:
        ids, wrong = [scene.dropped[-1]], "it was dropped"
    if not ids:
        return keep(scene)
    kv_len = len(ids) * scene.page_size - scene.rng.choice((0, 0, 1))
    last = scene.kept.get(ids[-1])
    if last is not None and scene.model.recurrent and not (last.has_state and kv_len % scene.page_size == 0):
        wrong = wrong or "no state is kept with these tokens"
    row = scene.call(
        f"admit_over {kv_len} kept tokens", lambda: scene.runtime.table.kept.admit_over(ids, kv_len), wrong=wrong
    )
    if row is not REFUSED:
        assert last is not None
        scene.history.admitted(row, [entry for id_ in ids for entry in scene.kept[id_].stored][:kv_len])
        scene.history.going_on.begin(row, *[kv_len] * (not last.only_device_knows))
        if last.only_device_knows:
            scene.history.going_on.lose_track([row])
    return None


def _continues(scene: Scene, kept: Kept, page_no: int, entries: list[int]) -> bool:
    """True if a kept page may follow others; a state is that of the tokens with which its page was kept."""
    return kept.page_no == page_no and (not scene.model.recurrent or kept.before == entries)


def drop(scene: Scene) -> None:
    """Kept pages go, or have gone."""
    if not scene.kept:
        keep(scene)
    ids, wrong = list(scene.kept)[: scene.rng.randint(1, 3)], ""
    if scene.dropped and scene.rng.random() < 0.3:
        ids, wrong = [scene.rng.choice(scene.dropped)], "it was dropped"
    if not ids:
        return None
    if scene.rng.random() < 0.15:
        return scene.drop_all()
    if scene.call(f"drop {ids}", lambda: scene.runtime.table.kept.drop(ids), wrong=wrong) is REFUSED:
        return None
    for id_ in ids:
        scene.kept.pop(id_, None)
        scene.dropped.append(id_)
    return None
