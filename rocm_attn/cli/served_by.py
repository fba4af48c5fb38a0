"""ServedBy: a model is served by the engine of rocm-serve, by the plug-ins of engines, or by nothing."""

import enum
from dataclasses import dataclass

from rocm_attn.cli.arguments import config_at, runner_config
from rocm_attn.errors import BadModel, Unsupported


class Server(enum.Enum):
    """The server of a model; the names are those of explain --json."""

    SERVE = "serve"
    PLUGINS = "plugins"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class ServedBy:
    """The servers of a model.

    server:     it serves a model
    but:        the one that does not, and why, "" if all do
    has_states: whether the model has recurrent layers, which engines run themselves
    """

    server: Server
    but: str
    has_states: bool

    def sentence(self) -> str:
        """Both in one line."""
        if self.server is Server.SERVE:
            of_plugins = "its attention by" if self.has_states else "by"
            return f"served by rocm-attn serve, and {of_plugins} the plug-ins for vLLM and SGLang"
        if self.server is Server.PLUGINS:
            whole = "its attention is " if self.has_states else ""
            return f"{whole}served by the plug-ins for vLLM and SGLang, not by rocm-attn serve: {self.but}"
        return f"not served: {self.but}"


def served_by(place: str, not_served: str, *, has_states: bool) -> ServedBy:
    """Returns the server of the model at `place`. Raises BadModel.

    not_served: why its attention is not, or ""; has_states: whether it has recurrent layers
    """
    if not_served:
        return ServedBy(Server.NOTHING, not_served, has_states)
    try:
        runner_config(config_at(place))
    except (BadModel, Unsupported) as refused:
        return ServedBy(Server.PLUGINS, str(refused).partition(";")[0], has_states)
    return ServedBy(Server.SERVE, "", has_states)
