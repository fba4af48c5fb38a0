"""Moves: what a server, or a person who debugs one, does between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rocm_attn.errors import DeviceFault, RocmAttnError, WrongState
from rocm_attn.step.merging import merge_states
from tests.amd.random_calls.draft import Draft
from tests.amd.random_calls.drafts import DRAFTS, beyond, going_on, not_finite, plain
from tests.amd.random_calls.faults import OutOfMemory, interrupt
from tests.amd.random_calls.finding import Finding
from tests.amd.random_calls.keeps import begin_over, drop, dropped_twice, keep
from tests.amd.random_calls.oracle import UNKNOWN, merged
from tests.amd.random_calls.setting import random_ladder
from tests.amd.random_calls.steps import FROM_OUTSIDE, WAYS, run
from tests.amd.random_calls.world import ExpectedFault, World


def step(world: World) -> None:
    """A step of some kind."""
    if not world.requests and world.rng.random() < 0.9:
        admit(world)
    draw = world.rng.choices(list(DRAFTS), list(DRAFTS.values()))[0]
    if not world.requests:
        draw = plain
    draft = draw(world)
    if draft is not None:
        run(world, draft, world.rng.choice(WAYS))


def admit(world: World) -> None:
    """A request comes, mostly with a prompt."""
    full = len(world.requests) == world.setting.options.num_rows
    refusal = world.refusal(world.admit)
    if bool(refusal) != full and not (refusal and world.was_interrupted):
        raise Finding(f"admit() with {len(world.requests)} requests: {refusal or 'a row came'}")
    world.say(f"admit: {refusal or list(world.requests)[-1]}")


def fork(world: World) -> None:
    """A request that shares the first tokens of another, however many."""
    rng, row = world.rng, world.rng.choice(list(world.requests))
    stored, page_size = world.end(row), world.runtime.table.page_size
    lengths = (stored, rng.randint(0, stored), stored // page_size * page_size, world.requests[row].reserved)
    kv_len = rng.choice((*lengths, world.requests[row].reserved + 1) if rng.random() < 0.2 else lengths[:3])
    refusal = world.refusal(lambda: world.fork(row, kv_len))
    world.say(f"fork row {row} at {kv_len}: {refusal or f'row {list(world.requests)[-1]}'}")
    if not refusal and kv_len > world.requests[row].reserved:
        raise Finding(f"row {row} was forked at {kv_len} tokens and has room for {world.requests[row].reserved}")


def free(world: World) -> None:
    """A request goes; a second time is refused."""
    row = world.rng.choice(list(world.requests))
    world.say(f"free row {row}")
    world.free(row)
    if not world.refusal(lambda: world.runtime.table.free(row)):
        raise Finding(f"row {row} was freed twice")


def reserve(world: World) -> None:
    """Room for later steps in one row, sometimes more than there is."""
    row = world.rng.choice(list(world.requests))
    most = world.runtime.max_kv_len
    kv_len = world.rng.randint(0, most) if world.rng.random() < 0.7 else most + world.rng.randint(1, 40)
    refusal = world.refusal(lambda: world.runtime.table.reserve(row, kv_len))
    world.say(f"reserve {kv_len} in row {row}: {refusal}")
    if refusal:
        return
    if kv_len > most:
        raise Finding(f"row {row} has room for {kv_len} tokens, more than max_kv_len = {most}")
    world.requests[row].reserved = max(world.requests[row].reserved, kv_len)


def reserve_many(world: World) -> None:
    """Room in several rows, or in none."""
    rows = list(world.requests)
    most = world.runtime.max_kv_len + (world.rng.random() < 0.1) * 9
    lengths = [world.rng.randint(0, most) for _ in rows]
    refusal = world.refusal(lambda: world.reserve(rows, lengths))
    world.say(f"reserve {lengths} in rows {rows}: {refusal}")
    if not refusal and max(lengths) > world.runtime.max_kv_len:
        raise Finding(f"room for {lengths} tokens, more than max_kv_len = {world.runtime.max_kv_len}")


def truncate(world: World) -> None:
    """A request goes back, to any length."""
    row = world.rng.choice(list(world.requests))
    kv_len = world.rng.randint(0, world.requests[row].reserved + (world.rng.random() < 0.1))
    room = world.requests[row].reserved
    refusal = world.refusal(lambda: world.truncate(row, kv_len))
    world.say(f"truncate row {row} to {kv_len}: {refusal}")
    if bool(refusal) != (kv_len > room):
        raise Finding(f"row {row} with room for {room} tokens was cut to {kv_len}: {refusal or 'taken'}")


def evict(world: World) -> None:
    """Give back what the window has left."""
    rows = [row for row in world.requests if world.rng.random() < 0.7]
    lengths = [world.rng.randint(0, world.end(row)) for row in rows]
    world.say(f"evict before {lengths} in rows {rows}")
    world.runtime.table.evict(np.array(rows, np.int32), np.array(lengths, np.int32))


def twin(world: World) -> None:
    """A request is given up and computed again from its tokens, in other chunks."""
    row = world.rng.choice(list(world.requests))
    world.say(f"row {row} is computed again")
    script, length = world.requests[row].script, world.end(row)
    world.free(row)
    again = world.admit()
    world.requests[again].script = script
    for _ in range(6):
        draft = plain(world)
        if draft is not None:
            run(world, draft, world.rng.choice(WAYS))
        if again not in world.requests or world.end(again) >= length:
            return


def ask(world: World) -> None:
    """Wait for the device and hear what went wrong."""
    world.say("check_device()")
    world.listen()


def capture_all(world: World) -> None:
    """Make every graph, or as many as go."""
    world.say("capture_all()")
    with _from_outside(world):
        world.runner.capture_all()
    world.runner.check_addresses()


def reopen(world: World) -> None:
    """Other capture sizes; refused ones change nothing."""
    sizes = random_ladder(world.rng, world.setting.options.max_num_seqs + 4)
    tokens = world.rng.choice(((1,), (6,), (4, 16)))
    if world.rng.random() < 0.1:
        sizes = world.rng.choice(((), (0,), (3, 2), (2, 2)))
    world.say(f"reopen for {sizes}, {tokens}")
    with _from_outside(world):
        refusal = world.refusal(lambda: world.runner.reopen(sizes, tokens))
        if bool(refusal) != (sizes in ((), (0,), (3, 2), (2, 2))):
            raise Finding(f"reopen for {sizes}: {refusal or 'taken'}")


def unseal(world: World) -> None:
    """The sealed addresses are given up: graphs are void, and none is made until reopen()."""
    sizes = random_ladder(world.rng, world.setting.options.max_num_seqs + 4)
    world.say(f"unseal for {sizes}")
    with _from_outside(world):
        world.runtime.seals.unseal(sizes)


def chained_copies(world: World) -> None:
    """Two forks go on in pages that are to be copied; the first one's origin has gone, so its page may be the second's.

    Memory may run out while the pages are copied.
    """
    page_size, most = world.runtime.table.page_size, world.runtime.max_kv_len
    torn = [row for row in world.requests if world.end(row) % page_size and world.end(row) < most]
    if len(torn) < 2:
        return
    forks = []
    for row in world.rng.sample(torn, 2):
        end = world.end(row)
        world.truncate(row, end)
        world.say(f"row {row} with {end} tokens goes on as a fork")
        if world.refusal(lambda: world.fork(row, end)):  # noqa: B023
            return
        forks.append(list(world.requests)[-1])
        if world.refusal(lambda: world.reserve(forks[-1:], [end + 1])):  # noqa: B023
            return
        if len(forks) == 1:
            world.free(row)
    draft = going_on(world, forks)
    for _ in range(3):
        if run(world, draft, world.rng.choice(("run", "run eagerly"))) or world.setting.calm:
            return


def new_weights(world: World) -> None:
    """Other sinks and slopes in mid-serving: used from then on, by graphs too."""
    world.say("new head weights")
    world.set_weights()
    world.bits.clear()


def steps_overlap(world: World) -> None:
    """A step cannot begin while another runs, nor anything be stored when none does."""
    draft = plain(world)
    if draft is None or not draft.is_plain:
        return
    world.say("calls out of order")
    batch = draft.batch(world.runtime.device)
    try:
        world.runtime.step(batch)
        for call in (lambda: world.runtime.step(batch), world.runtime.seals.seal, lambda: world.runner.run(batch)):
            _must_raise_wrong_state(call)
    except DeviceFault as fault:
        world.heard(fault)
    finally:
        world.runtime.end_step()
    _must_raise_wrong_state(world.runtime.gate.fill)
    for seq in draft.seqs:  # what was begun may be taken for stored
        world.oracle.store(seq.row, seq.begin, [UNKNOWN] * len(seq.ids))
        world.requests[seq.row].doubtful = max(world.requests[seq.row].doubtful, seq.end)


def wiped_table(world: World) -> None:
    """Something writes to the table on the device: the step that meets it says so."""
    rows = [row for row in world.requests if 0 < world.end(row) < world.runtime.max_kv_len]
    if not rows:
        return
    row = world.rng.choice(rows)
    begin = world.end(row)
    if world.refusal(lambda: world.reserve([row], [begin + 1])):
        return
    draft = plain(world)
    if draft is None or not any(seq.row == row and seq.ids for seq in draft.seqs):
        return
    world.listen()
    run(world, draft, "run eagerly")  # afterwards the device knows the row
    if row not in world.requests or not begin < world.end(row) < world.runtime.max_kv_len:
        return
    world.say(f"the table's row {row} is wiped on the device")
    world.runtime.table.full.entries[row].zero_()
    again = plain(world)
    if again is not None and any(seq.row == row and seq.ids for seq in again.seqs):
        again.seqs[:] = [seq for seq in again.seqs if seq.row == row]
        begin, page_size = again.seqs[0].begin, world.runtime.table.page_size
        # A page that is new to the row reaches the device with the step: of such a step nothing is expected.
        again.is_beyond = begin % page_size != 0 and not _shares_page(world, row, begin // page_size)
        if again.is_beyond:
            again.is_plain, again.pad_to = False, None
            run(world, again, world.rng.choice(("run", "run eagerly", "split")))
    if row in world.requests:
        world.free(row)


def stray_write(world: World) -> None:
    """Something writes a length on the device while a step runs: no other request's pages are touched."""
    most, requests = world.runtime.max_kv_len, world.requests
    # The pages that such a length would lead to are those of the next row.
    rows = [row for row in requests if row + 1 in requests and world.end(row) < most]
    rows = [row for row in rows if not requests[row].may_be_refused]
    if not rows:
        return
    row = world.rng.choice(rows)
    if world.refusal(lambda: world.reserve([row], [world.end(row) + 1])):
        return
    draft = going_on(world, [row])
    world.listen()
    runtime = world.runtime
    first = runtime.faults.step_number + 1
    length = runtime.table.width * runtime.table.page_size + world.rng.choice((1, 2, 9))
    world.say(f"stray kv_len {length}: {draft.words()}")
    batch = draft.batch(runtime.device)
    try:
        step = runtime.stage(batch).parts[0]
        for name, tensor in runtime.seals.tensors().items():
            if name == "kv_len":
                tensor[0] = length  # of a step that has other memory it changes nothing
        runtime.gate.fill()
        for number, layer in enumerate(world.model.layers):
            _, k, v = layer.of(world.model.entries(step))
            step.layers.store(number, k, v)
    finally:
        runtime.end_step()
    world.faults.append(ExpectedFault(range(first, runtime.faults.step_number + 1), must=False))
    world.step_passed()
    for seq in draft.seqs:
        world.free(seq.row)


def merge(world: World) -> None:
    """Attention over parts of the keys, put together."""
    generator = np.random.default_rng(world.rng.randrange(2**32))
    tokens, heads, dim = generator.integers(1, 4), generator.integers(1, 4), generator.integers(1, 9)
    sides = []
    for _ in range(world.rng.randint(1, 4)):
        lse = np.where(generator.random((tokens, heads)) < 0.3, -np.inf, generator.normal(0, 9, (tokens, heads)))
        out = generator.normal(0, 1, (tokens, heads, dim))
        out[np.isinf(lse)] = world.rng.choice((np.nan, np.inf, 3.0))
        sides.append((np.float32(out), np.float32(lse)))
    device = world.runtime.device
    given = merge_states([(torch.from_numpy(o).to(device), torch.from_numpy(at).to(device)) for o, at in sides])
    wanted = merged([(o.astype(np.float64), at.astype(np.float64)) for o, at in sides])
    # Each merge rounds a few times, and the exponential of a difference as large as the LSEs.
    for tensor, array in zip(given, wanted, strict=True):
        if not np.allclose(tensor.cpu().numpy(), array, atol=2e-5, rtol=1e-6):
            raise Finding(f"merge_states of {len(sides)} sides is off")


def copied(world: World) -> None:
    """A copy of the runtime is refused, or is right and its original too."""
    draft = plain(world)
    world.say("deepcopy(runtime)")
    try:
        other = copy.deepcopy(world.runtime)
    except (RocmAttnError, TypeError) as refusal:
        world.say(f"refused: {refusal}")
        return
    if draft is None or not draft.seqs:
        return
    kept = {row: list(kv) for row, kv in world.oracle.kv.items()}
    ends = {row: request.end for row, request in world.requests.items()}
    original, world.runtime = world.runtime, other
    try:
        run(world, draft, "call by call")
    finally:
        world.runtime = original
    world.oracle.kv = {row: kept[row] for row in world.requests}
    for row, request in world.requests.items():
        request.end = ends[row]


MOVES: dict[Callable[[World], None], int] = {
    step: 100,
    admit: 16,
    fork: 14,
    free: 8,
    reserve: 5,
    reserve_many: 4,
    evict: 4,
    truncate: 4,
    twin: 3,
    ask: 2,
    capture_all: 1,
    reopen: 3,
    unseal: 1,
    chained_copies: 5,
    new_weights: 2,
    steps_overlap: 1,
    wiped_table: 2,
    stray_write: 2,
    merge: 2,
    copied: 1,
    keep: 10,
    begin_over: 14,
    drop: 4,
    dropped_twice: 4,
}
NEED_REQUESTS = {
    keep,
    fork,
    free,
    reserve,
    reserve_many,
    truncate,
    twin,
    stray_write,
    wiped_table,
    steps_overlap,
    copied,
}


def move(world: World) -> None:
    """One move."""
    chosen = world.rng.choices(list(MOVES), list(MOVES.values()))[0]
    if chosen in NEED_REQUESTS and not world.requests:
        chosen = admit
    chosen(world)


def finish(world: World) -> None:
    """Every request takes a last step, every fault is reported, and nothing is held when all are gone."""
    for _ in range(8):
        draft = world.rng.choice((plain, plain, plain, not_finite, beyond))(world) if world.requests else plain(world)
        if draft is not None and run(world, draft, world.rng.choice(("run", "run", "split"))):
            break
    world.listen()
    unreported = [fault.steps[-1] for fault in world.faults if fault.must and not fault.reported]
    if unreported:
        raise Finding(f"the fault of step {unreported[0]} was never reported")
    for row in list(world.requests):
        world.free(row)
    for id_ in list(world.kept):
        world.drop([id_], world.spaces())
    run(world, Draft([], is_plain=True), "run eagerly")
    world.check_counts(nothing_waits=True)


@contextmanager
def _from_outside(world: World) -> Iterator[None]:
    """Memory that runs out, or an interrupt, somewhere inside; mostly neither."""
    chance, place = world.rng.random(), int(10 ** world.rng.uniform(0, 3.5))
    try:
        if world.setting.calm or chance < 0.5:
            yield
        elif chance < 0.8:
            world.say(f"memory runs out at operation {1 + place // 8}")
            with OutOfMemory(1 + place // 8):
                yield
        else:
            world.say(f"an interrupt at line {place}")
            with interrupt(place):
                yield
    except DeviceFault as fault:
        world.heard(fault)
    except FROM_OUTSIDE as cause:
        world.failed(cause)


def _must_raise_wrong_state(call: Callable[[], object]) -> None:
    try:
        call()
    except WrongState:
        return
    raise Finding("a call out of order was taken")


def _shares_page(world: World, row: int, page_no: int) -> bool:
    table = world.runtime.table
    return table.kept.num_holders(int(table.pages_of(row)[page_no])) > 1
