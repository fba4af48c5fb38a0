"""The fixtures that all tests here share."""

from __future__ import annotations

from tests.amd.one_thread import one_thread

__all__ = ["one_thread"]
