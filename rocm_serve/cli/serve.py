"""`rocm-attn serve`: serves a model with OpenAI's HTTP API.

Two processes serve. The engine's imports torch; this one, with HTTP and the tokenizer, does not. The engine's begins
first, so that it imports torch and reads weights while this one imports its own libraries.
"""

import argparse
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from rocm_attn.cli import about_a_library
from rocm_attn.cli.streams import say
from rocm_attn.errors import BadModel, BadRequest, BadSetting, RocmAttnError, reason_of
from rocm_serve.cli.engine_start import EngineStart, require_files
from rocm_serve.cli.options import ON_SERVE, SERVER
from rocm_serve.engine_process import EngineProcess
from rocm_serve.engine_thread import ServingEngine
from rocm_serve.models.places import find_model
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.child_process import ready_to_serve
from rocm_serve.server.address import bind
from rocm_serve.server.keys import keys_from
from rocm_serve.server.options import ServerOptions
from rocm_serve.server.traces import otlp_traces

# A message that a chat template must write.
_MESSAGE = "Name a river."


def run(options: argparse.Namespace) -> None:
    """Serves until a signal comes. Raises RocmAttnError; EngineEnded if the engine has ended by itself."""
    settings = ServerOptions(**{name: getattr(options, name) for name in SERVER})
    keys = keys_from(settings, os.environ)
    name = settings.served_model_name or options.model
    traces = [otlp_traces(name)] if settings.traces else []
    template = _template(settings)
    engine_options = EngineOptions(**{name: getattr(options, name) for name in ON_SERVE})
    require_files(engine_options)
    with bind(settings) as bound:
        place = str(find_model(options.model))
        start = EngineStart(options.model, place, engine_options, options.device, options.dtype, options.tp)
        with EngineProcess(partial(_made, start)) as engine:
            # Imported only now, while the engine's process works.
            from rocm_serve.server.generation_config import defaults_from
            from rocm_serve.server.run import serve
            from rocm_serve.server.served_model import ServedModel

            defaults = defaults_from(settings.generation_config, options.model, _announce)
            tokenizer = engine.limits.tokenizer
            if options.flight_record is not None:
                signal.signal(signal.SIGUSR1, lambda number, _: os.kill(engine.pid, number))
            if template is not None and tokenizer is not None:
                tokenizer = tokenizer.with_template(template)
            if tokenizer is None:
                _announce("the model has no tokenizer.json; it serves prompts of token ids alone")
            elif tokenizer.chat_template is None:
                _announce("the model has no chat template; conversations are refused unless --chat-template is given")
            model = ServedModel(name, tokenizer, engine.limits, settings, defaults)
            ready_to_serve()
            serve(engine, model, keys, bound, _announce, traces)


def _template(settings: ServerOptions) -> str | None:
    """Returns the text of --chat-template, or None. Raises BadSetting for one that cannot write a conversation."""
    if settings.chat_template is None:
        return None
    from rocm_serve.text.chat_template import ChatTemplate

    try:
        source = settings.chat_template.read_text(encoding="utf-8")
        if _MESSAGE not in ChatTemplate(source).render([{"role": "user", "content": _MESSAGE}]):
            raise BadModel("it writes no message")
    except (OSError, UnicodeDecodeError, BadModel, BadRequest) as error:
        raise BadSetting(
            f"chat_template {settings.chat_template} cannot be used ({reason_of(error)}); give a file with a template "
            "in Jinja, or leave it out for the model's own"
        ) from error
    return source


def _announce(line: str) -> None:
    say(f"rocm-attn serve: {line}")


@contextmanager
def _made(start: EngineStart) -> Iterator[ServingEngine]:
    """Yields the engine, in its process. Raises RocmAttnError, also for a library that cannot be imported."""
    with ExitStack() as until_served:
        try:
            from rocm_serve.cli.ready_engine import ready_engine

            engine = until_served.enter_context(ready_engine(start))
        except Exception as error:
            if sentence := about_a_library(error):
                raise RocmAttnError(sentence) from error
            raise
        yield engine
