"""Moves over kept pages: a prefix cache that keeps pages, begins requests over them, and lets go."""

from __future__ import annotations

from rocm_attn.paging.index_spaces import Space
from tests.amd.random_calls.finding import Finding
from tests.amd.random_calls.world import World


def keep(world: World) -> None:
    """Some pages of a request are kept: mostly such as are full, in every space that holds them."""
    rng, table = world.rng, world.runtime.table
    page_size = table.page_size
    full = [row for row in world.requests if world.end(row) >= page_size]
    row = rng.choice(full if full and rng.random() < 0.9 else list(world.requests))
    request = world.requests[row]
    surely, perhaps = request.end // page_size, max(request.end, request.doubtful) // page_size
    end = rng.choice((surely, surely, rng.randint(0, surely), surely + rng.choice((0, 0, 1, 2))))
    first = 0 if rng.random() < 0.8 else rng.randint(0, end)
    held = {space: table.pages_of(row, space).tolist()[first:end] for space in world.spaces()}
    spaces = [space for space, pages in held.items() if 0 not in pages]
    if rng.random() < 0.2:
        spaces = world.spaces() if rng.random() < 0.5 else [Space.FULL]
    refusal = world.refusal(lambda: world.keep(row, first, end, spaces))
    world.say(f"keep pages {first} .. {end} of row {row} in {[space.name for space in spaces]}: {refusal or 'kept'}")
    must_go = end <= surely and not any(0 in held[space] for space in spaces) and not world.is_disturbed
    must_not = first < end and (end > perhaps or any(0 in held[space] for space in spaces))
    if (refusal and must_go) or (must_not and not refusal):
        raise Finding(f"pages {first} .. {end} of row {row} with {request.end} tokens: {refusal or 'kept'}")


def begin_over(world: World) -> None:
    """A request over kept pages of any rows, whatever lies in them, of which the last one may be taken in part."""
    rng = world.rng
    if not world.kept and world.requests:
        keep(world)
    ids: list[int] = []
    while found := [id_ for id_, kept in world.kept.items() if kept.page_no == len(ids)]:
        ids.append(rng.choice(found))
    if not ids:
        return
    ids = ids[: rng.choice((len(ids), rng.randint(1, len(ids))))]
    page_size = world.runtime.table.page_size
    kv_len = len(ids) * page_size - (rng.randint(0, page_size - 1) if rng.random() < 0.4 else 0)
    if rng.random() < 0.1:
        rng.shuffle(ids)
    if rng.random() < 0.1:
        kv_len += rng.choice((-page_size, page_size, -kv_len, 1))
    in_order = [world.kept[id_].page_no for id_ in ids] == list(range(len(ids)))
    fits = -(-kv_len // page_size) == len(ids) and kv_len <= world.runtime.max_kv_len
    whole = all({*world.spaces()} == world.kept[id_].spaces for id_ in ids)
    has_row = len(world.requests) < world.setting.options.num_rows
    refusal = world.refusal(lambda: world.begin_over(ids, kv_len))
    world.say(f"begin over {kv_len} kept tokens: {refusal or f'row {list(world.requests)[-1]}'}")
    must_go = in_order and fits and whole and has_row and not world.was_interrupted
    if (refusal and must_go) or (not refusal and not (in_order and fits and has_row)):
        raise Finding(f"a request over {kv_len} tokens in kept pages {ids}: {refusal or 'it came'}")


def drop(world: World) -> None:
    """Some of what is kept goes, in one space or in all; what is gone is refused from then on."""
    rng = world.rng
    if not world.kept and world.requests:
        keep(world)
    if not world.kept:
        return
    ids = rng.sample(list(world.kept), rng.randint(1, len(world.kept)))
    spaces = world.spaces() if rng.random() < 0.7 else [rng.choice(world.spaces())]
    has_none = any(not {*spaces} & world.kept[id_].spaces for id_ in ids)
    refusal = world.refusal(lambda: world.drop(ids, spaces))
    world.say(f"drop {len(ids)} kept pages in {[space.name for space in spaces]}: {refusal or 'dropped'}")
    if bool(refusal) != has_none:
        raise Finding(f"kept pages {ids} were dropped in {spaces}: {refusal or 'taken'}")


def dropped_twice(world: World) -> None:
    """Ids that were dropped are taken for nothing else, whatever is kept since."""
    if not world.dropped:
        drop(world)
    if not world.dropped:
        return
    table, id_ = world.runtime.table, world.rng.choice(world.dropped)
    uses = (
        lambda: table.kept.drop([id_]),
        lambda: table.kept.admit_over([id_], 1),
        lambda: table.kept.num_holders_of([id_]),
    )
    world.say(f"the dropped id {id_} is used again")
    if not world.refusal(world.rng.choice(uses)):
        raise Finding(f"the dropped id {id_} was taken for a kept page")
