"""What hip_graphs raises.

Callers of rocm_attn see errors of rocm_attn.errors alone. Where it uses hip_graphs it turns these into its own words:
StaleRecording into GraphStale, BadLadder into BadSetting. RecordingRefused switches graphs off with its message as the
reason. SizeExceeded and KeyTaken would be a mistake of rocm_attn's own: it asks SizeLadder only for sizes that fit, and
releases a name's pin before it pins another tensor by it.
"""

from __future__ import annotations


class RecordingRefused(RuntimeError):
    """fn did something that a replay cannot repeat, or cannot repeat rightly; the message names the place."""


class StaleRecording(RuntimeError):
    """A recording reads memory that its owner has moved since; it must be recorded again."""


class KeyTaken(ValueError):
    """A name is in use already, and its holder would have been lost."""


class SizeExceeded(ValueError):
    """A size is larger than the largest of its ladder."""


class BadLadder(ValueError):
    """Sizes that make no ladder."""
