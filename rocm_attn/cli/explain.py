"""`rocm-attn explain`: which kernels would serve a model's layers on an arch, and why no others; without a GPU."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch

from rocm_attn.cli.arguments import described_model, page_choice, pages_as_json, requested_target
from rocm_attn.cli.engine_faults import faults, pool_of
from rocm_attn.cli.served_by import Server, served_by
from rocm_attn.cli.tile_choices import tile_choices
from rocm_attn.errors import BadSetting, Unsupported
from rocm_attn.machine.choices import AUTO, DEFAULT_PAGE_SIZE
from rocm_attn.machine.measured_choices import place_of, with_choices_of
from rocm_attn.machine.releases import aiter_not_read
from rocm_attn.machine.settings import settings
from rocm_attn.machine.target import Target
from rocm_attn.models.cut import cost_of_heads
from rocm_attn.models.geometry import AttentionGeometry, CompressedRows
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.paging.kv_pool import require_slots
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys, Indexer, KVEncoding, PoolKind, Problem
from rocm_attn.providers.contract import SMALLEST_POOL
from rocm_attn.providers.select import Selection, select
from rocm_attn.selection.kv_formats import KVFormat
from rocm_attn.selection.pages import PageChoice

_STATE = (
    "recurrent, {rule}, {num_value_heads} value heads over {num_key_heads} key heads, each with a {state_dtype} state "
    "of {key_dim} x {value_dim}, convolution of width {conv_width} over {conv_channels} channels\n"
    "  no pages: {bytes_per_slot} bytes a layer in each of a request's two slots; a step reads the one, and writes the "
    "other"
)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of equal geometry, and the kernels that serve them.

    layers:   indices into the model's layers
    reads:    the layer whose K and V each of them reads
    outcome:  the kernels, or why there are none
    compressed: rows that they attend to in addition
    of_rows:  the kernels of each of these, or why there are none
    """

    problem: Problem
    layers: tuple[int, ...]
    reads: tuple[int, ...]
    outcome: Selection | Unsupported
    compressed: tuple[CompressedRows, ...] = ()
    of_rows: tuple[Selection | Unsupported, ...] = ()

    @property
    def is_served(self) -> bool:
        """True if kernels serve all that the layers attend to."""
        return all(isinstance(outcome, Selection) for outcome in (self.outcome, *self.of_rows))


@dataclass(frozen=True, slots=True)
class Explained:
    """A model's kinds of layer on one rank, as the options of explain describe them.

    recurrent:  kind of recurrent layer -> indices into the model's layers
    about_choices: a sentence about measured choices that do not serve, or ""
    """

    whole: AttentionGeometry
    recurrent: Mapping[RecurrentLayer, tuple[int, ...]]
    target: Target
    pages: PageChoice
    kinds: Sequence[LayerKind]
    about_choices: str

    def not_served(self) -> str:
        """Why a kind of layer is not served; "" if all are."""
        if refused := [kind for kind in self.kinds if not kind.is_served]:
            return f"{len(refused)} of {len(self.kinds)} kinds of layer have no kernel on {self.target.arch}"
        return ""

    @property
    def no_server(self) -> str:
        """Why neither the engine nor a plug-in serves the layers, though kernels do; "" if the layers do not say so."""
        if not any(kind.compressed for kind in self.kinds):
            return ""
        return (
            "the plug-ins keep no state of compressed rows, and rocm-attn serve has no decoder with such layers; a "
            "runner of your own calls them (docs/compressed.md)"
        )

    def require_served(self, page_size: int | str | None) -> None:
        """Raises Unsupported if a kind of layer is not served. page_size: that of the option; None: none was given"""
        if why := self.not_served():
            searched = page_size in (None, AUTO) or all(kind.is_served for kind in self.kinds)
            raise Unsupported(why if searched else f"{why}; --page-size auto searches other page sizes")


def explained(options: argparse.Namespace) -> Explained:
    """Chooses kernels for options.config on options.arch. Raises BadModel, BadSetting, NeverFits, Unsupported."""
    target, about_choices = _with_measured_choices(requested_target(options), options.tuning)
    pool = SMALLEST_POOL if options.num_pages is None else replace(SMALLEST_POOL, num_pages=options.num_pages)
    whole = described_model(options.config).geometry
    pool = pool_of(options, pool, is_latent=all(layer.latent_dim for layer in whole.layers))
    geometry = whole.on_one_of(options.tp)

    dtype, kv = getattr(torch, options.dtype), KVFormat.named(options.kv_dtype, options.kv_scales, target)
    least = geometry.least_page_size
    stored = [layer.problem(dtype=dtype, page_size=least, kv=kv) for layer in geometry.layers[: geometry.num_storing]]
    over = [stored[read] for read in geometry.reads]
    compressed = dict.fromkeys(rows for layer in geometry.layers for rows in layer.compressed)

    choose = partial(select, target=target, provider=options.provider, pool=pool, deterministic=options.deterministic)

    def choose_with_rows(problem: Problem) -> Selection:
        # Only layers whose window is merged with compressed rows want a log-sum-exp.
        beside = [rows.problem(problem) for rows in compressed] if problem.wants_lse else []
        *_, chosen = map(choose, (*beside, problem))
        return chosen

    pages = _pages(options, over, choose_with_rows)
    require_slots(pool.num_pages, pages.page_size)
    problems = pages.problems(over)
    kinds = layer_kinds(problems, geometry, choose)
    recurrent: dict[RecurrentLayer, tuple[int, ...]] = {}
    for place, layer in geometry.recurrent:
        recurrent[layer] = (*recurrent.get(layer, ()), place)
    return Explained(whole, recurrent, target, pages, kinds, about_choices)


def _pages(options: argparse.Namespace, over: Sequence[Problem], choose: Callable[[Problem], Selection]) -> PageChoice:
    """The pages of the options. Without a size the best ones, and the usual ones if none serve or an engine is named.

    Raises Unsupported.
    """
    if options.page_size is not None:
        return page_choice(options, over, choose)
    if options.engine is None:
        with suppress(Unsupported):
            return page_choice(argparse.Namespace(page_size=AUTO, pool=options.pool), over, choose)
    return page_choice(argparse.Namespace(page_size=DEFAULT_PAGE_SIZE, pool=options.pool), over, choose)


def _page_lines(options: argparse.Namespace, pages: PageChoice) -> list[str]:
    """The pages that were chosen: in one line, or with all others if that was requested."""
    if not pages.lines:
        return []
    if options.page_size is None and options.pool != AUTO:
        size = pages.page_size
        if size == DEFAULT_PAGE_SIZE:
            return []
        return [f"{pages.describe()} were chosen: serve and capture-plan take them with --page-size {size}"]
    return [f"{pages.describe()} were chosen:", *pages.lines]


def run(options: argparse.Namespace) -> None:
    """Prints the choice for options.config on options.arch. Raises Unsupported if a kind of layer has no kernel.

    With options.engine the faults that are known of it come first, even if the attention of the model is not served.
    """
    known = faults(options)
    if options.engine is not None and not options.json:
        what = "these faults are" if known else "no fault is"
        print(f"{what} known of {options.engine} with this model (docs/known_bad.md)")
        print("\n".join([*(f"- {row.sentence(needs)}\n  fix: {row.fix}" for row, needs in known), ""]))
    model = explained(options)
    server = served_by(options.config, model.not_served() or model.no_server, has_states=bool(model.recurrent))
    target, pages, dtype = model.target, model.pages, getattr(torch, options.dtype)
    if options.json:
        of = target.releases
        releases = {"aiter": str(of.aiter), "rocm": str(of.rocm), "aiter_not_read": aiter_not_read(of.aiter)}
        described = {
            "served_by": server.server.value,
            "not_served_by_serve": server.but,
            "arch": target.arch,
            **(releases if target.is_amd else {}),
            **pages_as_json(pages),
            "page_sizes": list(pages.lines),
            "tuning": model.about_choices,
            "known_bad": [
                {"thread": row.thread, "needs": list(needs), "found": row.sentence(needs), "fix": row.fix}
                for row, needs in known
            ],
        }
        recurrent = [{"layers": list(places), **_state(layer, dtype)} for layer, places in model.recurrent.items()]
        kinds = [_as_json(kind) for kind in model.kinds]
        print(json.dumps({**described, "layer_kinds": kinds, "recurrent_layers": recurrent}, indent=2))
    else:
        print(server.sentence())
        print(f"{options.config} on {target.arch}, provider {options.provider}")
        for sentence in cost_of_heads(model.whole, options.tp):
            print(f"over {options.tp} ranks, {sentence}")
        if page_lines := _page_lines(options, pages):
            print("\n  ".join(page_lines))
        if target.is_amd and options.provider in ("auto", "aiter"):
            of = target.releases
            print(f"for AITER {of.aiter} and ROCm {of.rocm}; at start a runtime drops kernels that are missing")
            print("or fail its probe, and logs the reason")
            if unread := aiter_not_read(of.aiter):
                print(f"{unread}; kernels marked (not read) serve where their parameters agree and their probe passes")
        refused: dict[tuple[str, ...], str] = {}
        for kind in model.kinds:
            print("\n".join(["", *lines_of(kind, refused)]))
        for layer, places in model.recurrent.items():
            print(f"\n{count_of(places)}: {_STATE.format(**_state(layer, dtype))}")
        print("\n".join(_choice_lines(model.kinds, model.about_choices)))
        if server.server is Server.SERVE:
            print("sizes of steps, and their expected times: rocm-attn capture-plan, with --gpu")
    model.require_served(options.page_size)


def _with_measured_choices(target: Target, named: str | None) -> tuple[Target, str]:
    """The target with the rows of a file, and a sentence about rows that do not serve here. Raises BadSetting.

    named: the file, or "off"; if not given, the file that a runtime would read: if it is bad, none of its rows serve
    """
    if named is None:
        chosen = settings().tuning
        place = place_of(chosen)
        if place is None or (not chosen and not os.path.isfile(place)):
            return target, ""
        try:
            return with_choices_of(target, place)
        except BadSetting as refused:
            return target, f"{refused}; the built-in tiles are used"
    place = place_of(named)
    return (target, "") if place is None else with_choices_of(target, place)


def _choice_lines(kinds: Sequence[LayerKind], about_choices: str) -> list[str]:
    """The tiles of all layers with the rows that they come from."""
    outcomes = [(count_of(kind.layers), kind.outcome) for kind in kinds]
    outcomes += [(f"rows of {count_of(kind.layers)}", outcome) for kind in kinds for outcome in kind.of_rows]
    served = [(layers, outcome) for layers, outcome in outcomes if isinstance(outcome, Selection)]
    rows = [f"- {layers}: {row.line()}" for layers, outcome in served for row in tile_choices(outcome)]
    said = ["", "tiles of Triton's kernels:", *rows] if rows else []
    return said + ([about_choices] if about_choices else [])


def layer_kinds(
    problems: Sequence[Problem], geometry: AttentionGeometry, choose: Callable[[Problem], Selection]
) -> list[LayerKind]:
    """The distinct problems among the layers of a geometry, in order, each with its selection."""
    kinds: dict[tuple[Problem, tuple[CompressedRows, ...]], list[int]] = {}
    for number, (problem, layer) in enumerate(zip(problems, geometry.layers, strict=True)):
        kinds.setdefault((problem, layer.compressed), []).append(number)
    places = geometry.places
    return [
        LayerKind(
            problem,
            tuple(places[number] for number in where),
            tuple(places[geometry.reads[number]] for number in where),
            _outcome(problem, choose),
            compressed,
            tuple(_outcome(rows.problem(problem), choose) for rows in compressed),
        )
        for (problem, compressed), where in kinds.items()
    ]


def _outcome(problem: Problem, choose: Callable[[Problem], Selection]) -> Selection | Unsupported:
    try:
        return choose(problem)
    except Unsupported as unsupported:
        return unsupported


def lines_of(kind: LayerKind, refused: dict[tuple[str, ...], str]) -> list[str]:
    """A kind of layer, its kernels, and the kernels that were refused.

    refused: lines of refusals -> the first layers that have them; other layers refer to these
    """
    head = "\n".join((f"{count_of(kind.layers)}: {_geometry(kind.problem)}", *_shared(kind), *_row_lines(kind)))
    if isinstance(kind.outcome, Unsupported):
        summary = str(kind.outcome).partition("\n")[0]
        return [head, f"  {summary}", *(f"  not served: {reason}" for reason in kind.outcome.reasons)]
    refusals, layers = kind.outcome.refusal_lines(), count_of(kind.layers)
    if len(refusals) > 1 and (first := refused.setdefault(tuple(refusals), layers)) != layers:
        refusals = [f"others are refused for the same reasons as in {first}"]
    return [head, *(f"  {line}" for line in (*kind.outcome.lines(), *refusals))]


def _row_lines(kind: LayerKind) -> list[str]:
    """The rows that a kind attends to in addition to its window, their bytes, and their kernels."""
    lines = []
    for rows, outcome in zip(kind.compressed, kind.of_rows, strict=True):
        lines.append(f"  and {rows.describe()}")
        if rows.own_rows:
            count = f"floor(tokens / {rows.tokens}) rows" if rows.tokens > 1 else "as many rows as tokens"
            form, dim = kind.problem.page_format, rows.head_dim
            form = replace(form, page_size=form.page_size // rows.tokens, head_dim=dim, v_head_dim=dim)
            num_bytes = form.page_bytes // form.page_size
            lines.append(f"  a request has {count}, of {num_bytes:,} bytes each, K and V in one")
            state = rows.problem(kind.problem).state_format
            if state is not None:
                held = f"{state.page_bytes // state.page_size:,} bytes for each token of its window"
                lines.append(f"  and a state of {held}, float32")
        if isinstance(outcome, Unsupported):
            lines += [f"  rows: not served: {reason}" for reason in outcome.reasons]
        else:
            lines += [f"  rows: {line}" for line in outcome.lines()]
        lines.append("  the window:")
    return lines


def _state(layer: RecurrentLayer, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {
        "state_dtype": "float32",
        "conv_channels": layer.conv_channels,
        "bytes_per_slot": layer.num_bytes(dtype),
    }
    return {**asdict(layer), "rule": layer.rule.name, **sizes}


def _shared(kind: LayerKind) -> list[str]:
    """Layers that read another layer's K and V: a line for each layer that is read."""
    readers: dict[int, list[int]] = {}
    for layer, read in zip(kind.layers, kind.reads, strict=True):
        if layer != read:
            readers.setdefault(read, []).append(layer)
    return [f"  K and V of layer {read} are read by {count_of(tuple(layers))} too" for read, layers in readers.items()]


def count_of(layers: tuple[int, ...]) -> str:
    """The number of layers, and their indices, which are shortened to ranges."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    steps = {after - layer for layer, after in pairwise(layers)}
    if len(layers) > 2 and len(steps) == 1 and steps != {1}:
        numbers = f"{layers[0]}-{layers[-1]} in steps of {steps.pop()}"
    return f"{len(layers)} layers ({numbers})"


def _geometry(problem: Problem) -> str:
    parts = [
        f"{problem.num_q_heads} query heads over {problem.num_kv_heads} KV heads",
        f"head_dim {problem.head_dim}",
        str(problem.dtype).removeprefix("torch."),
        f"pages of {problem.page_size}",
    ]
    if problem.v_head_dim != problem.head_dim:
        parts.insert(2, f"v_head_dim {problem.v_head_dim}")
    if problem.window_right == UNLIMITED_WINDOW:
        parts.append("every token sees all later ones of its sequence")
    if problem.chunk:
        parts.append(f"chunks of {problem.chunk} keys")
    if problem.window_left not in (UNLIMITED_WINDOW, problem.chunk - 1):
        parts.append(f"window of {problem.window_left} previous keys")
    if problem.window_right > 0:
        parts.append(f"window of {problem.window_right} later keys")
    if problem.logits_soft_cap:
        parts.append(f"soft cap {problem.logits_soft_cap:g}")
    if problem.has_sinks:
        parts.append("sinks")
    if problem.custom_mask:
        parts.append("spans that pass the window" if problem.spans_pass_window else "custom masks")
    if not isinstance(problem.indexer, AllKeys):
        indexing = problem.indexer.indexing
        what = "tokens" if indexing.unit_tokens == 1 else f"blocks of {indexing.unit_tokens} tokens"
        whose = "its own" if isinstance(problem.indexer, Indexer) else "an earlier layer"
        parts.append(f"attends to {indexing.top} {what} chosen by {whose}")
    if problem.kv_encoding is not KVEncoding.LIKE_Q:
        parts.append(f"K and V in {problem.kv_encoding.value} with {problem.kv_scales.value}")
    if problem.pool is not PoolKind.SPLIT:
        parts.append(problem.pool.value)
    return ", ".join(parts)


def _as_json(kind: LayerKind) -> dict[str, Any]:
    problem = kind.problem
    described: dict[str, Any] = {
        "layers": list(kind.layers),
        "reads": list(kind.reads),
        "problem": {
            "num_q_heads": problem.num_q_heads,
            "num_kv_heads": problem.num_kv_heads,
            "head_dim": problem.head_dim,
            "v_head_dim": problem.v_head_dim,
            "dtype": str(problem.dtype).removeprefix("torch."),
            "kv_dtype": problem.page_format.encoding.value,
            "page_size": problem.page_size,
            "scale": problem.scale,
            "window_left": problem.window_left,
            "logits_soft_cap": problem.logits_soft_cap,
            "has_sinks": problem.has_sinks,
            "window_right": problem.window_right,
            "chunk": problem.chunk,
            "custom_mask": problem.custom_mask,
            "spans_pass_window": problem.spans_pass_window,
            "pool": problem.pool.name.lower(),
        },
        "compressed_rows": [
            {**asdict(rows), **_kernels_as_json(outcome)}
            for rows, outcome in zip(kind.compressed, kind.of_rows, strict=True)
        ],
    }
    return {**described, **_kernels_as_json(kind.outcome)}


def _kernels_as_json(outcome: Selection | Unsupported) -> dict[str, Any]:
    if isinstance(outcome, Unsupported):
        refusals = list(outcome.reasons)
        return {"provider": None, "kernels": {}, "over_a_selection": [], "refusals": refusals, "tiles": []}
    return {
        "provider": outcome.provider,
        "kernels": {step.value: kernel.entry.name for step, kernel in outcome.kernels.items()},
        "over_a_selection": [] if outcome.sparse is None else list(outcome.sparse.entries),
        "refusals": [f"{refusal.kind.value}: {refusal.kernel}: {refusal.reason}" for refusal in outcome.refusals],
        "tiles": [row.as_json() for row in tile_choices(outcome)],
    }
