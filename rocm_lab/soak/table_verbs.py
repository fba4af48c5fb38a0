"""Verbs of rows and kept pages, and of tokens that come from elsewhere and go there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.state_slots import require_state_slots
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.movers import Sent
from rocm_lab.soak.oracle import Bools
from rocm_lab.soak.scene import Kept, Scene

# Rows and kept pages


def admit(scene: Scene) -> None:
    """A row."""
    given = scene.call("admit", scene.runtime.table.admit)
    if given is not REFUSED:
        scene.admitted(given)


def reserve(scene: Scene) -> None:
    """Room in a row."""
    row = scene.a_row()
    kv_len = scene.rng.choice((scene.length(row) + 2, 12, -3, scene.options.max_kv_len + 1, 2**32 + 4))
    bad = row not in scene.oracle.kv or not 0 <= kv_len <= scene.options.max_kv_len
    scene.call(
        f"reserve {kv_len} in row {row}", lambda: scene.runtime.table.reserve(row, kv_len), wrong="it is bad" * bad
    )


def reserve_all(scene: Scene) -> None:
    """Room in some rows, or in none of them."""
    rows = [scene.a_row() for _ in range(scene.rng.randint(1, 3))]
    lengths = [scene.length(row) + scene.rng.randint(0, 5) for row in rows]
    bad = len(set(rows)) < len(rows) or not {*rows} <= {*scene.rows} or max(lengths) > scene.options.max_kv_len
    scene.call(
        f"reserve_all of {rows}", lambda: scene.runtime.table.reserve_all(rows, lengths), wrong="a row is bad" * bad
    )


def truncate(scene: Scene) -> None:
    """A row goes back, or is to go on."""
    row = scene.a_row()
    kv_len = scene.rng.choice((scene.length(row), max(0, scene.length(row) - 3), 0, scene.room(row) + 1))
    bad = row not in scene.oracle.kv or kv_len > scene.room(row)
    given = scene.call(
        f"truncate row {row} to {kv_len}", lambda: scene.runtime.table.truncate(row, kv_len), wrong="it is bad" * bad
    )
    if given is not REFUSED:
        if kv_len < scene.length(row):  # else it gives back room alone
            scene.changed(row)
            scene.unsure.add(row)
        scene.cut(row, kv_len)


def free(scene: Scene) -> None:
    """A row goes, or has gone."""
    row = scene.a_row()
    bad = row not in scene.oracle.kv
    given = scene.call(f"free row {row}", lambda: scene.runtime.table.free(row), wrong="it is no request's" * bad)
    if given is not REFUSED:
        scene.gone(row)


def given_to_another(scene: Scene) -> None:
    """A row goes, and another request comes to it whose tokens were sent from elsewhere."""
    if not scene.sent or not scene.rows:
        return export_row(scene)
    free(scene)
    return import_row(scene)


def fork(scene: Scene) -> None:
    """A row over another's tokens; also over room that has none yet."""
    row = scene.a_row()
    length, room = scene.length(row), scene.room(row)
    kv_len = scene.rng.choice((length, length, max(0, length - 3), room, room + 1))
    fork_at(scene, row, kv_len, "bad" * (row not in scene.oracle.kv or kv_len > room))


def fork_at(scene: Scene, row: int, kv_len: int, wrong: str = "") -> int | None:
    """Forks a row after these tokens. Returns the fork, or None if it was refused."""
    child: Any = scene.call(f"fork row {row} at {kv_len}", partial(scene.runtime.table.fork, row, kv_len), wrong=wrong)
    if child is REFUSED:
        return None
    scene.admitted(child, scene.oracle.kv[row][:kv_len])
    scene.going_on.fork(row, child, kv_len)
    if kv_len > scene.length(row) or row in scene.unsure:
        scene.unsure |= {row, child}
    return int(child)


def evict(scene: Scene) -> None:
    """Pages before the window go."""
    rows = [scene.a_row() for _ in range(2)]
    lengths = [scene.length(row) for row in rows]
    has_windows = len(scene.runtime.table.spaces) > 1
    given = scene.call(
        f"evict of {rows}",
        lambda: scene.runtime.table.evict(rows, lengths),
        wrong="a row is named twice" * (has_windows and rows[0] == rows[1]),
    )
    if given is REFUSED:
        return
    if scene.last is not None and {seq.row for seq in scene.last[1]} & {*rows}:
        scene.provoked = True  # that step run again may begin its windows before those lengths


def mark_stored(scene: Scene) -> None:
    """Tokens count as stored: as many as are, or fewer; of wrong rows, twice, or more than there is room for."""
    row = scene.a_row()
    length = scene.length(row)
    kv_len = scene.rng.choice((length, max(0, length - 2), scene.room(row) + 1, -1, 2**32))
    rows = [row] * scene.rng.choice((1, 1, 1, 2))
    bad = row not in scene.oracle.kv or not 0 <= kv_len <= scene.room(row) or len(rows) > 1
    has_more = not bad and kv_len > _stored_len(scene, row)
    given = scene.call(
        f"mark_stored({rows}, {kv_len})",
        lambda: scene.runtime.table.mark_stored(rows, [kv_len] * len(rows)),
        wrong="it is bad" * bad,
    )
    if given is not REFUSED:
        if kv_len < length:
            scene.unsure.add(row)  # perhaps below what others share
        scene.cut(row, kv_len)
        if has_more:
            scene.going_on.begin(row)


def keep(scene: Scene) -> None:
    """Full pages of a row stay."""
    row, rng = scene.a_row(), scene.rng
    full = scene.length(row) // scene.page_size
    first, last = (0, full) if rng.random() < 0.7 else (rng.randint(0, 1), full + 1)
    bad = row not in scene.oracle.kv or last > full
    # Where a path was moved, the places after it count as stored.
    bad = bad and row not in scene.unsure and first < last and _stored_len(scene, row) <= scene.length(row)
    table = scene.runtime.table.kept
    free, due = table.num_free_states, np.zeros(0, np.bool_)
    if row in scene.oracle.kv:
        due = table.states_due([row] * (last - first), list(range(first, last)))
    if rng.random() < 0.5:
        # Pages that have left the window are kept for the other layers.
        is_full = last * scene.page_size <= scene.length(row) and row not in scene.unsure
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
    if last * scene.page_size > scene.length(row):
        scene.unsure.add(row)  # it may not store in them again
    have = table.have_states(ids)
    _judge_checkpoints(scene, row, first, due, have, free)
    for page_no, id_, has_state in zip(range(first, last), ids.tolist(), have.tolist(), strict=True):
        stored = scene.oracle.page(row, page_no, scene.page_size)
        begin = page_no * scene.page_size
        only_device_knows = scene.going_on.only_device_knows(row, begin + scene.page_size)
        scene.kept[id_] = Kept(page_no, stored, scene.oracle.kv[row][:begin], has_state, only_device_knows)


def _stored_len(scene: Scene, row: int) -> int:
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
    for place, is_due in enumerate([] if row in scene.going_on.untracked else due.tolist()):
        end = (first + place + 1) * scene.page_size
        if not is_due and end % scene.spacing == 0 and scene.going_on.surely(row, end):
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
        scene.admitted(row, [entry for id_ in ids for entry in scene.kept[id_].stored][:kv_len])
        scene.going_on.begin(row, *[kv_len] * (not last.only_device_knows))
        if last.only_device_knows:
            scene.going_on.lose_track([row])
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


def look(scene: Scene) -> None:
    """Tables report their rows and pages, which changes nothing."""
    table, row = scene.runtime.table, scene.a_row()
    ids = list(scene.kept)[:2]
    calls: list[Callable[[], object]] = [
        lambda: table.pages_of(row),
        lambda: table.num_held(row),
        lambda: table.room([row]),
        lambda: table.is_reserved([row], [scene.length(row)]),
        lambda: table.is_admitted(row),
        lambda: (table.is_empty, table.most_new_seqs, table.next_row, table.fewest_free_pages, table.num_free_rows),
        lambda: table.space(table.full.space),
        lambda: (table.kept.ids(), table.kept.pages(ids), table.kept.num_holders_of(ids)),
        lambda: table.kept.num_holders(1),
        lambda: scene.runtime.seals.tensors(),
        lambda: (scene.runner.counters, scene.runner.may_run_again),
        lambda: (scene.runner.graph_again, scene.runner.graph_of_last, scene.runner.capture_report()),
        lambda: table.kept.are_kept(table.pages_of(row).tolist(), table.full.space),
        lambda: (scene.runtime.padding, scene.runtime.deterministic, scene.runtime.selections, scene.runtime.target),
        lambda: (scene.runtime.kinds, scene.runtime.max_kv_len, scene.runtime.head_weights.of(0)),
        scene.runtime.head_weights.tensors,
        lambda: require_state_slots(table, state=torch.zeros(scene.options.max_num_rows + 1, device=scene.device)),
        scene.runner.check_addresses,
    ]
    for number, each in enumerate(calls):
        if number < 5 and row not in scene.rows:
            if number in (0, 1):
                scene.call(f"a look at row {row}", each, wrong="it is no request's")
        else:
            before = scene.state()
            scene.call(f"look {number}", each)
            if scene.state() != before:
                raise Finding(f"look {number} has changed something")


# Tokens that come and go


def export_row(scene: Scene) -> None:
    """A row's tokens into a buffer: those that it has, or more."""
    _export(scene, "row")


def export_pages(scene: Scene) -> None:
    """The same by pages, all layers or each for itself."""
    _export(scene, scene.one_of("export", ("pages", "layers")))


def _export(scene: Scene, way: str) -> None:
    movers, row = scene.movers, scene.a_row()
    length = scene.length(row)
    # Its pages may have more tokens than the row: those of another one that shares them.
    kv_len = scene.rng.choice((length, length, max(1, length - 2), length + (way == "row")))
    wrong = "it has no such tokens" if row not in scene.oracle.kv or kv_len > length else ""
    if row in scene.unsure:
        wrong = ""

    def run() -> tuple[Any, Tensor]:
        pages = movers.exporter.pages_of(row, kv_len)
        if way != "row":
            return movers.export(pages, kv_len, scene.device, by_layers=way == "layers")
        buffer = movers.room(movers.exporter.extent(pages, kv_len), scene.device)
        return movers.exporter.export_row(row, kv_len, buffer), buffer

    given = scene.call(f"export {kv_len} of row {row} by {way}", run, wrong=wrong)
    if given is not REFUSED and kv_len <= length:
        stored = scene.oracle.kv[row][:kv_len]
        extent, buffer = given
        scene.sent.append(Sent(extent, buffer, stored, by_layers=way == "layers", is_checked=way == "row"))


def import_row(scene: Scene) -> None:
    """Exported tokens come into a row of their own, or into one of another request or of none."""
    if not scene.sent:
        return export_row(scene)
    sent = scene.rng.choice(scene.sent[-3:])
    if sent.by_layers and scene.kind == "windows":
        return None
    if sent.by_layers:
        return _import_pages(scene, sent, "layers")
    row = scene.call("importer.admit", lambda: scene.movers.importer.admit(sent.extent))
    if row is REFUSED:
        return None
    scene.admitted(row)
    scene.unsure.add(row)  # what its window needs is not there yet
    target = row if scene.kind == "windows" or scene.rng.random() < 0.8 else scene.a_row()
    buffer, spoiled = _on_its_way(scene, sent)
    wrong = "no checksum was sent" if not sent.is_checked else spoiled
    given = scene.call(
        f"import into row {target}",
        lambda: scene.movers.importer.import_row(target, sent.extent, buffer),
        wrong="it is no request's" if target not in scene.oracle.kv else wrong,
    )
    if given is not REFUSED:
        scene.oracle.begin(target, list(sent.stored))
        scene.going_on.begin(target, sent.extent.kv_len)
        if target == row:
            scene.unsure.discard(row)
        else:
            scene.unsure.add(target)  # what it shares may reach further
    return None


def _on_its_way(scene: Scene, sent: Sent) -> tuple[Tensor, str]:
    """The buffer as it arrives, and why it is wrong: some have changed bytes, or the checksum and state of others."""
    if not sent.is_checked or scene.rng.random() < 0.7:
        return sent.buffer, ""
    spoiled = sent.buffer.clone()
    record = 256 + scene.runtime.states.memory.shape[1]
    others = [each for each in scene.sent if each.is_checked and each.stored != sent.stored]
    if others and scene.rng.random() < 0.6:
        spoiled[-record:] = scene.rng.choice(others).buffer[-record:]
        return spoiled, "its checksum is that of other tokens"
    at = scene.rng.randrange(len(spoiled))
    spoiled[at] ^= 1 << scene.rng.randrange(8)
    return spoiled, f"byte {at} has changed"


def import_pages(scene: Scene) -> None:
    """The same by pages."""
    sent = next((each for each in reversed(scene.sent) if not each.by_layers), None)
    if sent is None:
        return export_row(scene)
    if scene.kind == "windows":  # pages of tokens that were not sent become 0 there; import_row() refuses them
        return import_row(scene)
    return _import_pages(scene, sent, "pages")


def _import_pages(scene: Scene, sent: Sent, what: str) -> None:
    importer = scene.movers.importer
    row = scene.call("importer.admit", lambda: importer.admit(sent.extent))
    if row is REFUSED:
        return
    scene.admitted(row)
    scene.unsure.add(row)  # what its window needs is not there yet

    def run() -> None:
        scene.movers.import_(importer.pages_of(row, sent.extent.kv_len), sent)
        scene.runtime.table.mark_stored([row], [sent.extent.kv_len])

    if scene.call(f"import the {what} of row {row}", run) is not REFUSED:
        scene.oracle.begin(row, list(sent.stored))
        scene.unsure.discard(row)
