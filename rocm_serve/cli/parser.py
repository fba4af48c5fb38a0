"""The arguments of generate and serve. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations  # argparse's Commands takes no parameter at run time

import argparse

from rocm_attn.cli import options as a
from rocm_attn.cli.parser import Commands, add_command, add_options
from rocm_serve.cli import options as o

_GENERATE_EXAMPLES = """\
examples:
  rocm-attn generate "What is the capital of France?"
  rocm-attn generate --model ./Llama-3.1-8B-Instruct --device cuda --dtype bfloat16 "Hello" "Tell me a joke."
  rocm-attn generate --model ./Llama-3.1-70B-Instruct --device cuda --tp 8 "Hello"
  rocm-attn generate --json --prompts-file prompts.txt --max-new-tokens 32 > results.json
  echo "Once upon a time" | rocm-attn generate --raw --temperature 0.8 --seed 7
  rocm-attn generate --temperature 0.8 --top-k 40 --stop "###" --json-schema answer.schema.json "Who was Ada Lovelace?"
  rocm-attn generate --check-every 100 --hang-after 60 --flight-record last_steps.json "Hello"
"""

_SERVE_EXAMPLES = """\
examples:
  rocm-attn serve
  rocm-attn serve --model ./Llama-3.1-8B-Instruct --device cuda --dtype bfloat16 --max-batch-size 256
  rocm-attn serve --model ./Llama-3.1-70B-Instruct --device cuda --tp 8 --served-model-name llama
  rocm-attn serve --host 0.0.0.0 --port 8000 --api-key-file keys.txt --max-new-tokens 4096 --deadline-seconds 120
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 32, "stream": true}'
"""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds generate and serve to `rocm-attn`, and to capture-plan the count of a model's weights."""
    _add_generate(commands)
    _add_serve(commands)
    commands.choices["capture-plan"].set_defaults(weights_counted_in="rocm_serve.models.weight_bytes")


def _add_generate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "generate",
        help="continue prompts with a model",
        description="Continue prompts with a model. Text goes to stdout as it is generated, progress and a report "
        "to stderr.",
        examples=_GENERATE_EXAMPLES,
    )
    parser.set_defaults(module="rocm_serve.cli.generate")
    json = a.JSON.but(help="print one JSON object with results and report, and nothing else")
    add_options(parser, (o.PROMPTS, o.PROMPTS_FILE, o.RAW, json))
    add_options(parser.add_argument_group("model"), (o.MODEL, a.DEVICE, o.RANKS_THAT_SERVE, o.DTYPE_OF_MODEL))
    add_options(parser.add_argument_group("serving"), (o.OF_ENGINE[name] for name in o.ON_GENERATE))
    add_options(parser.add_argument_group("text"), o.OF_REQUEST)
    add_options(parser.add_argument_group("sampling"), o.SAMPLING.values())


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "serve",
        help="serve a model with OpenAI's HTTP API",
        description="Serve a model with OpenAI's HTTP API: /v1/completions, /v1/chat/completions, /v1/models, "
        "/health, /ready and /metrics. After SIGTERM, running requests may finish; a second SIGTERM exits at once. "
        "Exit code 1 if the engine fails.",
        examples=_SERVE_EXAMPLES,
    )
    parser.set_defaults(module="rocm_serve.cli.serve")
    add_options(parser.add_argument_group("model"), (o.MODEL, a.DEVICE, o.RANKS_THAT_SERVE, o.DTYPE_OF_MODEL))
    add_options(parser.add_argument_group("clients"), o.SERVER.values())
    add_options(parser.add_argument_group("serving"), (o.OF_ENGINE[name] for name in o.ON_SERVE))
