"""Events: what steps have brought, put together token by token only where somebody goes through them so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple, overload

from rocm_attn.runner.request import Event, TokenEvent

# A step brings hundreds; these are put together without a call of Python for each.
_event: Callable[[tuple[int, int, str, None, None]], TokenEvent] = partial(tuple.__new__, TokenEvent)
_NO_TEXT, _NO_REASON, _NO_LOGPROBS = repeat(""), repeat(None), repeat(None)


class NewTokens(NamedTuple):
    """New tokens of a request that goes on, without text: in place of a TokenEvent for each."""

    request: int
    token_ids: Sequence[int]

    def events(self) -> Iterator[TokenEvent]:
        """They, one by one."""
        return map(_event, zip(repeat(self.request), self.token_ids, _NO_TEXT, _NO_REASON, _NO_LOGPROBS, strict=False))


class Events(Sequence[Event]):
    """Events in order. Equal to a list of the same ones.

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
        return sum(len(part.token_ids) if isinstance(part, NewTokens) else 1 for part in self.parts)

    def __bool__(self) -> bool:
        return bool(self.parts)

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
