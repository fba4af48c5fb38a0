"""Tokenising: clients' texts become tokens, in threads that do nothing else."""

from __future__ import annotations  # array takes no parameter before Python 3.12

import asyncio
import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from rocm_serve.server.api_errors import ApiError
from rocm_serve.text.token_count import TokenCount
from rocm_serve.text.tokenizer import Tokenizer

_Result = TypeVar("_Result")

# Texts up to this number of characters are tokenised in the event loop. A longer one would delay other requests.
_SHORT = 2048
# Niceness of the thread that reads long texts: it has a tenth of a core's time where another thread wants the core too.
NICENESS = 10
# A text above this number of characters takes a thread for long.
_LONG = 2**16
_LARGE = 2**20  # characters of a text that leaves much free memory, which glibc gives back when asked
_give_back: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", int)
# A token has fewer characters in most texts. A text with more of them for each token that fits is counted in pieces.
_USUAL_CHARACTERS = 8


class Tokenising:
    """Turns texts into tokens, and refuses those that cannot fit before the tokenizer reads them whole.

    Long texts are read one after the other, in a thread of their own: they hold up neither short ones nor what else the
    server does in threads, and few of them take memory at a time. The tokenizer releases Python's lock meanwhile, and
    where all cores are busy that thread waits for the others.

    tokenizer:   of the model
    most_tokens: of a prompt
    refusal:     makes the error for a prompt of too many tokens, from "" or "at least " and their number
    """

    def __init__(self, tokenizer: Tokenizer, most_tokens: int, refusal: Callable[[str, int], ApiError]) -> None:
        self.tokenizer, self._most_tokens, self._refusal = tokenizer, most_tokens, refusal
        self._count = TokenCount.of(tokenizer.backend)
        self._for_short = ThreadPoolExecutor(2, "tokenise")
        self._for_long = ThreadPoolExecutor(1, "tokenise-long", _yield_cores)

    async def prompt(self, text: str) -> array[int]:
        """Returns the tokens of a plain text. Raises ApiError, BadRequest."""
        if len(text) <= _SHORT:
            return self._prompt(text)
        return await self.in_thread(len(text), self._prompt, text)

    async def conversation(self, messages: Sequence[Mapping[str, Any]], write: Callable[[], str]) -> array[int]:
        """Returns the tokens of a conversation. Raises ApiError, BadRequest, BadModel. write: writes its text"""
        length = sum(len(message["content"]) + len(message.get("reasoning_content", "")) for message in messages)
        return await self.in_thread(length, self._conversation, write)

    def close(self) -> None:
        """Ends the threads. A text that is being read does not delay this; those that wait are given up."""
        for threads in (self._for_short, self._for_long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, length: int, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls a function that tokenises. length: characters of its text"""
        threads: Executor = self._for_long if length > _LONG else self._for_short
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
        finally:
            if length > _LARGE:
                with suppress(RuntimeError):  # close() was called
                    threads.submit(_give_back, 0)

    def _prompt(self, text: str) -> array[int]:
        self._refuse_long(text)
        return array("i", self.tokenizer.encode(text, self._check))

    def _conversation(self, write: Callable[[], str]) -> array[int]:
        text = write()
        self._refuse_long(text)
        return array("i", self.tokenizer.encode_unmarked(text, self._check))

    def _refuse_long(self, text: str) -> None:
        if self._most_tokens < len(text) // _USUAL_CHARACTERS:
            least = self._count.least(text, self._most_tokens)
            if least > self._most_tokens:
                raise self._refusal("at least ", least)

    def _check(self, num_tokens: int) -> None:
        if num_tokens > self._most_tokens:
            raise self._refusal("", num_tokens)


def _yield_cores() -> None:
    """Lowers the priority of the current thread. Linux has one for each thread."""
    with suppress(OSError):  # a container may forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
