"""How a draft is run: whole or split, by the runner or call by call, with or without a fault from outside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.split_forward import in_batch_order
from rocm_attn.errors import DeviceFault, RocmAttnError
from tests.amd.random_calls.draft import Draft
from tests.amd.random_calls.faults import OutOfMemory, interrupt
from tests.amd.random_calls.finding import Finding
from tests.amd.random_calls.judge import judge
from tests.amd.random_calls.world import ExpectedFault, Held, World
from tests.amd.worlds.world import padded_to

WAYS = ("run", "run", "run", "run eagerly", "call by call", "split", "split", "split, call by call")
MOST_STEPS_IN_A_MOVE = 100  # graphs are made and compared on steps of their own
FROM_OUTSIDE = (torch.OutOfMemoryError, KeyboardInterrupt)


def run(world: World, draft: Draft, way: str) -> bool:
    """Runs a draft, compares all of its results, and returns True if it was run.

    Raises Finding for anything that is wrong and was not reported.
    """
    world.say(f"{way}: {draft.words()}")
    try:
        batch = draft.batch(world.runtime.device)
    except RocmAttnError as refusal:
        return _refused(world, draft, str(refusal))
    first = world.runtime.faults.step_number + 1
    fault_of_its_own = ExpectedFault(range(first, first + MOST_STEPS_IN_A_MOVE), must=draft.must_be_reported)
    if draft.must_be_reported or draft.may_be_reported:
        world.faults.append(fault_of_its_own)
    for _ in range(6):
        before, first = world.state(), world.runtime.faults.step_number + 1
        try:
            world.model.forget()
            with _outside(world, draft):
                rows = _WAYS[way](world, batch, padded_to(draft.pad_to))
        except DeviceFault as fault:
            _unchanged(world, before, fault)
            world.heard(fault)
            if fault_of_its_own.reported or world.rng.random() < 0.15:
                _give_up(world, draft, fault_of_its_own)
                return False
        except RocmAttnError as refusal:
            _unchanged(world, before, refusal)
            _give_up(world, draft, fault_of_its_own)
            return _refused(world, draft, str(refusal))
        except FROM_OUTSIDE as cause:
            _failed(world, draft, cause)
            _give_up(world, draft, fault_of_its_own)
            return False
        else:
            fault_of_its_own.steps = range(first, world.runtime.faults.step_number + 1)
            return _passed(world, draft, rows, fault_of_its_own, _shape(world, draft, batch, way))
    raise Finding("a step is refused for faults of other steps again and again")


def _give_up(world: World, draft: Draft, fault: ExpectedFault) -> None:
    """The step is not tried again. The step that a graph was made of may have run, and been reported."""
    fault.must = False
    if draft.is_beyond:
        for seq in draft.seqs:
            world.free(seq.row)


def _shape(world: World, draft: Draft, batch: StepBatch, way: str) -> PaddedShape:
    padding = world.runtime.padding
    return (padding.split_shape if way.startswith("split") else padding.shape)(batch, padded_to(draft.pad_to))


def _refused(world: World, draft: Draft, why: str) -> bool:
    world.say(f"refused: {why.splitlines()[0]}")
    world.reported["refused"] = world.reported.get("refused", 0) + 1
    if draft.is_plain:
        raise Finding(f"a plain step was refused: {why.splitlines()[0]}")
    return False


def _unchanged(world: World, before: Held, error: Exception) -> None:
    """No step was run; pages that its windows had left may be given back already."""
    if not world.state().is_but_evictions(before):
        raise Finding(f"no step was run, and yet rows or pages have changed: {error}") from error


def _failed(world: World, draft: Draft, cause: BaseException) -> None:
    """The step may have stored its tokens, or not."""
    world.failed(cause)
    for seq in draft.seqs:
        if seq.row not in world.requests:
            continue
        # On the device a step may begin anywhere below its bound.
        begin = min(seq.begin, max(0, seq.kv_bound - seq.q_bound))
        world.oracle.store(seq.row, begin, [-1] * (max(seq.end, min(seq.kv_bound, seq.kv_on_device)) - begin))
        request = world.requests[seq.row]
        # Where it was to go back it may have ended before it did.
        request.doubtful = max(request.doubtful, seq.kv_bound, request.end)
        request.may_be_refused |= begin < request.end
        request.end = min(request.end, begin)


def _passed(world: World, draft: Draft, rows: Tensor, fault: ExpectedFault, shape: PaddedShape) -> bool:
    if draft.is_bad:
        raise Finding("a batch was taken that must be refused")
    if draft.is_beyond:
        world.step_passed()
        for seq in draft.seqs:
            world.free(seq.row)
        return True
    for seq in draft.seqs:
        world.oracle.store(seq.row, seq.begin, seq.stored)
        request = world.requests[seq.row]
        if seq.ids or seq.end > request.end:
            request.end = seq.end
        elif seq.q_bound and seq.kv_bound < request.end:
            # For all that the host knows, it went back.
            request.end, request.may_be_refused = seq.kv_bound, True
        if "kv_len" in draft.on_device:
            request.doubtful = max(request.doubtful, seq.kv_bound)
    wrong = judge(world, draft, rows, (shape.num_seqs, shape.num_tokens), shape.num_children)
    if wrong:
        # A result that is wrong and reported is not a silent one. The rows that it touched are given up.
        if fault not in world.faults:
            world.faults.append(fault)
        world.listen()
        if not fault.reported or (draft.is_plain and not world.is_disturbed):
            raise Finding(f"{wrong}{', and it was reported' if fault.reported else ''}")
        world.say(f"wrong, and reported: {wrong}")
        world.reported["wrong and reported"] = world.reported.get("wrong and reported", 0) + 1
        for seq in draft.seqs:
            world.free(seq.row)
    world.check_counts(nothing_waits=True)
    if world.rng.random() < 0.4:
        world.poison()
    world.step_passed()
    return True


def _outside(world: World, draft: Draft) -> AbstractContextManager[object]:
    """A fault from outside, at a place that is as likely early as late; mostly none.

    More often, and earlier, while pages wait to be copied: their launches come first.
    """
    rng, table = world.rng, world.runtime.table
    copies = max(len(table.space(space).pending.copies) for space in world.spaces())
    chance, operation, line = (
        rng.random(),
        int(10 ** rng.uniform(0, 1 if copies else 2.2)),
        int(10 ** rng.uniform(0, 3.3)),
    )
    if draft.is_beyond or world.setting.calm or chance >= (0.06, 0.3, 0.7)[min(copies, 2)]:
        return nullcontext()
    if chance < 0.025:
        world.say(f"an interrupt at line {line}")
        return interrupt(line)
    world.say(f"memory runs out at operation {operation}")
    return OutOfMemory(operation)


def _run(world: World, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
    return world.runner.run(batch, pad_to)


def _run_eagerly(world: World, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
    return world.runner.run_eagerly(batch, pad_to)


def _run_split(world: World, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
    return world.runner.run(batch, pad_to, halves=2)


def _call_by_call(world: World, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
    try:
        step = world.runtime.step(batch, world.runtime.plan(batch, pad_to)).parts[0]
        if world.rng.random() < 0.2:
            world.runtime.gate.fill()  # twice is harmless
        return world.model.forward_apart([step])[0][: batch.num_seqs]
    finally:
        world.runtime.end_step()


def _split_call_by_call(world: World, batch: StepBatch, pad_to: PadTo | None) -> Tensor:
    """The second half first, or both layer by layer."""
    try:
        split = world.runtime.step(batch, world.runtime.plan(batch, pad_to, halves=2))
        first, second = split.parts
        if world.rng.random() < 0.5:
            later, earlier = world.model.forward_apart([second, first])
        else:
            later = world.model.forward(second)
            earlier = world.model.forward(first)
        return in_batch_order(split, (earlier, later))[: batch.num_seqs]
    finally:
        world.runtime.end_step()


_WAYS: dict[str, Callable[[World, StepBatch, PadTo | None], Tensor]] = {
    "run": _run,
    "run eagerly": _run_eagerly,
    "call by call": _call_by_call,
    "split": _run_split,
    "split, call by call": _split_call_by_call,
}
