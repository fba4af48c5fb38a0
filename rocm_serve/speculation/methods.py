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
            f"speculative {name!r} is not known; give {OFF}, {NGRAM}, {DRAFT_MODEL}MODEL with a small model that "
            f"has the same tokens (a directory, a .gguf file or a name), {EAGLE}HEAD with the directory of an "
            f"EAGLE head, {EAGLE}{SEEDED} or {EAGLE}{SEEDED3}"
        )
