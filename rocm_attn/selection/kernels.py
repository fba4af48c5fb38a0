"""The kernels of a runtime: chosen by select(), among those that this machine has and that pass a probe."""

import logging
from collections.abc import Sequence
from functools import cache

import torch

from rocm_attn.machine import releases
from rocm_attn.machine.agreement import Agree, alone
from rocm_attn.machine.aiter_releases import not_read
from rocm_attn.machine.compile_watch import watch_compiles
from rocm_attn.machine.measured_choices import with_measured_choices
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import Selection, Unavailable, select
from rocm_attn.selection.probe import wrong_kernels


def choose_kernels(
    problems: Sequence[Problem],
    target: Target,
    provider: str,
    pool: PoolSize,
    *,
    deterministic: bool = False,
    device: torch.device,
    agree: Agree = alone,
) -> tuple[Selection, ...]:
    """Chooses the kernels of each problem, in order.

    Kernels that are probed run the problem's own shape against the reference first, once for each arch and version. A
    wrong one is switched off, and the next is used. On the meta device, where nothing runs, all of them count as
    installed and right. Tiles of rows that the user has measured on such a GPU are preferred to the tables' tiles.

    agree: a kernel that is missing or wrong on one rank is left out on all
    On a GPU compiles that hang are reported from now on.
    Raises Unsupported, BadSetting.
    """
    target, runs = with_measured_choices(target), device.type != "meta"
    if device.type == "cuda":
        watch_compiles()
    unavailable = dict(agree(missing_kernels(target, provider) if runs else {}))
    while True:
        selections = tuple(
            select(problem, target, provider, pool=pool, unavailable=unavailable, deterministic=deterministic)
            for problem in problems
        )
        wrong = agree(wrong_kernels(selections, device) if runs else {})
        if not wrong:
            break
        unavailable.update(wrong)
    kernels = (kernel for each in selections for kernel in each.kernels.values())
    of_aiter = runs and any(kernel.entry.provider == "aiter" for kernel in kernels)
    if of_aiter and (unread := not_read(releases.aiter_version())):
        _warn_once(f"{unread}; its kernels serve because their parameters agree and their probe passed")
    for selection in selections:
        if provider == "auto" and target.is_amd and runs and not deterministic:
            _say_what_fell_back(selection)
    return selections


def missing_kernels(target: Target, provider: str) -> Unavailable:
    """AITER's kernels that a provider would use on a target, with the parts that the installed AITER lacks for them."""
    return library.unavailable() if provider in ("auto", "aiter") and target.is_amd else {}


def _say_what_fell_back(selection: Selection) -> None:
    """Warns of the kinds of step that AITER does not serve, with the reasons."""
    for kind, kernel in selection.kernels.items():
        refused: dict[str, dict[str, None]] = {}  # reason -> the kernels that have it
        for r in selection.refusals:
            if r.kind is kind and r.kernel.startswith("aiter.") and "not bound" not in r.reason:
                refused.setdefault(r.reason, {})[r.kernel] = None
        every = set[str]().union(*refused.values())
        # A reason of every kernel, such as that there is no AITER, makes the others idle.
        of_all = {reason: kernels for reason, kernels in refused.items() if len(kernels) == len(every)}
        # Kinds for which AITER has no kernels have nothing to fall back from.
        if kernel.entry.provider != "aiter" and refused:
            why = "; ".join(f"{', '.join(kernels)}: {reason}" for reason, kernels in (of_all or refused).items())
            _warn_once(f"{kind.value} steps are served by {kernel.entry.name}, not by AITER ({why})")


@cache
def _warn_once(sentence: str) -> None:
    logging.getLogger(__name__).warning("%s", sentence)
