"""ServedBy: a model is served by the engine of rocm-serve, by the plug-ins of engines, or by nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rocm_attn.cli.arguments import config_at
from rocm_attn.cli.weights import runner_config
from rocm_attn.errors import BadModel, Unsupported


class Server(enum.Enum):
    """The server of a model; the names are those of explain --json."""

    SERVE = "serve"
    PLUGINS = "plugins"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class ServedBy:
    """server: it serves a model; but: the one that does not, and why, "" if all do"""

    server: Server
    but: str

    def sentence(self) -> str:
        """Both in one line."""
        if self.server is Server.SERVE:
            return "served by rocm-attn serve, and by the plug-ins for vLLM and SGLang"
        if self.server is Server.PLUGINS:
            return f"served by the plug-ins for vLLM and SGLang, not by rocm-attn serve: {self.but}"
        return f"not served: {self.but}"


def served_by(place: str, not_served: str) -> ServedBy:
    """Returns the server of the model at `place`. not_served: why its attention is not, or "". Raises BadModel."""
    if not_served:
        return ServedBy(Server.NOTHING, not_served)
    try:
        runner_config(config_at(place))
    except (BadModel, Unsupported) as refused:
        return ServedBy(Server.PLUGINS, str(refused).partition(";")[0])
    return ServedBy(Server.SERVE, "")
