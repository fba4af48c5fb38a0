"""Events: the results of steps, turned into one event per token only when they are iterated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, overload

from rocm_serve.request import Event, TokenEvent

# A step brings hundreds of events; map and zip make them without a Python call for each.
_event: Callable[[tuple[int, int, str, None, None]], TokenEvent] = partial(tuple.__new__, TokenEvent)
_NO_TEXT, _NO_REASON, _NO_LOGPROBS = repeat(""), repeat(None), repeat(None)


class NewTokens(NamedTuple):
    """New tokens of requests that go on, without text: replaces one TokenEvent per token.

    requests:  numbers
    token_ids: of each
    """

    requests: Sequence[int]
    token_ids: Sequence[Sequence[int]]

    def events(self) -> Iterator[TokenEvent]:
        """Yields a TokenEvent for each token."""
        for number, ids in zip(self.requests, self.token_ids, strict=True):
            yield from map(_event, zip(repeat(number), ids, _NO_TEXT, _NO_REASON, _NO_LOGPROBS, strict=False))

    def without(self, request: int) -> NewTokens:
        """The tokens of the other requests."""
        kept = [at for at, number in enumerate(self.requests) if number != request]
        return NewTokens([self.requests[at] for at in kept], [self.token_ids[at] for at in kept])


def without(parts: Sequence[Event | NewTokens], request: int) -> list[Event | NewTokens]:
    """The parts of Events without those of a request."""
    others = [part.without(request) if isinstance(part, NewTokens) else part for part in parts]
    return [part for part in others if (part.requests if isinstance(part, NewTokens) else part.request != request)]


class Events(Sequence[Event]):
    """Events in order. Equal to a list of the same events.

    parts: events, and NewTokens in the place of several
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Event | NewTokens] = ()) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Event]:
        for part in self.parts:
            if isinstance(part, NewTokens):
                yield from part.events()
            else:
                yield part

    def __len__(self) -> int:
        return sum(sum(map(len, part.token_ids)) if isinstance(part, NewTokens) else 1 for part in self.parts)

    def __bool__(self) -> bool:
        return any(not isinstance(part, NewTokens) or part.requests for part in self.parts)

    @overload
    def __getitem__(self, place: int) -> Event: ...
    @overload
    def __getitem__(self, place: slice) -> list[Event]: ...
    def __getitem__(self, place: int | slice) -> Event | list[Event]:
        return list(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Events)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))
