"""Requests of the tests of load, and OpenAI's own client, which sends them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import openai

T = TypeVar("T")
S = TypeVar("S")

MODEL = "tiny"
# A beginning that many conversations share, so that the prefix cache has something to find.
SYSTEM = " ".join(f"w{number}" for number in range(20, 36))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a chat request came to."""

    text: str
    finish_reason: str | None


def client_of(url: str, key: str = "nobody asks") -> openai.AsyncOpenAI:
    """A client that sends nothing twice."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def conversations(num: int, seed: int = 0, *, max_tokens: int = 12) -> list[dict[str, Any]]:
    """The fields of so many chat requests: some of a common beginning, greedy and by chance, streamed and whole."""
    chooser = random.Random(seed)
    asked = []
    for _ in range(num):
        messages = [{"role": "system", "content": SYSTEM}] if chooser.random() < 0.5 else []
        words = [f"w{chooser.randrange(1, 63)}" for _ in range(chooser.randrange(1, 30))]
        messages.append({"role": "user", "content": " ".join(words)})
        asked.append(
            {
                "model": MODEL,
                "messages": messages,
                "max_tokens": chooser.randrange(1, max_tokens + 1),
                "temperature": chooser.choice((0.0, 0.9)),
                "seed": chooser.randrange(2**31),
                "stream": chooser.random() < 0.5,
            }
        )
    return asked


async def ask(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> Answer:
    """The whole answer. Raises openai.APIError. An answer that ends early is one: a stream must have its reason."""
    if not asked["stream"]:
        (choice,) = (await client.chat.completions.create(**asked)).choices
        return Answer(choice.message.content or "", choice.finish_reason)
    text, reason = "", None
    async with await client.chat.completions.create(**asked) as stream:
        try:
            async for chunk in stream:
                for each in chunk.choices:
                    text += each.delta.content or ""
                    reason = each.finish_reason or reason
        except openai.APIError:
            raise
        except Exception as error:  # of the library below OpenAI's client, which does not say so in a type of its own
            raise LostAnswer(f"a stream broke off after {text!r}: {error}") from error
    if reason is None:
        raise LostAnswer(f"a stream ended after {text!r}")
    return Answer(text, reason)


class LostAnswer(AssertionError):
    """A stream has ended without saying why its text does."""


async def ask_all(
    url: str, asked: Sequence[dict[str, Any]], *, at_a_time: int, key: str = "nobody asks"
) -> list[Answer]:
    """Answers in the order of what was asked, with so many requests open at any time."""
    async with client_of(url, key) as client:
        return await in_parallel(lambda each: ask(client, each), asked, at_a_time)


async def in_parallel(function: Callable[[S], Awaitable[T]], items: Iterable[S], at_a_time: int) -> list[T]:
    """What the function returns for each item, in their order. What it raises is raised when all have ended."""
    places = asyncio.Semaphore(at_a_time)

    async def one(item: S) -> T:
        async with places:
            return await function(item)

    results = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
