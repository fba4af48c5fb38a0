"""Finding: what ends a seed, because it must not be."""

from __future__ import annotations


class Finding(Exception):
    """Something went wrong and no one was told; the message says what."""
