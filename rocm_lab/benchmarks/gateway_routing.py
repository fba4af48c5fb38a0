"""The value of a gateway's routing for the prefix caches of two servers, counted; see docs/scale.md.

python -m rocm_lab.benchmarks.gateway_routing  two servers of the tests' tiny model, both policies; writes the result
python -m rocm_lab.benchmarks.gateway_routing --page     writes the table of docs/scale.md from the result file

Requests of GROUPS conversations, each with its own beginning, in a random order. All beginnings together do not fit the
pages of one server, but do fit those of two. Counts do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rocm_lab.bench.machine import commit
from tests.amd.server.gateways import ask, gateway, get
from tests.amd.server.load.model_folder import write_model
from tests.amd.server.load.served import served
from tests.amd.server.scraped import families_of, value_of

RESULT = Path(__file__).parent / "results" / "gateway_routing.json"
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
BEGINS, ENDS = "<!-- written by python -m rocm_lab.benchmarks.gateway_routing -->", "<!-- end -->"
POLICIES = ("cache_aware", "round_robin")
GROUPS, REQUESTS_EACH, BEGINNING, END = 12, 12, 48, 4  # tokens are words of the tiny model
PAGE_SIZE, NUM_PAGES = 4, 112
AT_ONCE = 2


def prompts() -> list[str]:
    """Returns the prompts of all conversations, in a random order that is the same each time."""
    chance = random.Random(17)

    def words(number: int) -> str:
        return " ".join(f"w{chance.randrange(1, 60)}" for _ in range(number))

    found = []
    for _ in range(GROUPS):
        beginning = words(BEGINNING)
        found += [f"{beginning} {words(END)}" for _ in range(REQUESTS_EACH)]
    chance.shuffle(found)
    return found


def hit_share(policy: str) -> float:
    """The share of all prompts' tokens that a prefix cache had, with two servers behind a gateway."""
    asked = prompts()
    with ExitStack() as stack:
        flags = ("--num-pages", str(NUM_PAGES), "--max-batch-size", "4")
        model = write_model(Path(stack.enter_context(TemporaryDirectory())))
        urls = [stack.enter_context(served(model, *flags)).url for _ in range(2)]
        front = stack.enter_context(gateway(*urls, policy=policy))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert all(pool.map(lambda prompt: ask(front, prompt, 2).is_whole, asked))
        metrics = [families_of(get(f"{url}/metrics")) for url in urls]
    hits, lookups = (
        sum(value_of(each, f"rocm_attn_prefix_{name}_total") for each in metrics) for name in ("hits", "lookups")
    )
    return hits / lookups


def table(result: Mapping[str, Any]) -> str:
    """Returns the table of a result in docs/scale.md, between its two comments."""
    names = {"cache_aware": "`cache_aware`", "round_robin": "`round_robin`"}
    lines = ["| policy | prompts' tokens that were cached |", "|---|---|"]
    lines += [f"| {names[policy]} | {share:.1%} |" for policy, share in result["hit_share"].items()]
    most = result["beginning_tokens"] * (1 - result["groups"] / result["requests"])
    most /= result["beginning_tokens"] + result["end_tokens"]
    lines.append(f"| all that could be, if each beginning is computed once | {most:.1%} |")
    said = (
        f"{result['requests']} requests of {result['groups']} conversations, {result['beginning_tokens']} + "
        f"{result['end_tokens']} tokens each, two servers with {result['tokens_of_a_server']} tokens of KV each; "
        f"commit {result['commit']}."
    )
    return "\n".join([*lines, "", said])


def with_table(page: str, result: Mapping[str, Any]) -> str:
    """Returns the page with the table of a result."""
    before, begins, rest = page.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    assert begins, f"the page has no line {BEGINS}"
    assert ends, f"the page has no line {ENDS}"
    return f"{before}{begins}\n{table(result)}\n{ends}{after}"


def count() -> dict[str, Any]:
    """Counts both policies."""
    return {
        "commit": commit(),
        "groups": GROUPS,
        "requests": GROUPS * REQUESTS_EACH,
        "beginning_tokens": BEGINNING,
        "end_tokens": END,
        "tokens_of_a_server": PAGE_SIZE * NUM_PAGES,
        "hit_share": {policy: round(hit_share(policy), 3) for policy in POLICIES},
    }


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table; count nothing")
    if not parser.parse_args().page:
        RESULT.write_text(json.dumps(count(), indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
