"""Decode steps and prompts of an engine over tensor-parallel ranks, one on each GPU.

python -m rocm_lab.benchmarks.ranks --out rocm_lab/benchmarks/results/ranks_h200.json

A Llama of 8B with random weights in bfloat16 is served greedily over graphs by 1, 2, 4, ... ranks, as many as there are
GPUs. The front process commands the ranks, as it does in a server.

decode: the prompts of all requests, 512 tokens each, are computed; the median time between two steps, each of which
        brings every request one token
prompt: one prompt of 8,192 tokens alone, until its token comes; the median of a few
"""

import statistics
import time
from collections.abc import Iterator

import torch

from rocm_lab.benchmarks.random_models import random_model
from rocm_lab.benchmarks.round_time import prompt_of
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_lab.benchmarks.step_profile import DECODES, LONG_PROMPT, MODELS, MOST_TOKENS, PROMPT, measured
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.parallel.ranked_engine import RankedEngine
from rocm_serve.ranks import Ranks
from rocm_serve.request import Request, TokenEvent

MODEL = MODELS["8B"]
WARM_STEPS, STEPS = 24, 96
WARM_PROMPTS, PROMPTS = 2, 5
OPTIONS = measured(EngineOptions(), max(DECODES), 0)


def load(*, device: torch.device, ranks: Ranks) -> LoadedModel:
    """Returns a rank's part of the model."""
    assert device.index == torch.cuda.current_device()
    return random_model(MODEL, ranks=ranks)


def decode(engine: RankedEngine, num_seqs: int) -> Row:
    """Returns the time of steps in which each of num_seqs requests gets one token."""
    prompts = [prompt_of(PROMPT, number, MODEL.vocab_size) for number in range(num_seqs)]
    numbers = [engine.submit(Request(prompt, MOST_TOKENS, ignore_eos=True)) for prompt in prompts]
    waiting = set(numbers)
    while waiting:
        for event in engine.step():
            assert isinstance(event, TokenEvent), event
            waiting.discard(event.request)
    walls = list[float]()
    for _ in range(WARM_STEPS + STEPS):
        before = time.perf_counter()
        engine.step()
        walls.append((time.perf_counter() - before) * 1e6)
    for number in numbers:
        engine.cancel(number)
    engine.settle()
    return {"load": "decode", "requests": num_seqs, "us": round(statistics.median(walls[WARM_STEPS:]), 1)}


def prompts(engine: RankedEngine) -> Row:
    """Returns the time from a long prompt to its token."""
    walls = list[float]()
    for number in range(WARM_PROMPTS + PROMPTS):
        request = Request(prompt_of(LONG_PROMPT, number, MODEL.vocab_size), 1, ignore_eos=True)
        before = time.perf_counter()
        engine.generate([request])
        walls.append((time.perf_counter() - before) * 1e6)
    return {"load": "prompt", "requests": 1, "us": round(statistics.median(walls[WARM_PROMPTS:]), 1)}


def rows() -> Iterator[Row]:
    """Yields the figures of each load, by the number of ranks."""
    num_ranks = 1
    while num_ranks <= torch.cuda.device_count():
        with RankedEngine(load, OPTIONS, num_ranks=num_ranks, device_type="cuda") as engine:
            for num_seqs in DECODES:
                yield {"ranks": num_ranks, **decode(engine, num_seqs)}
            yield {"ranks": num_ranks, **prompts(engine)}
        num_ranks *= 2


def main() -> None:
    """Measures all loads."""
    out = parser_of(__doc__).parse_args().out
    write(out, rows=printed(rows()))


if __name__ == "__main__":
    main()
