"""How long a GPU waits for the host between decode steps, when steps are launched ahead and when they are not.

python -m rocm_lab.benchmarks.steps_ahead --out rocm_lab/benchmarks/results/steps_ahead_h200.json

An engine serves 64 requests of a Llama of random weights, graphs on. Events on the stream mark the beginning and the
end of each step, its picks included: between the end of one and the beginning of the next the GPU has nothing to do.
Tokens must be the same with steps ahead and without. Exits with 1, after writing the file, if they are not, or if more
than 1 % of the time is idle with steps ahead, but for a model whose steps are shorter than the host's work for them.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field

import torch

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.models.config import ModelConfig
from rocm_attn.step.protocols import RunsSteps
from rocm_lab.benchmarks.script import parser_of, write
from rocm_lab.benchmarks.tensor_parallel import RandomOnDevice, model_of
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.weights import load_weights
from rocm_serve.options import EngineOptions
from rocm_serve.ranks import ONE_RANK
from rocm_serve.request import Request
from rocm_serve.sampling.sampling_options import Sampling

NUM_SEQS, PROMPT, NEW_TOKENS = 64, 32, 160
SKIPPED = 20  # the first steps: prompts, and the capture
MOST_IDLE = 0.01
# Its steps are shorter than the host's work for one, so its GPU is idle either way: it shows the host's time.
BOUND_BY_THE_HOST = "2 layers of 1024"
MODELS = {
    "SmolLM2-135M's sizes": model_of((9, 3, 64), 576, 1536, 49152, 30, 1024),
    "Llama-3.2-1B's sizes": model_of((32, 8, 64), 2048, 8192, 128256, 16, 1024),
    BOUND_BY_THE_HOST: model_of((16, 8, 64), 1024, 2816, 32000, 2, 1024),
}
SAMPLINGS = {"greedy": None, "temperature 0.8, top_p 0.9": (0.8, 0.9)}


@dataclass
class Marked:
    """Steps of an engine, with an event before and after each."""

    steps: RunsSteps[torch.Tensor]
    begun: list[torch.Event] = field(default_factory=list)
    ended: list[torch.Event] = field(default_factory=list)

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> torch.Tensor:
        """Does the same as `RunsSteps.run`."""
        self.begun.append(event())
        return self.steps.run(batch, pad_to)


def event() -> torch.Event:
    """Returns an event that is recorded on the current stream now."""
    made = torch.Event("cuda", enable_timing=True)
    made.record()
    return made


def mark(engine: Engine) -> Marked:
    """Puts marks around the steps of an engine."""
    marked = Marked(engine._steps)
    pick = engine._picker.pick

    def and_then(*arguments: object) -> object:
        picked = pick(*arguments)  # type: ignore[arg-type]
        marked.ended.append(event())
        return picked

    engine._steps = marked
    engine._picker.pick = and_then  # type: ignore[method-assign,assignment]
    return marked


def measure(
    loaded: LoadedModel, sampling: tuple[float, float] | None, steps_ahead: int
) -> tuple[dict[str, float | int], list[tuple[int, ...]]]:
    """Returns figures of the decode steps, and all tokens."""
    engine = Engine(
        loaded,
        EngineOptions(
            max_batch_size=NUM_SEQS,
            chunk=NUM_SEQS * PROMPT,
            max_kv_len=512,
            num_pages=NUM_SEQS * 32 + 1,
            prefix_caching=False,
            steps_ahead=steps_ahead,
        ),
    )
    marked = mark(engine)
    random = torch.Generator().manual_seed(1)
    vocabulary = loaded.config.vocab_size
    prompts = [torch.randint(vocabulary, (PROMPT,), generator=random).tolist() for _ in range(NUM_SEQS)]
    how = [Sampling() if sampling is None else Sampling(*sampling, seed=seed) for seed in range(NUM_SEQS)]
    requests = [Request(tuple(prompt), NEW_TOKENS, each) for prompt, each in zip(prompts, how, strict=True)]
    completions = engine.generate(requests)
    torch.cuda.synchronize()
    begun, ended = marked.begun[SKIPPED:], marked.ended[SKIPPED:]
    gaps = [1e3 * end.elapsed_time(begin) for end, begin in zip(ended, begun[1:], strict=False)]
    total = 1e3 * ended[0].elapsed_time(ended[-1])
    report = engine.report().metrics
    figures: dict[str, float | int] = {
        "steps_ahead": steps_ahead,
        "steps": len(begun),
        "step_us": round(total / (len(ended) - 1), 1),
        "gap_us_median": round(statistics.median(gaps), 1),
        "idle_share": round(sum(gaps) / total, 4),
        "host_us_median": round(1e6 * report.host_seconds.quantile(0.5), 1),
        "replays": report.replays,
        "tokens_per_second": round(NUM_SEQS * 1e6 * (len(ended) - 1) / total),
    }
    return figures, [done.token_ids for done in completions]


def loaded_model(config: ModelConfig, device: torch.device) -> LoadedModel:
    """Returns a model with random weights in bfloat16."""
    weights = load_weights(RandomOnDevice(config, device), config, dtype=torch.bfloat16, device=device)
    return LoadedModel(config, weights, None, ONE_RANK)


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
    args = parser_of(__doc__).parse_args()
    device, rows, failures = torch.device("cuda"), [], []
    for name, config in MODELS.items():
        loaded = loaded_model(config, device)
        for how, sampling in SAMPLINGS.items():
            found = {}
            for steps_ahead in (0, 1):
                figures, found[steps_ahead] = measure(loaded, sampling, steps_ahead)
                rows.append({"model": name, "sampling": how, **figures})
                print(rows[-1], flush=True)
            if found[0] != found[1]:
                failures.append(f"{name}, {how}: tokens differ")
            if figures["idle_share"] > MOST_IDLE and name != BOUND_BY_THE_HOST:
                failures.append(f"{name}, {how}: {figures['idle_share']:.1%} idle with steps ahead")
    write(args.out, of_machine={"python_loop_us": python_us()}, rows=rows)
    print(*failures, sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
