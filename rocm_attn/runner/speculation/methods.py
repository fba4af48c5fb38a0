"""How tokens are guessed, as options name it. Only the standard library is imported: --help does not wait for torch."""

from __future__ import annotations

from rocm_attn.errors import BadSetting

OFF = "off"
NGRAM = "ngram"
DRAFT_MODEL = "draft:"


def require_method(name: str) -> None:
    """Raise BadSetting unless name is one of the above, the last one with a model after it."""
    if name not in (OFF, NGRAM) and not (name.startswith(DRAFT_MODEL) and len(name) > len(DRAFT_MODEL)):
        raise BadSetting(
            f"speculative {name!r} is not known; it is {OFF}, {NGRAM}, or {DRAFT_MODEL}MODEL with the directory, the "
            ".gguf file or the name of a small model that shares the large one's tokens"
        )
