"""The texts of constrained requests match the constraint, for any model and any way of serving."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rocm_attn.errors import BadRequest
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.request import Completion, Request, RequestsFailed
from rocm_serve.text.constraint import Constraint
from rocm_serve.text.matching import TextMatcher
from rocm_serve.text.tokenizer import Tokenizer
from tests.amd.runner.small_tokenizers import of_characters
from tests.amd.runner.tiny_model import tiny_model, word_tokenizer
from tests.amd.runner.with_parameters import BASE, CHARACTERS, CONSTRAINED, END, PLAIN, PROMPT, character_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return character_model()


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[Completion]:
    return [Engine(loaded, BASE).generate([request])[0] for request in (PLAIN, *CONSTRAINED)]


def test_texts_match_their_constraints_and_end_where_they_may(alone: list[Completion]) -> None:
    plain, schema, regex, choice, allowed = alone
    assert plain.finish_reason == "length"
    value = json.loads(schema.text)
    assert value.keys() == {"a", "b"}
    assert isinstance(value["a"], int)
    assert value["a"] >= 3
    assert value["b"] in ("x", "yes")
    assert re.fullmatch("[a-f]{4,9}[0-9]", regex.text)
    assert choice.text in ("yes", "no")  # although min_tokens is larger
    assert all(done.finish_reason == "stop" and done.token_ids[-1] == END for done in (schema, regex, choice))
    assert re.fullmatch("[a-z]+", allowed.text)
    assert {*allowed.token_ids} <= {*range(9, 44, 2)}
    assert [emitted.token_id for emitted in schema.logprobs] == list(schema.token_ids)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint.choice(["a<end>b"]), "a<end>b"),
        (Constraint.regex("<end>[b]"), "<end>b"),
        (Constraint.json_schema({"enum": ["<end>"]}), '"<end>"'),
        (Constraint.choice(["<b>a"]), "<b>a"),
    ],
    ids=["choice", "regex", "schema", "of a plain token"],
)
def test_a_text_that_looks_like_a_special_token_is_written_as_text(constraint: Constraint, text: str) -> None:
    """The token would end the text, and the text would lack it. A plain one in brackets was chosen and refused."""
    characters = CHARACTERS + "<>"
    backend = of_characters(characters)
    backend.add_tokens(["<b>"])
    words = Tokenizer(backend=backend, bos_token_id=None, chat_template=None)
    spelling = tiny_model(tokenizer=words, eos_token_ids=(len(characters),))
    (done,) = Engine(spelling, BASE).generate([Request(PROMPT, 40, constraint=constraint)])
    assert (done.text, done.finish_reason) == (text, "stop")


@pytest.mark.parametrize("are_added", [True, False])
def test_a_tokenizer_may_have_tokens_beyond_the_logits(are_added: bool) -> None:
    """Gemma 3 1B's has one for images, and others of fine-tuned models one that pads: constraints were refused."""
    names = [f"<{number}>" for number in range(200)]
    backend = of_characters((*CHARACTERS, "<end>") if are_added else (*CHARACTERS, "<end>", *names))
    if are_added:
        backend.add_special_tokens(names)
    larger = Tokenizer(backend=backend, bos_token_id=None, chat_template=None)
    model = tiny_model(tokenizer=larger, eos_token_ids=(END,))
    assert backend.get_vocab_size() > model.config.vocab_size
    (done,) = Engine(model, BASE).generate([Request(PROMPT, 40, constraint=Constraint.choice(["yes"]))])
    assert (done.text, done.finish_reason) == ("yes", "stop")


def test_a_choice_may_have_thousands_of_texts(loaded: LoadedModel) -> None:
    texts = [f"{number:04}"[::-1] for number in range(5000)]
    (done,) = Engine(loaded, BASE).generate([Request(PROMPT, 40, constraint=Constraint.choice(texts))])
    assert done.text in texts


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("constraint", "sentence"),
    [
        (lambda: Constraint.json_schema({"type": "strin"}), "cannot be used: .*strin"),
        (lambda: Constraint.json_schema("{bad"), "the JSON schema is not JSON"),
        (lambda: Constraint.json_schema("null"), "the JSON schema is no object; give one"),
        (lambda: Constraint.regex("[a"), "cannot be used: .*unclosed character class"),
        (lambda: Constraint.grammar("start: nothing"), "cannot be used: .*nothing"),
        (lambda: Constraint.json_schema({"a": {1, 2}}), "cannot be written as JSON"),
        (lambda: Constraint.regex("a" * 65_537), "has 65537 characters; at most 65536"),
        (lambda: Constraint.regex(""), "the constraint is empty"),
        (lambda: Constraint.choice([]), "a choice needs at least one text"),
        (lambda: Constraint.choice(["a", ""]), "a choice needs at least one text"),
        (lambda: Constraint.json_schema(nested(150)), "cannot be used: recursion limit exceeded"),
    ],
)
def test_constraints_without_sense_are_refused_with_the_reason(
    loaded: LoadedModel, constraint: Any, sentence: str
) -> None:
    """check(), which needs no model, and an engine refuse them; it keeps no trace of them, and of those before them."""
    with pytest.raises(BadRequest, match=sentence):
        constraint().check()
    engine = Engine(loaded, BASE)
    with pytest.raises(BadRequest, match=sentence):
        engine.generate([PLAIN, Request(PROMPT, 5, constraint=constraint())])
    assert not engine.has_work


def test_a_constraint_that_the_library_gives_up_on_fails_its_request_alone(
    loaded: LoadedModel, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = TextMatcher._compute

    def given_up(matcher: TextMatcher, new: list[int], **how: bool) -> None:
        compute(matcher, [*new, 20] if matcher.num_asked == 3 else new, **how)

    monkeypatch.setattr(TextMatcher, "_compute", given_up)
    with pytest.raises(RequestsFailed) as failed:
        Engine(loaded, BASE).generate([PLAIN, CONSTRAINED[0]])
    plain, schema = failed.value.completions
    assert plain == alone[0]
    assert schema.error.startswith("the constraint cannot be applied any further: ")
    assert len(schema.token_ids) == 3


def test_what_a_constraint_needs_is_said(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    request = CONSTRAINED[0]
    with pytest.raises(BadRequest, match="a constraint and the model has no tokenizer"):
        Engine(tiny_model(), BASE).submit(request)
    endless = Engine(replace(loaded, config=replace(loaded.config, eos_token_ids=())), BASE)
    with pytest.raises(BadRequest, match="no token that ends a text, which a constraint needs; give one in stop_token"):
        endless.submit(request)
    done = endless.generate([replace(CONSTRAINED[2], stop_token_ids=(END,))])[0]
    assert (done.text in ("yes", "no"), done.finish_reason) == (True, "stop")
    with pytest.raises(BadRequest, match="this model's tokenizer cannot be used with a constraint"):
        Engine(tiny_model(tokenizer=word_tokenizer(), eos_token_ids=(5,)), BASE).submit(request)
    with pytest.raises(BadRequest, match="ignore_eos is set together with a constraint"):
        replace(request, ignore_eos=True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        BadRequest, match=r"need the library llguidance, which is not installed; run in a checkout of rocm_attn: pip"
    ):
        Engine(loaded, BASE).submit(request)


def test_banned_tokens_are_ruled_out_as_long_as_others_are_left(loaded: LoadedModel) -> None:
    engine = Engine(loaded, BASE)
    engine.prepare_constraints()
    assert engine._matching is not None
    ones = engine._matching.matcher(Constraint.regex("1*"), ())

    def allowed(new: Sequence[int], banned: Sequence[int]) -> list[int]:
        assert engine._matching is not None
        if new:
            ones.ask(new)
        with engine._matching.computed:
            engine._matching.computed.wait_for(lambda: ones.is_ready)
        found: list[int] = np.flatnonzero(np.unpackbits(ones.mask(banned).view(np.uint8), bitorder="little")).tolist()
        return found

    one = PROMPT[1]
    assert allowed((), ()) == [one, END]
    assert allowed((one,), (END, 2)) == [one]
    assert allowed((one,), (END, one)) == [one, END]
