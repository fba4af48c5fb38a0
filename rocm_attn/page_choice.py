"""The page size of a pool, chosen before it is allocated: the one whose kernels, over all layers and steps, are best.

Kernels differ in the pages that they read, and a pool has one page size for all of its layers. So the choice is joint:
a size that suits the decode kernel may leave extend steps to a kernel that nobody would have taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rocm_attn.errors import Unsupported
from rocm_attn.padding import StepKind
from rocm_attn.problem import Problem
from rocm_attn.providers.select import ROWS, Selection

# What stands for a page size that is to be chosen.
AUTO_PAGE_SIZE: Literal["auto"] = "auto"

# Tokens in a page, in order of preference where kernels are equally good: small pages waste less at a sequence's end
# and are shared more often, but every page is an entry of the table.
PAGE_SIZES = (16, 32, 64, 128, 1, 1024)


# Masked steps come with the layers that ask for masks, and choose no page size for the others; nor do steps that share
# prefixes, which not every server has.
_KINDS = tuple(kind for kind in StepKind if kind not in (StepKind.MASKED, StepKind.SHARED))


@dataclass(frozen=True, slots=True)
class PageChoice:
    """A page size, and what each one that was considered came to.

    lines: a sentence each, in order of preference
    """

    page_size: int
    lines: tuple[str, ...]


def choose_page_size(
    problems: Sequence[Problem],
    choose: Callable[[Problem], Selection],
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> PageChoice:
    """The page size at which the most layers and kinds of step are served by the first provider that serves any.

    Among equals, the one whose kernels come first in their provider's rows; then the first of page_sizes.

    problems:   one for each layer; their own page sizes are not looked at
    choose:     the kernels of a problem, as select(); raises Unsupported
    Raises Unsupported where no size serves every layer, with the reasons of each.
    """
    num_layers = Counter(problems)
    costs: dict[int, tuple[int, int]] = {}
    lines, reasons = [], []
    for page_size in page_sizes:
        try:
            layers = [(choose(replace(problem, page_size=page_size)), count) for problem, count in num_layers.items()]
        except Unsupported as unsupported:
            lines.append(f"pages of {page_size}: some layers have no kernel")
            reasons += [f"pages of {page_size}: {reason}" for reason in unsupported.reasons]
            continue
        costs[page_size] = _cost(layers)
        lines.append(f"pages of {page_size}: {_shares(layers)}")
    if not costs:
        sizes = ", ".join(map(str, page_sizes))
        raise Unsupported(f"no page size of {sizes} has kernels for every layer", reasons)
    return PageChoice(min(costs, key=costs.__getitem__), tuple(lines))


def _cost(layers: Sequence[tuple[Selection, int]]) -> tuple[int, int]:
    """How far down the providers, and how far down their rows, the kernels of all layers and steps are."""
    providers = list(ROWS)
    by_provider = by_row = 0
    for selection, count in layers:
        for kind in _KINDS:
            row = selection.kernel(kind).row
            rows = ROWS[row.provider]
            by_provider += count * providers.index(row.provider)
            # A prefill that has no kernel of its own is served by a row that comes later than any of its own.
            by_row += count * (rows.index(row) if row.kind is kind else len(rows))
    return by_provider, by_row


def _shares(layers: Sequence[tuple[Selection, int]]) -> str:
    """Which provider serves how many of all pairs of a layer and a kind of step."""
    shares = Counter(
        {
            provider: sum(c for s, c in layers for kind in _KINDS if s.kernel(kind).row.provider == provider)
            for provider in ROWS
        }
    )
    total = sum(shares.values())
    named = [f"{provider} serves {share} of {total}" for provider, share in shares.items() if share]
    return f"{', '.join(named)} kinds of step over {sum(count for _, count in layers)} layers"
