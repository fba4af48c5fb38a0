"""EngineStart: the message from which the engine's process of `rocm-attn serve` makes its engine. Imports no torch."""

from dataclasses import dataclass

from rocm_attn.machine.whole_files import require_place
from rocm_serve.options import EngineOptions
from rocm_serve.speculation.methods import require_drafter


def require_files(options: EngineOptions) -> None:
    """Refuses files of the options before weights are read, which takes minutes. Raises BadModel, BadSetting."""
    require_drafter(options.speculative)
    for flag, place in {"--flight-record": options.flight_record, "--evidence": options.evidence}.items():
        if place is not None:
            require_place(place, flag)


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The engine of a server.

    name:      of the model, as it was given
    model:     its directory or .gguf file
    device:    of torch, by name; None: a GPU if there is one, else the CPU
    dtype:     likewise; None: see default_dtype
    num_ranks: that share the model
    """

    name: str
    model: str
    options: EngineOptions
    device: str | None
    dtype: str | None
    num_ranks: int
