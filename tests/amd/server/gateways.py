"""A gateway in front of servers, as docker/gateway/run.sh starts it, and clients that send requests to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from tests.amd.house.source_tree import ROOT


@contextmanager
def gateway(*servers: str, policy: str = "cache_aware") -> Iterator[str]:
    """The URL of a gateway that knows all servers; it is stopped afterwards."""
    environment = {
        **os.environ,
        "GATEWAY_PORT": str(_free_port()),
        "METRICS_PORT": str(_free_port()),
        "GATEWAY_POLICY": policy,
        "PYTHON": sys.executable,
    }
    url = f"http://127.0.0.1:{environment['GATEWAY_PORT']}"
    process = subprocess.Popen(
        ["bash", "docker/gateway/run.sh", *servers], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        while healthy(url) != len(servers):
            assert process.poll() is None, "the gateway has ended"
            _pause()
        yield url
    finally:
        process.kill()
        process.wait()


def get(url: str) -> str:
    """Returns the body of the answer to a GET. Raises OSError."""
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def healthy(url: str) -> int:
    """Returns the number of servers that a gateway sends requests to; 0 if it does not listen."""
    try:
        workers = json.loads(get(f"{url}/workers"))["workers"]
    except (OSError, HTTPException):
        return 0
    return sum(worker["is_healthy"] for worker in workers)


def until_healthy(url: str, num_servers: int) -> None:
    """Waits, however long, until a gateway sends requests to num_servers servers."""
    while healthy(url) != num_servers:
        _pause()


def _pause() -> None:
    time.sleep(0.2)  # the processes that start or end need the cores


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's part of an answer.

    text:     the text that has come
    is_whole: true if the answer said that it was over
    """

    text: str
    is_whole: bool


def ask(url: str, prompt: str, max_tokens: int, *, stream: bool = False) -> Answer:
    """Requests a completion. Raises HTTPError if the answer is an error before it begins."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        if not stream:
            return Answer(_text(json.loads(answer.read())), True)
        texts: list[str] = []
        try:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    return Answer("".join(texts), True)
                if data:
                    texts.append(_text(json.loads(data)))
        except (OSError, HTTPException):  # the connection broke
            pass
        return Answer("".join(texts), False)


def _text(reply: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in reply.get("choices", ()))
