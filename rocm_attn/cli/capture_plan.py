"""`rocm-attn capture-plan`: which graphs a model would get, and the size of its buffers; without a GPU."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.capture.forecast import CapturePlan, plan_capture
from rocm_attn.capture.graphs import shape_name
from rocm_attn.cli.arguments import described_model, page_choice, pages_as_json, requested_target, runtime_options
from rocm_attn.providers.select import select
from rocm_attn.selection.kv_formats import KVFormat

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_NOT_PREDICTED = "graphs also take memory for activations; it depends on the model and is measured when they are made"


def run(options: argparse.Namespace) -> None:
    """Prints the plan for options.config. Raises RocmAttnError."""
    model = described_model(options.config)
    target = requested_target(options)
    max_kv_len = model.max_kv_len(options.max_kv_len)
    geometry = model.geometry.without_idle_windows(max_kv_len)
    over = geometry.problems(
        dtype=getattr(torch, options.dtype),
        page_size=geometry.least_page_size,
        kv=KVFormat.named(options.kv_dtype, options.kv_scales, target),
    )
    pages = page_choice(
        options, over, lambda problem: select(problem, target, options.provider, deterministic=options.deterministic)
    )
    problems = pages.problems(over)
    if any(drafts.branches > 1 for drafts in options.drafts):
        problems = tuple(replace(problem, custom_mask=True) for problem in problems)
    common = runtime_options(options, max_kv_len=max_kv_len, page_size=pages.page_size)
    settings = replace(common, swa_pages=options.swa_pages, split_steps=options.split_steps, drafts=options.drafts)
    plan = plan_capture(problems, target, settings)
    state_bytes = geometry.state_bytes(getattr(torch, options.dtype))
    if options.json:
        described = {"arch": target.arch, **pages_as_json(pages), "max_kv_len": max_kv_len}
        print(json.dumps({**described, **_as_json(plan), "state_bytes_per_request": state_bytes}, indent=2))
    else:
        print(f"{options.config} on {target.arch}, up to {options.max_batch_size} sequences of {max_kv_len} tokens")
        if pages.lines:
            print(f"{pages.describe()} were chosen")
        print("\n".join(_lines(plan)))
        if state_bytes:
            print(f"recurrent states take {_size(state_bytes)} a request too; rocm_attn keeps none")


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
