"""Drafts of every kind: what a server does, and what only a careless or a hostile caller does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.errors import OutOfPages
from tests.amd.random_calls.draft import Draft
from tests.amd.random_calls.finding import Finding
from tests.amd.random_calls.model import NOT_FINITE_ID, VOCABULARY
from tests.amd.random_calls.seq import Seq
from tests.amd.random_calls.world import World


def plain(world: World) -> Draft | None:
    """Requests go on where they are: decode, extend, both in one step, and some that wait."""
    rng = world.rng
    longest = rng.choice((1, 1, 1, 3, 6, 12, 60 if world.runtime.max_kv_len > 60 else 1))
    seqs = []
    for row in _some(world):
        begin = world.end(row)
        fewest = 1 if longest == 1 or rng.random() < 0.9 else 0
        count = min(rng.choice((1, longest, rng.randint(fewest, longest))), world.runtime.max_kv_len - begin)
        if longest == 1 and count < 1:
            continue
        seqs.append(Seq(row, begin, _ids(world, row, begin, count)))
    if not _reserve(world, seqs):
        return None
    draft = Draft(seqs, is_plain=not any(world.requests[seq.row].may_be_refused for seq in seqs))
    return _padded(world, draft)


def going_on(world: World, rows: Sequence[int]) -> Draft:
    """These rows take a token each, for which they have room."""
    return Draft([Seq(row, world.end(row), _ids(world, row, world.end(row), 1)) for row in rows])


def back(world: World) -> Draft | None:
    """Some requests take tokens back and store others there; some of them say so first."""
    seqs = []
    for row in _some(world):
        stored = world.end(row)
        begin = max(0, stored - world.rng.choice((0, 1, 2, 5, 30)))
        if world.rng.random() < 0.3:
            world.truncate(row, begin)
        count = min(world.rng.randint(1, 6), world.runtime.max_kv_len - begin)
        if count:
            seqs.append(Seq(row, begin, _ids(world, row, begin, count, anew=0.6)))
    if not seqs or not _reserve(world, seqs):
        return None
    return _padded(world, Draft(seqs, notes=["goes back"]))


def gap(world: World) -> Draft | None:
    """A request skips tokens that it never stored. To be refused, unless no layer sees them."""
    row = world.rng.choice(list(world.requests))
    begin = max(world.end(row), world.requests[row].doubtful) + world.rng.randint(1, 9)
    if begin >= world.runtime.max_kv_len:
        return None
    seqs = [Seq(row, begin, _ids(world, row, begin, 1))]
    return Draft(seqs, notes=["leaves a gap"]) if _reserve(world, seqs) else None


def masked(world: World) -> Draft | None:
    """New tokens that see what their bits say, with positions of their own."""
    rng = world.rng
    if rng.random() < 0.9 and not any(problem.custom_mask for problem in world.setting.problems):
        return plain(world)
    seqs = []
    for row in _some(world):
        begin = world.end(row)
        count = min(rng.randint(0, 6), world.runtime.max_kv_len - begin)
        seq = Seq(row, begin, _ids(world, row, begin, count))
        shows = np.random.default_rng(rng.randrange(2**32)).random((count, seq.end)) < rng.choice((0.3, 0.7, 1.0))
        if rng.random() < 0.5:
            shows[:, :begin] = True
        seq.shows = shows
        if rng.random() < 0.6:
            seq.positions = [rng.randint(begin, begin + token) for token in range(count)]
        elif rng.random() < 0.2:
            seq.positions = [rng.randint(0, begin + token) for token in range(count)]
        seqs.append(seq)
    if not _reserve(world, seqs):
        return None
    return _padded(world, Draft(seqs, has_mask=True, extra_mask_bytes=rng.choice((0, 0, 3))))


def shared(world: World) -> Draft | None:
    """A decode step that says which neighbours hold the same pages."""
    page_size = world.runtime.table.page_size
    table, order = world.runtime.table, sorted(_some(world), key=lambda row: world.requests[row].ancestor)
    rows = [row for row in order if 0 < world.end(row) < world.runtime.max_kv_len]
    groups: list[PrefixGroup] = []
    while sum(group.num_seqs for group in groups) < len(rows):
        at = sum(group.num_seqs for group in groups)
        pages = table.pages_of(rows[at]).tolist()
        common = world.end(rows[at]) // page_size
        count = 1
        for row in rows[at + 1 :]:
            others = table.pages_of(row).tolist()
            same = [a == b for a, b in zip(pages, others, strict=False)] + [False]
            fewer = min(common, same.index(False), world.end(row) // page_size)
            if fewer == 0:
                break
            common, count = fewer, count + 1
        groups.append(PrefixGroup(count, common * page_size if count > 1 else 0))
    seqs = [Seq(row, at, _ids(world, row, at, 1)) for row, at in ((row, world.end(row)) for row in rows)]
    if not _reserve(world, seqs):
        return None
    kept = world.kept_prefixes
    if kept is not None and kept.groups == tuple(groups):
        prefixes = kept
    else:
        prefixes = world.kept_prefixes = SharedPrefixes(groups)
    return _padded(world, Draft(seqs, prefixes=prefixes, notes=[f"groups {groups}"]))


def on_device(world: World) -> Draft | None:
    """The device knows shorter lengths, or other ids, than the host."""
    rng = world.rng
    decodes = rng.random() < 0.4
    names = rng.choice((("kv_len",), ("token_ids",), ("kv_len", "q_len"), ("kv_len", "q_len", "token_ids"), ("q_len",)))
    seqs = []
    for row in _some(world):
        stored = world.end(row)
        back = rng.choice((0, 0, 1, 2, 4)) if "kv_len" in names else 0
        begin = max(0, stored - back)
        bound = min(1 if decodes else rng.randint(1, 5), world.runtime.max_kv_len - begin)
        count = rng.randint(0, bound) if "q_len" in names else bound
        if bound < 1:
            continue
        seq = Seq(row, begin, _ids(world, row, begin, count, anew=0.3))
        seq.q_bound = bound
        # A length of the host's is what the device has.
        most = world.runtime.max_kv_len
        seq.kv_bound = min(most, max(seq.end, bound) + rng.randint(0, 4)) if "kv_len" in names else seq.end
        if "kv_len" not in names and bound > seq.kv_bound:
            continue
        seqs.append(seq)
    if not seqs or not _reserve(world, seqs):
        return None
    draft = Draft(seqs, on_device=frozenset(names), may_be_reported=True)
    if rng.random() < 0.2 and not decodes:
        _add_masks(world, draft)
    return _padded(world, draft)


def beyond(world: World) -> Draft | None:
    """Lengths on the device lie outside of their bounds."""
    draft = on_device(world)
    if draft is None or not draft.on_device & {"kv_len", "q_len"} or draft.has_mask:
        return None
    rng = world.rng
    seq = rng.choice(draft.seqs)
    if "kv_len" in draft.on_device:
        room = world.runtime.table.width * world.runtime.table.page_size
        seq.kv_on_device = rng.choice((seq.kv_bound + 1, seq.kv_bound + 7, room, room + 3, 2**30, -1, -(2**31)))
        if 0 <= seq.kv_on_device <= seq.kv_bound:
            seq.kv_on_device = seq.kv_bound + 1
    else:
        seq.q_on_device = rng.choice((seq.q_bound + 1, seq.q_bound + 40, 2**30, -1))
    draft.is_beyond = True
    draft.notes.append(f"row {seq.row} has kv_len {seq.kv_on_device}, q_len {seq.q_on_device} on the device")
    return draft


def not_finite(world: World) -> Draft | None:
    """Some tokens whose V is infinite or NaN: they reach no one who does not see them."""
    draft = plain(world)
    if draft is None:
        return None
    for seq in draft.seqs:
        seq.ids = [NOT_FINITE_ID if world.rng.random() < 0.2 else token_id for token_id in seq.ids]
    draft.is_plain = False
    draft.may_be_reported = any(NOT_FINITE_ID in seq.ids for seq in draft.seqs)
    draft.notes.append("not finite")
    if world.rng.random() < 0.4:
        _add_masks(world, draft)
        draft.is_plain = False
    return draft


def bad(world: World) -> Draft | None:
    """A batch that no runtime may take."""
    rng = world.rng
    seqs = [
        Seq(row, begin, _ids(world, row, begin, 1))
        for row, begin in ((row, world.end(row)) for row in _some(world))
        if begin < world.runtime.max_kv_len
    ]
    if not seqs or not _reserve(world, seqs):
        return None
    draft, seq = Draft(seqs), rng.choice(seqs)
    taken = set(world.requests)
    spoil: dict[str, Callable[[], object]] = {
        "a row twice": lambda: seqs.append(Seq(seq.row, seq.begin, seq.ids)),
        "row 0": lambda: setattr(seq, "row", 0),
        "a negative row": lambda: setattr(seq, "row", -1),
        "a row that is not admitted": lambda: setattr(
            seq, "row", min({*range(1, world.setting.options.num_rows + 2)} - taken)
        ),
        "more than reserved": lambda: setattr(seq, "kv_bound", world.requests[seq.row].reserved + 1),
        "more new tokens than KV": lambda: setattr(seq, "kv_bound", 0),
        "padded to fewer": lambda: setattr(draft, "pad_to", len(seqs) - 1),
        "groups of others": lambda: setattr(draft, "prefixes", SharedPrefixes([PrefixGroup(len(seqs) + 1, 0)])),
    }
    what = rng.choice(list(spoil))
    spoil[what]()
    draft.notes.append(f"bad: {what}")
    draft.is_bad = True
    return draft


def torn_groups(world: World) -> Draft | None:
    """Groups of a decode step drawn at random: refused, unless they happen to share what they say."""
    draft = plain(world)
    if draft is None or any(len(seq.ids) != 1 for seq in draft.seqs) or len(draft.seqs) < 2:
        return None
    page_size = world.runtime.table.page_size
    first = world.rng.randint(1, len(draft.seqs))
    lengths = [world.rng.randint(1, 2) * page_size, 0]
    counts = [first, len(draft.seqs) - first]
    groups = [PrefixGroup(count, length) for count, length in zip(counts, lengths, strict=True) if count]
    draft.prefixes, draft.is_plain = SharedPrefixes(groups), False
    draft.notes.append(f"groups {groups}")
    return draft


DRAFTS: dict[Callable[[World], Draft | None], int] = {
    plain: 40,
    back: 14,
    gap: 2,
    masked: 8,
    shared: 10,
    on_device: 10,
    beyond: 3,
    not_finite: 3,
    bad: 4,
    torn_groups: 2,
}


def _some(world: World) -> list[int]:
    """Some requests, in any order."""
    rows = list(world.requests)
    world.rng.shuffle(rows)
    rows = rows[: world.setting.options.max_num_seqs]
    return rows if world.rng.random() < 0.5 else rows[: world.rng.randint(0, len(rows))]


def _ids(world: World, row: int, begin: int, count: int, anew: float = 0.15) -> list[int]:
    """Mostly the request's script."""
    rng, script = world.rng, world.requests[row].script
    other = rng.random() < anew
    return [rng.randint(1, VOCABULARY - 1) if other else script[begin + token] for token in range(count)]


def _reserve(world: World, seqs: list[Seq]) -> bool:
    """Make room for what the host says of the sequences; requests outside of the step are given up where that helps."""
    rows, lengths = [seq.row for seq in seqs], [seq.kv_bound for seq in seqs]
    if world.rng.random() < 0.1:
        stored = [world.end(row) for row in rows]
        world.runtime.table.evict(np.array(rows, np.int32), np.array(stored, np.int32))
    for _ in range(len(world.requests) + 2):
        refusal = world.refusal(lambda: world.reserve(rows, lengths))
        if not refusal:
            return True
        if not refusal.startswith(OutOfPages.__name__):
            raise Finding(f"room for {lengths} tokens in rows {rows} was refused: {refusal}")
        if world.kept and world.rng.random() < 0.5:
            world.say("dropped all that was kept")
            for id_ in list(world.kept):
                world.drop([id_], world.spaces())
            continue
        others = [row for row in world.requests if row not in rows]
        if not others:
            world.say(f"no room: {refusal}")
            return False
        victim = world.rng.choice(others)
        world.say(f"gave up row {victim}")
        world.free(victim)
    return False


def _add_masks(world: World, draft: Draft) -> None:
    draft.has_mask = True
    for seq in draft.seqs:
        generator = np.random.default_rng(world.rng.randrange(2**32))
        seq.shows = generator.random((len(seq.ids), seq.end)) < 0.6


def _padded(world: World, draft: Draft) -> Draft:
    """Sometimes padded further than the ladder does, beyond the rows of the table too."""
    if world.rng.random() < 0.12:
        draft.pad_to = 2 * world.rng.randint((len(draft.seqs) + 1) // 2, len(draft.seqs) + 3) or None
    return draft
