"""Tokens per second on a CPU: the runner and transformers' own generate, with the same weights, dtype and batch.

python -m rocm_lab.benchmarks.runner_vs_transformers --out rocm_lab/benchmarks/results/runner_cpu.json

The contestants take turns, so that a change of the machine's speed affects all of them; a round before the first warms
up and makes graphs. A speed is only recorded if all of them generate the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rocm_lab.bench.machine import describe_machine, version_of
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.text.hf_reference import hf_llama

NEW_TOKENS = 64
PROMPTS = (
    "Tell me a story about a dragon who learns to cook.",
    "Explain how rain forms, step by step.",
    "Write a poem about the winter moon.",
    "List ten facts about the planet Jupiter.",
    "What should I pack for a week of hiking in the Alps?",
    "Describe the history of the Roman Empire.",
    "How do I bake bread at home?",
    "Why is the sky blue?",
)

Tokens = list[list[int]]


def runner(loaded: LoadedModel, prompts: Tokens, *, graphs: bool) -> Callable[[], Tokens]:
    """The runner, all prompts in one batch."""
    options = EngineOptions(
        provider="torch", max_batch_size=len(prompts), graphs=graphs, max_kv_len=256, capture_after=0
    )
    engine = Engine(loaded, options)
    requests = [Request(tuple(prompt), NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    return lambda: [list(completion.token_ids) for completion in engine.generate(requests)]


def transformers_generate(loaded: LoadedModel, prompts: Tokens) -> Callable[[], Tokens]:
    """transformers, all prompts in one batch, padded on the left."""
    model: Any = hf_llama(loaded)
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None

    def generate() -> Tokens:
        with torch.inference_mode():
            out = model.generate(
                token_ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
        tokens: Tokens = out[:, longest:].tolist()
        return tokens

    return generate


def measure(contestants: dict[str, Callable[[], Tokens]], rounds: int) -> dict[str, Any]:
    """Medians over rounds in which each contestant runs once."""
    outputs = {name: generate() for name, generate in contestants.items()}
    if any(tokens != outputs["transformers"] for tokens in outputs.values()):
        raise SystemExit("the contestants generate different tokens; their speeds mean nothing")
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, generate in contestants.items():
            before = time.perf_counter()
            generate()
            seconds[name].append(time.perf_counter() - before)
    num_tokens = len(PROMPTS) * NEW_TOKENS
    ratios = {
        name: statistics.median(t / own for t, own in zip(seconds["transformers"], seconds[name], strict=True))
        for name in contestants
    }
    return {
        name: {
            "tokens_per_s": round(num_tokens / statistics.median(seconds[name]), 1),
            "times_transformers": round(ratios[name], 3),
            "seconds": [round(second, 3) for second in seconds[name]],
        }
        for name in contestants
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are measured (5)")
    parser.add_argument("--threads", type=int, help="threads of torch (its own choice)")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    loaded = load_model("smollm2", dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.tokenizer is not None
    prompts = [loaded.tokenizer.encode_chat(prompt) for prompt in PROMPTS]
    contestants = {
        "transformers": transformers_generate(loaded, prompts),
        "runner, graphs": runner(loaded, prompts, graphs=True),
        "runner, no graphs": runner(loaded, prompts, graphs=False),
    }
    result = {
        "what": f"{len(prompts)} prompts, {NEW_TOKENS} new tokens each, SmolLM2-135M, float32, greedy",
        "machine": {**describe_machine(), "transformers": version_of("transformers")},
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "results": measure(contestants, options.rounds),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["results"], indent=2))


if __name__ == "__main__":
    main()
