"""Speculation methods, as options name them. Only the standard library is imported: --help does not wait for torch."""

from __future__ import annotations

from rocm_attn.errors import BadSetting

OFF = "off"
NGRAM = "ngram"
DRAFT_MODEL = "draft:"
EAGLE = "eagle:"
# Replaces an EAGLE head's directory: random weights, always the same ones.
SEEDED = "seeded"
# Likewise, for a head of EAGLE-3.
SEEDED3 = "seeded3"


def require_method(name: str) -> None:
    """Raises BadSetting unless name is one of the above, the last two with a model after them."""
    has_model = any(name.startswith(kind) and len(name) > len(kind) for kind in (DRAFT_MODEL, EAGLE))
    if name not in (OFF, NGRAM) and not has_model:
        raise BadSetting(
            f"speculative {name!r} is not known; it is {OFF}, {NGRAM}, {DRAFT_MODEL}MODEL with the directory, the "
            f".gguf file or the name of a small model that shares the large one's tokens, or {EAGLE}HEAD with the "
            f"directory of an EAGLE head, or {EAGLE}{SEEDED} or {EAGLE}{SEEDED3}"
        )
