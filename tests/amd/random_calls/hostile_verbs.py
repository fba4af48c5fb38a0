"""Verbs of steps with masks and shared prefixes, and of what is no one's wish: infinities, no memory, a stray write."""

from __future__ import annotations

import numpy as np
import torch

from rocm_attn.batch.mask import StepMask, spans_of_blocks
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.errors import DeviceFault, RocmAttnError
from tests.amd.random_calls.finding import Finding
from tests.amd.random_calls.model import NOT_FINITE_ID
from tests.amd.random_calls.scene import Scene
from tests.amd.random_calls.seq import Seq
from tests.amd.random_calls.setting import MAX_KV_LEN, MAX_SEQS
from tests.amd.random_calls.step_verbs import by_hand, by_runner, judged_step, reserve_for
from tests.amd.runtime.interrupts import OutOfMemory


def going_on(scene: Scene, most: int = 3) -> list[Seq]:
    """New tokens of some rows that surely go on, with room for them."""
    rows = [row for row in scene.some(3) if scene.surely_goes_on(row)]
    seqs = [Seq(row, scene.length(row), scene.ids(scene.rng.randint(1, most))) for row in rows]
    reserve_for(scene, seqs)
    return [seq for seq in seqs if scene.room(seq.row) >= seq.end]


def step_with_mask(scene: Scene) -> None:
    """New tokens that see what their bits say, with positions of their own."""
    rng, seqs = scene.rng, going_on(scene)
    for seq in seqs:
        generator, count = np.random.default_rng(rng.randrange(2**32)), len(seq.ids)
        seq.shows = generator.random((count, seq.end)) < rng.choice((0.3, 0.7, 1.0))
        if rng.random() < 0.5:
            seq.shows[:, : seq.begin] = True
        if rng.random() < 0.6:
            seq.positions = [rng.randint(seq.begin, seq.begin + token) for token in range(count)]
    cells = np.packbits(
        np.concatenate([np.zeros(0, np.bool_), *(seq.shows.ravel() for seq in seqs if seq.shows is not None)]),
        bitorder="little",
    )
    # Bits after the last cell are no one's.
    bits = torch.from_numpy(np.concatenate([cells, np.full(rng.choice((0, 3)), 255, np.uint8)])).to(scene.device)
    mask = StepMask(bits, scene.ints([position for seq in seqs for position in seq.positions]))
    judged_step(scene, rng.choice((by_hand, by_runner)), "a step with a mask", seqs, scene.batch(seqs, mask=mask))
    scene.verified = None  # a move would be one of this step, which may be right


def step_with_spans(scene: Scene) -> None:
    """New tokens of a block see each other, and all before it, in layers that take masks."""
    seqs, block = going_on(scene), scene.rng.randint(1, 3)
    if not seqs:
        return
    for seq in seqs:
        number = np.arange(len(seq.ids))[:, None] // block
        seq.shows = np.arange(seq.end) < np.minimum(seq.begin + (number + 1) * block, seq.end)
    kv_len, q_len = (np.array(each, np.int32) for each in zip(*((seq.end, len(seq.ids)) for seq in seqs), strict=True))
    batch = scene.batch(seqs, mask=spans_of_blocks(kv_len, q_len, block, scene.device))
    judged_step(scene, scene.rng.choice((by_hand, by_runner)), f"a step of blocks of {block}", seqs, batch)
    scene.verified = None  # a move would be one of this step, which may be right


def step_sharing_prefixes(scene: Scene) -> None:
    """A decode step that says which neighbours hold the same pages; seldom of neighbours that do not."""
    table, page_size = scene.runtime.table, scene.page_size
    rows = [row for row in scene.rows if row not in scene.unsure and not scene.only_device_knows(row)]
    rows = [row for row in rows if 0 < scene.length(row) < MAX_KV_LEN]
    rows = sorted(rows, key=lambda row: table.pages_of(row).tolist())[:MAX_SEQS]
    seqs = [Seq(row, scene.length(row), scene.ids(1)) for row in rows]
    reserve_for(scene, seqs)
    if not seqs or any(scene.room(seq.row) < seq.end for seq in seqs):
        return
    groups: list[PrefixGroup] = []
    at = 0
    while at < len(seqs):
        pages, common, end = table.pages_of(rows[at]).tolist(), seqs[at].begin // page_size, at + 1
        while end < len(seqs):
            same = [a == b for a, b in zip(pages, table.pages_of(rows[end]).tolist(), strict=False)] + [False]
            fewer = min(common, same.index(False), seqs[end].begin // page_size)
            if fewer == 0:
                break
            common, end = fewer, end + 1
        groups.append(PrefixGroup(end - at, common * page_size if end - at > 1 else 0))
        at = end
    apart = [at for at, group in enumerate(groups[:-1]) if group.num_seqs == 1]
    wrong = ""
    if apart and min(seq.begin for seq in seqs) >= page_size and scene.rng.random() < 0.3:
        at = apart[0]
        groups[at : at + 2] = [PrefixGroup(1 + groups[at + 1].num_seqs, page_size)]
        wrong = "two neighbours hold different pages"
    batch = scene.batch(seqs, prefixes=SharedPrefixes(groups))
    run = scene.rng.choice((by_hand, by_runner))
    judged_step(scene, run, f"a step that shares {groups}", seqs, batch, wrong)


def step_of_infinities(scene: Scene) -> None:
    """Some tokens have an infinite V: they are reported, and reach no one who does not see them."""
    seqs = going_on(scene)
    for seq in seqs:
        seq.ids = [NOT_FINITE_ID if scene.rng.random() < 0.4 else token_id for token_id in seq.ids]
    rows = [seq.row for seq in seqs if NOT_FINITE_ID in seq.ids]
    if not rows:
        return
    scene.provoked = True
    run = scene.rng.choice((by_hand, by_runner))
    if judged_step(scene, run, "a step of infinities", seqs, scene.batch(seqs)):
        if not scene.listen():
            raise Finding("an infinite V was not reported")
        scene.last = None
        scene.give_up(rows)


def memory_runs_out(scene: Scene) -> None:
    """Memory runs out somewhere in a step: what was stored before it is whole, also where pages were to be copied."""
    seqs = going_on(scene)
    if not seqs or scene.open is not None:
        return
    batch, place = scene.batch(seqs), int(10 ** scene.rng.uniform(0, 2.2))
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
        scene.broke_off(seq)


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
    scene.broke_off(seqs[0])
    scene.give_up([seqs[0].row])
