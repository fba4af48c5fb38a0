"""Verbs of steps that go wrong by no call's fault: infinities, no memory, a stray write."""

import torch

from rocm_attn.errors import DeviceFault, RocmAttnError
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.model import NOT_FINITE_ID
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.shown_verbs import going_on
from rocm_lab.soak.step_verbs import a_run, judged_step, reserve_for
from rocm_lab.soak.table_verbs import fork_at
from tests.amd.runtime.interrupts import OutOfMemory


def step_of_infinities(scene: Scene) -> None:
    """Some tokens have an infinite V: they are reported, and reach no one who does not see them."""
    seqs = going_on(scene)
    for seq in seqs:
        seq.ids = [NOT_FINITE_ID if scene.rng.random() < 0.4 else token_id for token_id in seq.ids]
    rows = [seq.row for seq in seqs if NOT_FINITE_ID in seq.ids]
    if not rows:
        return
    scene.provoked = True
    if judged_step(scene, a_run(scene), "a step of infinities", seqs, scene.batch(seqs)):
        if not scene.listen():
            raise Finding("an infinite V was not reported")
        scene.last = None
        scene.history.give_up(rows)


def memory_runs_out(scene: Scene) -> None:
    """Memory runs out somewhere in a step: what was stored before it is whole, also where pages were to be copied."""
    seqs = going_on(scene)
    if not seqs or scene.open is not None:
        return
    forks = scene.rng.random() < 0.5
    for seq in seqs if forks else ():
        _replaced_by_a_fork(scene, seq)
    # Pages are copied first.
    batch, place = scene.batch(seqs), int(10 ** scene.rng.uniform(0, 1 if forks else 2.2))
    scene.say(f"memory runs out at operation {place}")
    scene.provoked = True
    scene.last = scene.verified = None
    try:
        with OutOfMemory(place):
            scene.runner.run(batch)
    except torch.OutOfMemoryError:
        pass
    except DeviceFault as fault:
        scene.heard(fault)
        return
    except RocmAttnError as refusal:
        scene.say(f"refused: {refusal}")
        return
    for seq in seqs:
        scene.history.broke_off(seq)


def _replaced_by_a_fork(scene: Scene, seq: Seq) -> None:
    """A fork goes on in place of its row, which ends: the row's last page is free once it was copied."""
    parent, child = seq.row, fork_at(scene, seq.row, seq.begin)
    if child is not None:
        seq.row = child
        reserve_for(scene, [seq])
        scene.end(parent)


def stray_write(scene: Scene) -> None:
    """Something writes a length on the device while a step runs: no other request's pages are touched."""
    seqs = going_on(scene, most=1)[:1]
    if not seqs or scene.open is not None:
        return
    runtime = scene.runtime
    length = runtime.table.width * scene.page_size + scene.rng.choice((1, 2, 9))
    scene.say(f"a stray length {length} in row {seqs[0].row}")
    scene.provoked = True
    scene.last = scene.verified = None
    try:
        step = runtime.stage(scene.batch(seqs)).parts[0]
        for name, tensor in runtime.seals.tensors().items():
            if name == "kv_len":
                tensor[0] = length  # of a step that has other memory it changes nothing
        runtime.gate.fill()
        for number, layer in enumerate(scene.model.layers):
            _, k, v = layer.of(scene.model.entries(step))
            step.layers.store(number, k, v)
    except DeviceFault as fault:
        scene.heard(fault)
    finally:
        runtime.end_step()
    scene.listen()
    scene.history.broke_off(seqs[0])
    scene.history.give_up([seqs[0].row])
