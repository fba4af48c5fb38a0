"""Constraint: structured output, the form that a request's text must have. llguidance compiles it; imported late."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from rocm_attn.errors import BadRequest
from rocm_attn.machine.distributions import installing
from rocm_attn.machine.settings import check_fields
from rocm_serve.text.characters import require_characters

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Most characters of a constraint: longer ones take long to read.
MOST_CHARACTERS = 1 << 16
# Constraints that may be compiled or wait for it, including those whose request has left. It bounds an engine's work.
MOST_COMPILING = 64
# States of a constraint's lexer, of 1 or 2 kB each. The library allows 250,000.
MOST_LEXER_STATES = 100_000
_LONGEST_REASON = 400
# A character that no text has.
_NO_TEXT = "\U0010ffff"

ConstraintKind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """Structured output: a form that all of a request's new text must match. Use one of the class methods to make it.

    kind: whether text is a JSON schema, a regular expression, or a grammar in Lark's notation
    text: at most 65,536 characters
    lead: rules in Lark's notation; their rule `lead` matches text before the constrained text. Empty: none

    Raises BadRequest.
    """

    kind: ConstraintKind
    text: str
    lead: str = ""

    def __post_init__(self) -> None:
        check_fields(self, BadRequest)
        if self.kind not in get_args(ConstraintKind):
            raise BadRequest(f"kind is {self.kind!r}; it must be one of {', '.join(get_args(ConstraintKind))}")
        if len(self.text) > MOST_CHARACTERS:
            raise BadRequest(f"the constraint has {len(self.text)} characters; at most {MOST_CHARACTERS} are allowed")
        if not self.text:
            raise BadRequest("the constraint is empty; leave it out, or give the text's pattern")
        require_characters(self.text, "the constraint")

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Constraint:
        """A JSON value that a JSON schema accepts. schema: a mapping, or its JSON text"""
        return cls("json_schema", schema if isinstance(schema, str) else _as_json(schema))

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that a regular expression matches in full."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Constraint:
        """One of these texts."""
        are_texts = isinstance(texts, Sequence) and all(isinstance(text, str) and text for text in texts)
        if isinstance(texts, str) or not are_texts or not texts:
            raise BadRequest("a choice needs at least one text, each with at least one character; give a list of them")
        # A name in capitals is one lexeme. The library takes at most 2,000 rules at a place.
        return cls("lark", f"start: ONE\nONE: {' | '.join(map(_as_json, texts))}")

    @classmethod
    def grammar(cls, lark: str) -> Constraint:
        """A text that a context-free grammar in Lark's notation accepts, from its rule `start` on."""
        return cls("lark", lark)

    def check(self) -> None:
        """Raises BadRequest with llguidance's reason if it refuses the constraint. No model is needed.

        It takes milliseconds, but a few constraints take minutes or gigabytes, and a thread that compiles one cannot be
        stopped. Constraints from untrusted clients are first tried in a process: see constraint_trial.py.
        """
        is_error, reasons = library().LLMatcher.validate_grammar_with_warnings(grammar_of(self))
        if is_error:
            raise BadRequest(f"the constraint cannot be used: {reason_of(reasons[0])}")


def library() -> Any:
    """Imports llguidance. Raises BadRequest if it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise BadRequest(
            f"constraints need the library llguidance, which is not installed; {installing('rocm_serve', 'server')}"
        ) from error
    return llguidance


def grammar_of(constraint: Constraint) -> str:
    """Returns the constraint as a grammar of the library. Raises BadRequest."""
    alone = _grammar_alone(constraint)
    if not constraint.lead:
        return alone
    rest = {"lark_grammar": alone} if constraint.kind == "lark" else json.loads(alone)["grammars"][0]
    whole = {"name": "whole", "lark_grammar": f"start: lead @rest\n{constraint.lead}"}
    return json.dumps({"grammars": [whole, {**rest, "name": "rest"}]})


def _grammar_alone(constraint: Constraint) -> str:
    """Returns the grammar without its lead. Raises BadRequest."""
    matcher = library().LLMatcher
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(constraint.text))
    if constraint.kind == "lark":
        return str(matcher.grammar_from_lark(constraint.text))
    try:
        schema = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f'the JSON schema is not JSON ({error}); give an object, as {{"type": "object"}}') from error
    if not isinstance(schema, dict | bool):
        raise BadRequest('the JSON schema is no object; give one, as {"type": "object"}')
    return str(matcher.grammar_from_json_schema(constraint.text))


def tokens_of(tokenizer: str, vocab_size: int, ends: Sequence[int]) -> Any:
    """Returns a tokenizer as the library reads it, with all its tokens. This takes a second and megabytes.

    tokenizer:  as tokenizers.Tokenizer.to_str() writes it
    vocab_size: of the logits, which may lack the tokenizer's last tokens: Gemma 3 1B's have none for images
    ends:       tokens that end a text
    Raises BadRequest if the library cannot read it.
    """
    content = json.loads(tokenizer)
    vocab = content["model"]["vocab"]
    of_model = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    last = max((*of_model, *(each["id"] for each in content["added_tokens"])), default=0)
    try:
        return library().LLTokenizer(_unspelled(content), n_vocab=max(vocab_size, last + 1), eos_token=list(ends))
    except ValueError as error:
        raise BadRequest(
            f"this model's tokenizer cannot be used with a constraint ({error}); leave the constraint out"
        ) from error


def _unspelled(content: Any) -> str:
    """Returns the same tokenizer with names of special tokens that no constraint spells.

    Otherwise the library takes a special token for such a text of a constraint. The answer would lack it, or end there.
    It would refuse its own choice of an added one in angle brackets, which it takes for special too.
    """
    model, added = content["model"], content["added_tokens"]
    for each in added:
        each["special"] |= each["content"].startswith("<") and each["content"].endswith(">")
    named = {each["content"]: _NO_TEXT + each["content"] for each in added if each["special"]}
    for each in added:
        each["content"] = named.get(each["content"], each["content"])
    vocab = model["vocab"]
    if isinstance(vocab, list):  # names with scores, of a Unigram model
        model["vocab"] = [[named.get(name, name), score] for name, score in vocab]
    else:
        model["vocab"] = {named.get(name, name): token for name, token in vocab.items()}
    if model.get("unk_token"):
        model["unk_token"] = named.get(model["unk_token"], model["unk_token"])
    return json.dumps(content)


def compiled_of(constraint: Constraint, tokens: Any) -> LLMatcher:
    """Compiles the constraint over tokens_of(), and tries it on the first token of a text. Raises BadRequest."""
    limits = library().LLParserLimits(max_lexer_states=MOST_LEXER_STATES)
    compiled: LLMatcher = library().LLMatcher(tokens, grammar_of(constraint), log_level=0, limits=limits)
    if compiled.is_error():
        raise BadRequest(f"the constraint cannot be used: {reason_of(compiled.get_error())}")
    first = compiled.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise BadRequest(f"the constraint cannot be used: no text can begin with it ({reason_of(first.get_error())})")
    return compiled


def failed_of(tokens: Any) -> LLMatcher:
    """A matcher over tokens_of() in its state of error."""
    failed: LLMatcher = library().LLMatcher(tokens, "", log_level=0)
    return failed


def reason_of(error: str) -> str:
    """The library's message in one line, without its dump of its own state."""
    words = " ".join(error.partition("<state>")[0].split())
    return words if len(words) <= _LONGEST_REASON else words[:_LONGEST_REASON] + "..."


def why_failed(error: BaseException) -> str:
    """The message for an error that is none of the library's refusals. A panic is not an Exception."""
    return f"the constraint cannot be used: the library fails ({reason_of(f'{type(error).__name__}: {error}')})"


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"the constraint cannot be written as JSON ({error})") from error
