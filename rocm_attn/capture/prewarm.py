"""Compiles what a model will need, before it is served: by running its steps once, over memory that holds no request.

On a GPU the steps really run, and AITER compiles what they need of it. For a GPU that is not there Triton's kernels are
compiled, into the cache entries that a process on that GPU will find. Either way the runtime's own launchers decide
what is compiled, at the sizes that will be served.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.capture.eager_steps import MOST_TOKENS, eager_steps
from rocm_attn.capture.graphs import Progress, capture_shapes, draft_shapes, shape_name
from rocm_attn.capture.made_graphs import takes_inputs
from rocm_attn.capture.probe_requests import as_steps_of, new_requests, typical_new_tokens
from rocm_attn.errors import BadSetting
from rocm_attn.guards.registry import guards_from_settings
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.machine.target import Target
from rocm_attn.paging.index_spaces import num_pages as pages_of
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.accepting import accept_drawn, verified
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part

# Above this a storage takes code with 64-bit addresses; a pool that is larger than this needs no more of itself here.
_BUFFER_LOAD_BYTES = 2 << 30

# New tokens of trees that are verified where no captured step does.
_TREE_NODES = 4


@dataclass(frozen=True, slots=True)
class PrewarmReport:
    """What came of it.

    compiled: kernels by name and how many variants of each were compiled
    cached:   likewise, those that were there already
    cache:    Triton's cache; empty where no kernel was needed
    """

    compiled: dict[str, int]
    cached: dict[str, int]
    cache: str
    seconds: float

    def lines(self) -> list[str]:
        """The report in sentences."""
        if not (self.compiled or self.cached):
            return ["nothing to compile: the chosen kernels are torch operations"]
        lines = [f"compiled {name}, {_variants(count)}" for name, count in sorted(self.compiled.items())]
        compiled, cached = sum(self.compiled.values()), sum(self.cached.values())
        where = f"; cache {self.cache}" if self.cache else ""
        return [*lines, f"{compiled} compiled, {cached} there already, {self.seconds:.1f} s{where}"]


def prewarm(
    problems: Sequence[Problem],
    target: Target,
    options: RuntimeOptions,
    *,
    device: torch.device,
    progress: Progress = lambda done, total, name: None,
) -> PrewarmReport:
    """Compile what the layers need on the target.

    options:  what will be served; its pages are those of the pool that will be there
    device:   the GPU that is the target; the CPU where the target is not there
    progress: called before each step and at the end
    Raises what build_runtime raises; BadSetting under Triton's interpreter.
    """
    if target.is_gpu and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise BadSetting("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    started = time.perf_counter()
    runtime = _runtime(problems, target, options, device)
    steps, memory = list(_steps(runtime)), _Memory(runtime.device)
    compiled: Counter[str] = Counter()
    cached: Counter[str] = Counter()

    def count(name: str, was_cached: bool) -> None:
        (cached if was_cached else compiled)[name] += 1

    with _compiling(target, device, count):
        for done, (shape, batch) in enumerate(steps):
            progress(done, len(steps), shape_name(shape))
            _run(runtime, batch, shape, memory)
    if runtime.target.is_gpu == (runtime.device.type == "cuda"):  # else nothing has run
        runtime.check_device()
    progress(len(steps), len(steps), "")
    return PrewarmReport(
        compiled=dict(compiled),
        cached=dict(cached),
        cache=_cache_folder() if compiled or cached else "",
        seconds=time.perf_counter() - started,
    )


def _runtime(
    problems: Sequence[Problem], target: Target, options: RuntimeOptions, device: torch.device
) -> AttentionRuntime:
    """A runtime of one layer of each kind, over a pool that is as large as it needs to be to compile the same."""
    kinds = list(dict.fromkeys(problems))
    row = min(
        problem.page_size * problem.num_kv_heads * min(problem.head_dim, problem.v_head_dim) * problem.dtype.itemsize
        for problem in kinds
    )
    of_each = max(options.verify_tokens, _TREE_NODES, *(drafts.tokens for drafts in options.drafts))
    largest_step = max(
        *options.capture_tokens,
        *options.prompt_tokens,
        options.max_num_seqs * of_each,
        min(MOST_TOKENS, options.max_num_seqs * options.max_kv_len),
    )
    least = 2 + options.max_num_seqs + pages_of(largest_step, kinds[0].page_size)
    num_pages = max(least, min(options.num_pages, _BUFFER_LOAD_BYTES // row + 1))
    provider, guards = options.provider, guards_from_settings()
    if target.is_gpu and device.type == "cpu":
        if provider == "aiter":
            raise BadSetting(f"AITER compiles its kernels on the GPU that runs them; prewarm it on a {target.arch}")
        provider = "triton"
        guards = guards.without("echo_check")  # kernels that are only compiled answer nothing
    small = replace(options, num_pages=num_pages, provider=provider)
    runtime = build_runtime(kinds, small, device=device, target=target, guards=guards)
    for layer, problem in enumerate(kinds):
        weights = HeadWeights.random(problem, torch.Generator(runtime.device))
        runtime.head_weights.set(layer, weights)
    return runtime


def _steps(runtime: AttentionRuntime) -> Iterator[tuple[PaddedShape, list[int]]]:
    """A step of every shape that is captured, and those of eager_steps(): the shape, and its sequences' new tokens.

    Rounds of drafts are among them. That they run in halves asks for no other kernels.
    """
    table = runtime.table
    for shape in (*draft_shapes(runtime.padding), *capture_shapes(runtime.padding)):
        q_len = typical_new_tokens(runtime, shape)
        if q_len is not None:
            yield shape, q_len.tolist()
    if not runtime.target.is_gpu:
        return  # nothing is compiled
    own = {kind for selection in runtime.selections for kind in selection.kernels if not kind.captured}
    steps = eager_steps(
        runtime.padding, max_seqs=table.most_new_seqs, max_kv_len=table.max_kv_len, uncaptured=tuple(own)
    )
    for shape, each in steps:
        # A pool for windows may have fewer pages than a step of all these tokens takes: serving has none there.
        if pages_of(np.array(each), table.page_size).sum() <= table.fewest_free_pages:
            yield shape, each


def _run(runtime: AttentionRuntime, q_len: list[int], shape: PaddedShape, memory: _Memory) -> None:
    """One step of requests with so many new tokens each, through every kind of layer."""
    new, cached = _with_cached(runtime, q_len, shape)
    pad_to = PadTo(max(shape.num_seqs, len(q_len)))
    with new_requests(runtime, cached, new) as batch:
        _run_step(runtime, as_steps_of(shape, batch, torch.Generator(runtime.device)), pad_to, memory)
        most_verified = max(runtime.padding.verify, _TREE_NODES)
        if shape.kind.extra is Extra.MASK and shape.drafts is NO_DRAFTS and max(q_len) <= most_verified:
            _verify(runtime, batch, pad_to, memory)


def _with_cached(
    runtime: AttentionRuntime, q_len: list[int], shape: PaddedShape
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """New tokens of each request, and those that it has in the cache.

    One of an extend step has one, where steps of new prompts alone have a kernel of their own; where the shortest has
    no room for it, the longest one has a new token less.
    """
    has_prefill = any(StepKind.PREFILL in selection.kernels for selection in runtime.selections)
    new, cached = np.array(q_len, np.int32), np.zeros(len(q_len), np.int32)
    if not has_prefill or shape.kind is not StepKind.EXTEND:
        return new, cached
    shortest, longest, table = int(new.argmin()), int(new.argmax()), runtime.table
    more = new + (np.arange(len(q_len)) == shortest)
    if more[shortest] <= table.max_kv_len and pages_of(more, table.page_size).sum() <= table.fewest_free_pages:
        cached[shortest] = 1
    elif new[longest] > 2:
        new[longest] -= 1
        cached[longest] = 1
    return new, cached


def _run_step(runtime: AttentionRuntime, batch: StepBatch, pad_to: PadTo, memory: _Memory) -> None:
    """A whole step, or a round of drafts, each of whose branches continues itself."""
    with runtime.step(batch, runtime.plan(batch, pad_to)) as step:
        if takes_inputs(runtime, step):
            runtime.gate.take_inputs()
        for part in step.parts:
            if part.number:
                part.keep_branches()
            _attend_all(runtime, part, memory)


def _verify(runtime: AttentionRuntime, batch: StepBatch, pad_to: PadTo, memory: _Memory) -> None:
    """The same tokens as trees of drafts, and what becomes of them: acceptance, and K and V that move."""
    width, device = max(1, batch.max_q_len), runtime.device
    parents = torch.arange(-1, width - 1, dtype=torch.int32, device=device).expand(batch.num_seqs, width).contiguous()
    batch = replace(batch, mask=TreeMask(parents))
    with runtime.step(batch, runtime.plan(batch, pad_to)) as step:
        (part,) = step.parts
        _attend_all(runtime, part, memory)
        accept_drawn(torch.zeros_like(part.token_ids), verified(part, parents))
    nothing = Accepted.empty(batch.num_seqs, width, device)
    for tensor in nothing:
        tensor.zero_()
    runtime.move_accepted(nothing, torch.from_numpy(batch.rows.copy()).to(device))


def _attend_all(runtime: AttentionRuntime, part: Part, memory: _Memory) -> None:
    for layer, selection in enumerate(runtime.selections):
        _attend(part, layer, selection.problem, memory)


def _attend(part: Part, layer: int, problem: Problem, memory: _Memory) -> None:
    num_tokens = part.token_ids.shape[0]

    def zeros(name: str, num_heads: int, dim: int) -> Tensor:
        return memory.zeros(name, (num_tokens, num_heads, dim), problem.dtype)

    q, out = zeros("q", problem.num_q_heads, problem.head_dim), zeros("out", problem.num_q_heads, problem.v_head_dim)
    k = zeros("k", problem.num_kv_heads, problem.head_dim)
    is_latent = problem.pool is PoolKind.LATENT
    v = k[..., : problem.v_head_dim] if is_latent else zeros("v", problem.num_kv_heads, problem.v_head_dim)
    # A kernel may store in its own launch, which is another variant.
    part.layers.store_and_attend(layer, q, k, v, out)
    part.layers.store(layer, k, v)
    part.layers.attend(layer, q, out)


class _Memory:
    """What layers are given, of all steps one after the other: to fill as much for each takes longer than all else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros where nothing has been written to this name's."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._held[name, dtype] = torch.zeros(size, dtype=dtype, device=self._device)
        return held[:size].view(shape)


@contextmanager
def _compiling(target: Target, device: torch.device, count: Callable[[str, bool], None]) -> Iterator[None]:
    """Tells what Triton compiles and what it finds in its cache; where the target is not there, nothing runs.

    count: takes a kernel's name and whether it was there already
    """
    if not target.is_gpu:
        yield
        return
    from rocm_attn.kernels.compile_only import AbsentGpu, compile_only, observe_compiles
    from rocm_attn.kernels.launch import observe_launches

    with ExitStack() as stack:
        stack.enter_context(observe_compiles(lambda event: count(event.name, event.was_cached)))
        if device.type == "cpu":
            gpu = AbsentGpu(target.arch, target.compute_units, target.wave_size, target.lds_bytes)
            stack.enter_context(compile_only(gpu))
            # Each launch by Triton's ordinary path: the quick one keeps what only a device can run.
            stack.enter_context(observe_launches(_launch))
        yield


def _launch(launch: Callable[[], object]) -> None:
    launch()


def _cache_folder() -> str:
    from rocm_attn.kernels.compile_only import cache_folder

    return cache_folder()


def _variants(count: int) -> str:
    return "1 variant" if count == 1 else f"{count} variants"
