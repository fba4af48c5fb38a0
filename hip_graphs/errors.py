"""The exceptions of hip_graphs.

Callers of rocm_attn see only errors of rocm_attn.errors. Where it uses hip_graphs it converts these: StaleRecording
into GraphStale, BadLadder into BadSetting. RecordingRefused switches graphs off with its message as the reason.
SizeExceeded and KeyTaken would be a bug of rocm_attn itself: it asks SizeLadder only for sizes that fit, and releases a
name's pin before it pins another tensor by it.
"""


class RecordingRefused(RuntimeError):
    """fn did something that a replay cannot repeat, or cannot repeat correctly; the message names the place."""


class StaleRecording(RuntimeError):
    """A recording reads memory that its owner has moved since; it must be recorded again."""


class KeyTaken(ValueError):
    """A name is in use already, and its holder would have been lost."""


class SizeExceeded(ValueError):
    """A size is larger than the largest of its ladder."""


class BadLadder(ValueError):
    """Sizes that make no ladder."""
