"""Compiles all kernels that a model needs before it is served, by running its steps once without requests.

On a GPU the steps really run, and AITER compiles the kernels that they need. If the target GPU is not there, Triton's
kernels are compiled into the cache entries that a process on that GPU will find. In both cases the runtime's own
launchers decide what is compiled, at the sizes that will be served.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.halves import HALVES
from rocm_attn.batch.mask import TokenSpans, TreeMask
from rocm_attn.batch.padding import PaddedShape, PaddingPolicy, PadTo
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.batch.step_kinds import Extra, StepKind
from rocm_attn.capture.graphs import Progress, capture_shapes, draft_shapes, shape_name, takes_inputs
from rocm_attn.capture.probe_requests import as_steps_of, evenly, give_states, new_tokens_of
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.errors import BadSetting
from rocm_attn.guards.registry import guards_from_settings
from rocm_attn.kernels.sampling import parameter_columns as columns
from rocm_attn.kernels.speculative.arguments import Accepted
from rocm_attn.machine.settings import interprets_kernels
from rocm_attn.machine.target import Target
from rocm_attn.paging.index_spaces import num_pages as pages_of
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, SLOTS_OF_ROW, RecurrentLayers, slot_bytes
from rocm_attn.problem import AllKeys, Indexer, Problem, all_see_cells
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.accepting import accept_drawn, verified
from rocm_attn.step.echo import NoEcho
from rocm_attn.step.head_weights import HeadWeights
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part

# Storages above this take code with 64-bit addresses, so a larger pool is built with no more than this here.
_BUFFER_LOAD_BYTES = 2 << 30

# New tokens of trees that are verified if no captured step verifies drafts.
_TREE_NODES = 4

# New tokens of a step, at most: the size of the prompt chunks that engines run at a time.
MOST_TOKENS = 8192
# New tokens of a sequence if there may be more sequences: a mask of few long ones would have many cells.
_MOST_EACH = 256


@dataclass(frozen=True, slots=True)
class PrewarmReport:
    """The result of prewarm().

    compiled, cached: kernels by name, with the number of variants of each that were compiled, or were cached already
    cache: Triton's; empty if no kernel was needed
    """

    compiled: dict[str, int]
    cached: dict[str, int]
    cache: str
    seconds: float

    def lines(self) -> list[str]:
        if not (self.compiled or self.cached):
            return ["nothing to compile: the chosen kernels are torch operations"]
        lines = [
            f"compiled {name}, {count} variant{'' if count == 1 else 's'}"
            for name, count in sorted(self.compiled.items())
        ]
        compiled, cached = sum(self.compiled.values()), sum(self.cached.values())
        where = f"; cache {self.cache}" if self.cache else ""
        return [*lines, f"{compiled} compiled, {cached} found in the cache, {self.seconds:.1f} s{where}"]


def prewarm(
    problems: Sequence[Problem],
    target: Target,
    options: RuntimeOptions,
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS,
    *,
    device: torch.device,
    progress: Progress = lambda done, total, name: None,
) -> PrewarmReport:
    """Compiles the kernels that the layers need on the target.

    options:  the options that will be served; its pages are those of the pool that will be there
    recurrent: layers that keep states in place of K and V, with the checkpoints that will be there
    device:   the GPU that is the target; the CPU if the target is not there
    progress: called before each step and at the end
    Raises what build_runtime raises; BadSetting under Triton's interpreter.
    """
    if target.is_gpu and interprets_kernels(os.environ):
        raise BadSetting("TRITON_INTERPRET is set, so nothing would be compiled; unset it")
    started = time.perf_counter()
    runtime = _runtime_of_kinds(problems, target, options, recurrent, device)
    compiled: Counter[str] = Counter()
    cached: Counter[str] = Counter()

    def count(name: str, was_cached: bool) -> None:
        (cached if was_cached else compiled)[name] += 1

    with _compiling(target, device, count):
        run_every_kernel(runtime, MOST_TOKENS, progress=progress)
    if runtime.target.is_gpu == (runtime.device.type == "cuda"):  # otherwise nothing has run
        runtime.check_device()
    cache = ""
    if compiled or cached:
        from rocm_attn.kernels.compile_only import cache_folder

        cache = cache_folder()
    return PrewarmReport(dict(compiled), dict(cached), cache, time.perf_counter() - started)


def run_every_kernel(
    runtime: AttentionRuntime,
    most_tokens: int,
    run_model: Callable[[StepBatch], object] = lambda batch: None,
    progress: Progress = lambda done, total, name: None,
) -> None:
    """Runs steps that together need every kernel of the runtime's steps, in rows that no request has; then picks.

    One layer of each kind runs in them, over zeros. So a process compiles before its first request, not after it.

    most_tokens: of a step
    run_model:   runs a step of the whole model, whose layers may have kernels besides attention. It gets prompts of
                 token 0, each with at most twice as many tokens as the one before: tiles depend on the number of tokens
    progress:    called before each step and at the end
    """
    steps, attend = list(_steps(runtime, most_tokens)), _Attend(runtime)
    for done, (shape, q_len) in enumerate(steps):
        progress(done, len(steps), shape_name(shape))
        _run(runtime, q_len, shape, attend)
    for q_len in _prompts(runtime, most_tokens):
        with _rows_without_requests(runtime, np.zeros_like(q_len), q_len) as rows:
            run_model(StepBatch(rows, q_len, q_len, np.zeros(q_len.sum(), np.int32)))
    for dtype in {torch.float32, *(selection.problem.dtype for selection in runtime.selections)}:
        _pick(runtime, dtype)
    progress(len(steps), len(steps), "")


def _prompts(runtime: AttentionRuntime, most_tokens: int) -> Iterator[Int32Array]:
    """New tokens of the sequences of prompts with 1, 2, 4, ... tokens, up to the most that there is room for."""
    table, num_tokens = runtime.table, 1
    while num_tokens <= most_tokens:
        q_len = np.array(evenly(num_tokens, -(-num_tokens // table.max_kv_len)), np.int32)
        if len(q_len) > table.most_new_seqs or not _fits(runtime, q_len):
            return
        yield q_len
        num_tokens = most_tokens if num_tokens < most_tokens < 2 * num_tokens else 2 * num_tokens


def _runtime_of_kinds(
    problems: Sequence[Problem],
    target: Target,
    options: RuntimeOptions,
    recurrent: RecurrentLayers,
    device: torch.device,
) -> AttentionRuntime:
    """A runtime with one layer of each kind, over pools just large enough that the same variants are compiled.

    device: the target, or the CPU if the target is not there; its kernels are then the project's own
    Raises what build_runtime raises, BadSetting.
    """
    kinds = list(dict.fromkeys(problems))
    row = min(p.page_size * p.num_kv_heads * min(p.head_dim, p.v_head_dim) * p.dtype.itemsize for p in kinds)
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
            raise BadSetting(f"AITER compiles its kernels on the GPU that runs them; run prewarm on a {target.arch}")
        provider = "triton"
        guards = replace(guards, publishing=replace(guards.publishing, new_echo_check=NoEcho))
    small = replace(options, num_pages=num_pages, provider=provider)
    states = _states_of_kinds(recurrent, options.num_rows + 1)
    runtime = build_runtime(kinds, small, states, device=device, target=target, guards=guards)
    for layer, problem in enumerate(kinds):
        runtime.head_weights.set(layer, HeadWeights.random(problem, torch.Generator(runtime.device)))
    return runtime


def _states_of_kinds(recurrent: RecurrentLayers, num_rows: int) -> RecurrentLayers:
    """One layer of each kind. Its checkpoints make the slots exceed 2 GiB if those of all layers do.

    Fewer layers change no other variant: the strides between slots are multiples of 16 elements for any layers.
    num_rows: the reserved row included
    """
    of_kinds = replace(recurrent, layers=tuple(dict.fromkeys(recurrent.layers)), checkpoints=0)
    of_rows, of_slot = SLOTS_OF_ROW * num_rows, slot_bytes(of_kinds)
    if (of_rows + recurrent.checkpoints) * slot_bytes(recurrent) <= _BUFFER_LOAD_BYTES:
        return of_kinds
    return replace(of_kinds, checkpoints=max(0, _BUFFER_LOAD_BYTES // of_slot + 1 - of_rows))


def _steps(runtime: AttentionRuntime, most_tokens: int) -> Iterator[tuple[PaddedShape, Int32Array]]:
    """A step of every shape that is captured, and those of eager_steps(): the shape, and its sequences' new tokens.

    Rounds of drafts are among them. Running them in halves needs no other kernels. Recurrent layers refuse rounds and
    masks, so there is no such step with them.
    """
    table, has_states = runtime.table, not runtime.states.is_empty
    for shape in (*draft_shapes(runtime.padding), *capture_shapes(runtime.padding)):
        q_len = _typical_with_room(runtime, shape)
        if q_len is not None and not (has_states and _goes_on_in_trees(shape)):
            yield shape, q_len
    if not runtime.target.is_gpu:
        return  # there is no GPU target, so no kernel to compile
    own = {kind for selection in runtime.selections for kind in selection.kernels if not kind.captured}
    eager = eager_steps(
        runtime.padding,
        max_seqs=table.most_new_seqs,
        max_kv_len=table.max_kv_len,
        most_tokens=most_tokens,
        uncaptured=tuple(own),
    )
    for shape, each in eager:
        # A pool for windows may have fewer pages than a step of all these tokens takes; no such step is served then.
        if _fits(runtime, np.array(each)) and not (has_states and _goes_on_in_trees(shape)):
            yield shape, np.array(each, np.int32)


def _typical_with_room(runtime: AttentionRuntime, shape: PaddedShape) -> Int32Array | None:
    """New tokens of as many sequences as there are rows and pages for; None if there is no such step of the shape."""
    for max_seqs in range(runtime.table.most_new_seqs, 0, -1):
        q_len = new_tokens_of(runtime, shape, max_seqs)
        if q_len is None or _fits(runtime, q_len):
            return q_len
    return None


def _goes_on_in_trees(shape: PaddedShape) -> bool:
    """True for steps that no recurrent layer serves."""
    return shape.drafts is not NO_DRAFTS or shape.kind.extra is Extra.MASK


def _fits(runtime: AttentionRuntime, kv_len: Int32Array) -> bool:
    return bool(pages_of(kv_len, runtime.table.page_size).sum() <= runtime.table.fewest_free_pages)


def _run(runtime: AttentionRuntime, q_len: Int32Array, shape: PaddedShape, attend: _Attend) -> None:
    """Runs one step of requests with q_len new tokens through every kind of layer."""
    new, cached = q_len.copy(), np.zeros_like(q_len)
    shortest, longest = int(new.argmin()), int(new.argmax())
    # If steps of new prompts alone have a kernel of their own, one sequence of an extend step has a token in the cache.
    # If the shortest has no room for it, the longest one has one new token less.
    if shape.kind is StepKind.EXTEND and any(StepKind.PREFILL in each.kernels for each in runtime.selections):
        cached[shortest] = 1
        if (new + cached)[shortest] > runtime.table.max_kv_len or not _fits(runtime, new + cached):
            cached[shortest], cached[longest] = 0, int(new[longest] > 2)
            new -= cached
    pad_to = PadTo(max(shape.num_seqs, len(q_len)))
    with _rows_without_requests(runtime, cached, new) as rows:
        batch = StepBatch(rows, cached + new, new)
        whole = as_steps_of(runtime, shape, batch, torch.Generator(runtime.device))
        with runtime.step(whole, runtime.plan(whole, pad_to)) as step:
            if takes_inputs(runtime, step):
                runtime.gate.take_inputs(step)
            for part in step.parts:
                if part.number:
                    part.keep_branches()
                attend(part)
        is_tree = shape.kind.extra is Extra.MASK and shape.drafts is NO_DRAFTS
        if is_tree and q_len.max() <= max(runtime.padding.verify, _TREE_NODES):
            _verify(runtime, batch, pad_to, attend)


@contextmanager
def _rows_without_requests(runtime: AttentionRuntime, cached: Int32Array, new: Int32Array) -> Iterator[Int32Array]:
    """Yields rows with room for these tokens of each, of which some count as stored; frees them."""
    table = runtime.table
    rows = np.array([table.admit() for _ in new], np.int32)
    try:
        table.reserve_all(rows, cached + new)
        table.mark_stored(rows, cached)
        going_on = np.flatnonzero(cached)
        runtime.states.memory.index_fill_(0, give_states(runtime, rows[going_on], cached[going_on]), 0)
        yield rows
    finally:
        for row in rows.tolist():
            table.free(row)


def _verify(runtime: AttentionRuntime, batch: StepBatch, pad_to: PadTo, attend: _Attend) -> None:
    """Runs the same tokens with spans, and as trees of drafts; then accepts drafts and moves K and V."""
    width, device = max(1, batch.max_q_len), runtime.device
    parents = torch.arange(-1, width - 1, dtype=torch.int32, device=device).expand(batch.num_seqs, width).contiguous()
    spans = replace(batch, mask=TokenSpans([], device))
    with runtime.step(spans, runtime.plan(spans, pad_to)) as step:
        attend(step.parts[0])
    if not all_see_cells(each.problem for each in runtime.selections):
        return
    batch = replace(batch, mask=TreeMask(parents))
    with runtime.step(batch, runtime.plan(batch, pad_to)) as step:
        (part,) = step.parts
        attend(part, everywhere=True)  # accepted tokens move once all layers have stored
        accept_drawn(torch.zeros_like(part.token_ids), verified(part, parents))
    nothing = Accepted.empty(batch.num_seqs, width, device)
    for tensor in nothing:
        tensor.zero_()
    runtime.move_accepted(nothing)


def _pick(runtime: AttentionRuntime, dtype: torch.dtype) -> None:
    """Picks tokens from logits of zeros, in every way. The kernels are the same for every vocabulary."""
    vocab, device, ops = 64, runtime.device, runtime.core.ops
    logits, shaped = torch.zeros(1, vocab, dtype=dtype, device=device), torch.zeros(1, vocab, device=device)
    tokens, found, counts, masks, parameters, likeliest = (
        torch.zeros(1, *size, dtype=torch.int32, device=device)
        for size in ((), (2,), (vocab,), (vocab // 32,), (columns.NUM_COLUMNS,), (3,))
    )
    parameters[:, [columns.COUNTS, columns.MASK]] = columns.NONE
    ops.pick_rows(logits, torch.zeros(1, 3, device=device), tokens, found, num_drawing=1)
    ops.shape_rows(logits, parameters, counts, masks, shaped)
    ops.cut_rows(parameters, shaped)
    ops.likeliest(logits, torch.zeros(1, 2, dtype=torch.int32, device=device), tokens, likeliest)


class _Attend:
    """Stores and attends in every kind of layer, and goes on with states in every kind of recurrent one."""

    def __init__(self, runtime: AttentionRuntime) -> None:
        of_layer = runtime.kinds.of_layer
        self._layers = {of_layer.index(kind): each.problem for kind, each in enumerate(runtime.selections)}
        self._problems = runtime.kinds.problems
        self._inputs, self._chooser = ZeroInputs(runtime.device), runtime.core.layers.selecting.source
        recurrent = runtime.states.recurrent.layers
        self._recurrent = {recurrent.index(form): form for form in dict.fromkeys(recurrent)}

    def __call__(self, part: Part, *, everywhere: bool = False) -> None:
        """everywhere: in every layer with pages, also where another one is of the same kind"""
        for layer, problem in (dict(enumerate(self._problems)) if everywhere else self._layers).items():
            q, k, v, out = self._inputs.of(problem, len(part.token_ids))
            if problem.state_format is not None:
                given, rows = self._inputs.of_fold(problem.state_format, problem.fold_columns, len(part.token_ids))
                part.layers.fold(layer, given, given, rows)
            # A kernel may store in its own launch, which is another variant.
            part.layers.store_and_attend(layer, q, k, v, out)
            part.layers.store(layer, k, v)
            # Without the log-sum-exp, and with it if the layer may be asked for it.
            wanted = (None, self._inputs.of_lse(problem, len(part.token_ids))) if problem.wants_lse else (None,)
            for lse in wanted:
                part.layers.attend(layer, q, out, lse)
            if isinstance(problem.indexer, AllKeys):
                continue
            self._select(part, self._chooser[layer])
            for lse in wanted:
                part.layers.attend_selected(layer, q, out, lse)
        for layer, form in self._recurrent.items():
            num_tokens = len(part.token_ids)
            if form.convolution.channels:
                # Only the model's code knows whether there is a bias, and where rows of x begin.
                for spare in (0, 1):
                    x, weight, bias, out = self._inputs.of_convolution(form, num_tokens, spare=spare)
                    part.states.convolve(layer, x, weight, None, out)
                    part.states.convolve(layer, x, weight, bias, out)
            part.states.recur(layer, *self._inputs.of_recurrence(form, num_tokens))

    def _select(self, part: Part, layer: int) -> None:
        """Stores index keys of a layer and chooses among them, with weights of the index heads and without."""
        problem = self._problems[layer]
        assert isinstance(problem.indexer, Indexer)
        k, q, weights = self._inputs.of_index(problem.indexer, problem.dtype, len(part.token_ids))
        part.layers.store_index(layer, k)
        coded = problem.indexer.key_encoding.over(problem.dtype)
        for index_q in (q, q.to(coded.dtype)) if coded.is_fp8 else (q,):
            part.layers.select(layer, index_q)
            part.layers.select(layer, index_q, weights)
            if problem.indexer.indexing.candidate_blocks:
                part.layers.select_among(layer, index_q, weights)


@contextmanager
def _compiling(target: Target, device: torch.device, count: Callable[[str, bool], None]) -> Iterator[None]:
    """Counts what Triton compiles and what it finds in its cache. Nothing runs if the target is not there."""
    if not target.is_gpu:
        yield
        return
    from rocm_attn.kernels.compile_only import compile_only, observe_compiles
    from rocm_attn.kernels.launch import observe_launches
    from rocm_attn.machine.absent_gpu import absent_gpu

    with ExitStack() as stack:
        stack.enter_context(observe_compiles(lambda event: count(event.name, event.was_cached)))
        if device.type == "cpu":
            stack.enter_context(compile_only(absent_gpu(target)))
            # Each launch takes Triton's ordinary path; the fast path keeps handles that only a device can run.
            stack.enter_context(observe_launches(_launch))
        yield


def _launch(launch: Callable[[], object]) -> None:
    launch()


def eager_steps(
    padding: PaddingPolicy,
    *,
    max_seqs: int,
    max_kv_len: int,
    most_tokens: int = MOST_TOKENS,
    uncaptured: Sequence[StepKind] = (),
) -> Iterator[tuple[PaddedShape, list[int]]]:
    """Steps that together need every kernel that a step without a graph can need: shapes, and new tokens of sequences.

    Launchers choose tiles, and how rows are cut into parts and summed, by a step's sizes. Only they know where one
    choice ends and the next begins. So there is a step for every number of sequences that a step can be padded to, with
    enough different counts of new tokens to meet each choice.

    max_seqs:   sequences that a step may have
    max_kv_len: tokens that a sequence may have
    most_tokens: tokens that a step may have
    uncaptured: kinds that never are graphs and have kernels of their own
    """
    for size, fewest in _padded_seqs(padding, max_seqs).items():
        num_seqs = min(size, max_seqs)
        longest = min(max(_MOST_EACH, -(-most_tokens // max(1, num_seqs - 1))), max_kv_len)
        for kind in (*padding.kinds(1), *uncaptured):
            if kind.decodes:
                yield PaddedShape(kind, size, size), [1]
                continue
            # Counts from `size` on, since tiles end at a mean over padded sequences. Some tiles end at a number of
            # tokens, which may lie between the last of these counts and the most that there can be.
            counts = {
                *_token_counts(kind, fewest, most_tokens, is_dense=False),
                *_token_counts(kind, size, most_tokens, is_dense=True),
            }
            most = min((num_seqs - 1) * longest + (1 if kind.mixes else longest), most_tokens)
            if most > min(counts):
                counts.add(most)
            for num_tokens in sorted(counts):
                q_len = _new_tokens(kind, num_tokens, longest)
                is_of_kind = kind.extra is Extra.MASK or (max(q_len) > 1 and (min(q_len) == 1) == kind.mixes)
                if len(q_len) <= num_seqs and is_of_kind:
                    yield PaddedShape(kind, size, num_tokens), q_len


def _padded_seqs(padding: PaddingPolicy, max_seqs: int) -> dict[int, int]:
    """Numbers of sequences that steps, or halves of them, can be padded to -> the fewest that are padded to it."""
    fewest: dict[int, int] = {}
    for count in range(1, max_seqs + 1):
        fewest.setdefault(padding.round_seqs(count, 1), count)
        if padding.max_children > 1:
            # One half may have one sequence, and the other all others.
            fewest[padding.round_seqs(count, HALVES) // HALVES] = 1
    return fewest


def _token_counts(kind: StepKind, num_seqs: int, most_tokens: int, *, is_dense: bool) -> Iterator[int]:
    """Token counts of steps of num_seqs sequences or more: each at most double the last, like the bounds of tiles.

    is_dense: also yields one more than each count, since some step of more sequences has as many query blocks
    """
    each = 1 if kind.extra is Extra.MASK else 2
    num_tokens = max(num_seqs, 2) + 1 if kind.mixes else num_seqs * each
    while True:
        yield num_tokens
        if num_tokens >= most_tokens:
            return
        if is_dense:
            yield num_tokens + 1
        num_tokens = min(2 * num_tokens, most_tokens)


def _new_tokens(kind: StepKind, num_tokens: int, longest: int) -> list[int]:
    """Shares num_tokens new tokens out among as few sequences as can have them; one has a single token if kinds mix."""
    rest = num_tokens - kind.mixes
    return [1] * kind.mixes + evenly(rest, -(-rest // longest))
