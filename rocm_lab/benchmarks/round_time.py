"""Host time of an engine's steps, plain ones and rounds of drafts, and the GPU's waits for the host.

python -m rocm_lab.benchmarks.round_time --out rocm_lab/benchmarks/results/round_time_h200.json

An engine serves a Llama, greedily, graphs on. Its layers add nothing, and its output matrix makes each text repeat in a
circle, so that all drafts are accepted and a round brings as many tokens as possible; but hardly any drafts of a head,
whose weights are random. A small model that drafts has one layer of the model's. Each step has three figures, medians
of the steps after the first ones:

launch: the host's time from the beginning of Engine.step() to the last launch, less the waits for the device: the wait
        of a GPU that has nothing else to do. A step that reads tokens first reads them in it
whole:  all time in Engine.step() less the waits for the device, including reading, booking and handing out tokens.
        Means of eight steps, while no text has ended
idle:   the GPU's, by events around the launches of each step, in a separate run: the events cost the host time
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from rocm_attn.models.config import ModelConfig
from rocm_attn.step.host_ring import Fence
from rocm_lab.benchmarks.random_models import RandomOnDevice, model_of, random_model
from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from rocm_serve.speculation import engines
from rocm_serve.speculation.device_steps import DeviceSpeculation

# Its steps are shorter than the host's work for one, so its GPU is idle either way: it shows the host's time.
BOUND_BY_THE_HOST = "2 layers of 1024"
MODELS = {
    "Llama-3.2-1B's sizes": model_of((32, 8, 64), 2048, 8192, 128256, 16, 4096),
    BOUND_BY_THE_HOST: model_of((16, 8, 64), 1024, 2816, 32000, 2, 4096),
}
# model -> numbers of sequences, and of drafts.
MEASURED = {BOUND_BY_THE_HOST: ((1, 8, 64), (0, 4, 8)), "Llama-3.2-1B's sizes": ((1, 8, 64), (8,))}
SMALL, HEAD = "draft:one layer", "eagle:seeded"
# Drafters and numbers of branches in addition to n-grams, with 4 drafts of the first model.
DRAFTERS = ((SMALL, 1), (SMALL, 2), (HEAD, 1), (HEAD, 2))
WITH_MODELS = 4
PROMPT, STEPS = 100, 200
KV_BYTES = 8 << 30
CIRCLE = 16  # tokens
TOGETHER = 8
SKIPPED = 30  # the first steps: prompts, captures, and texts that do not repeat yet


class GoingRound(RandomOnDevice):
    """Weights of a model whose next token depends on the last one alone, in circles of CIRCLE tokens."""

    def read(self, name: str, *where: slice) -> torch.Tensor:
        """Does the same as `TensorSource.read`."""
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return torch.zeros_like(super().read(name))[where]
        if name != "lm_head.weight":
            return super().read(name, *where)
        embedding = super().read("model.embed_tokens.weight")
        whole = len(embedding) // CIRCLE * CIRCLE
        after = embedding[:whole].view(-1, CIRCLE, embedding.shape[1]).roll(1, 1)
        return torch.cat([after.reshape(whole, -1), embedding[whole:]])[where]


@dataclass
class TimedFence:
    """A fence whose waits are timed.

    us:   of each wait, in one step, and when it was over
    last: when the fence was recorded last, after a step's last launch, by time.perf_counter()
    """

    fence: Fence
    us: list[tuple[float, float]]
    last: list[float] = field(default_factory=lambda: [0.0])

    def record(self) -> None:
        """Does the same as `Fence.record`."""
        self.fence.record()
        self.last[0] = time.perf_counter()

    def synchronize(self) -> None:
        """Does the same as `Fence.synchronize`."""
        before = time.perf_counter()
        self.fence.synchronize()
        after = time.perf_counter()
        self.us.append(((after - before) * 1e6, after))

    def query(self) -> bool:
        """Does the same as `Fence.query`."""
        return self.fence.query()


def engine_of(loaded: LoadedModel, num_seqs: int, num_drafts: int, drafter: str = "ngram", topk: int = 1) -> Engine:
    """Returns an engine that has its requests."""
    options = EngineOptions(
        max_batch_size=num_seqs,
        max_kv_len=PROMPT + STEPS * (1 + num_drafts) + 2 * num_drafts,
        prefix_caching=False,
        capture_after=0,
        kv_bytes=KV_BYTES,
    )
    if num_drafts:
        chunk = max(512, num_seqs * (1 + num_drafts))
        options = replace(options, chunk=chunk, speculative=drafter, draft_tokens=num_drafts, topk=topk)
    with patch.object(engines, "load_model", lambda *which, **how: going_round(loaded.config, 1)):
        engine = Engine(loaded, options)
    for number in range(num_seqs):
        prompt = prompt_of(PROMPT, number, loaded.config.vocab_size)
        engine.submit(Request(prompt, STEPS * (1 + num_drafts), ignore_eos=True))
    return engine


def prompt_of(length: int, seed: int, vocabulary: int) -> tuple[int, ...]:
    """Returns random token ids."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocabulary, (length,), generator=random).tolist())


def going_round(config: ModelConfig, num_layers: int) -> LoadedModel:
    """Returns the model of these sizes, with num_layers layers."""
    return random_model(replace(config, layers=config.layers[:num_layers]), GoingRound)


def watch(engine: Engine) -> tuple[list[tuple[float, float]], list[float]]:
    """Returns TimedFence.us of all fences of an engine, and TimedFence.last of its last launch."""
    waits: list[tuple[float, float]] = []
    launched = [0.0]
    for memory in engine._picker.plain._host:
        memory.done = TimedFence(memory.done, waits, launched)
    if isinstance(engine._speculative_steps, DeviceSpeculation):
        for of_speculative_step in engine._speculative_steps._memory:
            of_speculative_step.done = TimedFence(of_speculative_step.done, waits, launched)
    return waits, launched


def measure(engine: Engine, num_seqs: int) -> dict[str, float | int]:
    """Returns the figures of the steps of one engine."""
    waits, launched = watch(engine)
    all_us, launch_us, num_steady = list[float](), list[float](), 0
    while engine.has_work:
        num_steady = len(all_us) if engine._scheduler.num_running == num_seqs else num_steady
        waits.clear()
        before, launched_before = time.perf_counter(), launched[0]
        engine.step()
        after = time.perf_counter()
        all_us.append((after - before) * 1e6 - sum(us for us, _ in waits))
        if launched[0] != launched_before:
            waited = sum(us for us, until in waits if until < launched[0])
            launch_us.append((launched[0] - before) * 1e6 - waited)
    metrics, whole_us = engine.report().metrics, by_step(all_us[SKIPPED:num_steady])
    return {
        "launch_us_median": median(launch_us),
        "launch_us_p90": round(statistics.quantiles(launch_us[SKIPPED:-5], n=10)[8], 1),
        "whole_us_median": round(statistics.median(whole_us), 1),
        "whole_us_mean": round(statistics.mean(whole_us), 1),
        "whole_us_p10": round(statistics.quantiles(whole_us, n=10)[0], 1),
        "whole_us_p90": round(statistics.quantiles(whole_us, n=10)[8], 1),
        "steps": len(all_us),
        "replays": metrics.replays,
        "acceptance_length": round(1 + metrics.accepted_drafts / max(1, metrics.verifications), 2),
    }


def by_step(us: list[float]) -> list[float]:
    """Means of TOGETHER steps each: some steps read no round, and some read several."""
    return [statistics.mean(us[first : first + TOGETHER]) for first in range(0, len(us) - TOGETHER + 1, TOGETHER)]


def median(values: list[float]) -> float:
    """Returns the median of the steps after the first ones and before the last."""
    return round(statistics.median(values[SKIPPED:-5]), 1)


def idle(engine: Engine) -> dict[str, float]:
    """Returns the GPU's time per step, and its wait for the next one."""
    begun, ended = list[torch.Event](), list[torch.Event]()

    def marked(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def and_mark(*arguments: object) -> Any:
            begun.append(event())
            found = call(*arguments)
            ended.append(event())
            return found

        setattr(owner, name, and_mark)

    marked(engine, "_run")
    marked(engine._speculative_steps, "launch")
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    first, last = begun[SKIPPED:-5], ended[SKIPPED:-5]
    gaps = [1e3 * end.elapsed_time(begin) for end, begin in zip(last, first[1:], strict=False)]
    total = 1e3 * last[0].elapsed_time(last[-1])
    return {
        "step_us": round(total / len(gaps), 1),
        "idle_us": round(statistics.median(gaps), 1),
        "idle_share": round(sum(gaps) / total, 4),
    }


def event() -> torch.Event:
    """Returns an event that is recorded on the current stream now."""
    made = torch.Event("cuda", enable_timing=True)
    made.record()
    return made


def python_us() -> float:
    """Returns the time of a fixed loop of Python: the speed of this host."""
    best = float("inf")
    for _ in range(20):
        before = time.perf_counter()
        total = 0
        for number in range(10_000):
            total += number & 7
        best = min(best, time.perf_counter() - before)
    return round(best * 1e6, 1)


def main() -> None:
    """Measures every number of sequences and of drafts."""
    options = parser_of(__doc__).parse_args()
    write(options.out, of_machine={"python_loop_us": python_us()}, rows=printed(rows()))


def rows() -> Iterator[Row]:
    """Yields the figures of each model, number of sequences and drafter."""
    for name, (num_seqs_of, drafts_of) in MEASURED.items():
        loaded = going_round(MODELS[name], len(MODELS[name].layers))
        drafters = DRAFTERS if name == BOUND_BY_THE_HOST else ()
        for num_seqs in num_seqs_of:
            how = [(num_drafts, "ngram", 1) for num_drafts in drafts_of]
            for num_drafts, drafter, topk in [*how, *((WITH_MODELS, *each) for each in drafters)]:
                engine_with = partial(engine_of, loaded, num_seqs, num_drafts, drafter, topk)
                what = {"model": name, "num_seqs": num_seqs, "draft_tokens": num_drafts, "drafter": drafter}
                yield {**what, "topk": topk, **measure(engine_with(), num_seqs), **idle(engine_with())}


if __name__ == "__main__":
    main()
