"""ApiError: an error answer in OpenAI's form."""

from rocm_attn.errors import BadModel, BadRequest, FitsLater, RocmAttnError
from rocm_serve.async_engine import EngineEnded
from rocm_serve.limits import ContextExceeded
from rocm_serve.request_stream import RequestFailed
from rocm_serve.server.record import note_error, request_id

# A client that has gone reads no answer. The status is for the counts, and is nginx's.
CLIENT_GONE = 499

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """A request that is answered with an error.

    status:      HTTP status
    code:        a word that programs can look for
    param:       the field that is wrong, or ""
    retry_after: seconds after which the same request may be served; None if that is unknown
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str = "", retry_after: int | None = None
    ) -> None:
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after
        # A chat template may refuse a message in that message's words, with half of a character in them.
        super().__init__(message.encode(errors="backslashreplace").decode())

    def body(self) -> dict[str, object]:
        """Returns the body in the form that OpenAI's clients read, and the request's id."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": str(self), "type": kind, "param": self.param or None, "code": self.code}
        return {"error": {**error, "request_id": request_id() or None}}

    def note(self) -> None:
        """Notes it as the error of the current request. Call it where it is sent."""
        note_error(self.status, self.code, str(self))

    def headers(self) -> dict[str, str]:
        """Returns the headers that go with the body."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 504:
            headers["x-should-retry"] = "false"  # OpenAI's clients would ask for the same work again
        if self.status in (408, 413) or self.code in ("draining", "ambiguous_length"):
            headers["connection"] = "close"
        return headers


def bad_request(message: str, param: str = "", code: str = "invalid_value") -> ApiError:
    """Returns the error for a wrong request."""
    return ApiError(400, message, code=code, param=param)


def client_gone() -> ApiError:
    """Returns the error for a client that closed its connection or stopped reading. It does not get the answer."""
    return ApiError(CLIENT_GONE, "the client has disconnected", code="client_gone")


def reader_late(most_unread: int) -> ApiError:
    """Returns the error for a client that reads more slowly than the answer comes. It gets no more, nor this error."""
    return ApiError(
        CLIENT_GONE,
        f"more than {most_unread} tokens of the answer wait for the client to read them",
        code="reader_late",
    )


def deadline_passed(seconds: float) -> ApiError:
    """Returns the error for a request that has taken too long."""
    return ApiError(
        504,
        f"the request was not done within its deadline of {seconds:g} seconds and was aborted; ask for fewer "
        "tokens, or set a later deadline",
        code="deadline_exceeded",
    )


def draining(retry_after: int) -> ApiError:
    """Returns the error of a server that is shutting down and takes no more requests."""
    return ApiError(
        503,
        "the server is shutting down and accepts no more requests; send this one to another server, or again later",
        code="draining",
        retry_after=retry_after,
    )


def given_up_at_shutdown() -> ApiError:
    """Returns the error for a request that was not done when the server shut down."""
    return ApiError(
        503,
        "the server is shutting down, and the request was aborted before it was done; send it again",
        code="shutting_down",
    )


def api_error(error: RocmAttnError, retry_after: int) -> ApiError:
    """Converts an error of the engine to an answer. retry_after: seconds until a place is free"""
    if isinstance(error, FitsLater):
        return ApiError(429, str(error), code="too_many_requests", retry_after=retry_after)
    if isinstance(error, ContextExceeded):
        return bad_request(str(error), "max_tokens", code="context_length_exceeded")
    if isinstance(error, BadRequest | BadModel):
        return bad_request(str(error))
    if isinstance(error, RequestFailed):
        if error.completion.is_own_fault:
            return bad_request(str(error))
        return ApiError(500, f"the request has failed: {error}", code="request_failed")
    if isinstance(error, EngineEnded):
        return ApiError(503, str(error), code="engine_ended")
    return ApiError(500, str(error), code="server_error")
