"""`rocm-attn capture-plan`: which graphs a model would get, and the size of its buffers; without a GPU."""

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.capture.fit import Fit, fit_of
from rocm_attn.capture.forecast import CapturePlan, plan_capture
from rocm_attn.capture.graphs import shape_name
from rocm_attn.capture.step_times import NOT_COUNTED, StepBudget, StepTimes, fitting
from rocm_attn.cli.arguments import pages_as_json, planned_runtime, requested_target
from rocm_attn.cli.weights import NOT_KNOWN, Weights, weights_of
from rocm_attn.errors import BadSetting
from rocm_attn.machine.choices import USED_SHARE
from rocm_attn.machine.gpus import GPUS, Gpu
from rocm_attn.models.cut import cost_of_heads

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_NOT_PREDICTED = (
    "graphs also take memory for the model's activations, which depends on the model and is measured when they are made"
)


def run(options: argparse.Namespace) -> None:
    """Prints the plan for options.config. Raises RocmAttnError."""
    gpu = _gpu(options)
    target = requested_target(options)
    runtime = planned_runtime(options, target, {}, swa_pages=options.swa_pages, split_steps=options.split_steps)
    pages, problems, settings, states = runtime.pages, runtime.problems, runtime.settings, runtime.states
    max_kv_len = settings.max_kv_len

    def planned(num_pages: int) -> CapturePlan:
        recurrent = states.with_checkpoints(num_pages * states.page_bytes)
        return plan_capture(problems, target, replace(settings, num_pages=num_pages), recurrent)

    plan = planned(settings.num_pages)
    weights = weights_of(options)
    fit = None
    if gpu is not None and weights.num_bytes != NOT_KNOWN:
        fit = fit_of(
            plan,
            planned,
            budget=int(options.gpu_memory_share * gpu.memory_bytes),
            weight_bytes=weights.num_bytes,
        )
    times = budget = None
    most = options.max_batch_size if fit is None else min(options.max_batch_size, fitting(fit.room))
    if gpu is not None and weights.matrices != NOT_COUNTED and problems[0].dtype.itemsize == 2:
        times = StepTimes(
            weights.matrices, [problems[read] for read in runtime.whole.reads], gpu.rates, states.recurrent.layers
        )
        budget = StepBudget.chosen(times, most)
    if options.json:
        described = {
            "arch": target.arch,
            "ranks": options.tp,
            **pages_as_json(pages),
            "max_kv_len": settings.max_kv_len,
        }
        of_weights = {"weights_bytes": None if weights.num_bytes == NOT_KNOWN else weights.num_bytes}
        of_fit = {"fit": None if fit is None else {**asdict(fit), "left": fit.left, "fits": fit.fits}}
        of_states = {"state_bytes_per_request": states.of_each_request, "spacing": states.recurrent.spacing}
        expected = {} if times is None or budget is None else {"budget": budget.as_json(), **times.as_json(most)}
        print(json.dumps({**described, **_as_json(plan), **of_weights, **of_fit, **of_states, **expected}, indent=2))
    else:
        ranks = "" if options.tp == 1 else f", one of {options.tp} ranks"
        print(
            f"{options.config} on {target.arch}{ranks}, up to {options.max_batch_size} sequences of {max_kv_len} tokens"
        )
        for sentence in cost_of_heads(runtime.whole, options.tp):
            print(f"over {options.tp} ranks, {sentence}")
        if pages.lines:
            print(f"{pages.describe()} were chosen")
        print("\n".join(_lines(plan)))
        print("\n".join(_fit_lines(options, weights, gpu, fit)))
        if times is not None and budget is not None:
            print("\n".join(["", *budget.lines(), *times.lines(most)]))
        if states.recurrent.layers:
            print(
                f"recurrent states take {_size(states.of_each_request)} a request; the prefix cache keeps one after "
                f"{states.recurrent.spacing} tokens or a multiple, {_size(states.of_checkpoints(1))} each"
            )


def _gpu(options: argparse.Namespace) -> Gpu | None:
    """The GPU of --gpu, whose arch is that of --arch if it is not given. Raises BadSetting."""
    if options.gpu is None:
        if options.arch is None:
            raise BadSetting("give --gpu, as mi300x, which says how many tokens fit, or --arch, as gfx942")
        if options.gpu_memory_share != USED_SHARE:
            raise BadSetting("--gpu-memory-share is of a GPU's memory, and there is no --gpu; give it, as mi300x")
        return None
    gpu = GPUS[options.gpu]
    if options.arch not in (None, gpu.arch):
        raise BadSetting(f"--gpu {options.gpu} is {gpu.arch}, and --arch is {options.arch}; leave --arch out")
    options.arch = gpu.arch
    if not 0 < options.gpu_memory_share <= 1:
        raise BadSetting(f"--gpu-memory-share is {options.gpu_memory_share}; it must be above 0 and at most 1")
    return gpu


def _fit_lines(options: argparse.Namespace, weights: Weights, gpu: Gpu | None, fit: Fit | None) -> list[str]:
    on_rank = "" if options.tp == 1 else " on each rank"
    if weights.num_bytes == NOT_KNOWN:
        return ["", f"weights{on_rank} are not known: {weights.source}"]
    lines = ["", f"weights{on_rank} take {_size(weights.num_bytes)} ({weights.source})"]
    if gpu is None or fit is None:
        return [*lines, "--gpu says whether it fits, and how many tokens would"]
    lines.append(
        f"{options.gpu} has {_size(gpu.memory_bytes)} ({gpu.source}); {_size(fit.budget)} of them may be in use "
        f"(--gpu-memory-share {options.gpu_memory_share:g})"
    )
    driver = f"graphs keep up to {_size(fit.graphs)} in the driver, by what an H200 showed"
    if fit.fits:
        lines.append(f"fits: {_size(fit.left)} remain for activations; {driver}")
        return [*lines, f"K and V have {fit.tokens:,} tokens, and {fit.room:,} would fit without activations"]
    if fit.room == 0:
        return [
            *lines,
            f"does not fit: the rest leaves no room for a token of K and V; {driver}; use more ranks (--tp)",
        ]
    verdict, these = "does not fit:", "K and V"
    if options.num_pages is None:  # all sequences at full length: serve allocates fewer pages by itself
        verdict = "fits with fewer pages, as serve allocates: for every sequence at full length,"
        these = "K and V of these"
    return [
        *lines,
        f"{verdict} {_size(-fit.left)} are missing before activations; {driver}",
        f"{these} have {fit.tokens:,} tokens, and {fit.room:,} would fit: "
        f"--num-pages {1 + fit.room // fit.page_size}, or more ranks (--tp)",
    ]


def _lines(plan: CapturePlan) -> list[str]:
    lines = ["", f"{len(plan.buckets)} graphs, made in this order:"]
    for bucket in plan.buckets:
        used = f"buffers {_size(bucket.step_bytes)}, workspace {_size(bucket.workspace_bytes)}"
        lines.append(f"  {shape_name(bucket.shape):44} {used}")
    if plan.lengths:
        lines.append("  and more of each for longer sequences: a kernel compiles the length bucket in")
    lines += ["", "memory:"]
    lines += [f"  {part.name:20} {_size(part.num_bytes):>12}   {part.knob}" for part in plan.parts]
    lines.append(f"  {'total':20} {_size(plan.num_bytes):>12}")
    if any(bucket.shape.drafts is not NO_DRAFTS for bucket in plan.buckets):
        lines.append(f"  {'total for drafts':20} {_size(plan.draft_bytes):>12}")
    return [*lines, "", _NOT_PREDICTED]


def _size(num_bytes: int) -> str:
    for unit_bytes, unit in _UNITS:
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes} bytes"


def _as_json(plan: CapturePlan) -> dict[str, Any]:
    return {
        "buckets": [
            {
                "kind": bucket.shape.kind.value,
                "num_seqs": bucket.shape.num_seqs,
                "num_tokens": bucket.shape.num_tokens,
                "halves": bucket.shape.num_halves,
                "branches": bucket.shape.drafts.branches,
                "draft_steps": bucket.shape.drafts.steps,
                "step_bytes": bucket.step_bytes,
                "workspace_bytes": bucket.workspace_bytes,
            }
            for bucket in plan.buckets
        ],
        "more_graphs_by_length": plan.lengths,
        "parts": [{"name": part.name, "bytes": part.num_bytes, "knob": part.knob} for part in plan.parts],
        "total_bytes": plan.num_bytes,
        "draft_bytes": plan.draft_bytes,
    }
