"""ApiKeys: the clients that are served, and the cached prefixes that each may use."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rocm_attn.errors import BadSetting
from rocm_attn.machine.settings import API_KEYS
from rocm_serve.server.options import ServerOptions

_SHORTEST = 8


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Keys as their SHA-256, so that no key is printed by mistake. If empty, everybody is served."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, keys: list[str]) -> ApiKeys:
        """Makes the keys. Raises BadSetting for a key that no header can carry, or that is easy to guess."""
        for number, key in enumerate(keys, 1):
            if len(key) < _SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
                raise BadSetting(
                    f"API key {number} cannot be used; a key has at least {_SHORTEST} printable ASCII characters and "
                    "no space"
                )
        return cls(tuple(dict.fromkeys(_digest(key.encode()) for key in keys)))

    def salt_of(self, authorization: bytes | None) -> str | None:
        """Returns the salt of the cached prefixes of a header's sender, "" if there are no keys, None if no key fits.

        Every key is compared in constant time.
        """
        if not self.digests:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given, found = _digest(key.strip()), None
        for digest in self.digests:
            if hmac.compare_digest(given, digest):
                found = digest
        return found.hex() if found is not None and scheme.lower() == b"bearer" else None


def keys_from(options: ServerOptions, environment: Mapping[str, str]) -> ApiKeys:
    """Returns the keys of the file, else of the variable. Raises BadSetting, also for a public address without keys."""
    if options.api_key_file is not None:
        keys = _read(options.api_key_file)
    else:
        keys = [key.strip() for key in environment.get(API_KEYS, "").split(",") if key.strip()]
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
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"the API keys in {path} cannot be read ({error})") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise BadSetting(f"{path} holds no API key; it must have one per line, or leave --api-key-file out")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
