"""Agreement: ranks that run one model in step must take the same kernels, make the same graphs, raise the same faults.

What a rank finds wrong with a kernel or a graph is true of its own device, driver and disk. Where the ranks of a model
go on with different ones, their collectives no longer meet. So each of them sends the others what it found, and all act
on everything that was found. A fault of the device is seen by one rank alone, whenever its echo comes: it waits for the
meeting before the next step but one, so that all ranks raise it between the same two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rocm_attn.errors import DeviceFault, RocmAttnError

# What this rank found wrong, by name of the thing -> what some rank found wrong; called by every rank, equally often.
Agree = Callable[[Mapping[str, str]], Mapping[str, str]]

# One operation by two names: the first is the older one, which warns from torch 2.13 on.
all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# Called with why a rank waits for the others, and with an empty string when it does not any more.
OnWait = Callable[[str], None]

_STEPS_WRAP = 2**31 - 1


class RanksDiverged(RocmAttnError, RuntimeError):
    """Ranks of one model were given different steps: a mistake in what decides them, and nothing after it is right."""


class Meetings(Protocol):
    """What the ranks of one model tell each other between steps; one for each runtime. All ranks call it alike.

    holds_faults: whether a fault that a step finds waits for a meeting, instead of being raised by that step
    steps_late:   how many steps after the one that has found a fault it is raised, at the latest
    digest:       of what the next step must have in common with that of other ranks; 0: nothing is compared
    """

    @property
    def holds_faults(self) -> bool: ...
    @property
    def steps_late(self) -> int: ...

    digest: int

    def before_step(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        """What all ranks are to raise now, in place of the step; mostly nothing. Waits for no rank that keeps up.

        number: of this rank's last step
        found:  on this rank, and not raised yet
        Raises RanksDiverged for the step before.
        """
        ...

    def all_faults(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        """What any rank has found. Waits for all of them."""
        ...

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Inside of it this rank waits for the others although something went wrong on it, which may have left them in
        a collective. reason: what; empty: nothing did
        """
        ...


class Agreement(Protocol):
    """How ranks agree: called as Agree is, on kernels and graphs; and by meetings, on faults."""

    def __call__(self, findings: Mapping[str, str]) -> Mapping[str, str]: ...

    def new_meetings(self) -> Meetings:
        """For one runtime."""
        ...


class _NoMeetings:
    """Of a rank alone, which raises a fault when it finds it."""

    holds_faults = False
    steps_late = 0

    def __init__(self) -> None:
        self.digest = 0

    def before_step(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        return ()

    def all_faults(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        return found

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        return nullcontext()


class _Alone:
    """A model on one rank, or ranks that need not agree: what was found."""

    def __call__(self, findings: Mapping[str, str]) -> Mapping[str, str]:
        return findings

    def new_meetings(self) -> Meetings:
        return _NoMeetings()


alone = _Alone()


class _Among:
    """All ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, on_wait: OnWait) -> None:
        self._group = group
        self._on_wait = on_wait

    def __call__(self, findings: Mapping[str, str]) -> Mapping[str, str]:
        of_rank: list[Mapping[str, str]] = [{} for _ in range(self._group.size())]
        dist.all_gather_object(of_rank, dict(findings), group=self._group)
        return found_by_any(of_rank)

    def new_meetings(self) -> Meetings:
        return _GroupMeetings(self._group, self._on_wait)


def say_who_waits(reason: str) -> None:
    """Log what went wrong on a rank that waits for the others: they may be in a collective that never ends."""
    if reason:
        logging.getLogger(__name__).warning("this rank waits for the others to agree, because %s", reason)


def among(group: dist.ProcessGroup, on_wait: OnWait = say_who_waits) -> Agreement:
    """All ranks of a group, which must be those that run one model in step: not those of another data-parallel replica,
    unless its forward meets theirs in a collective, as over shared experts.

    group:   one with a backend for tensors of the host, such as Gloo; best one that nothing else uses
    on_wait: called with a reason when this rank waits for the others although something went wrong on it, and with
             nothing when they have agreed
    """
    return _Among(group, on_wait)


def found_by_any(findings_of_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Everything that some rank found wrong, with the lowest such rank unless all of them say the same."""
    found: dict[str, str] = {}
    for rank, findings in enumerate(findings_of_rank):
        for name, reason in findings.items():
            everywhere = all(others.get(name) == reason for others in findings_of_rank)
            found.setdefault(name, reason if everywhere else f"on rank {rank}: {reason}")
    return found


# A fault as it is sent: what, step, rows, is_contained.
SentFault = tuple[str, int | None, tuple[int, ...], bool]


class _GroupMeetings:
    """Of a group. What a rank says before a step is heard before the next one, when it has long arrived."""

    holds_faults = True
    steps_late = 2  # it is said before the next step, and heard before the one after that

    def __init__(self, group: dist.ProcessGroup, on_wait: OnWait) -> None:
        self.digest = 0
        self._group = group
        self._on_wait = on_wait
        self._said = torch.zeros(2, dtype=torch.int64)  # number of faults, digest
        self._heard = torch.zeros(2 * group.size(), dtype=torch.int64)
        # the same memory, whose elements NumPy reads and writes in a tenth of the time
        self._said_words, self._heard_words = self._said.numpy(), self._heard.numpy().reshape(-1, 2)
        self._work: dist.Work | None = None  # of what was said before the last step

    def before_step(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        faults: Sequence[DeviceFault] = ()
        if self._work is not None:
            self._work.wait()
            self._work = None
            heard = self._heard_words.tolist()
            for rank, (_, digest) in enumerate(heard):
                if digest != heard[0][1]:
                    raise RanksDiverged(
                        f"rank {rank} ran another step than rank 0 after step {number - 1}; ranks of one model must be "
                        "given the same requests in the same order"
                    )
            if any(num_faults for num_faults, _ in heard):
                faults = self.all_faults(number, found)
        if not faults:
            self._said_words[:] = len(found), self.digest
            self._work = all_gather_into(self._heard, self._said, group=self._group, async_op=True)
        return faults

    def all_faults(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        sent = [(str(fault), fault.step, fault.rows, fault.is_contained) for each in found for fault in each.each]
        of_rank: list[tuple[int, list[SentFault]]] = [(0, []) for _ in range(self._group.size())]
        dist.all_gather_object(of_rank, (number, sent), group=self._group)
        return faults_of_any(of_rank, number)

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        if reason:
            self._on_wait(reason)
        yield
        if reason:
            self._on_wait("")


def faults_of_any(of_rank: Sequence[tuple[int, Sequence[SentFault]]], number: int) -> list[DeviceFault]:
    """One fault for each step that some rank found a fault of, by this rank's numbers of steps.

    of_rank: number of each rank's last step, and its faults. Trials of graphs count as steps, and one that failed early
             on a rank has left it with lower numbers
    number:  of this rank's last step
    """
    by_step: dict[int | None, list[tuple[int, SentFault]]] = {}
    for rank, (theirs, faults) in enumerate(of_rank):
        for fault in faults:
            step = None if fault[1] is None else (fault[1] - theirs + number) & _STEPS_WRAP
            by_step.setdefault(step, []).append((rank, fault))
    found = []
    for step, sent in by_step.items():
        same = len(sent) == len(of_rank) and len({what for _, (what, *_) in sent}) == 1
        what = sent[0][1][0] if same else "; ".join(f"on rank {rank}: {what}" for rank, (what, *_) in sent)
        rows = tuple(dict.fromkeys(row for _, fault in sent for row in fault[2]))
        found.append(DeviceFault(what, step, rows, is_contained=all(fault[3] for _, fault in sent)))
    return found
