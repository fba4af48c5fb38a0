"""ChatTemplate: a model's own way of writing a conversation as text."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocm_attn.errors import BadModel, BadRequest


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template that came with a model; it runs in a sandbox.

    source:    the template's text
    bos_token: text of the tokens that a template may name, "" where the model has none
    """

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, up to where the model is to go on.

        messages: each with "role" ("system", "user", "assistant") and "content"
        Raises BadRequest for messages that the template refuses, BadModel for a template that is damaged.
        """
        try:
            return (
                _environment()
                .from_string(self.source)
                .render(
                    messages=list(messages),
                    add_generation_prompt=True,
                    bos_token=self.bos_token,
                    eos_token=self.eos_token,
                )
            )
        except _Refused as error:
            raise BadRequest(f"the model's chat template refuses the messages: {error}") from error
        except _TEMPLATE_ERRORS as error:
            raise BadModel(
                f"the model's chat template fails ({error}); pass the prompt as it stands instead"
            ) from error


# what a template may raise on the way: it is a program of somebody else's
_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _Refused(Exception):
    """What raise_exception() inside a template raises."""


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for Hugging Face expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
