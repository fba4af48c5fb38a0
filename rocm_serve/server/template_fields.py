"""Fields of conversations that say how the chat template writes them."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from rocm_serve.server.api_errors import bad_request
from rocm_serve.text.chat_template import Rendering


class TemplateFields(BaseModel):
    """vLLM's fields, and OpenAI's reasoning_effort, which is a variable of the templates that know it.

    Other templates know whether the model reasons: they get enable_thinking and thinking, false for the effort none.
    """

    chat_template: Annotated[str, Field(max_length=1 << 16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None

    def rendering(self, last: dict[str, Any]) -> Rendering:
        """Returns how the template writes the conversation. last: its last message. Raises ApiError, BadRequest."""
        goes_on = bool(self.continue_final_message) or "prefix" in last
        if goes_on and self.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other; leave one of them out",
                "continue_final_message",
            )
        if goes_on and (last["role"] != "assistant" or "tool_calls" in last):
            raise bad_request(
                "continue_final_message continues a text of the assistant, which the last message is not; add one, "
                "or leave the field out",
                "continue_final_message",
            )
        effort: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
        begins_answer = self.add_generation_prompt is not False
        return Rendering({**effort, **(self.chat_template_kwargs or {})}, begins_answer, goes_on)
