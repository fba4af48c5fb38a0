"""Speculation methods, as options name them. No torch is imported: --help does not wait for it."""

from rocm_attn.errors import BadSetting
from rocm_serve.models.places import find_model

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


def require_drafter(speculative: str) -> None:
    """Raises BadModel if the option names a model that is not there. Reads no weights."""
    kind, colon, path = speculative.partition(":")
    if colon and (kind + colon, path) not in ((EAGLE, SEEDED), (EAGLE, SEEDED3)):
        find_model(path)


def require_ranks(speculative: str, num_ranks: int) -> None:
    """Raises BadSetting if num_ranks ranks cannot share a model with the option's draft tokens."""
    if num_ranks > 1 and speculative not in (OFF, NGRAM):
        raise BadSetting(
            f"speculative is {speculative} and {num_ranks} ranks share the model, but a draft model runs on one rank; "
            "use speculative ngram or one rank"
        )
