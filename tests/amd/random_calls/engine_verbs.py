"""Verbs of an engine: every public call of ExternalAttention that reaches pages, tables or graphs, sometimes wrong."""

from collections.abc import Callable

import torch

from rocm_attn.integrations.kv_passport import KVPassport
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.watch.shadow_check import shadow_check
from rocm_lab.soak.calls import REFUSED
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.oracle import UNKNOWN
from rocm_lab.soak.seq import Seq
from tests.amd.random_calls import engine_step_verbs, engine_table_verbs
from tests.amd.random_calls.engine_scene import MOST_SEQS, EngineScene
from tests.amd.random_calls.engine_tables import PAGE, ROWS, WIDTH

Verb = Callable[[EngineScene], None]


# Observers


def forget(scene: EngineScene) -> None:
    """Rows go to other requests: nothing is looked at."""
    rows = scene.ints([scene.rng.randrange(ROWS)])
    scene.call("forget", lambda: scene.attention.forget(rows))


def weights(scene: EngineScene) -> None:
    """Other sinks, and such as no layer has."""
    scene.set_weights()
    bad = HeadWeights(sinks=torch.zeros(7))
    scene.call("weights of another layer", lambda: scene.attention.set_head_weights(1, bad), wrong="they are bad")


def shadow(scene: EngineScene) -> None:
    """shadow_check() of the step that has run, and of none."""
    seqs = scene.seqs(count=1)
    if not seqs:
        return
    step = scene.step(seqs)
    given = engine_step_verbs.run(scene, "a step to look at", seqs, step)
    engine_step_verbs.right(scene, "a step to look at", seqs, given)
    if given is REFUSED:
        return
    q, _, _ = scene.model.layers[0].of(scene.entries_of(seqs, step.padded_tokens))
    found = scene.call("shadow_check", lambda: shadow_check(scene.attention, 0, q, given[0]), right=True)
    if found and not any(UNKNOWN in scene.oracle.kv[seq.row] for seq in seqs):
        raise Finding(f"shadow_check says that sequences {found} are wrong")
    scene.call("shadow_check of layer 9", lambda: shadow_check(scene.attention, 9, q, given[0]), wrong="no such layer")


def look(scene: EngineScene) -> None:
    """The engine's attention reports its own state."""
    attention = scene.attention
    copies = any(table.source.copied for table in attention.tables.spaces)
    wrong = "" if copies else "no table is copied"
    scene.call("the event of copies", lambda: attention.tables.copied.query(), wrong=wrong)
    looks: list[Callable[[], object]] = [
        *(core.sealed_tensors for core in attention.cores.values()),
        attention.kernels,
        lambda: attention.pages.in_every_layer[Space.FULL],
        lambda: (attention.pages.layer(0), attention.pages.format(1)),
        lambda: KVPassport.of(attention),
        attention.pages.require_bound,
    ]
    for each in looks:
        scene.call("a look", each, right=True)


def ask(scene: EngineScene) -> None:
    """check_device()."""
    scene.call("check_device", scene.attention.check_device)


ENGINE_VERBS: dict[str, Verb] = {
    verb.__name__: verb
    for verb in (
        engine_step_verbs.decode, engine_step_verbs.extend, engine_step_verbs.compiled_step,
        engine_step_verbs.rows_worked, engine_step_verbs.masked,
        engine_step_verbs.spanned, engine_step_verbs.spoiled, engine_step_verbs.wrong_slots,
        engine_step_verbs.begin, engine_step_verbs.fill, engine_step_verbs.store,
        engine_step_verbs.attend, engine_step_verbs.of_a_thread, engine_step_verbs.seal, engine_step_verbs.capture,
        engine_step_verbs.replay, engine_step_verbs.recorded_fill, engine_table_verbs.use, engine_table_verbs.write,
        engine_table_verbs.bind, engine_table_verbs.bind_wrong, engine_table_verbs.admit, engine_table_verbs.release,
        engine_table_verbs.share, engine_table_verbs.export, engine_table_verbs.import_, forget, weights, shadow, look,
        ask,
    )
}  # fmt: skip


# Before and after a few verbs


def engine_prefill(scene: EngineScene) -> None:
    """Three requests that have tokens."""
    while len([row for row in scene.rows if scene.length(row)]) < 3:
        before = len(scene.rows)
        engine_table_verbs.admit(scene)
        if len(scene.rows) == before:
            return


def engine_settle(scene: EngineScene) -> None:
    """Each request goes on by a token, eagerly or by the graph, if there is one."""
    scene.compare_pool("closing")
    scene.tables.write()
    scene.listen()
    scene.provoked = False
    live = [row for row in scene.rows if 0 < scene.length(row) < WIDTH * PAGE]
    for first in range(0, len(live), MOST_SEQS):
        seqs = [Seq(row, scene.length(row), [scene.rng.randint(1, 11)]) for row in live[first : first + MOST_SEQS]]
        for seq in seqs:
            scene.tables.reserve(seq.row, seq.end)
        seqs = [seq for seq in seqs if len(scene.tables.pages[seq.row]) * PAGE >= seq.end]
        scene.tables.write()
        if seqs:
            by_graph = scene.graph is not None and scene.rng.random() < 0.5
            if by_graph:
                given = engine_step_verbs.replayed(scene, "going on by the graph", seqs)
            else:
                given = engine_step_verbs.run(scene, "going on", seqs, scene.step(seqs))
            if given is REFUSED:
                raise Finding("a plain step was refused")
            engine_step_verbs.right(scene, "going on", seqs, given)
    scene.listen()
    scene.compare_pool("going on")


def engine_clear(scene: EngineScene) -> None:
    """Room for the next verbs."""
    for row in [row for row in scene.rows if UNKNOWN in scene.oracle.kv[row] or scene.length(row) > WIDTH * PAGE - 12]:
        scene.release(row)
    while len(scene.rows) > 4:
        scene.release(scene.rng.choice(scene.rows))
    scene.sent = scene.sent[-4:]
    scene.log = scene.log[-12:]
