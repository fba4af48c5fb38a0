"""`rocm-attn prewarm`: compiles the kernels that a model will need, as the user who will serve it."""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import torch

from rocm_attn.capture.kernel_bundle import load_bundle, save_bundle
from rocm_attn.capture.prewarm import PrewarmReport, prewarm
from rocm_attn.cli.arguments import pages_as_json, planned_runtime
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.cli.signals import sigterm_interrupts
from rocm_attn.errors import BadSetting
from rocm_attn.machine.releases import triton_version
from rocm_attn.machine.target import Target, detect_target, known_target, target_elsewhere
from rocm_attn.machine.whole_files import require_place
from rocm_attn.selection.kernels import missing_kernels


def run(options: argparse.Namespace) -> None:
    """Compiles for options.config and prints the report. Raises RocmAttnError."""
    target, device = target_and_device(options.arch)
    # A GPU that is not here is assumed to have every kernel that AITER brings.
    missing = missing_kernels(target, options.provider) if device.type == "cuda" else {}
    runtime = planned_runtime(options, target, missing, verify_tokens=options.verify_tokens)
    pages, served, states = runtime.pages, runtime.settings, runtime.states
    compile_all = partial(
        prewarm,
        runtime.problems,
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
        if target.is_gpu:
            _writable_cache()
        return compile_all()
    from rocm_attn.kernels.compile_only import cache_at

    try:
        require_place(Path(options.bundle), "--bundle")
        # An empty cache, so that the bundle has the kernels of this model and no others. It is removed at SIGTERM too.
        with sigterm_interrupts(), TemporaryDirectory() as folder, cache_at(folder):
            report = compile_all()
            if not report.compiled:
                raise BadSetting(f"--bundle has nothing to write: {report.lines()[0]}")
            save_bundle(Path(options.bundle), Path(folder), bundle_facts(target))
    except OSError as error:
        raise BadSetting(f"--bundle cannot write {options.bundle}: {error}") from error
    return replace(report, cache=options.bundle)


def _writable_cache() -> Path:
    """The folder of Triton's cache. Raises BadSetting if it has no name, or if Triton cannot write to it."""
    from rocm_attn.kernels.compile_only import cache_folder

    named = cache_folder()
    if not named:
        raise BadSetting("TRITON_CACHE_DIR is empty, and Triton compiles nothing then; unset it, or name a folder")
    folder = Path(named)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadSetting(
            f"Triton's cache {folder} cannot be written ({error.strerror}); set TRITON_CACHE_DIR to another folder"
        ) from error
    return folder


def bundle_facts(target: Target) -> dict[str, str]:
    """The conditions under which kernels that are compiled here for a target can be used."""
    return {"arch": target.arch, "Triton": triton_version(), "processor": platform.machine()}


def _checked(file: Path, target: Target, compile_all: Callable[[], PrewarmReport]) -> PrewarmReport:
    """Adds a bundle to Triton's cache, and compiles what is missing. Raises BadSetting if anything was."""
    cache = _writable_cache()
    try:
        load_bundle(file, cache, bundle_facts(target))
    except OSError as error:
        raise BadSetting(f"--check cannot copy {file} into Triton's cache {cache}: {error}") from error
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
