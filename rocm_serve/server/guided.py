"""Fields of bodies that constrain the answer, as OpenAI, vLLM and SGLang name them."""

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from rocm_serve.server.api_errors import bad_request
from rocm_serve.server.tools import ToolPart
from rocm_serve.text.constraint import Constraint

_Choices = Annotated[list[str], Field(fail_fast=True)]


class JsonSchema(ToolPart):
    """The schema that an answer's JSON must fit."""

    name: str = ""
    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(ToolPart):
    """The format that the answer must have. schema: of a json_object, which llama.cpp and Together put there"""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class StructuredOutputs(ToolPart):
    """vLLM's constraint: one of its fields. grammar: in Lark's notation"""

    schema_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: _Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class GuidedFields(BaseModel):
    """response_format is OpenAI's; structured_outputs and guided_ are vLLM's; regex and json_schema are SGLang's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: _Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None

    @cached_property
    def constraint(self) -> Constraint | None:
        """The constraint on the answer. Raises ApiError, BadRequest."""
        given = self._given()
        if len(given) > 1:
            raise bad_request(
                f"the request constrains its answer by {' and by '.join(given)}; leave all but one of them out",
                list(given)[1].partition(".")[0],
            )
        for name, value in given.items():
            kind = _KINDS[name.rpartition(".")[2].removeprefix("guided_")]
            if kind is None:
                raise bad_request(
                    f"{name} is not supported here; give json, regex, choice, grammar or json_object",
                    "structured_outputs",
                    code="unsupported_parameter",
                )
            return kind(value)
        return None

    def _given(self) -> dict[str, Any]:
        """Each field that constrains, with its value. Raises ApiError."""
        form, parts = self.response_format, self.structured_outputs
        named = {name: getattr(self, name) for name in GuidedFields.model_fields}
        named |= {"response_format": None, "structured_outputs": None}
        if form is not None and form.type == "json_object":
            named["response_format.json_object"] = True if form.schema_ is None else None
            named["response_format.schema"] = form.schema_
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise bad_request("response_format.json_schema is missing; give it a schema", "response_format")
            named["response_format.json_schema"] = form.json_schema.content
        if parts is not None:
            fields = {
                f"structured_outputs.{name.rstrip('_')}": getattr(parts, name) for name in type(parts).model_fields
            }
            given = {name: value for name, value in fields.items() if value not in (None, False)}
            if not given:
                raise bad_request(
                    "structured_outputs has no constraint; give json, regex, choice, grammar or json_object",
                    "structured_outputs",
                )
            named |= given
        return {name: value for name, value in named.items() if value is not None}


# The last word of a field's name -> its constraint; None: not served.
_KINDS: dict[str, Callable[[Any], Constraint] | None] = {
    "json": Constraint.json_schema,
    "schema": Constraint.json_schema,
    "json_schema": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
    "json_object": lambda _: Constraint.json_object(),
    "structural_tag": None,
}
