"""What hip_graphs raises; an upper floor translates these into its own words."""

from __future__ import annotations


class RecordingRefused(RuntimeError):
    """fn did something that a replay cannot repeat, or cannot repeat rightly; the message names the place."""


class StaleRecording(RuntimeError):
    """A recording reads memory that its owner has moved since; it must be recorded again."""


class NotRecorded(RuntimeError):
    """A replay was asked for under a key that holds no recording."""


class KeyTaken(ValueError):
    """A key or a name is in use already, and its holder would have been lost."""


class SizeExceeded(ValueError):
    """A size is larger than the largest of its ladder."""


class BadLadder(ValueError):
    """Sizes that make no ladder."""
