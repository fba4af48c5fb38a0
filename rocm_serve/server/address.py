"""The address of a server: its socket, and its URL."""

import contextlib
import socket

from rocm_attn.errors import BadSetting, reason_of
from rocm_serve.server.options import ServerOptions

# The limit of a kernel's timeout, a signed integer of 32 bits.
_MOST_MILLISECONDS = 2**31 - 1


def bind(options: ServerOptions) -> socket.socket:
    """Returns the socket of a server, which does not listen yet. Raises BadSetting if the address cannot be bound.

    Connections left by a killed server do not block the port for the next one (SO_REUSEADDR).
    """
    with contextlib.ExitStack() as unless_bound:
        try:
            found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, address = found[0]
            bound = unless_bound.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # Connections inherit it: the kernel ends one whose client takes no bytes for this time.
                milliseconds = int(min(max(1, options.write_seconds * 1000), _MOST_MILLISECONDS))
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            bound.bind(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be a host's
            raise cannot_listen(options, error) from error
        unless_bound.pop_all()
    return bound


def cannot_listen(options: ServerOptions, error: OSError | UnicodeError) -> BadSetting:
    """Returns the error of an address at which a server cannot listen."""
    return BadSetting(
        f"the server cannot listen on {options.host} port {options.port} ({reason_of(error)}); choose another with "
        "--host and --port"
    )


def url_of(bound: socket.socket, options: ServerOptions) -> str:
    """Returns the URL of a socket's server."""
    host, port = bound.getsockname()[:2]
    scheme = "http" if options.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
