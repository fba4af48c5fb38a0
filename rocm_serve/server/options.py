"""ServerOptions: limits for the server's clients. `rocm-attn serve` makes its flags of the fields.

Only the standard library is imported, so that --help does not wait for torch.
"""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_attn.machine.choices import AUTO
from rocm_attn.machine.option_texts import check_options, option
from rocm_serve.text.written_forms import CALL_FORMS, REASONING_FORMS, CallForm, ReasoningForm, require_form

LOOPBACK = "127.0.0.1"

# Option -> the forms that it chooses among.
_FORMS: dict[str, Iterable[CallForm | ReasoningForm]] = {"tool_parser": CALL_FORMS, "reasoning_parser": REASONING_FORMS}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server's address, and the limits of one request. Raises BadSetting."""

    host: str = option(LOOPBACK, "address that the server listens on", unit="ADDRESS")
    port: int = option(
        8000,
        "port that the server listens on; 0 chooses a free one, which is printed",
        unit="PORT",
        least=0,
        most=65535,
    )
    served_model_name: str | None = option(
        None, "name of the model in requests and answers", kind=str, unit="NAME", default_is="the value of --model"
    )
    generation_config: str = option(
        "auto",
        "defaults of the sampling parameters that a request omits: auto reads temperature, top_p, top_k, min_p, "
        "repetition_penalty and suppress_tokens from the model's generation_config.json, none uses OpenAI's defaults, "
        "and a path names another such file",
        unit="auto|none|FILE",
    )
    api_key_file: Path | None = option(  # noqa: RUF009  # it makes a field
        None,
        "file with one API key per line, alone or after its name and a space; empty lines and lines with # are "
        "skipped; clients send a key as a bearer token",
        kind=Path,
        unit="FILE",
        default_is="the keys in ROCM_ATTN_API_KEYS, separated by commas; without any, everybody is served",
    )
    allow_anonymous: bool = option(False, "allow a --host that other machines can reach without API keys")
    tls_cert: Path | None = option(  # noqa: RUF009
        None,
        "file with the server's certificate and its chain (PEM)",
        kind=Path,
        unit="FILE",
        default_is="without TLS",
    )
    tls_key: Path | None = option(  # noqa: RUF009
        None,
        "file with the certificate's key, not encrypted (PEM)",
        kind=Path,
        unit="FILE",
        default_is="in the file of --tls-cert",
    )
    max_connections: int = option(
        4096,
        "most open connections; further ones are closed at once; fewer if the process may not open this many files",
        unit="CONNECTIONS",
        least=1,
    )
    client_share: float = option(
        0.5,
        "share of --max-connections that one address may use, and of --max-waiting-bytes that one key may use, or "
        "one address if there are no keys; use 1 if a gateway passes requests on, because all then have its address",
        unit="SHARE",
        above=0,
        most=1,
    )
    head_seconds: float = option(30.0, "time that a client may take to send a request's head", unit="SECONDS", above=0)
    max_requests: int = option(
        256, "most prompts that run or wait; further requests are answered 429", unit="REQUESTS", least=1
    )
    max_new_tokens: int | None = option(
        None,
        "most new tokens that a request may ask for",
        kind=int,
        unit="TOKENS",
        least=1,
        default_is="the model's context",
    )
    max_prompt_tokens: int | None = option(
        None, "most tokens of a prompt", kind=int, unit="TOKENS", least=1, default_is="the model's context"
    )
    max_choices: int = option(16, "most answers that a request may ask for: its prompts times n", unit="N", least=1)
    max_stops: int = option(16, "most stop strings and stop tokens per request", unit="N", least=0)
    max_logprobs: int = option(20, "most top tokens that a request may ask for at each position", unit="N", least=0)
    max_body_bytes: int = option(4 * 2**20, "most bytes of a request's body", unit="BYTES", least=1)
    max_waiting_bytes: int = option(
        64 * 2**20,
        "most bytes of all bodies that are being read or wait for the engine; further ones are answered 429",
        unit="BYTES",
        least=1,
    )
    body_seconds: float = option(60.0, "time that a client may take to send a request's body", unit="SECONDS", above=0)
    deadline_seconds: float = option(
        600.0, "time that a request may take; clients may ask for less", unit="SECONDS", above=0
    )
    constraint_seconds: int = option(
        10, "CPU seconds that compiling a request's constraint may take", unit="SECONDS", least=1
    )
    write_seconds: float = option(
        60.0,
        "time after which a connection is closed if its client reads nothing of its answer",
        unit="SECONDS",
        above=0,
    )
    max_unread_tokens: int = option(
        4096,
        "most unread tokens of a streamed answer; a request with more is aborted",
        unit="TOKENS",
        least=1,
    )
    drain_seconds: float = option(
        30.0, "time after SIGTERM in which running requests may finish before they are aborted", unit="SECONDS", least=0
    )
    access_log: bool = option(
        False,
        "write a line of JSON per request to stderr; a request that is answered 500 or above always gets one",
    )
    traces: bool = option(
        False,
        "send OpenTelemetry traces of requests to OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra otel",
    )
    unhealthy_after: int = option(
        5, "consecutive failed requests after which /health and /ready answer 503", unit="REQUESTS", least=1
    )
    truth_seconds: float = option(
        60.0,
        "time for which /health/truth repeats its last verdict instead of a new run of the truth probe",
        unit="SECONDS",
        above=0,
    )
    truth_every: float = option(
        0.0,
        "time between runs of the truth probe, each of which delays tokens by a few steps; 0: only /health/truth "
        "runs it",
        unit="SECONDS",
        least=0,
    )
    chat_template: Path | None = option(  # noqa: RUF009
        None,
        "file with the chat template (Jinja)",
        kind=Path,
        unit="FILE",
        default_is="the model's own",
    )
    trust_request_chat_template: bool = option(False, "allow requests with their own chat_template")
    tool_parser: str = option(
        AUTO, "format of the model's function calls; auto derives it from the chat template", unit="NAME"
    )
    reasoning_parser: str = option(
        AUTO, "format of the model's reasoning; auto derives it from the chat template", unit="NAME"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if "/" in self.host or self.host.count(":") == 1:  # an address of IPv6 has more
            raise BadSetting(f"host is {self.host}; give an address or a name alone, and the port as --port")
        if self.served_model_name == "":
            raise BadSetting("served_model_name is empty; give a name, or leave it out for that of the model")
        self._check_tls()
        if self.most_waiting_bytes_of_one < self.max_body_bytes:
            raise BadSetting(
                f"max_waiting_bytes is {self.max_waiting_bytes} and client_share {self.client_share:g}, so that no "
                f"client could send a body of {self.max_body_bytes} bytes, which max_body_bytes allows; raise "
                "max_waiting_bytes"
            )
        for name, forms in _FORMS.items():
            form = getattr(self, name)
            try:
                require_form(form, forms)
            except LookupError as error:
                raise BadSetting(f"{name} is {form!r}, which is no form that is read here; {error}") from None

    @property
    def most_waiting_bytes_of_one(self) -> int:
        """The part of max_waiting_bytes that one client may have."""
        return int(self.max_waiting_bytes * self.client_share)

    def _check_tls(self) -> None:
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise BadSetting("tls_key is given and tls_cert is not; give the certificate too")
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, _no_password)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            files = f"tls_cert {self.tls_cert}" + (f" and tls_key {self.tls_key}" if self.tls_key else "")
            raise BadSetting(f"{files} cannot be used ({error}); give a certificate and its key, in PEM") from error


def _no_password() -> str:
    """Raises ValueError when the password of an encrypted key is needed. OpenSSL would ask the terminal."""
    raise ValueError("the key is encrypted")
