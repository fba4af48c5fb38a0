"""Worlds of AITER's kernels: a runtime on CPU tensors over the stand-in, with a target given by the tests."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.limits import MAX_PAGE_SIZE
from rocm_attn.machine import releases
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.aiter.entries import ENTRIES as AITER_ROWS
from rocm_attn.providers.contract import SMALLEST_POOL, KernelEntry, LayerKernel
from rocm_attn.providers.select import Selection, select
from tests.amd.aiter.eight_bit_world import EightBitWorld

CPU = torch.device("cpu")
GFX942 = known_target("gfx942")


def plain_problem(
    page_size: int = 16,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
    wants_lse: bool = False,
) -> Problem:
    """Returns a problem with these query and KV heads over K and V pages."""
    return Problem(*heads, dims[0], dtype, page_size, v_head_dim=dims[1], scale=0.21, wants_lse=wants_lse)


def latent_problem(num_q_heads: int = 16) -> Problem:
    """Returns DeepSeek's latent attention, absorbed, on pages of one token."""
    return Problem(num_q_heads, 1, 576, torch.bfloat16, 1, v_head_dim=512, scale=0.05, pool=PoolKind.LATENT)


def vectorised_problem(
    page_size: int = 16,
    *,
    heads: tuple[int, int] = (16, 2),
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float16,
) -> Problem:
    """Returns a problem over vectorised pages with the usual scale. Every kernel that reads such pages serves it."""
    scale = dims[0] ** -0.5
    return Problem(*heads, dims[0], dtype, page_size, v_head_dim=dims[1], scale=scale, pool=PoolKind.VECTORIZED)


def in_eight_bits(problem: Problem, scales: Scales = Scales.LAYER, arch: str = "gfx942") -> Problem:
    """Returns the problem over pages in the arch's own 8-bit encoding."""
    encoding = KVEncoding.E4M3FNUZ if arch == "gfx942" else KVEncoding.E4M3FN
    return replace(problem, kv_encoding=encoding, kv_scales=scales)


def functions_of(row: KernelEntry) -> list[str]:
    """Returns the AITER functions that the row's name contains."""
    return row.name.removeprefix("aiter.").partition("[")[0].split("+")


def partly_torch(problem: Problem, target: Target = GFX942) -> Selection:
    """Selects the first AITER kernel that serves each kind of step, and torch's for kinds that AITER does not serve.

    Torch's kernels read pages as long as AITER's here, which a runtime without AITER does not offer.
    """
    cpu = known_target("cpu")
    of_torch = select(replace(problem, page_size=min(problem.page_size, MAX_PAGE_SIZE)), cpu, "torch").kernels
    kernels = {
        kind: LayerKernel(each.entry, each.entry.bind(problem, cpu, SMALLEST_POOL)) for kind, each in of_torch.items()
    }
    for kind in StepKind:
        serving = [row for row in AITER_ROWS if row.kind is kind and not row.refusals(problem, target)]
        for row in reversed(serving):
            with suppress(LookupError):
                kernels[kind] = LayerKernel(row, row.bind(problem, target, SMALLEST_POOL))
    return Selection(problem, target, kernels, ())


def world(
    problem: Problem,
    *,
    provider: str = "aiter",
    max_kv_len: int = 640,
    capture_tokens: Sequence[int] = (1,),
    selections: Sequence[Selection] | None = None,
) -> EightBitWorld:
    """Returns a world with room for eight sequences, four of which may be long."""
    serving = EightBitWorld.build(
        [problem],
        CPU,
        provider,
        num_pages=2 + 4 * -(-max_kv_len // problem.page_size),
        max_kv_len=max_kv_len,
        capture_tokens=capture_tokens,
        target=with_installed_aiter(GFX942),
        selections=selections,
    )
    serving.set_scales()
    return serving


def with_installed_aiter(target: Target) -> Target:
    """Returns the target with the release of the stand-in, if one is installed."""
    version = releases.aiter_version()
    return replace(target, releases=Releases(target.releases.rocm, Release.of(version))) if version else target
