"""Agreement: makes the ranks of one model use the same kernels and graphs, and raise the same faults.

A fault that a rank finds in a kernel or a graph depends on its own device, driver and disk. If the ranks of a model
continued with different kernels or graphs, their collectives would hang. So each rank sends the others its findings,
and all act on the findings of all. Only one rank sees a device fault, at some later step. It is not raised at once, but
exchanged before the next step but one, so that all ranks raise it between the same two steps.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rocm_attn.errors import DeviceFault, RocmAttnError

# Findings of this rank, by name -> findings of any rank; called by every rank, equally often.
Agree = Callable[[Mapping[str, str]], Mapping[str, str]]

# One operation under two names: the first is the older one, which warns from torch 2.13 on.
all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# Called with the reason why a rank waits for the others, and with an empty string when it no longer waits.
OnWait = Callable[[str], None]

_STEPS_WRAP = 2**31 - 1


class RanksDiverged(RocmAttnError, RuntimeError):
    """Ranks of one model got different steps, by a bug in the code that schedules them. Later results are wrong."""


class Meetings:
    """The exchange of faults between the ranks of one model, before each step; one object per runtime.

    All ranks make the same calls. This base class is for a single rank, which raises a fault when it finds it.

    holds_faults: True if a fault waits for the next exchange, instead of being raised by the step that finds it
    steps_late:   the most steps between the one that finds a fault and the one that raises it
    digest:       hash of the properties that the next step must have in common on all ranks; 0: not compared
    """

    holds_faults = False
    steps_late = 0

    def __init__(self) -> None:
        self.digest = 0

    def before_step(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        """Returns the faults that all ranks must raise now, instead of running the step; usually none.

        It waits only for ranks that are late.

        number: of this rank's last step
        found:  on this rank, and not raised yet
        Raises RanksDiverged for the step before.
        """
        return ()

    def all_faults(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        """Returns the faults that any rank has found. Waits for all of them."""
        return found

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """Returns a context in which this rank waits for the others after an error: they may hang in a collective.

        reason: the error; empty if there was none
        """
        return nullcontext()


class Agreement(Protocol):
    """How ranks agree: on kernels and graphs by calling it (see Agree), and on faults by new_meetings()."""

    def __call__(self, findings: Mapping[str, str]) -> Mapping[str, str]: ...

    def new_meetings(self) -> Meetings:
        """Makes the meetings of one runtime."""


class _Alone:
    """A model on one rank, or ranks that need not agree: returns the rank's own findings."""

    def __call__(self, findings: Mapping[str, str]) -> Mapping[str, str]:
        return findings

    def new_meetings(self) -> Meetings:
        return Meetings()


alone = _Alone()


class _Among:
    """Agreement of all ranks of a group."""

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
    """Logs the error of a rank that waits for the others: they may be in a collective that never ends."""
    if reason:
        logging.getLogger(__name__).warning("this rank waits for the others to agree, because %s", reason)


def among(group: dist.ProcessGroup, on_wait: OnWait = say_who_waits) -> Agreement:
    """Returns the agreement of all ranks of a process group: those that run one model in the same steps.

    Ranks of another data-parallel replica do not belong to it, unless the forwards of both share a collective, for
    instance with expert parallelism.

    group:   a process group with a backend for host tensors, such as Gloo; best one that nothing else uses
    on_wait: called with a reason when this rank waits for the others after an error, and with "" when they have agreed
    """
    return _Among(group, on_wait)


def found_by_any(findings_of_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """All findings of any rank, with the lowest such rank unless all of them report the same."""
    found: dict[str, str] = {}
    for rank, findings in enumerate(findings_of_rank):
        for name, reason in findings.items():
            everywhere = all(others.get(name) == reason for others in findings_of_rank)
            found.setdefault(name, reason if everywhere else f"on rank {rank}: {reason}")
    return found


# A fault in the form in which it is sent: what, step, rows, is_contained.
SentFault = tuple[str, int | None, tuple[int, ...], bool]


class _GroupMeetings(Meetings):
    """The meetings of a group. A message before a step is read before the next one, when it has long arrived."""

    holds_faults = True
    steps_late = 2  # it is sent before the next step, and read before the one after that

    def __init__(self, group: dist.ProcessGroup, on_wait: OnWait) -> None:
        super().__init__()
        self._group = group
        self._on_wait = on_wait
        self._said = torch.zeros(2, dtype=torch.int64)  # number of faults, digest
        self._heard = torch.zeros(2 * group.size(), dtype=torch.int64)
        # the same memory, whose elements NumPy reads and writes in a tenth of the time
        self._said_words, self._heard_words = self._said.numpy(), self._heard.numpy().reshape(-1, 2)
        self._work: dist.Work | None = None  # for the message before the last step

    def before_step(self, number: int, found: Sequence[DeviceFault]) -> Sequence[DeviceFault]:
        faults: Sequence[DeviceFault] = ()
        if self._work is not None:
            self._work.wait()
            self._work = None
            heard = self._heard_words.tolist()
            for rank, (_, digest) in enumerate(heard):
                if digest != heard[0][1]:
                    raise RanksDiverged(
                        f"rank {rank} ran another step than rank 0 after step {number - 1}; give all ranks of a "
                        "model the same requests in the same order"
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
    """One fault for each step in which some rank found a fault, by this rank's numbers of steps.

    of_rank: number of each rank's last step, and its faults. Trials of graphs count as steps, and a trial that failed
             early on a rank has left it with lower numbers
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
