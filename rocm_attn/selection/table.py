"""The capability table for readers: every row of every provider with its limits, as Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.metadata.step_tensors import Need
from rocm_attn.machine.target import KNOWN_TARGETS
from rocm_attn.providers.contract import Baked, Fault, KernelEntry, Limits, ReadAhead
from rocm_attn.providers.select import ENTRIES, INDEXER_ENTRIES, SELECTED_ENTRIES
from rocm_attn.providers.sparse import IndexLimits

_INTRODUCTION = """\
# Kernels

The known kernels and their limits. `rocm-attn kernels` prints this page; a test checks that it is current.
`rocm-attn explain CONFIG.json --arch gfx942` lists the kernels that would serve a model, and why the others would not.

The first kernel that serves a kind of step is used; with the provider `auto`, AITER's come before Triton's, and on a
CPU those for CPUs before PyTorch's. A prefill step is an extend step in which no sequence has a token in the cache;
without a kernel of its own it runs as an extend step. A verify step has up to four new tokens in each sequence, and a
masked step its own mask; layers without a kernel for one run it as a mixed step. A shared step decodes sequences that
share prefixes; layers that cannot share them run it as a decode step. One table has sliding windows, soft caps, sinks,
ALiBi slopes and attention that is not causal; another has the encodings of K and V. *Ranges* are chunks, and windows
with later keys ([which keys a token sees](steps.md#which-keys-a-token-sees)). `triton.rows` and `torch.rows` attend to
[rows of several tokens](compressed.md), and no other kernel of these steps does.

Vectorised pages hold K and V in another order, which some of AITER's kernels read, and torch's reference; a function
that reads both orders has two entries. `--pool auto --page-size auto` chooses layout and page size before a pool is
made.
"""

_MEANING = """\
- **reads ahead**: entries that a kernel reads past a sequence's last page; buffers are longer by as many, which hold
  page 0.
- **masks V**: if no, V past a sequence's end is multiplied by a probability of 0, and 0 * NaN is NaN; the store then
  zeroes the rest of the last page.
- **clears pads**: if no, a launch after the kernel zeroes the padded tokens of its output.
- **LSE**: "without ALiBi" means that only layers without ALiBi slopes get it.
- AITER's kernels refuse combinations of scores that would be wrong: soft caps with ALiBi slopes, or sinks with either;
  `explain` lists them.
- **K and V**: encodings of pages; AITER's kernels read one of the two eight-bit encodings on each arch, see below.
- **a scale per**: the elements that share one scale of eight-bit codes.
- **multiplies**: in eight bits, q or the probabilities of values are rounded to four significant bits.
- **releases**: a release that is not known is treated as one of them.
- **freezes**: host values that are part of a graph's key.
- **pool limit**: bytes of one layer's K pages, and of its V pages.
- **any batch**: yes if a sequence's result is bitwise the same in any batch; deterministic mode needs it.
- **Triton**: the only releases that it runs with; a release that is not known is treated as none of them.
- A padded sequence has the least KV length.
"""

# A provider that is not here has its own name as its title.
_TITLES = {"aiter": "AITER", "triton": "Triton", "cpu": "CPU", "torch": "PyTorch"}


def markdown() -> str:
    """The whole page, with a newline at its end."""
    parts = [_INTRODUCTION]
    for provider, entries in ENTRIES.items():
        bound = _merged([entry for entry in entries if not entry.not_bound])
        parts += [
            f"## {_TITLES.get(provider, provider)}\n",
            *(_table(each, bound) for each in (_SERVES, _SCORES, _CODED, _DEMANDS)),
        ]
        if sparse := _sparse(provider):
            parts += ["Layers with an indexer, in every kind of step, in addition to the kernels above:\n", sparse]
        if faulty := _faults(bound):
            parts += ["Refused in some releases; `explain` takes `--aiter-release` and `--rocm-release`:\n", faulty]
        odd: dict[str, list[str]] = {}
        for entry, kinds in bound:
            for note in entry.notes:
                odd.setdefault(note, []).append(f"`{entry.name}` ({kinds})")
        if odd:
            parts.append("Oddities of kernels that are used nevertheless:\n")
            parts.append("".join(f"- {', '.join(named)}: {note}\n" for note, named in odd.items()))
        unbound = _merged([entry for entry in entries if entry.not_bound])
        if unbound:
            parts.append("Known, but not bound:\n")
            parts.append("".join(f"- `{entry.name}` ({kinds}): {entry.not_bound}\n" for entry, kinds in unbound))
    return "\n".join([*parts, _MEANING])


class _Line(NamedTuple):
    """A row, and the kinds of step that it serves."""

    entry: KernelEntry
    kinds: str

    @property
    def limits(self) -> Limits:
        return self.entry.limits


def _merged(entries: Sequence[KernelEntry]) -> list[_Line]:
    """Merges rows that differ only in the kind of step."""
    kinds: dict[KernelEntry, list[str]] = {}
    for entry in entries:
        kinds.setdefault(replace(entry, kind=StepKind.DECODE, bakes=frozenset()), []).append(entry.kind.value)
    bakes = {
        entry: frozenset(b for other in entries if other.name == entry.name for b in other.bakes) for entry in kinds
    }
    return [_Line(replace(entry, bakes=bakes[entry]), ", ".join(values)) for entry, values in kinds.items()]


def _sparse(provider: str) -> str:
    """The sparse kernels of a provider; empty if it has none."""
    cells = [
        f"| `{entry.name}` | selects | {_archs(entry.limits)} | {_dtypes(entry.limits)} | "
        f"{_range(entry.limits.head_dim)} | any | {entry.limits.num_heads} | {_yes(entry.batch_invariant)} |"
        for entry in INDEXER_ENTRIES.get(provider, ())
    ]
    cells += [
        f"| `{entry.name}` | attends over {', '.join(pool.value for pool in entry.limits.pools)} | "
        f"{_archs(entry.limits)} | {_dtypes(entry.limits)} | "
        f"{_range(entry.limits.head_dim)}/{_range(entry.limits.v_head_dim)} | {_page_sizes(entry.limits)} | "
        f"{entry.limits.max_gqa_ratio} on a KV head | {_yes(entry.batch_invariant)} |"
        for entry in SELECTED_ENTRIES.get(provider, ())
    ]
    head = [
        "| kernel | what it does | archs | dtypes | head_dim | page sizes | heads | any batch |",
        f"|{' --- |' * 8}",
    ]
    return "".join(f"{line}\n" for line in head + cells) if cells else ""


def _archs(limits: Limits | IndexLimits) -> str:
    return ", ".join(limits.archs).replace("*", "\\*")


def _dtypes(limits: Limits | IndexLimits) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in limits.dtypes)


def _faults(lines: Sequence[_Line]) -> str:
    """The faults of the kernels on GPUs in some releases; empty if none are known."""
    named: dict[Fault, dict[str, None]] = {}
    for entry, kinds in lines:
        for fault in entry.faults:
            if any(KNOWN_TARGETS[arch].is_gpu for arch in fault.archs):
                named.setdefault(fault, {})[f"`{entry.name}` ({kinds})"] = None
    head = ["| kernels | archs | releases | refused, because |", "| --- | --- | --- | --- |"]
    cells = [
        f"| {', '.join(names)} | {', '.join(fault.archs)} | {fault.releases()} | {fault.what} |"
        for fault, names in named.items()
    ]
    return "".join(f"{line}\n" for line in head + cells) if cells else ""


def _table(columns: dict[str, Callable[[_Line], str]], lines: Sequence[_Line]) -> str:
    entries = [list(columns), ["---"] * len(columns), *([cell(line) for cell in columns.values()] for line in lines)]
    return "".join(f"| {' | '.join(entry)} |\n" for entry in entries)


def _range(span: tuple[int, int]) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}"


def _dims(line: _Line) -> str:
    limits = line.limits
    if limits.exact_dims:
        return ", ".join(str(qk) if qk == v else f"{qk}/{v}" for qk, v in limits.exact_dims)
    same = limits.head_dim == limits.v_head_dim
    dims = _range(limits.head_dim) if same else f"{_range(limits.head_dim)}/{_range(limits.v_head_dim)}"
    step = f", multiples of {limits.dim_step}" if limits.dim_step > 1 else ""
    return f"{dims}{step}{', K and V alike' if limits.dims_alike else ''}"


def _page_sizes(limits: Limits) -> str:
    return ", ".join(map(str, limits.page_sizes)) if limits.page_sizes else _range(limits.page_size)


def _heads(line: _Line) -> str:
    limits = line.limits
    least = f"{limits.least_gqa_ratio} to " if limits.least_gqa_ratio > 1 else ""
    return f"{least}{limits.max_gqa_ratio} on a KV head"


def _reads_ahead(line: _Line) -> str:
    ahead = line.entry.reads_ahead
    if ahead == ReadAhead():
        return "no"
    return f"{ahead.list_entries} entries" if ahead.list_entries else f"tiles of {ahead.table_tokens} tokens"


def _needs(line: _Line) -> str:
    names = {
        Need.PAGE_LIST: "page list",
        Need.BLOCK_TABLE: "block table",
        Need.KV_LEN_INT64: "int64 lengths",
        Need.MASK: "packed masks",
        Need.PREFIXES: "groups of sequences",
    }
    needs = [name for need, name in names.items() if need in line.entry.needs]
    return ", ".join(needs + ["lengths on the host"] * line.entry.needs_host_lengths) or "nothing"


def _freezes(line: _Line) -> str:
    names = {Baked.MAX_KV_LEN: "longest KV", Baked.MAX_Q_LEN: "most new tokens"}
    return ", ".join(name for baked, name in names.items() if baked in line.entry.bakes) or "nothing"


def _lse(line: _Line) -> str:
    limits = line.limits
    return "yes" if limits.lse and limits.lse_of_slopes else "without ALiBi" if limits.lse else "no"


def _scale_values(line: _Line) -> str:
    names = {
        Scales.LAYER: "layer",
        Scales.HEAD: "KV head",
        Scales.TOKEN: "token",
        Scales.GROUP: "group of a record",
        Scales.FOOTER: "group, in the footer",
    }
    return ", ".join(name for scales, name in names.items() if scales in line.limits.scales) or "nothing"


def _window(limits: Limits) -> str:
    return f"of {limits.least_window} keys or more" if limits.window and limits.least_window else _yes(limits.window)


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _pool_limit(line: _Line) -> str:
    limit = line.limits.max_side_bytes
    return f"{(limit + 1) >> 30} GiB" if limit else "none"


_NAMED: dict[str, Callable[[_Line], str]] = {
    "kernel": lambda line: f"`{line.entry.name}`",
    "steps": lambda line: line.kinds,
}

_SERVES: dict[str, Callable[[_Line], str]] = {
    **_NAMED,
    "archs": lambda line: _archs(line.limits),
    "dtypes": lambda line: _dtypes(line.limits),
    "head_dim": _dims,
    "page sizes": lambda line: _page_sizes(line.limits),
    "query heads": _heads,
    "pools": lambda line: ", ".join(pool.value for pool in line.limits.pools),
    "LSE": _lse,
    "pool limit": _pool_limit,
}


def _ranges(limits: Limits) -> str:
    return ("yes" if limits.others else "only these") if limits.ranges else "no"


_SCORES: dict[str, Callable[[_Line], str]] = {
    **_NAMED,
    "window": lambda line: _window(line.limits),
    "ranges": lambda line: _ranges(line.limits),
    "soft cap": lambda line: _yes(line.limits.soft_cap),
    "sinks": lambda line: _yes(line.limits.sinks),
    "ALiBi": lambda line: _yes(line.limits.alibi),
    "not causal": lambda line: _yes(line.limits.non_causal),
}

_CODED: dict[str, Callable[[_Line], str]] = {
    **_NAMED,
    "K and V": lambda line: ", ".join(encoding.value for encoding in line.limits.encodings),
    "a scale per": _scale_values,
    "multiplies": lambda line: "in eight bits" if line.entry.rounds_products else "in q's dtype",
}

_DEMANDS: dict[str, Callable[[_Line], str]] = {
    "kernel": _NAMED["kernel"],
    "needs": _needs,
    "freezes": _freezes,
    "reads ahead": _reads_ahead,
    "least KV length": lambda line: str(line.entry.min_kv_len),
    "masks V": lambda line: _yes(line.entry.masks_v),
    "clears pads": lambda line: _yes(line.entry.clears_pads),
    "in graphs": lambda line: _yes(line.entry.graph_safe),
    "any batch": lambda line: _yes(line.entry.batch_invariant),
    "Triton": lambda line: ", ".join(map(str, line.limits.tritons)) or "any",
}
