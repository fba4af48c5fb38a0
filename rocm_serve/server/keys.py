"""ApiKeys: the clients that are served, their names, and the cached prefixes that each may use."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rocm_attn.errors import BadSetting, reason_of
from rocm_attn.machine.settings import API_KEYS, misspelt
from rocm_serve.server.options import ServerOptions

# The name of clients where there are no keys.
ANONYMOUS = "anonymous"
_SHORTEST = 8
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request. name: of its API key; salt: of the cached prefixes that it may use"""

    name: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys as their SHA-256, so that no key is printed by mistake. If empty, everybody is served.

    names: of the keys, for logs and counts: the word before a key, or key-1 for the first, if it has none
    """

    digests: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: list[str]) -> ApiKeys:
        """Makes the keys, each given alone or after its name and a space.

        Raises BadSetting for a key that no header can carry, that is too short, or that is given twice, and for a name
        that no label should have, or that two keys have.
        """
        name_of: dict[bytes, str] = {}
        for number, given in enumerate(keys, 1):
            name, _, key = given.rpartition(" ")
            name = name.strip() or f"key-{number}"
            if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
                raise BadSetting(
                    f"API key {number} cannot be used; a key has at least {_SHORTEST} printable ASCII characters and "
                    "no space, and may come after a name and a space"
                )
            if not _NAME.fullmatch(name) or name == ANONYMOUS or name in name_of.values():
                raise BadSetting(
                    f"API key {number} cannot have its name; a name has up to 64 letters, digits, dots, dashes and "
                    f"underscores, is not {ANONYMOUS}, and no other key has it"
                )
            digest = _digest(key.encode())
            if digest in name_of:
                raise BadSetting(f"API key {number} is also that of {name_of[digest]}; give each client its own key")
            name_of[digest] = name
        return cls(tuple(name_of), tuple(name_of.values()))

    def sender_of(self, authorization: bytes | None) -> Sender | None:
        """Returns a header's sender, ANONYMOUS if there are no keys, None if no key fits.

        Every key is compared in constant time.
        """
        if not self.digests:
            return Sender(ANONYMOUS)
        scheme, _, key = (authorization or b"").partition(b" ")
        given, found = _digest(key.strip()), None
        for digest, name in zip(self.digests, self.names, strict=True):
            if hmac.compare_digest(given, digest):
                found = Sender(name, digest.hex())
        return found if scheme.lower() == b"bearer" else None


def keys_from(options: ServerOptions, environment: Mapping[str, str]) -> ApiKeys:
    """Returns the keys of the file, else of the variable. Raises BadSetting, also for a public address without keys."""
    if options.api_key_file is not None:
        keys = _read(options.api_key_file)
    else:
        given = environment.get(API_KEYS, "")
        keys = [key.strip() for key in given.split(",") if key.strip()]
        if given and not keys:
            raise BadSetting(f"{API_KEYS} is {given!r}, which holds no API key; give keys, or unset it to have none")
        for name, meant in () if keys else misspelt(environment).items():
            if meant == API_KEYS:  # a server without keys would serve everybody
                raise BadSetting(f"{name} is set, which nothing reads; keys are in {API_KEYS}")
    if not keys and not options.allow_anonymous and not is_loopback(options.host):
        raise BadSetting(
            f"the server would listen on {options.host}, which others can reach, without API keys; give "
            f"--api-key-file or {API_KEYS}, or --allow-anonymous to serve everybody"
        )
    return ApiKeys.of(keys)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(path: Path) -> list[str]:
    try:
        # A byte that is no UTF-8 may be in a comment; in a key it is refused like other characters beyond ASCII.
        # str.splitlines would also end a comment at U+0085 and the like, and take its rest for a key.
        lines = path.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    except OSError as error:
        raise BadSetting(
            f"the API keys in {path} cannot be read ({reason_of(error)}); give a file with one per line"
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise BadSetting(f"{path} holds no API key; it must have one per line, or leave --api-key-file out")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
