"""Tokens that tokenizer_config.json names and tokenizer.json lacks. transformers 5.24 adds them, and so do we."""

from collections.abc import Iterator, Mapping

import tokenizers

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import Fields, shown

_FILE = "tokenizer_config.json"
# transformers numbers new ones in this order, and those of other names after them.
_ORDER = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")
# Lists of special tokens, by the releases of transformers that write them.
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


def add_tokens(backend: tokenizers.Tokenizer, options: Mapping[str, object]) -> None:
    """Adds those of added_tokens_decoder under their ids, and then the special ones that the file names. options: its

    Without it, a template that writes such a token would write the letters of its name. A token that pads is in no
    text, and may be a word that others have, or have no logit; it is left out. Raises BadModel.
    """
    numbered, known = Fields(options, _FILE).inner("added_tokens_decoder"), _added_to(backend)
    lacking = {}
    for name in numbered.values:
        token = numbered.inner(name)
        if name.isdecimal() and token.text("content") not in known:
            flags = {flag: token.flag(flag) for flag in _FLAGS if token.has(flag)}
            lacking[int(name)] = tokenizers.AddedToken(token.text("content"), **flags)
    backend.add_tokens([lacking[number] for number in sorted(lacking)])
    for number, added in lacking.items():
        if (given := backend.token_to_id(added.content)) != number:
            raise BadModel(
                f"{_FILE} has {shown(added.content)} as token {number}, and after tokenizer.json it is {given}; save "
                "the tokenizer again, or take both files from one place"
            )
    known, special = _added_to(backend), special_texts(options).values()
    named = dict.fromkeys(text for text in _named(options) if text not in known or text in special)
    tokens = [known.get(text) or tokenizers.AddedToken(text, normalized=False) for text in named]
    for each in tokens:
        each.special = True  # also if tokenizer.json does not say so, whose other flags stay
    backend.add_special_tokens(tokens)


def special_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Returns the texts of the special tokens by name, such as "eos_token"."""
    return {name: text for name, token in options.items() if name.endswith("_token") and (text := text_of(token))}


def text_of(token: object) -> str:
    """The text of a special token in tokenizer_config.json, which is a string or an object that holds one."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _added_to(backend: tokenizers.Tokenizer) -> dict[str, tokenizers.AddedToken]:
    return {token.content: token for token in backend.get_added_tokens_decoder().values()}


def _named(options: Mapping[str, object]) -> Iterator[str]:
    texts = special_texts(options)
    yield from (texts[name] for name in dict.fromkeys((*_ORDER, *texts)) if name in texts and name != "pad_token")
    for name in _LISTS:
        more = options.get(name)
        values = more.values() if isinstance(more, Mapping) else more if isinstance(more, list) else ()
        yield from filter(None, map(text_of, values))
