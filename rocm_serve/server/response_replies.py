"""ResponseReplies: answers of /v1/responses, whole or in typed events."""

import secrets
import time
from collections.abc import Callable, Sequence

from rocm_serve.request import Completion, FinishReason
from rocm_serve.request_stream import OutputChunk
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.server.call_reader import Reader, Thought, ToolCall
from rocm_serve.server.emitted_tokens import Json
from rocm_serve.server.replies import Usage
from rocm_serve.server.responses_body import ResponsesBody


class ResponseReplies:
    """The answer to one request. It is built of events, streamed or not.

    sampling:     of the answer, with defaults for all that the body does not say
    reader:       of the answer's text
    count_tokens: of a text
    """

    done = b""

    def __init__(
        self,
        model: str,
        body: ResponsesBody,
        sampling: Sampling,
        reader: Callable[[], Reader],
        count_tokens: Callable[[str], int],
    ) -> None:
        self._body, self._model, self._reader, self._count_tokens = body, model, reader(), count_tokens
        self._sampling = sampling
        self._id, self._created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self._output: list[Json] = []  # the last one may be unfinished
        self._events: list[Json] = []
        self._num_events, self._thought = 0, ""
        self._reason: FinishReason | None = None

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        """Returns the whole answer."""
        (done,) = completions
        self._take(done)
        return self._response(usage)

    def opening(self, index: int) -> list[Json]:
        """Returns the events before the first piece."""
        self._add("response.created", response=self._response(None))
        self._add("response.in_progress", response=self._response(None))
        return self._taken()

    def chunk(self, index: int, piece: OutputChunk) -> list[Json]:
        """Returns the events of a piece."""
        self._take(piece)
        return self._taken()

    def ending(self, usage: Usage, *, is_asked: bool) -> list[Json]:
        """Returns the last event, which has the whole answer and always the usage."""
        self._add(f"response.{self._status}", response=self._response(usage))
        return self._taken()

    def _add(self, kind: str, **fields: object) -> None:
        self._events.append({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _taken(self) -> list[Json]:
        events, self._events = self._events, []
        return events

    def _take(self, said: Completion | OutputChunk) -> None:
        parts = self._reader.push(said.text)
        if said.finish_reason is not None:
            parts += self._reader.finish(is_cut=said.finish_reason != "stop")
            self._reason = said.finish_reason
        for part in parts:
            if isinstance(part, ToolCall):
                self._finish_item("completed")
                self._call(part)
            elif isinstance(part, Thought):
                self._thought += part.text
                self._write("reasoning", "reasoning_text", part.text)
            else:
                self._write("message", "output_text", part)
        if said.finish_reason is not None:
            self._finish_item(self._status)

    def _call(self, call: ToolCall) -> None:
        item = {"type": "function_call", "id": f"fc_{secrets.token_hex(24)}", "call_id": call.call_id}
        item |= {"name": call.name, "arguments": "", "status": "in_progress"}
        self._begin(item)
        where = {"item_id": item["id"], "output_index": len(self._output) - 1}
        self._add("response.function_call_arguments.delta", **where, delta=call.arguments)
        item["arguments"] = call.arguments
        self._add("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments)
        self._finish_item("completed")

    def _begin(self, item: Json) -> None:
        self._output.append(item)
        self._add("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))

    def _write(self, kind: str, part: str, text: str) -> None:
        """Adds to the unfinished item of a kind, which begins if there is none."""
        if not (self._output and self._output[-1]["status"] == "in_progress" and self._output[-1]["type"] == kind):
            self._finish_item("completed")
            named: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            number = f"{'msg' if kind == 'message' else 'rs'}_{secrets.token_hex(24)}"
            self._begin({"type": kind, "id": number, **named, "status": "in_progress", "content": []})
            self._output[-1]["content"] = [_part(part)]
            self._add("response.content_part.added", **self._where, part=_part(part))
        self._output[-1]["content"][0]["text"] += text
        self._add(f"response.{part}.delta", **self._where, delta=text, **_logprobs(part))

    @property
    def _where(self) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _finish_item(self, status: str) -> None:
        """Finishes the last item, if it is unfinished."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return
        item = self._output[-1]
        item["status"] = status
        if "content" in item:
            (part,) = item["content"]
            self._add(f"response.{part['type']}.done", **self._where, text=part["text"], **_logprobs(part["type"]))
            self._add("response.content_part.done", **self._where, part=part)
        self._add("response.output_item.done", output_index=len(self._output) - 1, item=item)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, usage: Usage | None) -> Json:
        """Returns the answer so far. usage: None while it is made"""
        body = self._body
        is_cut = usage is not None and self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if usage is None else self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True, exclude_defaults=False)},
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "tools": [{"strict": False, **tool.model_dump()} for tool in body.tools],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._count_tokens(self._thought) if self._thought else 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(kind: str) -> Json:
    return {"type": kind, "text": "", **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


def _logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "output_text" else {}
