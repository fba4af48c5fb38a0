"""A checkout of ROCm/aiter on a machine without ROCm: which one, and how its Python modules are imported from there.

`import aiter` asks ROCm for the GPU and builds C++. Therefore `_replaced` replaces the package itself, and the modules
that build or ask, by stand-ins that describe the machine. Every other module is the checkout's own file. These
functions that rocm_attn calls are then real, with the kernels that they launch:

    aiter.ops.triton.attention.unified_attention.unified_attention   (Triton)
    aiter.ops.triton.gluon.pa_decode_gluon.pa_decode_gluon           (Gluon; its reduction is AITER's Triton kernel,
                                                                      which AITER has in addition to the C++ one)
    aiter.ops.triton.attention.unified_attention_sparse_mla.unified_attention_sparse_mla   (Triton)
    aiter.mla.mla_decode_fwd and mla_prefill_fwd                     (stage 2 in Triton; stage 1 is assembly, which
                                                                      latent_stages.py replaces)

The rest of AITER is C++ and assembly, which no simulator here runs.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton

from rocm_attn.machine.aiter_marks import marks_in
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target, known_target
from tests.amd.aiter_source import latent_stages

VARIABLE = "AITER_SOURCE"

_FLASH_ATTENTION = "aiter.ops.triton._triton_kernels.flash_attn_triton_amd"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout. root: its folder, which holds aiter/."""

    root: Path

    @classmethod
    def named(cls) -> Checkout:
        """Returns the checkout that AITER_SOURCE names. Raises ValueError if it names none."""
        folder = os.environ.get(VARIABLE, "")
        if not folder:
            raise ValueError(f"{VARIABLE} is not set; set it to the folder of a checkout of github.com/ROCm/aiter")
        root = Path(folder).resolve()
        if not (root / "aiter" / "ops" / "triton").is_dir():
            raise ValueError(f"{VARIABLE} names {folder}, which has no aiter/ops/triton; name a checkout of ROCm/aiter")
        return cls(root)

    def commit(self) -> str:
        """The last tag or the one checked out, the number of commits since then, and whether files were changed."""
        return _git(self.root, "describe", "--tags", "--match=v[0-9]*", "--long", "--abbrev=10", "--dirty=+changes")

    def date(self) -> str:
        return _git(self.root, "show", "--no-patch", "--format=%cs", "HEAD")

    def target(self, arch: str) -> Target:
        """Returns the arch with this AITER, and with the ROCm of the image."""
        known = known_target(arch)
        here = replace(known.releases, aiter=release_of(self.commit()), marks=marks_in(self.root / "aiter"))
        return replace(known, releases=here)


def release_of(commit: str) -> Release:
    """Returns the release of a commit, or the next one in development, as the commit's build would name itself.

    v0.1.20-46-ge4048607a5 is in the development of 0.1.21, and v0.1.19.post2-139-gc16d44bd2f in that of 0.1.19.post3.
    """
    tag, commits_since, _ = commit.rsplit("-", 2)
    if commits_since == "0":
        return Release.of(tag)
    match = re.match(r"(v\d+\.\d+\.(?:\d+\.post)?)(\d+)", tag)
    assert match is not None, tag
    return Release.of(f"{match[1]}{int(match[2]) + 1}.dev{commits_since}")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def imported(checkout: Checkout, arch: str) -> Iterator[None]:
    """Makes `import aiter` find the checkout while active, as on a machine with a GPU of that arch.

    A Triton driver for the arch must be active: AITER's modules ask it when they are imported.
    """
    others = [name for name in sys.modules if _is_its(name)]
    assert not others, f"another AITER is imported: {others}"
    modules = _imported.setdefault((checkout, arch), {})
    sys.modules.update(modules or _replaced(checkout.root, arch))
    properties = SimpleNamespace(multi_processor_count=known_target(arch).compute_units, gcnArchName=arch)
    try:
        # Older releases ask torch for the number of compute units.
        with (
            mock.patch.object(torch.cuda, "current_device", return_value=0),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        ):
            yield
    finally:
        for name in [name for name in sys.modules if _is_its(name)]:
            modules[name] = sys.modules.pop(name)


# A module asks for the arch once, so each arch has modules of its own.
_imported: dict[tuple[Checkout, str], dict[str, ModuleType]] = {}


def _is_its(name: str) -> bool:
    return name.split(".")[0] in ("aiter", "csrc")


def _replaced(root: Path, arch: str) -> Mapping[str, ModuleType]:
    """Returns the modules that are not the checkout's own, by name."""
    target = known_target(arch)
    own = root / "aiter"
    dtypes = _module(
        "aiter.utility.dtypes",
        fp8=target.fp8_dtype,
        bf16=torch.bfloat16,
        fp16=torch.float16,
        fp32=torch.float32,
        i32=torch.int32,
    )
    modules = [
        dtypes,
        # Packages whose __init__ would load all of AITER; their folders are searched.
        _module(
            "aiter",
            own,
            dtypes=dtypes,
            mla_decode_stage1_asm_fwd=latent_stages.mla_decode_stage1_asm_fwd,
            mla_prefill_asm_fwd=latent_stages.mla_prefill_asm_fwd,
        ),
        _module("aiter.ops", own / "ops"),
        _module("aiter.ops.triton", own / "ops" / "triton"),
        # unified_attention takes one small function from it.
        _module(_FLASH_ATTENTION, own.parent.joinpath(*_FLASH_ATTENTION.split("."))),
        # Modules that build C++ and ask rocminfo.
        _module("aiter.jit"),
        _module("aiter.jit.core", is_experimental_enabled=lambda: False),
        _module("aiter.jit.utils"),
        _module(
            "aiter.jit.utils.chip_info",
            get_gfx=lambda: arch,
            get_gfx_runtime=lambda: arch,
            get_cu_num=lambda: target.compute_units,
        ),
        _module("aiter.ops.attention", get_mla_decode_fwd_max_splits=_not_called),
        _module("csrc"),
        _module("csrc.cpp_itfs"),
        _module("csrc.cpp_itfs.pa"),
        _module("csrc.cpp_itfs.pa.pa_ps", launch_pa_decode_ps_reduce=_reduce_parts),
    ]
    return {module.__name__: module for module in modules}


def _module(name: str, folder: Path | None = None, **content: object) -> ModuleType:
    """Returns a package. Without a folder nothing more is found in it."""
    module = ModuleType(name)
    module.__path__ = [] if folder is None else [str(folder)]
    for key, value in content.items():
        setattr(module, key, value)
    return module


def _not_called(*arguments: object) -> int:
    raise AssertionError("the provider left AITER to choose the number of splits")


def _reduce_parts(
    output: torch.Tensor,
    exp_sums: torch.Tensor,
    max_logits: torch.Tensor,
    logits: torch.Tensor,
    sinks: torch.Tensor | None,
    *strides: int,
    query_seq_len: int,
    query_group_size: int,
    head_size: int,
    context_partition_num: int,
) -> None:
    """Reduces pa_decode_gluon's parts with the kernel that it falls back to if the C++ one was not built."""
    gluon = importlib.import_module("aiter.ops.triton.gluon.pa_decode_gluon")
    kernel: Any = gluon.paged_attention_decode_ps_reduce_kernel
    launch: Callable[..., object] = kernel[(output.shape[0], output.shape[2], query_seq_len * query_group_size)]
    launch(
        output,
        exp_sums,
        max_logits,
        logits,
        sinks,
        *strides,
        query_group_size=query_group_size,
        head_size=head_size,
        context_partition_num=context_partition_num,
        HEAD_SIZE_POW2=triton.next_power_of_2(head_size),
        USE_SINKS=sinks is not None,
        MAX_CONTEXT_PARTITION_NUM=triton.next_power_of_2(context_partition_num),
    )
