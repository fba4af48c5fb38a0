"""The check that a text has whole characters: JSON can write half of one."""

from rocm_attn.errors import BadRequest


def require_characters(text: str, of: str = "the text") -> None:
    """Raises BadRequest for a text with half of a character. of: the text's name in the sentence"""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"character {error.start + 1} of {of} is the surrogate U+{ord(text[error.start]):04X}, half of a "
            "character; give whole characters"
        ) from error
