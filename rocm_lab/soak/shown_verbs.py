"""Verbs of steps that say what their tokens see or share, or whose tokens are taken back."""

from functools import partial

import numpy as np
import torch

from rocm_attn.batch.mask import StepMask, spans_of_blocks
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_lab.soak.finding import Finding
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.step_verbs import a_run, judged_step, reserve_for


def going_on(scene: Scene, most: int = 3, fewest: int = 1) -> list[Seq]:
    """New tokens of some rows that surely go on, with room for them."""
    rows = [row for row in scene.some(3) if scene.history.surely_goes_on(row)]
    seqs = [Seq(row, scene.history.length(row), scene.ids(scene.rng.randint(fewest, most))) for row in rows]
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
    mask = StepMask(
        torch.from_numpy(cells).to(scene.device), scene.ints([position for seq in seqs for position in seq.positions])
    )
    judged_step(scene, a_run(scene), "a step with a mask", seqs, scene.batch(seqs, mask=mask))
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
    judged_step(scene, a_run(scene), f"a step of blocks of {block}", seqs, batch)
    scene.verified = None  # a move would be one of this step, which may be right


def step_sharing_prefixes(scene: Scene) -> None:
    """A decode step that says which neighbours hold the same pages; seldom of neighbours that do not."""
    table, page_size = scene.runtime.table, scene.page_size
    rows = [row for row in scene.rows if row not in scene.history.unsure and not scene.history.only_device_knows(row)]
    rows = [row for row in rows if 0 < scene.history.length(row) < scene.options.max_kv_len]
    rows = sorted(rows, key=lambda row: table.pages_of(row).tolist())[: scene.options.max_num_seqs]
    seqs = [Seq(row, scene.history.length(row), scene.ids(1)) for row in rows]
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
    judged_step(scene, a_run(scene), f"a step that shares {groups}", seqs, batch, wrong)


def verify_drafts(scene: Scene) -> None:
    """A step of a token and drafts; any number of them is taken back, and the rows go on from there."""
    rng, run = scene.rng, a_run(scene)
    seqs = going_on(scene, scene.setting.num_drafts, scene.setting.num_drafts)
    if not seqs or not judged_step(scene, run, "drafts to verify", seqs, scene.batch(seqs)):
        return
    is_cut = rng.random() < 0.7
    later = [Seq(seq.row, rng.randint(seq.begin, seq.end), scene.ids(rng.choice((1, 1, 2, 5)))) for seq in seqs]
    for seq in later:
        if is_cut and seq.begin < scene.history.length(seq.row):
            cut = partial(scene.runtime.table.truncate, seq.row, seq.begin)
            scene.call(f"row {seq.row} goes back to {seq.begin}", cut, right=True)
            scene.history.changed(seq.row)
            scene.history.cut(seq.row, seq.begin)
    reserve_for(scene, later)
    if any(scene.room(seq.row) < seq.end for seq in later):
        return
    taken = judged_step(scene, run, f"rows go on after drafts, cut: {is_cut}", later, scene.batch(later))
    if is_cut and not taken and scene.open is None:
        raise Finding("rows that were cut to accepted drafts do not go on")
