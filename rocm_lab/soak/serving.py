"""Verbs of a server: steps that must be taken, of requests that grow, share pages, run out of them and end."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, repeat

from rocm_attn.batch.padding import PadTo
from rocm_attn.errors import OutOfPages
from rocm_lab.soak.scene import Scene
from rocm_lab.soak.seq import Seq
from rocm_lab.soak.step_verbs import (
    Run,
    after_round,
    by_runner,
    by_runner_in_halves,
    judged_step,
    move_paths,
    round_by_runner,
    tree_over,
    verify_trees,
)

_CHUNKS = 2, 20  # new tokens of a chunk, both included
_END_BEFORE = 9  # tokens before its largest length at which a request ends: the most that one verb stores


def decode(scene: Scene) -> None:
    """One new token in each sequence."""
    serve(scene, "decode", repeat(1))


def extend(scene: Scene) -> None:
    """Chunks of a few sequences."""
    serve(scene, "extend", [_chunk(scene) for _ in range(3)])


def mixed(scene: Scene) -> None:
    """Up to two chunks among decodes and idle sequences."""
    chunks = [_chunk(scene) for _ in range(scene.rng.randint(0, 2))]
    serve(scene, "mixed", chain(chunks, (min(1, scene.rng.randrange(4)) for _ in repeat(0))))


def idle(scene: Scene) -> None:
    """No new token in any sequence."""
    serve(scene, "idle", repeat(0))


def empty(scene: Scene) -> None:
    """No sequence."""
    serve(scene, "empty", ())


def trees(scene: Scene) -> None:
    """Trees of drafts, each with a mask; mostly the tokens of a path are kept, and moved where they follow others."""
    drawn = [tree_over(scene, row) for row in _rows(scene) if scene.history.length(row)]
    fit = {seq.row for seq in _with_room(scene, [seq for seq, _, _ in drawn])}
    drawn = [tree for tree in drawn if tree[0].row in fit]
    if not drawn:
        return
    verify_trees(scene, drawn, _runner(scene))
    if scene.verified is not None and scene.rng.random() < 0.8:
        unsure = set(scene.history.unsure)
        move_paths(scene, scene.verified, [], "")
        scene.history.unsure = unsure  # an accepted path must go on


def rounds(scene: Scene) -> None:
    """A round of drafts, none of which is kept but those of chains."""
    drafts = scene.rng.choice(scene.options.drafts)
    seqs = _with_room(scene, after_round(scene, _rows(scene), drafts))
    round_by_runner(scene, [seq.row for seq in seqs], drafts)


def _runner(scene: Scene) -> Run:
    """A step by the runner, sometimes in halves."""
    return by_runner_in_halves if scene.rng.random() < 0.25 else by_runner


def _chunk(scene: Scene) -> int:
    return scene.rng.randint(*_CHUNKS)


def serve(scene: Scene, what: str, lengths: Iterable[int]) -> None:
    """Runs a step that must be taken, of rows that go on. lengths: the new tokens of the first, the second and so on"""
    rng, longest = scene.rng, scene.options.max_kv_len
    seqs = [
        Seq(row, scene.history.length(row), scene.ids(min(new, longest - scene.history.length(row))))
        for row, new in zip(_rows(scene), lengths, strict=False)
    ]
    seqs = _with_room(scene, seqs)
    run = _runner(scene)
    batch = scene.batch(seqs)
    pad_to = None
    if rng.random() < 0.15:
        # One in three also pads tokens, as if another rank prefilled.
        more = 2 * max(1, batch.num_tokens) if rng.random() < 0.3 else 0
        pad_to = PadTo(2 * len(seqs) + 2 * rng.randint(1, 2), more)
    what += " in halves" * (run is by_runner_in_halves)
    judged_step(scene, run, what, seqs, batch, pad_to=pad_to, right=True)


def _rows(scene: Scene) -> list[int]:
    """Rows that go on, in any order: as many as a step takes, or fewer. Others end: some may be refused."""
    rng, longest = scene.rng, scene.options.max_kv_len - _END_BEFORE
    for row in scene.rows:
        if scene.history.length(row) > longest or (not scene.history.surely_goes_on(row) and rng.random() < 0.3):
            scene.end(row)
    rows = [row for row in scene.rows if scene.history.surely_goes_on(row)]
    rng.shuffle(rows)
    most = min(len(rows), scene.options.max_num_seqs)
    return rows[: most if rng.random() < 0.5 else rng.randint(min(1, most), most)]


def _with_room(scene: Scene, seqs: Sequence[Seq]) -> list[Seq]:
    """Reserves pages. Preempts the youngest requests and drops the oldest kept pages until there are enough."""
    left, table = list(seqs), scene.runtime.table
    while True:
        try:
            table.reserve_all([seq.row for seq in left], [seq.end for seq in left])
        except OutOfPages:
            if scene.kept and scene.rng.random() < 0.3:
                oldest = list(scene.kept)[:4]
                scene.call(f"drop {oldest}", partial(table.kept.drop, oldest), right=True)
                for id_ in oldest:
                    del scene.kept[id_]
            else:
                victim = scene.rows[-1]
                scene.end(victim)
                left = [seq for seq in left if seq.row != victim]
        else:
            return left
