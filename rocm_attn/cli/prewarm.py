"""`rocm-attn prewarm`: compiles the kernels that a model will need, as the user who will serve it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rocm_attn.capture.kernel_bundle import load_bundle, save_bundle
from rocm_attn.capture.prewarm import PrewarmReport, prewarm
from rocm_attn.cli.arguments import described_model, page_choice, pages_as_json, runtime_options, state_memory
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.errors import BadSetting
from rocm_attn.machine.releases import triton_version
from rocm_attn.machine.target import Target, detect_target, known_target, target_elsewhere
from rocm_attn.providers.select import select
from rocm_attn.selection.kernels import missing_kernels
from rocm_attn.selection.kv_formats import KVFormat


def run(options: argparse.Namespace) -> None:
    """Compiles for options.config and prints the report. Raises RocmAttnError."""
    model = described_model(options.config)
    target, device = target_and_device(options.arch)
    max_kv_len = model.max_kv_len(options.max_kv_len)
    geometry = model.geometry.on_one_of(options.tp).without_idle_windows(max_kv_len)
    # A GPU that is not here is assumed to have every kernel that AITER brings.
    missing = missing_kernels(target, options.provider) if device.type == "cuda" else {}
    over = geometry.problems(
        dtype=getattr(torch, options.dtype),
        page_size=geometry.least_page_size,
        kv=KVFormat.named(options.kv_dtype, options.kv_scales, target),
    )
    pages = page_choice(options, over, lambda problem: select(problem, target, options.provider, unavailable=missing))
    problems = pages.problems(over)
    if any(drafts.branches > 1 for drafts in options.drafts):
        problems = tuple(replace(problem, custom_mask=True) for problem in problems)
    common = runtime_options(options, max_kv_len=max_kv_len, page_size=pages.page_size)
    served = replace(common, drafts=options.drafts, verify_tokens=options.verify_tokens)
    states = state_memory(geometry, problems, served)
    compile_all = partial(
        prewarm,
        problems,
        target,
        served,
        states.with_checkpoints(served.num_pages * states.page_bytes),
        device=device,
        progress=ProgressBar(sys.stderr, "compiling"),
    )
    report = _with_bundles(options, target, compile_all)
    ran = device.type == "cuda"
    if options.json:
        print(json.dumps({"arch": target.arch, "ran": ran, **pages_as_json(pages), **asdict(report)}))
    else:
        how = "run" if ran else "compiled without running"
        print(f"{options.config} on {target.arch}, {pages.describe()}, {how}")
        print("\n".join(report.lines()))


def _with_bundles(
    options: argparse.Namespace, target: Target, compile_all: Callable[[], PrewarmReport]
) -> PrewarmReport:
    """Compiles all kernels; takes them from options.check or writes them to options.bundle, if there is one.

    Raises BadSetting.
    """
    if options.check is not None:
        return _checked(Path(options.check), target, compile_all)
    if options.bundle is None:
        return compile_all()
    from rocm_attn.kernels.compile_only import cache_at

    # An empty cache, so that the bundle has the kernels of this model and no others.
    with TemporaryDirectory() as folder, cache_at(folder):
        try:
            report = compile_all()
            if not report.compiled:
                raise BadSetting(f"--bundle has nothing to write: {report.lines()[0]}")
            save_bundle(Path(options.bundle), Path(folder), bundle_facts(target))
        except OSError as error:
            raise BadSetting(f"--bundle cannot write {options.bundle}: {error}") from error
    return replace(report, cache=options.bundle)


def bundle_facts(target: Target) -> dict[str, str]:
    """The conditions under which kernels that are compiled here for a target can be used."""
    return {"arch": target.arch, "Triton": triton_version(), "processor": platform.machine()}


def _checked(file: Path, target: Target, compile_all: Callable[[], PrewarmReport]) -> PrewarmReport:
    """Adds a bundle to Triton's cache, and compiles what is missing. Raises BadSetting if anything was."""
    from rocm_attn.kernels.compile_only import cache_folder

    try:
        load_bundle(file, Path(cache_folder()), bundle_facts(target))
    except OSError as error:
        raise BadSetting(f"--check cannot read {file}: {error}") from error
    report = compile_all()
    if report.compiled:
        raise BadSetting(
            f"{file} lacks {sum(report.compiled.values())} variants that these options need, of "
            f"{', '.join(sorted(report.compiled))}; give --bundle the options that will be served, and the same source"
        )
    return report


def target_and_device(arch: str | None) -> tuple[Target, torch.device]:
    """The target, and the device that runs its steps: this machine's GPU if it is the target, else the CPU.

    Raises BadSetting.
    """
    here = detect_target(torch.device("cuda")) if torch.cuda.is_available() else known_target("cpu")
    if arch is None and not here.is_gpu:
        raise BadSetting("there is no GPU to compile for; name one with --arch, or run this on the machine that serves")
    target = here
    if arch is not None and arch != here.arch:
        target = target_elsewhere(arch)
    return target, torch.device("cuda" if target == here and here.is_gpu else "cpu")
