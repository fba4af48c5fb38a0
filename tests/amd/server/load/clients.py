"""Requests of the load tests, and OpenAI's own client, which sends them."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import openai

T = TypeVar("T")
S = TypeVar("S")

MODEL = "tiny"
# A beginning that many conversations share, so that the prefix cache finds something.
SYSTEM = " ".join(f"w{number}" for number in range(20, 36))


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a chat request."""

    text: str
    finish_reason: str | None


def client_of(url: str, key: str = "nobody asks") -> openai.AsyncOpenAI:
    """A client that sends nothing twice, and waits for as long as a busy machine takes."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=None)


def conversations(num: int, seed: int = 0, *, max_tokens: int = 12) -> list[dict[str, Any]]:
    """Fields of `num` chat requests: some share a beginning; greedy and random; streamed and whole."""
    chooser = random.Random(seed)
    requested = []
    for _ in range(num):
        messages = [{"role": "system", "content": SYSTEM}] if chooser.random() < 0.5 else []
        words = [f"w{chooser.randrange(1, 63)}" for _ in range(chooser.randrange(1, 30))]
        messages.append({"role": "user", "content": " ".join(words)})
        requested.append(
            {
                "model": MODEL,
                "messages": messages,
                "max_tokens": chooser.randrange(1, max_tokens + 1),
                "temperature": chooser.choice((0.0, 0.9)),
                "seed": chooser.randrange(2**31),
                "stream": chooser.random() < 0.5,
            }
        )
    return requested


async def ask(client: openai.AsyncOpenAI, requested: dict[str, Any]) -> Answer:
    """Returns the whole answer. Raises openai.APIError, also for an early end: a stream must have its finish reason."""
    if not requested["stream"]:
        (choice,) = (await client.chat.completions.create(**requested)).choices
        return Answer(choice.message.content or "", choice.finish_reason)
    text, reason = "", None
    async with await client.chat.completions.create(**requested) as stream:
        try:
            async for chunk in stream:
                for each in chunk.choices:
                    text += each.delta.content or ""
                    reason = each.finish_reason or reason
        except openai.APIError:
            raise
        except Exception as error:  # from the library below OpenAI's client, which has no type of its own for it
            raise LostAnswer(f"a stream broke off after {text!r}: {error}") from error
    if reason is None:
        raise LostAnswer(f"a stream ended after {text!r}")
    return Answer(text, reason)


class LostAnswer(AssertionError):
    """A stream has ended without its finish reason."""


async def request_all(
    url: str, requested: Sequence[dict[str, Any]], *, at_a_time: int, key: str = "nobody asks"
) -> list[Answer]:
    """Returns the answers in the order of the requests, with at_a_time requests open at any time."""
    async with client_of(url, key) as client:
        return await in_parallel(lambda each: ask(client, each), requested, at_a_time)


async def in_parallel(function: Callable[[S], Awaitable[T]], items: Iterable[S], at_a_time: int) -> list[T]:
    """Returns the function's results in the order of the items. An exception is raised when all have ended."""
    places = asyncio.Semaphore(at_a_time)

    async def one(item: S) -> T:
        async with places:
            return await function(item)

    results = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
