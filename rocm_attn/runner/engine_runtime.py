"""The runtime that an engine serves with: its pages are chosen, and its pool is sized."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rocm_attn.errors import BadSetting
from rocm_attn.machine.target import detect_target
from rocm_attn.paging.kv_pool import page_bytes
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.providers.select import Selection, select
from rocm_attn.runner.loading import LoadedModel
from rocm_attn.runner.options import EngineOptions
from rocm_attn.runner.pool_size import PoolPages, default_kv_bytes, pool_pages
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.selection.kernels import missing_kernels
from rocm_attn.selection.pages import PageChoice, choose_pages, open_page_sizes, open_pools
from rocm_attn.step.options import RuntimeOptions


def runtime_for(loaded: LoadedModel, options: EngineOptions) -> AttentionRuntime:
    """A runtime whose pool holds max_batch_size sequences of full length, or as many as the memory allows.

    Raises BadSetting, Unsupported, CapacityExceeded.
    """
    config, weights = loaded.config, loaded.weights
    max_kv_len = config.context_len if options.max_kv_len is None else options.max_kv_len
    if max_kv_len > config.context_len:
        raise BadSetting(
            f"max_kv_len is {max_kv_len} and the model's context is {config.context_len}; it cannot be more"
        )
    geometry = config.attention.without_idle_windows(max_kv_len)
    over = geometry.problems(dtype=weights.dtype, page_size=1)
    chosen = _page_choice(over, weights.device, options)
    problems = chosen.problems(over)
    pages = _pages(problems, options, max_kv_len, weights.device)
    return build_runtime(
        problems,
        RuntimeOptions(
            num_pages=pages.full,
            swa_pages=pages.swa,
            max_num_seqs=options.max_batch_size,
            # a sequence cannot outgrow the pool
            max_kv_len=min(max_kv_len, (pages.full - 1) * chosen.page_size),
            provider=options.provider,
            deterministic=options.deterministic,
        ),
        device=weights.device,
    )


def _page_choice(problems: Sequence[Problem], device: torch.device, options: EngineOptions) -> PageChoice:
    """The pages of the options, chosen as far as they are left open. Raises Unsupported where none have kernels."""
    target = detect_target(device)
    missing = missing_kernels(target, options.provider)

    def choose(problem: Problem) -> Selection:
        return select(problem, target, options.provider, unavailable=missing, deterministic=options.deterministic)

    return choose_pages(problems, choose, open_page_sizes(options.page_size), open_pools(options.pool))


def _pages(problems: Sequence[Problem], options: EngineOptions, max_kv_len: int, device: torch.device) -> PoolPages:
    """The pages that were asked for, and as many as there is use and room for of the others. Raises BadSetting."""
    if options.swa_pages and all(problem.window_left == UNLIMITED_WINDOW for problem in problems):
        raise BadSetting(
            f"swa_pages is {options.swa_pages} and no layer of the model has a window that sequences of up to "
            f"{max_kv_len} tokens outgrow, so nothing would lie there; leave it out"
        )
    kv_bytes = options.kv_bytes
    if kv_bytes is None:
        # What is asked for by number is not cut to the memory that is there.
        kv_bytes = default_kv_bytes(device) if options.num_pages is None else options.num_pages * page_bytes(problems)
    pages = pool_pages(
        problems,
        max_num_seqs=options.max_batch_size,
        max_kv_len=max_kv_len,
        chunk=options.chunk,
        kv_bytes=kv_bytes,
    )
    full = pages.full if options.num_pages is None else options.num_pages
    return PoolPages(full, min(pages.swa, full) if options.swa_pages is None else options.swa_pages)
