"""Tokens that other files of a model name and tokenizer.json lacks. transformers 5.24 adds them, and so do we."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import tokenizers

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import Fields, shown

_FILE, _OLDER = "tokenizer_config.json", "added_tokens.json"
# transformers numbers new ones in this order, and those of other names after them.
_ORDER = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Lists of special tokens, by the releases of transformers that write them. The second one may have names, too.
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")


class _Special(NamedTuple):
    """A special token and its object in the file. name: "" for one of a list"""

    name: str
    text: str
    token: Fields


def add_tokens(backend: tokenizers.Tokenizer, options: Mapping[str, object], older: Mapping[str, object]) -> None:
    """Adds those of added_tokens_decoder under their ids, and then the special ones that the file names.

    Without it, a template that writes such a token would write the letters of its name.

    options: of tokenizer_config.json; older: text -> id, of added_tokens.json, which has no flags
    Raises BadModel.
    """
    named = list(_named(options))
    _add_numbered(backend, Fields(options, _FILE).inner("added_tokens_decoder"), Fields(older, _OLDER), named)
    _add_named(backend, named)


def _add_numbered(backend: tokenizers.Tokenizer, numbered: Fields, older: Fields, named: Sequence[_Special]) -> None:
    """Adds the tokens that files give an id. Flags of added_tokens_decoder count, not those of tokenizer.json."""
    known, of_file = _added_to(backend), dict[int, tokenizers.AddedToken]()
    for name in filter(str.isdecimal, numbered.values):
        token = numbered.inner(name)
        added = of_file[int(name)] = _added(token.text("content"), token)
        added.special |= added.content in known and known[added.content].special  # either file may say so
    special = {text for _, text, _ in named}
    for text in older.values.keys() - known.keys():
        of_file[older.count(text, least=0)] = tokenizers.AddedToken(text, special=text in special)
    tokens = [of_file[number] for number in sorted(of_file)]
    backend.add_tokens([each for each in tokens if repr(each) != repr(known.get(each.content))])
    for number, added in of_file.items():
        if added.content not in known and (given := backend.token_to_id(added.content)) != number:
            file = _OLDER if older.values else _FILE
            raise BadModel(
                f"{file} has {shown(added.content)} as token {number}, and after tokenizer.json it is {given}; save "
                "the tokenizer again, or take both files from one place"
            )


def _add_named(backend: tokenizers.Tokenizer, named: Sequence[_Special]) -> None:
    """Adds the special tokens, under the ids after all others.

    A token that pads is in no text, and may be a word that others have, or have no logit; it is left out unless tokens
    that have the numbers after it are added.
    """
    known, new = _added_to(backend), dict[str, tokenizers.AddedToken]()
    for name, text, token in named:
        # One with a name is special, also if tokenizer.json does not say so.
        is_left = text in known if not name else name == "pad_token" and backend.token_to_id(text) is not None
        if not is_left and text not in new:
            new[text] = known.get(text) or _added(text, token, special=True)
    if new and next(reversed(new)) not in {text for name, text, _ in named if name != "pad_token"}:
        new.popitem()
    for each in new.values():
        each.special = True
    backend.add_special_tokens(list(new.values()))


def special_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Returns the texts of the special tokens by name, such as "eos_token"."""
    return {name: text for name, text, _ in _named(options) if name}


def text_of(token: object) -> str:
    """The text of a special token in tokenizer_config.json, which is a string or an object that holds one."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _added_to(backend: tokenizers.Tokenizer) -> dict[str, tokenizers.AddedToken]:
    return {token.content: token for token in backend.get_added_tokens_decoder().values()}


def _added(text: str, token: Fields, **flags: bool) -> tokenizers.AddedToken:
    """A token with the flags of its object, and others that this lacks. Raises BadModel."""
    return tokenizers.AddedToken(text, **flags | {flag: token.flag(flag) for flag in _FLAGS if token.has(flag)})


def _named(options: Mapping[str, object]) -> Iterator[_Special]:
    """The special tokens, in the order of their numbers."""
    by_name = {name: token for name, token in options.items() if name.endswith("_token")}
    listed: list[tuple[str, object]] = []
    for name in _LISTS:
        more = options.get(name)
        if isinstance(more, Mapping):
            by_name |= more
        elif isinstance(more, list):
            listed += [("", token) for token in more]
    names = [name for name in dict.fromkeys((*_ORDER, *by_name)) if name in by_name]
    for name, token in [*((name, by_name[name]) for name in names), *listed]:
        if text := text_of(token):
            of_token = Fields(token if isinstance(token, Mapping) else {}, f"{_FILE}: {name or shown(text)}")
            yield _Special(name, text, of_token)
