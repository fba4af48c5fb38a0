"""Guards: the safeguards against silent corruption, as values from which a runtime is built.

Each part that has safeguards has a frozen dataclass of them: TableGuards for the request table, MemoryGuards for the
memory of steps, and so on. Guards is composed of these. A field's default is the safe code. To show that a safeguard is
needed, a test replaces it by a wrong twin, code without the safeguard: ROCM_ATTN_DEBUG=1 ROCM_ATTN_DISABLE_GUARDS=id.
Wrong twins are in rocm-lab, which registers them by an entry point of the group WRONG_TWINS. The code of a step never
checks which of the two it runs. guards.json lists the safeguards; docs/guards.md is made from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from rocm_attn.errors import BadSetting
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.machine.distributions import installing
from rocm_attn.machine.settings import Settings, require_kind, settings
from rocm_attn.paging.adopted import AdoptedGuards
from rocm_attn.paging.batch_checks import BatchGuards
from rocm_attn.paging.host_record import HostGuards
from rocm_attn.paging.page_table import TableGuards
from rocm_attn.step.core import StepGuards
from rocm_attn.step.echo import NoEcho
from rocm_attn.step.publisher import PublishingGuards

# The group of the entry point of WRONG_TWINS: a mapping of every safeguard's id to its wrong twin.
WRONG_TWINS = "rocm_attn.wrong_twins"


@dataclass(frozen=True, slots=True)
class CaptureGuards:
    """The safeguards of a StepRunner's graphs.

    new_pins:    makes the check whether the memory that graphs read has moved
    may_capture: the number of the seal, 0 without one -> whether graphs may be made: a seal's memory cannot move
    """

    new_pins: Callable[[], PinnedTensors] = PinnedTensors
    may_capture: Callable[[int], bool] = lambda seal_number: seal_number > 0


@dataclass(frozen=True, slots=True)
class Guards:
    """The safeguards of a runtime against silent corruption, by part. All are on by default."""

    step: StepGuards = field(default_factory=StepGuards)
    table: TableGuards = field(default_factory=TableGuards)
    batch: BatchGuards = field(default_factory=BatchGuards)
    publishing: PublishingGuards = field(default_factory=PublishingGuards)
    capture: CaptureGuards = field(default_factory=CaptureGuards)
    adopted: AdoptedGuards = field(default_factory=AdoptedGuards)
    host: HostGuards = field(default_factory=HostGuards)

    @property
    def off(self) -> tuple[str, ...]:
        """Ids of the safeguards that are switched off, in the order of GUARDS."""
        return tuple(guard.id for guard in GUARDS if guard.is_off(self))

    def warn(self) -> None:
        """Logs the safeguards that are switched off, if any are."""
        if self.off:
            logging.getLogger(__name__).warning("safeguards are switched off: %s", ", ".join(self.off))

    def without(self, *ids: str) -> Guards:
        """Returns these guards with some more switched off, by id, for tests.

        Raises BadSetting for an id that does not exist, and if rocm-lab, which has the replacements, is not installed.
        """
        known = {guard.id: guard for guard in GUARDS}
        guards = self
        for id_ in ids:
            if id_ not in known:
                raise BadSetting(f"no safeguard has the id {id_!r}; the ids are {', '.join(known)}")
            guards = known[id_].put_in(guards, _wrong_twins()[id_])
        return guards


_ALL_ON = Guards()


@dataclass(frozen=True, slots=True)
class Guard:
    """One safeguard.

    id:       its name in the environment
    place:    its field of Guards: names of parts and of a part's field, from the outside in
    prevents: the fault that occurs without it
    report:   where that fault occurred: seed n, a founding report; Hn, a hazard of SGLang's AITER backend; Gn,
              the promise that it keeps
    test:     fails without it and passes with it: file::function
    """

    id: str
    place: tuple[str, ...]
    prevents: str
    report: str
    test: str

    def value_in(self, guards: Guards) -> Any:
        """The value at its place."""
        return reduce(getattr, self.place, guards)

    def is_off(self, guards: Guards) -> bool:
        """True if another value is at its place, except for one that stands for a device that runs nothing."""
        value = self.value_in(guards)
        return value is not self.value_in(_ALL_ON) and value is not NoEcho

    def put_in(self, guards: Guards, value: Any) -> Guards:
        """The same guards with another value at its place."""
        return _put(guards, self.place, value)


@cache
def _wrong_twins() -> Mapping[str, Any]:
    """Returns id -> the value of a safeguard that is switched off. Raises BadSetting."""
    for entry_point in entry_points(group=WRONG_TWINS):
        twins: Mapping[str, Any] = entry_point.load()
        return twins
    raise BadSetting(
        f"safeguards can only be switched off if rocm-lab is installed, and it is not; {installing('rocm_lab')}"
    )


_T = TypeVar("_T")


def _put(part: _T, place: Sequence[str], value: Any) -> _T:
    name, rest = place[0], place[1:]
    return replace(part, **{name: _put(getattr(part, name), rest, value) if rest else value})  # type: ignore[type-var]


GUARDS: tuple[Guard, ...] = tuple(
    Guard(**{**row, "place": tuple(row["place"].split("."))})
    for row in json.loads(Path(__file__).with_name("guards.json").read_text(encoding="utf-8"))
)


def guards_from_settings(chosen: Settings | None = None) -> Guards:
    """Returns all safeguards except those that the settings switch off. Default: the process's settings.

    Raises BadSetting for an id that does not exist, and for settings of another kind.
    """
    chosen = chosen if chosen is not None else settings()
    require_kind("chosen", chosen, Settings, BadSetting)
    return Guards().without(*chosen.disable_guards)
