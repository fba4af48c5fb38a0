"""Log-likelihoods that lm-eval reads from a server, beside those of transformers for the same questions.

rocm-attn serve --model FOLDER --dtype float32 --port 8000
python -m rocm_lab.benchmarks.lm_eval_likelihoods --url http://127.0.0.1:8000 --model FOLDER --questions FILE

FILE has a question on each line: {"query": TEXT, "choices": [TEXT, ...], "gold": NUMBER OF THE RIGHT CHOICE}. lm-eval
asks the server through its model local-completions, and transformers through hf. The exit status is 1 if a
log-likelihood differs by more than --most, or if only one of the two calls a choice the likeliest text.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_TASK = "rocm_attn_local"


class Likelihood(NamedTuple):
    """A choice's log-likelihood after the query, and whether each of its tokens is the likeliest one."""

    logprob: float
    is_greedy: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares the two, prints the result, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of a server with the model, such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="a folder, or an id of the hub, by which the server names it")
    parser.add_argument("--questions", type=Path, required=True, help="a file with a question on each line")
    parser.add_argument("--dtype", default="float32", help="in which transformers computes (float32)")
    parser.add_argument("--device", default="cpu", help="on which transformers computes (cpu)")
    parser.add_argument("--most", type=float, default=1e-3, help="largest difference of a log-likelihood (0.001)")
    options = parser.parse_args(arguments)
    try:
        lm_eval = importlib.import_module("lm_eval")
    except ImportError:
        parser.error("lm-eval is not installed; install it with pip install 'lm-eval[api,hf]>=0.4.13'")
    if not options.questions.is_file():
        parser.error(f"{options.questions} is no file; give one with a question on each line")
    url = f"{options.url.rstrip('/')}/v1/completions"
    hf = {"pretrained": options.model, "dtype": options.dtype, "device": options.device}
    theirs = likelihoods(lm_eval, "hf", hf, options.questions)
    ours = likelihoods(lm_eval, "local-completions", {"model": options.model, "base_url": url}, options.questions)
    worst, disagreeing = compared(ours, theirs)
    print(
        f"{len(ours)} choices: log-likelihoods differ by at most {worst:.2g}, {disagreeing} are likeliest for one only"
    )
    return int(not worst <= options.most or disagreeing > 0)


def likelihoods(lm_eval: Any, model: str, model_args: dict[str, str], questions: Path) -> list[Likelihood]:
    """Returns the likelihoods of all choices, in their order. model: by lm-eval's name"""
    task = {
        "task": _TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions.resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    }
    result = lm_eval.simple_evaluate(model=model, model_args=model_args, tasks=[task], bootstrap_iters=0)
    samples = sorted(result["samples"][_TASK], key=lambda sample: sample["doc_id"])
    return [Likelihood(float(logprob), bool(greedy)) for sample in samples for ((logprob, greedy),) in sample["resps"]]


def compared(ours: Sequence[Likelihood], theirs: Sequence[Likelihood]) -> tuple[float, int]:
    """Returns the largest difference of log-likelihoods, and the number of choices that are greedy for one only."""
    pairs = list(zip(ours, theirs, strict=True))
    differences = [abs(own.logprob - other.logprob) for own, other in pairs]
    # max() would pass over NaN.
    worst = next((each for each in differences if each != each), max(differences, default=0.0))
    return worst, sum(own.is_greedy is not other.is_greedy for own, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
