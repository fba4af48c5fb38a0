"""Host time of an engine's steps, plain ones and rounds of n-gram speculation, less its waits for the device.

python -m benchmarks.round_time --out benchmarks/results/round_time_h200.json

An engine serves a small Llama, greedily, graphs on. Its layers add nothing, and its output matrix makes each text go
round in a circle, so that all drafts are accepted and a round hands out as many tokens as it can. What counts is the
time in Engine.step() less the waits for the device: all of it, and the part before the step's last launch, during which
a device has nothing else to do. Medians of the steps after the first ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

import torch

from benchmarks.steps_ahead import BOUND_BY_THE_HOST, MODELS, python_us
from benchmarks.tensor_parallel import RandomOnDevice
from rocm_attn.bench.machine import describe_machine
from rocm_attn.runner.engine import Engine
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.ranks import ONE_RANK
from rocm_attn.runner.request import Request
from rocm_attn.runner.weights import load_weights
from rocm_attn.step.host_ring import Fence

NUM_SEQS = (1, 8, 64)
DRAFT_TOKENS = (0, 4, 8)
PROMPT, NEW_TOKENS = 100, 600
CIRCLE = 16  # tokens
SKIPPED = 30  # the first steps: prompts, captures, and texts that do not go round yet


class GoingRound(RandomOnDevice):
    """Weights of a model whose next token follows from the last one alone, in circles of so many tokens."""

    def read(self, name: str, *where: slice) -> torch.Tensor:
        """As TensorSource.read."""
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return torch.zeros_like(super().read(name))[where]
        if name != "lm_head.weight":
            return super().read(name, *where)
        embedding = super().read("model.embed_tokens.weight")
        whole = len(embedding) // CIRCLE * CIRCLE
        after = embedding[:whole].view(-1, CIRCLE, embedding.shape[1]).roll(1, 1)
        return torch.cat([after.reshape(whole, -1), embedding[whole:]])[where]


@dataclass
class Waits:
    """A fence whose waits are timed.

    us:   of each wait, in one step
    last: when the fence was recorded last, after a step's last launch, by time.perf_counter()
    """

    fence: Fence
    us: list[float]
    last: list[float] = field(default_factory=lambda: [0.0])

    def record(self) -> None:
        """As Fence.record."""
        self.fence.record()
        self.last[0] = time.perf_counter()

    def synchronize(self) -> None:
        """As Fence.synchronize."""
        before = time.perf_counter()
        self.fence.synchronize()
        self.us.append((time.perf_counter() - before) * 1e6)


def measure(loaded: LoadedModel, num_seqs: int, num_drafts: int) -> dict[str, float | int]:
    """Figures of the steps of one engine."""
    options = EngineOptions(max_batch_size=num_seqs, max_kv_len=1024, prefix_caching=False, capture_after=0)
    if num_drafts:
        options = EngineOptions(
            max_batch_size=num_seqs,
            max_kv_len=1024,
            prefix_caching=False,
            capture_after=0,
            chunk=max(512, num_seqs * (1 + num_drafts)),
            speculative="ngram",
            draft_tokens=num_drafts,
        )
    engine = Engine(loaded, options)
    waits: list[float] = []
    launched = [0.0]
    for memory in engine._picker.plain._host:
        memory.done = Waits(memory.done, waits, launched)
    random = torch.Generator().manual_seed(1)
    vocabulary = loaded.config.vocab_size
    for _ in range(num_seqs):
        prompt = torch.randint(vocabulary, (PROMPT,), generator=random).tolist()
        engine.submit(Request(tuple(prompt), NEW_TOKENS, ignore_eos=True))
    all_us, bubble_us = [], []
    while engine.has_work:
        waits.clear()
        before = time.perf_counter()
        engine.step()
        after = time.perf_counter()
        all_us.append((after - before) * 1e6 - sum(waits))
        # Of rounds, the wait comes before the launch; of plain steps ahead, after it.
        bubble_us.append((launched[0] - before) * 1e6 - (sum(waits) if num_drafts else 0))
    metrics = engine.report().metrics
    middle = slice(SKIPPED, len(all_us) - 5)
    return {
        "num_seqs": num_seqs,
        "draft_tokens": num_drafts,
        "host_us_median": round(statistics.median(all_us[middle]), 1),
        "host_us_p10": round(statistics.quantiles(all_us[middle], n=10)[0], 1),
        "before_launch_us_median": round(statistics.median(bubble_us[middle]), 1),
        "steps": len(all_us),
        "replays": metrics.replays,
        "acceptance_length": round(1 + metrics.accepted_drafts / max(1, metrics.verifications), 2),
    }


def main() -> None:
    """Measure every number of sequences and of drafts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    config, device = MODELS[BOUND_BY_THE_HOST], torch.device("cuda")
    weights = load_weights(GoingRound(config, device), config, dtype=torch.bfloat16, device=device)
    loaded = LoadedModel(config, weights, None, ONE_RANK)
    rows = []
    for num_seqs in NUM_SEQS:
        for num_drafts in DRAFT_TOKENS:
            rows.append(measure(loaded, num_seqs, num_drafts))
            print(rows[-1], flush=True)
    with open(args.out, "w") as file:
        json.dump({"machine": {**describe_machine(), "python_loop_us": python_us()}, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
