"""The arguments of every command. Nothing here imports torch, so that --help is instant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from rocm_attn.cli import options as o
from rocm_attn.cli.bench_parser import add_bench

_EPILOG = """\
exit codes: 0 done, 1 the job failed, 2 wrong usage or bad input, 130 interrupted
"""

_GENERATE_EXAMPLES = """\
examples:
  rocm-attn generate "What is the capital of France?"
  rocm-attn generate --model ./Llama-3.1-8B-Instruct --device cuda --dtype bfloat16 "Hello" "Tell me a joke."
  rocm-attn generate --model ./Llama-3.1-70B-Instruct --device cuda --tp 8 "Hello"
  rocm-attn generate --json --prompts-file prompts.txt --max-new-tokens 32 > results.json
  echo "Once upon a time" | rocm-attn generate --raw --temperature 0.8 --seed 7
  rocm-attn generate --temperature 0.8 --top-k 40 --stop "\n\n" --json-schema answer.schema.json "Who was Ada Lovelace?"
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

_EXPLAIN_EXAMPLES = """\
examples:
  rocm-attn explain config.json --arch gfx942
  rocm-attn explain ./Llama-3.1-8B-Instruct/config.json --arch gfx950 --page-size 64 --json
  rocm-attn explain ./DeepSeek-V3/config.json --arch gfx950 --tp 8 --page-size auto
  rocm-attn explain config.json --arch gfx942 --page-size auto --pool auto
  rocm-attn explain config.json --arch gfx942 --cost
  rocm-attn explain config.json --arch gfx950 --aiter-release 0.1.14 --rocm-release 7.0
  rocm-attn explain ./Llama-3.1-70B-Instruct/config.json --arch gfx942 --tp 8
"""

_SOAK_EXAMPLES = """\
examples:
  rocm-attn soak --steps 2000
  rocm-attn soak --steps 20000 --seed 7 --device cuda --json > soak.json
  rocm-attn soak --speculative --rounds 10000
"""

_TRUTH_EXAMPLES = """\
examples:
  rocm-attn truth ./Llama-3.1-8B-Instruct
  rocm-attn truth tokens --providers triton --kv-encodings as-q,e4m3fnuz/token
  rocm-attn truth config.json --tp 8 --kv-encodings all --pool-gib 9 --json > truth.json
  rocm-attn truth blocks --device cpu --lengths 500,900 --chunk 250
"""

_PREWARM_EXAMPLES = """\
examples:
  rocm-attn prewarm ./Llama-3.1-8B-Instruct                       on the GPU that will serve, as the user who will
  rocm-attn prewarm config.json --arch gfx942 --max-batch-size 256    while an image is built
"""

_TUNE_EXAMPLES = """\
examples:
  rocm-attn tune ./Llama-3.1-8B-Instruct --dry-run --arch gfx942        what would be tried, without a GPU
  rocm-attn tune ./Llama-3.1-8B-Instruct --seconds 1800
  rocm-attn tune config.json --tp 8 --shapes 64x4k,256x2k,1x8k+2048 --output tuning.json
  rocm-attn tune 32x8x128 --page-size 64 --json > tuned.json            32 query heads over 8 KV heads of 128
"""

_CAPTURE_PLAN_EXAMPLES = """\
examples:
  rocm-attn capture-plan config.json --arch gfx942 --max-batch-size 256
  rocm-attn capture-plan config.json --arch gfx950 --max-batch-size 64 --max-kv-len 32768 --json
"""

Commands = argparse._SubParsersAction  # argparse has no public name for what add_subparsers() returns


def build_parser() -> argparse.ArgumentParser:
    """The parser of `rocm-attn`; the command's name is in .command."""
    parser = argparse.ArgumentParser(
        prog="rocm-attn",
        description="A ROCm-first attention runtime: paged KV cache, HIP graphs, and a small model runner on top.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    searches = (_add_explain, _add_capture_plan, _add_prewarm, _add_tune)
    for add in (_add_generate, _add_serve, *searches, _add_replay_step, _add_soak, _add_truth):
        add(commands)
    commands.add_parser("kernels", help="print the table of all kernels with their limits, as Markdown")
    guards = commands.add_parser("guards", help="list the safeguards, what each prevents and whether it is on")
    _add_options(guards, [o.JSON.but(help="print a list of JSON objects")])
    _add_doctor(commands)
    add_bench(commands)
    env = commands.add_parser("env", help="print versions and devices, for a bug report")
    _add_options(env, [o.JSON])
    return parser


def _add_options(parser: argparse._ActionsContainer, options: Iterable[o.Option]) -> None:
    for option in options:
        parser.add_argument(*option.names, **option.arguments)


def _add_command(
    commands: Commands[argparse.ArgumentParser], name: str, *, help: str, description: str, examples: str = ""
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"{examples}\n{_EPILOG}" if examples else _EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_generate(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "generate",
        help="continue prompts with a model",
        description="Continue prompts with a model. Text goes to stdout as it comes, progress and a report to stderr.",
        examples=_GENERATE_EXAMPLES,
    )
    json = o.JSON.but(help="print one JSON object with results and report, and nothing else")
    _add_options(parser, (o.PROMPTS, o.PROMPTS_FILE, o.RAW, json))
    _add_options(parser.add_argument_group("model"), (o.MODEL, o.DEVICE, o.RANKS_THAT_SERVE, o.DTYPE_OF_MODEL))
    _add_options(parser.add_argument_group("serving"), (o.OF_ENGINE[name] for name in o.ON_GENERATE))
    _add_options(parser.add_argument_group("text"), o.OF_REQUEST)
    _add_options(parser.add_argument_group("sampling"), o.SAMPLING.values())


def _add_serve(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "serve",
        help="serve a model by OpenAI's HTTP API",
        description="Serve a model by OpenAI's HTTP API: /v1/completions, /v1/chat/completions, /v1/models, /health, "
        "/ready and /metrics. SIGTERM lets the requests end that were taken; a second one ends at once. Exit code 1 "
        "where the engine has ended by itself.",
        examples=_SERVE_EXAMPLES,
    )
    _add_options(parser.add_argument_group("model"), (o.MODEL, o.DEVICE, o.RANKS_THAT_SERVE, o.DTYPE_OF_MODEL))
    _add_options(parser.add_argument_group("clients"), o.SERVER.values())
    _add_options(parser.add_argument_group("serving"), (o.OF_ENGINE[name] for name in o.ON_SERVE))


def _add_explain(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "explain",
        help="say which kernels would run a model, and why no others; needs no GPU",
        description="Name the kernel of every kind of layer and step of a model on an arch, and every kernel refused.",
        examples=_EXPLAIN_EXAMPLES,
    )
    options = (o.CONFIG, o.ARCH.but(required=True), o.DTYPE, *o.KV_FORMAT, *o.PAGES, o.PROVIDER, o.RANKS, o.NUM_PAGES)
    _add_options(parser, (*options, o.DETERMINISTIC, *o.RELEASES, o.TUNING_FILE, o.COST, o.JSON))


def _add_capture_plan(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "capture-plan",
        help="say which graphs a model would get and what its buffers would take; needs no GPU",
        description="List the graphs that would be made, largest first, and every buffer with its bytes and with the "
        "setting that decides its size. Nothing is captured or allocated.",
        examples=_CAPTURE_PLAN_EXAMPLES,
    )
    swa_pages = o.SWA_PAGES.but(default=0, help="pages of a pool for layers with a window (none)")
    max_batch_size = o.MAX_BATCH_SIZE.but(required=True)
    options = (o.CONFIG, o.ARCH.but(required=True), max_batch_size, o.MAX_KV_LEN, o.NUM_PAGES, swa_pages, *o.PAGES)
    captured = (o.CAPTURE_SIZES, o.CAPTURE_TOKENS, o.SPLIT_STEPS, o.SHARED_PREFIXES, o.DRAFTS)
    _add_options(parser, (*options, o.DTYPE, *o.KV_FORMAT, o.PROVIDER, *captured, o.DETERMINISTIC, *o.RELEASES, o.JSON))


def _add_prewarm(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "prewarm",
        help="compile what a model will need, as the user who will serve it",
        description="Run a model's attention steps once, at the sizes that will be served, so that every kernel is in "
        "the cache. With --arch nothing runs, and no GPU is needed: what is compiled is what that GPU will find.",
        examples=_PREWARM_EXAMPLES,
    )
    arch = o.ARCH.but(help="gfx942 (MI300X), gfx950 (MI355X), sm_90 or sm_80 (this machine's GPU)")
    options = (o.CONFIG, arch, o.PROVIDER, o.DTYPE, *o.KV_FORMAT, *o.PAGES, o.MAX_BATCH_SIZE, o.MAX_KV_LEN, o.NUM_PAGES)
    served = (o.CAPTURE_SIZES, o.CAPTURE_TOKENS, o.DETERMINISTIC, o.SHARED_PREFIXES, o.DRAFTS, o.VERIFY_TOKENS)
    _add_options(parser, (*options, *served, o.JSON))


def _add_tune(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "tune",
        help="search faster tiles for a model's layers on this GPU",
        description="Try other tiles of the project's Triton kernels for a model's layers, compare each with the "
        "reference and then with the tiles in use, and keep what is faster in a file that runtimes read.",
        examples=_TUNE_EXAMPLES,
    )
    config = o.CONFIG.but(
        metavar="CONFIG.json|QxKVxDIM",
        help="a model's config.json, the directory that holds it, a .gguf file, or query heads x KV heads x head dim",
    )
    arch = o.ARCH.but(help="with --dry-run: gfx942 (MI300X), gfx950 (MI355X), sm_90 or sm_80 (gfx942)")
    model = (config, o.RANKS, o.DTYPE, *o.KV_FORMAT, *o.PAGES, o.PROVIDER, o.MAX_KV_LEN)
    _add_options(parser, (*model, o.SHAPES, o.SECONDS, o.OUTPUT, o.JOBS, o.DEVICE, arch, o.DRY_RUN, o.JSON))


def _add_replay_step(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "replay-step",
        help="run a step of a flight recorder's dump again and compare",
        description="Rebuild one step of a dump, with its lengths, rows and sizes and with random K and V; run it "
        "eagerly, as a graph and by the float64 reference. Exit code 1 if they do not agree.",
    )
    provider = o.PROVIDER.but(default=None, help="whose attention kernels run (the dump's)")
    seed = o.SEED.but(help="of the random K and V (0)")
    _add_options(parser, (o.DUMP, o.STEP, seed, o.DEVICE, provider, o.JSON))


def _add_soak(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "soak",
        help="run random steps of a tiny model and compare every output with the reference",
        description="Let requests come, grow, share pages, run out of them and go, with graphs on, and compare every "
        "output of every step with a float64 reference. Stops with exit code 1 at the first difference.",
        examples=_SOAK_EXAMPLES,
    )
    seed = o.SEED.but(help="of everything random; the same seed, the same steps (0)")
    dtype = o.DTYPE.but(default=None, help="of q, k, v and the KV cache (bfloat16 on a GPU, float32 on a CPU)")
    deterministic = o.DETERMINISTIC.but(
        help="soak deterministic mode: some sequences must be bitwise what they are alone"
    )
    json = o.JSON.but(help="print one JSON object with what was done, or what was found")
    speculative = o.switch(
        "--speculative", "mostly draft and verify: rounds, chains, trees, and what becomes of rejected ones"
    )
    _add_options(parser.add_mutually_exclusive_group(), (o.STEPS, o.ROUNDS))
    _add_options(parser, (seed, o.DEVICE, o.PROVIDER, dtype, deterministic, speculative, json))


def _add_truth(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "truth",
        help="plant needles in long contexts, and see that every one is found",
        description="Serve long sequences of a model's layers, in chunks and decode steps that are captured and "
        "replayed, in which every query asks for one key, and see that its value comes back, and that what is hidden "
        "does not. Pages lie on both sides of 2 and 4 GiB. Exit code 1 if a needle was missed.",
        examples=_TRUTH_EXAMPLES,
    )
    config = o.CONFIG.but(
        metavar="CONFIG.json|SHAPE",
        help="a model's config.json, the directory that holds it, a .gguf file, or dense, latent, tokens, pools or "
        "blocks: layers of well-known models",
    )
    seed = o.SEED.but(help="of keys, values and what is asked for (0)")
    served = (o.DEVICE, o.PROVIDERS, o.DTYPE, o.KV_ENCODINGS, *o.PAGES, o.RANKS, o.DETERMINISTIC)
    _add_options(parser, (config, *served, o.LENGTHS, o.CHUNK, o.POOL_GIB, o.EAGER, seed, o.JSON))


def _add_doctor(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands,
        "doctor",
        help="look for what is known to go wrong with installations and machines, with the fix of each",
        description="Look at packages, ROCm, GPUs, caches and variables for everything that has gone wrong for others. "
        "Works where torch or AITER cannot be imported; touches no GPU memory. Exit code 1 if there is a problem.",
    )
    _add_options(parser, (o.AT_BUILD, o.JSON.but(help="print a list of JSON objects")))
