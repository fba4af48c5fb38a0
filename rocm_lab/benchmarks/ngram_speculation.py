"""The speedup of SmolLM2 on code edits when earlier text is drafted again.

python -m rocm_lab.benchmarks.ngram_speculation --out rocm_lab/benchmarks/results/ngram_speculation_h200.json

An engine continues prompts that hold code and the beginning of its changed copy: greedily, the same number of tokens of
each, once plainly and once with each number of drafts. The first run of an engine makes its graphs, the second is
measured. Texts are compared with those of plain decoding: in float32 they must be equal; in a 16-bit dtype verify and
decode steps round differently, and the file contains the number of equal ones.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch

from rocm_lab.benchmarks.script import parser_of, write
from rocm_serve.engine import Engine
from rocm_serve.models.loading import LoadedModel, load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request

NEW_TOKENS = 128
DRAFT_TOKENS = (4, 8)
BATCH_SIZES = (1, 8)
ROUNDS = 4
FUNCTIONS = (
    """def total(items):
    result = 0
    for item in items:
        result = result + item.price * item.count
    return result""",
    """def read_lines(path):
    lines = []
    with open(path) as file:
        for line in file:
            lines.append(line.strip())
    return lines""",
    """class Counter:
    def __init__(self, start):
        self.value = start

    def increment(self, step):
        self.value = self.value + step
        return self.value""",
    """def find(items, wanted):
    for index in range(len(items)):
        if items[index] == wanted:
            return index
    return -1""",
)
EDITS = (
    "# The same code, with a comment before each function:\n",
    "# The same code, with other names:\n",
)


def prompts() -> list[str]:
    """Code, and the beginning of its changed copy."""
    return [f"{code}\n\n\n{edit}{code.split(chr(10), 1)[0]}\n" for edit in EDITS for code in FUNCTIONS]


def measure(
    loaded: LoadedModel, options: EngineOptions, requests: list[Request]
) -> tuple[dict[str, object], list[tuple[int, ...]]]:
    """Figures of the second run, and its tokens."""
    engine = Engine(loaded, options)
    engine.generate(requests)
    before = engine.report().metrics
    started = time.perf_counter()
    completions = engine.generate(requests)
    seconds = time.perf_counter() - started
    after = engine.report().metrics
    verified = after.verifications - before.verifications
    accepted = after.accepted_drafts - before.accepted_drafts
    steps = after.steps - before.steps
    figures: dict[str, object] = {
        "sequences": options.max_batch_size,
        "draft_tokens": options.draft_tokens if options.speculates else 0,
        "seconds": round(seconds, 3),
        "tokens_per_second": round((after.new_tokens - before.new_tokens) / seconds),
        "steps": steps,
        "step_us": round(1e6 * seconds / steps),
        "acceptance_length": round(1 + accepted / verified, 2) if verified else 1.0,
        "host_us": round(1e6 * after.host_seconds.quantile(0.5)),
        "eager_steps": steps - (after.replays - before.replays),
        "replays": after.replays - before.replays,
        "graphs": engine.report().graphs,
    }
    return figures, [done.token_ids for done in completions]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--speculative", default="ngram", help="as of rocm-attn generate")
    parser.add_argument("--topk", type=int, default=1)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_model(args.model, dtype=getattr(torch, args.dtype), device=device)
    assert loaded.tokenizer is not None
    ids = [loaded.tokenizer.encode(prompt) for prompt in prompts()]
    each_once = [Request(tuple(each), args.new_tokens, ignore_eos=True) for each in ids]
    rows, failures = [], []
    for num_seqs in BATCH_SIZES:
        requests = each_once * (ROUNDS if num_seqs > 1 else 1)  # so that places are taken again as they come free
        plain = EngineOptions(max_batch_size=num_seqs, max_kv_len=512, prefix_caching=False, capture_after=0)
        speed, expected = 0.0, list[tuple[int, ...]]()
        for num_drafts in (0, *DRAFT_TOKENS):
            options = plain
            if num_drafts:
                options = replace(plain, speculative=args.speculative, draft_tokens=num_drafts, topk=args.topk)
            figures, tokens = measure(loaded, options, requests)
            if not num_drafts:
                speed, expected = float(str(figures["tokens_per_second"])), tokens
            figures["speedup"] = round(float(str(figures["tokens_per_second"])) / speed, 2)
            figures["equal_texts"] = f"{sum(a == b for a, b in zip(tokens, expected, strict=True))} of {len(tokens)}"
            rows.append(figures)
            print(figures, flush=True)
            if args.dtype == "float32" and tokens != expected:
                failures.append(f"{num_seqs} sequences, {num_drafts} drafts: tokens differ")
            speculative = args.speculative.split(":")[0]
            write(args.out, dtype=args.dtype, speculative=speculative, topk=args.topk, rows=rows)
    print(*failures, sep="\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
