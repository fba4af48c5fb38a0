"""The parts of bodies about functions that a model may ask to call, in the form of OpenAI's API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rocm_serve.server.api_errors import bad_request
from rocm_serve.server.finite_json import FINITE_JSON
from rocm_serve.text.chat_template import CallArguments

MOST_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ToolPart(BaseModel):
    """A part of a body. It is strict: a number that is sent as a string is refused, as OpenAI does."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Function(ToolPart):
    """A function. parameters: a JSON schema of an object; None: the function takes none"""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(ToolPart):
    """A function that the model may ask for."""

    type: Literal["function"]
    function: Function

    @property
    def as_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it. Raises ApiError."""
        parameters = self.function.parameters
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        if parameters.get("type", "object") != "object":
            raise bad_request(
                f"the parameters of the function {self.function.name} must be a JSON schema of type object", "tools"
            )
        described = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": {**described, "parameters": parameters}}


class NamedFunction(ToolPart):
    """The name of a function."""

    name: FunctionName


class NamedTool(ToolPart):
    """A function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(ToolPart):
    """A call that was made. arguments: as JSON; many clients send an empty text, or a null, for none"""

    name: FunctionName
    arguments: str | None = None


class MadeCall(ToolPart):
    """A call that an assistant has asked for."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    @property
    def as_template(self) -> dict[str, Any]:
        """The call as chat templates expect it: the arguments as an object. Raises ApiError."""
        try:
            arguments = FINITE_JSON.decode(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise bad_request(
                f"the arguments of the call of {self.function.name} in the messages must be a string that holds a "
                "JSON object with finite numbers",
                "messages",
            )
        function = {"name": self.function.name, "arguments": CallArguments(arguments)}
        return {"id": self.id, "type": "function", "function": function}
