"""Verbs of tables that the soak does not draw: windows, stored tokens, looks, and tokens that come and go."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rocm_attn.paging.state_slots import require_state_slots
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.movers import Sent
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.table_verbs import free, stored_len


def reserve_all(scene: Scene) -> None:
    """Room in some rows, or in none of them."""
    rows = [scene.a_row() for _ in range(scene.rng.randint(1, 3))]
    lengths = [scene.history.length(row) + scene.rng.randint(0, 5) for row in rows]
    bad = len(set(rows)) < len(rows) or not {*rows} <= {*scene.rows} or max(lengths) > scene.options.max_kv_len
    scene.call(
        f"reserve_all of {rows}", lambda: scene.runtime.table.reserve_all(rows, lengths), wrong="a row is bad" * bad
    )


def given_to_another(scene: Scene) -> None:
    """A row goes, and another request comes to it whose tokens were sent from elsewhere."""
    if not scene.sent or not scene.rows:
        return export_row(scene)
    free(scene)
    return import_row(scene)


def evict(scene: Scene) -> None:
    """Pages before the window go."""
    rows = [scene.a_row() for _ in range(2)]
    lengths = [scene.history.length(row) for row in rows]
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
    length = scene.history.length(row)
    kv_len = scene.rng.choice((length, max(0, length - 2), scene.room(row) + 1, -1, 2**32))
    rows = [row] * scene.rng.choice((1, 1, 1, 2))
    bad = row not in scene.oracle.kv or not 0 <= kv_len <= scene.room(row) or len(rows) > 1
    has_more = not bad and kv_len > stored_len(scene, row)
    given = scene.call(
        f"mark_stored({rows}, {kv_len})",
        lambda: scene.runtime.table.mark_stored(rows, [kv_len] * len(rows)),
        wrong="it is bad" * bad,
    )
    if given is not REFUSED:
        if kv_len < length:
            scene.history.unsure.add(row)  # perhaps below what others share
        scene.history.cut(row, kv_len)
        if has_more:
            scene.history.going_on.begin(row)


def look(scene: Scene) -> None:
    """Tables report their rows and pages, which changes nothing."""
    table, row = scene.runtime.table, scene.a_row()
    ids = list(scene.kept)[:2]
    calls: list[Callable[[], object]] = [
        lambda: table.pages_of(row),
        lambda: table.num_held(row),
        lambda: table.room([row]),
        lambda: table.is_reserved([row], [scene.history.length(row)]),
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


def export_row(scene: Scene) -> None:
    """A row's tokens into a buffer: those that it has, or more."""
    _export(scene, "row")


def export_pages(scene: Scene) -> None:
    """The same by pages, all layers or each for itself."""
    _export(scene, scene.one_of("export", ("pages", "layers")))


def _export(scene: Scene, way: str) -> None:
    movers, row = scene.movers, scene.a_row()
    length = scene.history.length(row)
    # Its pages may have more tokens than the row: those of another one that shares them.
    kv_len = scene.rng.choice((length, length, max(1, length - 2), length + (way == "row")))
    wrong = "it has no such tokens" if row not in scene.oracle.kv or kv_len > length else ""
    if row in scene.history.unsure:
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
    scene.history.admitted(row)
    scene.history.unsure.add(row)  # what its window needs is not there yet
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
        scene.history.going_on.begin(target, sent.extent.kv_len)
        if target == row:
            scene.history.unsure.discard(row)
        else:
            scene.history.unsure.add(target)  # what it shares may reach further
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
    scene.history.admitted(row)
    scene.history.unsure.add(row)  # what its window needs is not there yet

    def run() -> None:
        scene.movers.import_(importer.pages_of(row, sent.extent.kv_len), sent)
        scene.runtime.table.mark_stored([row], [sent.extent.kv_len])

    if scene.call(f"import the {what} of row {row}", run) is not REFUSED:
        scene.oracle.begin(row, list(sent.stored))
        scene.history.unsure.discard(row)
