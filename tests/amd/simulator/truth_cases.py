"""The truth test on a simulated arch, cut to size: a runtime whose every launch runs as machine code, and its needles.

It covers the whole chain: metadata, quantise, store, index, top-k, attend; captured and replayed, over codes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.machine.target import known_target
from rocm_attn.problem import ALL_KEYS, EarlierSelection, Indexer, KVEncoding, PoolKind, Problem, Row, Scales
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.truth.check import NeedleCheck, TruthPlan, TruthReport
from tests.amd.faulty_kernels import Fault, faulty, with_launches
from tests.amd.simulator.case import KernelCase, own_encoding

BF16 = torch.bfloat16
# A first chunk, a chunk over a prefix, a decode step.
PLAN = TruthPlan(lengths=(22,), first_chunk=5, chunk=17, decode_steps=1, provider="triton")
LONGER = replace(PLAN, lengths=(12, 40), first_chunk=25, chunk=15)


@dataclass(frozen=True, slots=True)
class Run:
    """A run on an arch. layers: one of each kind; compute_units: so few that programs share nothing at all"""

    layers: Callable[[KVEncoding], list[Problem]]
    plan: TruthPlan = PLAN
    fault: Fault | None = None
    compute_units: int = 2


def windowed(codes: KVEncoding) -> list[Problem]:
    """A layer with a window, whose K and V have a scale."""
    return [_dense(codes, window_left=9, has_sinks=True)]


def tokens(codes: KVEncoding) -> list[Problem]:
    """Latents in codes, of which an indexer chooses four tokens by keys in codes."""
    latents = Problem(
        2,
        1,
        80,
        BF16,
        16,
        v_head_dim=64,
        scale=80**-0.5,
        pool=PoolKind.LATENT,
        kv_encoding=codes,
        kv_scales=Scales.TOKEN,
    )
    return [replace(latents, indexer=Indexer(2, 128, Indexing(0.125, top=4), codes, Scales.TOKEN))]


def records(codes: KVEncoding) -> list[Problem]:
    """The same over records, and a layer over all of them."""
    (latents,) = tokens(codes)
    layer = replace(latents, head_dim=144, v_head_dim=128, scale=144**-0.5, kv_scales=Scales.GROUP)
    return [layer, replace(layer, indexer=ALL_KEYS)]


def rows(codes: KVEncoding) -> list[Problem]:
    """A window, rows of 4 tokens that overlap, of which an indexer chooses three by keys in codes, and rows of 8."""
    indexing = Indexing(0.125, top=3, key_tokens=4, last_unit=LastUnit.LEFT_OUT)
    window = Problem(2, 1, 64, BF16, 16, window_left=9, has_sinks=True, pool=PoolKind.LATENT)
    all_rows = replace(window, window_left=-1, has_sinks=False, row=Row(8))
    indexer = Indexer(2, 128, indexing, codes, Scales.TOKEN)
    return [window, replace(all_rows, row=Row(4, overlaps=True, also=128), indexer=indexer), all_rows]


def blocks(codes: KVEncoding) -> list[Problem]:
    """Blocks of four tokens, the last one among them, and a layer that reuses them."""
    indexing = Indexing(0.125, top=4, unit_keys=4, rectified=False, last=1)
    layer = _dense(codes)
    return [replace(layer, indexer=each) for each in (Indexer(2, 64, indexing), EarlierSelection(indexing))]


def dense(codes: KVEncoding) -> list[Problem]:
    """All keys, in codes and in the dtype in which they are computed."""
    return [_dense(codes), _dense(KVEncoding.LIKE_Q)]


def _dense(codes: KVEncoding, **more: object) -> Problem:
    scales = Scales.NONE if codes is KVEncoding.LIKE_Q else Scales.LAYER
    layer = Problem(4, 2, 64, BF16, 16, v_head_dim=64, scale=64**-0.5, kv_encoding=codes, kv_scales=scales)
    return replace(layer, **more)  # type: ignore[arg-type]


def found(arch: str, run: Run) -> TruthReport:
    """Returns the report on the needles."""
    target = replace(known_target(arch), compute_units=run.compute_units)
    guards = Guards() if run.fault is None else with_launches(partial(faulty, run.fault))

    def build(layers: Sequence[Problem], options: RuntimeOptions) -> AttentionRuntime:
        return build_runtime(layers, options, device="cpu", target=target, guards=guards)

    return NeedleCheck(run.layers(KVEncoding[own_encoding(arch).name]), run.plan, build).run()


def run_truth(arch: str, run: Run) -> None:
    """Checks that every needle is found, and that every step was a replay if graphs are made."""
    report = found(arch, run)
    assert report.passed, "\n".join(map(str, report.misses))
    assert report.replays == (report.steps if run.plan.graphs else 0)
    assert all(tally.requested and tally.hidden for of_layer in report.tallies for tally in of_layer)


def run_lie(arch: str, run: Run) -> None:
    """Checks that needles are missed if a kernel misinterprets its inputs."""
    assert not found(arch, run).passed


def in_other_codes(args: AttendArgs) -> AttendArgs:
    """Takes pages for pages of the other arch: finite values, half or twice as large."""
    pages, form = args.pages, args.pages.format
    other = Encoding.E4M3FN if form.encoding is Encoding.E4M3FNUZ else Encoding.E4M3FNUZ
    k, v = (side.view(torch.uint8).view(other.dtype) for side in (pages.k, pages.v))
    taken = LayerPages(k, v, replace(form, encoding=other), pages.k_scale, pages.v_scale)
    return args._replace(pages=taken)


def truth_cases(arch: str) -> list[KernelCase]:
    """Sparse attention over latents in codes: graphed on gfx942, eager on gfx950, in a third of the launches."""
    plan = replace(PLAN, graphs=arch == "gfx942")
    return [KernelCase("truth-tokens", arch, partial(run_truth, arch, Run(tokens, plan)))]


def more_truth_cases(arch: str) -> list[KernelCase]:
    """Every kind of layer, longer; codes that are taken for the other arch's."""
    kinds = {"windowed": windowed, "tokens": tokens, "records": records, "blocks": blocks, "dense": dense}
    kinds["rows"] = rows
    runs = {f"truth-longer_{name}": partial(run_truth, arch, Run(layers, LONGER)) for name, layers in kinds.items()}
    lie = Run(windowed, replace(PLAN, graphs=False), in_other_codes)
    runs["truth-other_codes"] = partial(run_lie, arch, lie)
    return [KernelCase(name, arch, run) for name, run in runs.items()]
