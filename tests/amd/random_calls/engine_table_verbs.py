"""Verbs of an engine's tables, pages and requests."""

from typing import Any

import torch

from rocm_attn.paging.adopted import CsrSource, TableSource
from rocm_attn.paging.index_spaces import Space
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.movers import Sent
from rocm_lab.soak.seq import Seq
from tests.amd.random_calls.engine_scene import EngineScene
from tests.amd.random_calls.engine_step_verbs import replayed, right, run, wrong
from tests.amd.random_calls.engine_tables import NUM_PAGES, PAGE, ROWS, WIDTH

# Tables and pages


def use(scene: EngineScene) -> None:
    """Another table, or the same with other rows; one that has moved is refused where graphs read it."""
    tables = scene.attention.tables
    kind = scene.one_of("use", ("moved", "fewer", "the same", "another kind", "narrow"))
    if kind == "moved":
        before = scene.tables.entries, scene.tables.indptr, scene.tables.indices
        scene.tables.make()
        scene.tables.write()
        given = scene.call(
            "use of a moved table", lambda: tables.use(scene.tables.source()), wrong="graphs" * scene.is_sealed
        )
        if given is REFUSED:
            scene.tables.entries, scene.tables.indptr, scene.tables.indices = before
        return
    if kind == "the same":
        scene.call("use of the same table", lambda: tables.use(scene.tables.source()), right=True)
        return
    if kind == "another kind":
        other: Any = CsrSource(scene.tables.indptr, scene.tables.indices)
        if scene.kind == "lists":
            other = TableSource(scene.tables.entries)
        scene.call("use of another kind of table", lambda: tables.use(other), wrong="it is another kind")
        return
    if kind == "narrow" and scene.kind != "lists":
        narrow = scene.tables.entries[:, :2]
        scene.call("use of a narrow table", lambda: tables.use(narrow), wrong="rows are too short")
        return
    _fewer_rows(scene)


def _fewer_rows(scene: EngineScene) -> None:
    """The same table with fewer rows: a step of one that it has not must be reported; then all rows again."""
    seqs = scene.seqs(count=1)
    if not seqs or max(seq.row for seq in seqs) == 0:
        return
    count = max(seq.row for seq in seqs)
    tables = scene.attention.tables
    if scene.kind == "lists":
        fewer: Any = CsrSource(scene.tables.indptr[: count + 1], scene.tables.indices)
    else:
        fewer = scene.tables.entries[:count]
    if scene.call("use of fewer rows", lambda: tables.use(fewer)) is REFUSED:
        return
    if scene.graph is not None and scene.rng.random() < 0.5:
        scene.provoked = True
        if replayed(scene, "a replay over fewer rows", seqs) is not REFUSED and not scene.listen():
            raise Finding("a replay over a row that the table has no more was not reported")
        scene.give_up([seq.row for seq in seqs])
    else:
        wrong(scene, "a row that the table has no more", seqs, scene.step(seqs))
    scene.call("use of all rows", lambda: tables.use(scene.tables.source()), right=True)


def write(scene: EngineScene) -> None:
    """tables.write(): the pages from row 0 on; or more than there is room for."""
    tables = scene.attention.tables
    pages = [scene.tables.pages.get(row, []) for row in range(ROWS)]
    if scene.rng.random() < 0.3:
        scene.call("write of too much", lambda: tables.write([[0] * (WIDTH + 1)]), wrong="the row is too long")
    bad = "it has no rows of pages" if scene.kind in ("slots", "lists") else ""
    scene.call("write", lambda: tables.write(pages), wrong=bad)
    scene.call("write of a space that is none", lambda: tables.write(pages, Space.SWA), wrong="no layer lives there")


def bind(scene: EngineScene) -> None:
    """Pages anew: those that there are, or others, which are refused where graphs read them."""
    pages, layer = scene.attention.pages, scene.rng.randrange(2)
    kv = scene.kv[layer]
    kind = scene.one_of("bind", ("the same", "moved", "all"))
    if kind == "the same":
        scene.call("bind of the same pages", lambda: pages.bind(layer, kv[0], kv[1]), right=True)
    elif kind == "all":
        axes = scene.rng.choice(("kv page token head dim", "kv page token"))
        bad = "these are no axes" if axes == "kv page token" else ""
        scene.call(f"bind_all of {axes}", lambda: pages.bind_all(scene.kv, axes), wrong=bad)
    else:
        moved = kv.clone()
        given = scene.call(
            "bind of moved pages", lambda: pages.bind(layer, moved[0], moved[1]), wrong="graphs" * scene.is_sealed
        )
        if given is not REFUSED:
            scene.kv[layer] = moved
            scene.renew_movers()


def bind_wrong(scene: EngineScene) -> None:
    """Pages of another form, of no layer, or more than kernels were chosen for."""
    pages, layer = scene.attention.pages, scene.rng.randrange(2)
    kv = scene.kv[layer]
    kind = scene.one_of("bind wrong", ("more", "another page size", "index", "no layer"))
    if kind == "index":
        scene.call("bind_index", lambda: pages.bind_index(layer, kv[0][:, :, 0]), wrong="no layer has an indexer")
    elif kind == "no layer":
        scene.call("bind of layer 7", lambda: pages.bind(7, kv[0], kv[1]), wrong="there is no such layer")
    else:
        shape = (NUM_PAGES + 1, PAGE) if kind == "more" else (4, PAGE + 1)
        other = torch.zeros(2, *shape, 1, kv.shape[-1], device=scene.device)
        scene.call(f"bind: {kind}", lambda: pages.bind(layer, other[0], other[1]), wrong="the layer has others")


# Requests, and tokens that come and go


def admit(scene: EngineScene) -> None:
    """A request with a prompt."""
    row = scene.admit()
    if row is None:
        return
    seq = Seq(row, 0, [scene.rng.randint(1, 11) for _ in range(scene.rng.randint(2, 7))])
    scene.tables.reserve(row, seq.end)
    scene.tables.write()
    if len(scene.tables.pages[row]) * PAGE >= seq.end:
        right(scene, "a prompt", [seq], run(scene, "a prompt", [seq], scene.step([seq])))


def release(scene: EngineScene) -> None:
    """A request goes."""
    if scene.rows:
        scene.release(scene.rng.choice(scene.rows))


def share(scene: EngineScene) -> None:
    """A request over the full pages of another."""
    rows = [row for row in scene.rows if scene.length(row) >= PAGE]
    row = scene.admit() if rows else None
    if row is None:
        return
    parent = scene.rng.choice(rows)
    full = scene.length(parent) // PAGE
    scene.tables.pages[row] = scene.tables.pages[parent][:full]
    scene.oracle.begin(row, scene.oracle.kv[parent][: full * PAGE])
    scene.tables.write()


def export(scene: EngineScene) -> None:
    """A request's tokens into a buffer, whole or by layers; pages that are none are refused."""
    rows = [row for row in scene.rows if scene.length(row)]
    if not rows:
        return
    row = scene.rng.choice(rows)
    kv_len = scene.length(row)
    listed = scene.tables.pages[row][: -(-kv_len // PAGE)]
    movers, bad = scene.movers, scene.rng.random() < 0.2
    if bad:
        listed = [*listed[:-1], NUM_PAGES + 1]
    by_layers = scene.rng.random() < 0.4

    pages = {Space.FULL: listed}
    given = scene.call(
        f"export of row {row}",
        lambda: movers.export(pages, kv_len, scene.device, by_layers=by_layers),
        wrong="there is no such page" * bad,
    )
    if given is not REFUSED:
        extent, buffer = given
        scene.sent.append(Sent(extent, buffer, list(scene.oracle.kv[row]), by_layers))
    scene.call(
        "export of a row",
        lambda: movers.exporter.export_row(row, kv_len, torch.zeros(0)),
        wrong="rows of an engine are not known",
    )


def import_(scene: EngineScene) -> None:
    """Exported tokens come into pages of a new request, whole or by layers."""
    if not scene.sent:
        return export(scene)
    sent, row = scene.rng.choice(scene.sent[-3:]), scene.admit()
    if row is None:
        return None
    scene.tables.reserve(row, len(sent.stored))
    scene.tables.write()
    listed = {Space.FULL: scene.tables.pages[row][: -(-len(sent.stored) // PAGE)]}
    if len(listed[Space.FULL]) * PAGE < len(sent.stored):
        return None

    if scene.call(f"import into row {row}", lambda: scene.movers.import_(listed, sent)) is not REFUSED:
        scene.oracle.begin(row, list(sent.stored))
    scene.call("a row of a runtime", lambda: scene.movers.importer.admit(sent.extent), wrong="an engine has none")
    return None
