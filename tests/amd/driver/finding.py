"""Finding: what ends a seed, because it must not be."""

from __future__ import annotations


class Finding(Exception):
    """Something went wrong and nothing reported it; the message says what."""
