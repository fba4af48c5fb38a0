"""Requests to a server with OpenAI's API: /v1/completions, streamed, prompts as token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from rocm_attn.errors import BadSetting
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.load import LoadOptions, RequestRecord, ServingResult, put_load
from rocm_lab.bench.request_trace import RequestTrace

_CONNECT_S = 30.0


class _NoEvent(Exception):
    """A line of a stream is not one of OpenAI's events."""


class OpenAITarget:
    """A model of a server.

    client: of httpx, with the server's URL
    """

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model

    async def serve(self, prompt: Sequence[int], output_tokens: int, outcome: RequestRecord) -> None:
        """Does the same as Target.serve."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    outcome.failure = f"HTTP {response.status_code}: {_first_words(response.text)}"
                    return
                ended = False
                async for line in response.aiter_lines():
                    ended = _read(line, outcome) or ended
                if not ended and not outcome.failure:
                    outcome.failure = "the stream ended early"
        except _NoEvent as error:
            outcome.failure = f"not an event of OpenAI's API: {_first_words(str(error))}"
        except httpx.HTTPError as error:
            outcome.failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def run_load(
    url: str, model: str, api_key: str, trace: RequestTrace, options: LoadOptions, meter: EnergyMeter
) -> ServingResult:
    """Sends a trace to a server. model: empty: the first that the server names; api_key: empty: none

    Raises BadSetting if there is no such server.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=options.concurrency, max_keepalive_connections=options.concurrency)
    patience = httpx.Timeout(options.max_seconds, connect=_CONNECT_S)
    # trust_env is False, because a proxy would be measured too.
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=patience, trust_env=False
    ) as client:
        name = model or await _first_model(client, url)
        return await put_load(OpenAITarget(client, name), trace, options, meter)


async def _first_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        name: str = response.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise BadSetting(f"{url}/v1/models lists no model ({error}); give the URL of a server, or --model") from error
    return name


def _read(line: str, outcome: RequestRecord) -> bool:
    """Reads a line of the stream. Returns whether it is the last one. Raises _NoEvent."""
    if not line.startswith("data:"):
        return False
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return True
    try:
        return _read_event(json.loads(data), outcome)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _NoEvent(data) from error


def _read_event(found: dict[str, Any], outcome: RequestRecord) -> bool:
    """Reads an event. Returns False: an event is never the last line."""
    if "error" in found:
        outcome.failure = f"an error in the stream: {_first_words(str(found['error']))}"
        return False
    if any(choice.get("text") or choice.get("token_ids") for choice in found.get("choices") or ()):
        outcome.pieces.append(time.perf_counter())
    usage = found.get("usage")
    if usage:
        outcome.tokens = usage["completion_tokens"]
    return False


def _first_words(text: str) -> str:
    return " ".join(text.split())[:120]
