"""`rocm-attn truth`: checks that every key of a long context is found, on this machine and for a model's layers."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from rocm_attn.cli.arguments import described_model, device_named, kv_encodings, page_choice, pages_as_json
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.cli.signals import sigterm_interrupts
from rocm_attn.cli.streams import json_text
from rocm_attn.errors import BadProblem, RocmAttnError, Unsupported
from rocm_attn.machine.target import Target, detect_target
from rocm_attn.problem import AllKeys, Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import select
from rocm_attn.selection.build import build_runtime
from rocm_attn.selection.kernels import missing_kernels
from rocm_attn.selection.pages import PageChoice
from rocm_attn.truth.check import NeedleCheck, TruthPlan, TruthReport
from rocm_attn.truth.shapes import SHAPES

# A CPU needs minutes for work that takes a GPU a second.
_LENGTHS_ON_CPU, _CHUNK_ON_CPU = (200, 600, 1000), 300
_POOL_GIB_ON_GPU = 5.0


class NeedlesMissed(RocmAttnError):
    """A truth test found something, or could not be run in any way."""


@dataclass(frozen=True, slots=True)
class Way:
    """How K and V are kept, and the provider that reads them."""

    provider: str
    encoding: KVEncoding
    scales: Scales

    def __str__(self) -> str:
        scales = "" if self.encoding is KVEncoding.LIKE_Q else f", {self.scales.value}"
        return f"provider {self.provider}, K and V {self.encoding.value}{scales}"

    def of(self, problem: Problem) -> Problem:
        """The layer with K and V kept this way. Raises BadProblem."""
        return replace(problem, kv_encoding=self.encoding, kv_scales=self.scales)


def run(options: argparse.Namespace) -> None:
    """Prints the findings. Raises NeedlesMissed if a key was missed, or if nothing could be run."""
    device = device_named(options.device)
    target = detect_target(device)
    results, refused = [], []
    ways = [Way(provider, *kept) for provider in options.providers for kept in kv_encodings(options.kv_encodings)]
    try:
        with sigterm_interrupts():
            for way in ways:
                try:
                    pages, problems = _layers(options, way, target)
                    report = _report(options, way, problems, device)
                except (Unsupported, BadProblem) as error:
                    refused.append((way, str(error)))
                    continue
                results.append((way, pages, report))
                if not options.json:
                    print("\n".join(_lines(way, pages, report)), flush=True)
    finally:  # what was found so far is kept at Ctrl-C
        ended_before = ways[len(results) + len(refused) :]
        refused += [(way, "the command was ended before") for way in ended_before]
        # If nothing was found, the error says all that there is to say.
        has_more_to_say = bool(results) or not ended_before
        if options.json and has_more_to_say:
            passed = not ended_before and bool(results) and all(report.passed for _, _, report in results)
            print(json_text(_as_json(target, passed, results, refused)), flush=True)
        elif has_more_to_say:
            print("".join(f"not run: {way}: {why}\n" for way, why in refused), end="", flush=True)
    failed = [str(way) for way, _, report in results if not report.passed]
    if failed:
        raise NeedlesMissed(f"needles were missed, or hidden ones were seen: {'; '.join(failed)}")
    if not results:
        raise NeedlesMissed("nothing could be run; choose other providers, encodings or page sizes")


def _layers(options: argparse.Namespace, way: Way, target: Target) -> tuple[PageChoice, tuple[Problem, ...]]:
    """The pages, and one layer of each kind. Raises Unsupported, BadProblem, BadModel."""
    dtype = getattr(torch, options.dtype)
    if options.config in SHAPES:
        over: Sequence[Problem] = SHAPES[options.config](dtype, way.encoding)
    else:
        geometry = described_model(options.config, f", or one of {', '.join(SHAPES)}").geometry.on_one_of(options.tp)
        over = geometry.without_idle_windows(max(_plan(options, way, 0, torch.device("cpu")).kv_len)).problems(
            dtype=dtype, page_size=128
        )
    over = [way.of(problem) for problem in dict.fromkeys(over)]  # a layer of each kind, in order
    missing = missing_kernels(target, way.provider)
    pages = page_choice(options, over, partial(select, target=target, provider=way.provider, unavailable=missing))
    return pages, pages.problems(over)


def _plan(options: argparse.Namespace, way: Way, num_pages: int, device: torch.device) -> TruthPlan:
    on_gpu = device.type == "cuda"
    usual = TruthPlan()
    return TruthPlan(
        lengths=options.lengths or (usual.lengths if on_gpu else _LENGTHS_ON_CPU),
        chunk=options.chunk or (usual.chunk if on_gpu else _CHUNK_ON_CPU),
        num_pages=num_pages,
        provider=way.provider,
        graphs=not options.eager,
        deterministic=options.deterministic,
        seed=options.seed,
    )


def _report(options: argparse.Namespace, way: Way, problems: Sequence[Problem], device: torch.device) -> TruthReport:
    gib = options.pool_gib if options.pool_gib is not None else _POOL_GIB_ON_GPU * (device.type == "cuda")
    largest = max(_side_bytes(problem) for problem in problems)
    plan = _plan(options, way, int(gib * (1 << 30)) // largest, device)
    bar, check = ProgressBar(sys.stderr, str(way)), NeedleCheck(problems, plan, partial(build_runtime, device=device))
    return check.run(lambda done, total: bar(done, total, "steps" if done < total else ""))


def _side_bytes(problem: Problem) -> int:
    """Bytes of a page in the largest of a layer's K pages, V pages and pages of its state."""
    forms = filter(None, (problem.page_format, problem.state_format))
    return max(max(form.line, form.side_elements[1] * form.page_size) * form.encoding.dtype.itemsize for form in forms)


def _lines(way: Way, pages: PageChoice, report: TruthReport) -> list[str]:
    lines = [
        "",
        f"{way}, {pages.describe()}, {report.pool_bytes / (1 << 30):.2f} GiB for K and as much for V of a layer",
    ]
    for problem, kernels, of_layer in zip(report.problems, report.kernels, report.tallies, strict=True):
        lines += ["", f"  {_geometry(problem)}", f"  {'; '.join(kernels)}"]
        lines.append(f"  {'tokens':>8} {'asked for':>12} {'missed':>9} {'hidden':>12} {'seen':>9} {'furthest':>9}")
        lines += [
            f"  {length:>8,} {tally.requested:>12,} {tally.missed:>9,} {tally.hidden:>12,} {tally.seen:>9,} "
            f"{tally.worst:>9.1e}"
            for length, tally in zip(report.lengths, of_layer, strict=True)
        ]
    lines += ["", *(f"  {miss}" for miss in report.misses)]
    verdict = "every needle was found" if report.passed else "NEEDLES WERE MISSED"
    return [*lines, f"  {verdict}; {report.replays} of {report.steps} steps were replays"]


def _geometry(problem: Problem) -> str:
    """A layer in words."""
    kind = f"{problem.num_q_heads} query heads over {problem.num_kv_heads} KV heads of {problem.head_dim}"
    if problem.pool is PoolKind.LATENT:
        kind = f"{problem.num_q_heads} heads over latents of {problem.v_head_dim} in rows of {problem.head_dim}"
    if problem.row.tokens > 1:
        kind += f" for {problem.row.tokens} tokens each"
    if problem.window_left >= 0:
        kind += f", a window of {problem.window_left + 1}"
    if isinstance(problem.indexer, AllKeys):
        return kind
    indexing = problem.indexer.indexing
    of = "its own indexer" if isinstance(problem.indexer, Indexer) else "an earlier layer's indexer"
    return f"{kind}, over {indexing.top} units of {indexing.unit_tokens} tokens of {of}"


def _as_json(
    target: Target,
    passed: bool,
    results: Sequence[tuple[Way, PageChoice, TruthReport]],
    refused: Sequence[tuple[Way, str]],
) -> dict[str, object]:
    return {
        "arch": target.arch,
        "passed": passed,
        "runs": [
            {
                "way": str(way),
                **pages_as_json(pages),
                "passed": report.passed,
                "pool_bytes": report.pool_bytes,
                "steps": report.steps,
                "replays": report.replays,
                "layers": [
                    {
                        "layer": _geometry(problem),
                        "kernels": list(kernels),
                        "sequences": [
                            {"tokens": length, **asdict(tally)}
                            for length, tally in zip(report.lengths, of_layer, strict=True)
                        ],
                    }
                    for problem, kernels, of_layer in zip(report.problems, report.kernels, report.tallies, strict=True)
                ],
                "misses": [asdict(miss) for miss in report.misses],
            }
            for way, pages, report in results
        ],
        "not_run": [{"way": str(way), "reason": why} for way, why in refused],
    }
