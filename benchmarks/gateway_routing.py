"""What a gateway's routing is worth to the prefix caches of two servers, counted; see docs/scale.md.

python -m benchmarks.gateway_routing            two servers of the tests' tiny model, both policies; writes the result

Requests of GROUPS conversations, each with a beginning of its own, in a random order. All beginnings together do not
fit the pages of one server, and do fit those of two. Counts do not depend on how fast the machine is.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.machine import commit
from tests.amd.server.gateways import ask, gateway, get
from tests.amd.server.running import served_process
from tests.amd.server.scraped import families_of, value_of

RESULT = Path(__file__).parent / "results" / "gateway_routing.json"
POLICIES = ("cache_aware", "round_robin")
GROUPS, REQUESTS_EACH, BEGINNING, END = 12, 12, 48, 4  # tokens are words of the tiny model
PAGE_SIZE, NUM_PAGES = 4, 112
AT_ONCE = 2


def prompts() -> list[str]:
    """Of all conversations, in a random order that is the same each time."""
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
        urls = [stack.enter_context(served_process(*flags))[1] for _ in range(2)]
        front = stack.enter_context(gateway(*urls, policy=policy))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert all(pool.map(lambda prompt: ask(front, prompt, 2).is_whole, asked))
        metrics = [families_of(get(f"{url}/metrics")) for url in urls]
    hits, lookups = (
        sum(value_of(each, f"rocm_attn_prefix_{name}_total") for each in metrics) for name in ("hits", "lookups")
    )
    return hits / lookups


def main() -> None:
    """The command."""
    found = {
        "commit": commit(),
        "groups": GROUPS,
        "requests": GROUPS * REQUESTS_EACH,
        "beginning_tokens": BEGINNING,
        "end_tokens": END,
        "tokens_of_a_server": PAGE_SIZE * NUM_PAGES,
        "hit_share": {policy: round(hit_share(policy), 3) for policy in POLICIES},
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
