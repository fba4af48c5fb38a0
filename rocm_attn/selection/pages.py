"""Chooses a pool's page size and layout, before it is allocated: those with the best kernels over all layers and steps.

Kernels differ in the pages that they read, and a pool has one page size and one layout for all of its layers. So the
choice is joint: pages that suit the decode kernel may leave extend steps with a much slower kernel.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.errors import BadProblem, Unsupported
from rocm_attn.machine.choices import AUTO
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import ENTRIES, Selection

# Tokens in a page, in order of preference if kernels are equally good: small pages waste less at a sequence's end and
# are shared more often, but every page is an entry of the table.
PAGE_SIZES = (16, 32, 64, 128, 1, 1024)

# Layouts by name, in order of preference. Every kernel of this project reads linear pages, including those for shared
# prefixes, masks and deterministic mode. Latent layers always have a pool of their own kind.
POOLS: Mapping[str, PoolKind] = {"linear": PoolKind.SPLIT, "vectorized": PoolKind.VECTORIZED}

# Masked steps belong to layers with masks, and do not decide the pages of other layers; neither do steps that share
# prefixes or verify drafts, which not every server has.
_KINDS = tuple(kind for kind in StepKind if kind.extra is Extra.NOTHING and kind is not StepKind.VERIFY)


@dataclass(frozen=True, slots=True)
class PageChoice:
    """A page size and a layout, and a line about each pair that was considered.

    pool:  of the layers that are not latent
    lines: a sentence each, in order of preference; none if there was no choice
    """

    page_size: int
    pool: PoolKind
    lines: tuple[str, ...]

    def describe(self) -> str:
        return f"{_layout(self.pool)}pages of {self.page_size} tokens"

    def problems(self, problems: Sequence[Problem]) -> tuple[Problem, ...]:
        """The same layers over these pages. Raises BadProblem if that is not possible."""
        return tuple(_over(problem, self.page_size, self.pool) for problem in problems)


def open_page_sizes(page_size: int | Literal["auto"]) -> tuple[int, ...]:
    """The page sizes to choose from: the given one, or all if it is left open."""
    return PAGE_SIZES if page_size == AUTO else (page_size,)


def open_pools(pool: str) -> tuple[PoolKind, ...]:
    """The layouts to choose from: the one with this name in POOLS, or all if it is left open."""
    return tuple(POOLS.values()) if pool == AUTO else (POOLS[pool],)


def choose_pages(
    problems: Sequence[Problem],
    choose: Callable[[Problem], Selection],
    page_sizes: Sequence[int] = PAGE_SIZES,
    pools: Sequence[PoolKind] = tuple(POOLS.values()),
) -> PageChoice:
    """Chooses the pages over which the most layers and kinds of step are served by the first provider that serves any.

    Among equals the first of pools is chosen, because rows over different layouts have no order; then the pages whose
    kernels come first in their provider's rows; then the first of page_sizes. If there is only one choice, no kernels
    are compared.

    problems:   one for each layer; their own page sizes and layouts are ignored, except latent ones
    choose:     the kernels of a problem, like select(); raises Unsupported
    Raises Unsupported if no pages serve every layer, with the reasons of each.
    """
    if len(page_sizes) == len(pools) == 1:
        return PageChoice(page_sizes[0], pools[0], ())
    costs: dict[tuple[PoolKind, int], tuple[int, int, int]] = {}
    lines, reasons = [], []
    # A model of only latent layers has one layout.
    for pool in pools if any(problem.pool is not PoolKind.LATENT for problem in problems) else pools[:1]:
        for page_size in page_sizes:
            pages = f"{_layout(pool)}pages of {page_size}"
            try:
                counted = Counter(_over(problem, page_size, pool) for problem in problems)
                layers = [(choose(problem), count) for problem, count in counted.items()]
            except BadProblem as impossible:
                lines.append(f"{pages}: not possible for some layers")
                reasons.append(f"{pages}: {impossible}")
                continue
            except Unsupported as unsupported:
                lines.append(f"{pages}: some layers have no kernel")
                reasons += [f"{pages}: {reason}" for reason in unsupported.reasons]
                continue
            by_provider, by_entry = _cost(layers)
            costs[pool, page_size] = by_provider, pools.index(pool), by_entry
            lines.append(f"{pages}: {_shares(layers)}")
    if not costs:
        sizes, layouts = ", ".join(map(str, page_sizes)), " or ".join(pool.value for pool in pools)
        raise Unsupported(f"no page size of {sizes} has kernels for every layer over {layouts}", reasons)
    pool, page_size = min(costs, key=costs.__getitem__)
    return PageChoice(page_size, pool, tuple(lines))


def _layout(pool: PoolKind) -> str:
    return "vectorised " if pool is PoolKind.VECTORIZED else ""


def _over(problem: Problem, page_size: int, pool: PoolKind) -> Problem:
    """The layer over pages of this size and layout."""
    return replace(problem, page_size=page_size, pool=problem.pool if problem.pool is PoolKind.LATENT else pool)


def _cost(layers: Sequence[tuple[Selection, int]]) -> tuple[int, int]:
    """The sum over all layers and steps of the kernel's rank among providers, and of its rank among their rows."""
    providers = list(ENTRIES)
    by_provider = by_entry = 0
    for selection, count in layers:
        for kind in _KINDS:
            entry = selection.kernel(kind).entry
            # By name: a layer with sparse kernels has other rows of the same names.
            rows = [(each.name, each.kind) for each in ENTRIES[entry.provider]]
            by_provider += count * providers.index(entry.provider)
            # A prefill without a kernel of its own is served by a row that counts as coming after all of its own.
            by_entry += count * (rows.index((entry.name, kind)) if entry.kind is kind else len(rows))
    return by_provider, by_entry


def _shares(layers: Sequence[tuple[Selection, int]]) -> str:
    """How many of all pairs of a layer and a kind of step each provider serves."""
    shares = Counter(
        {
            provider: sum(c for s, c in layers for kind in _KINDS if s.kernel(kind).entry.provider == provider)
            for provider in ENTRIES
        }
    )
    total = sum(shares.values())
    named = [f"{provider} serves {share} of {total}" for provider, share in shares.items() if share]
    return f"{', '.join(named)} kinds of step over {sum(count for _, count in layers)} layers"
