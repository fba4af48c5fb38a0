"""Runs every kernel of an engine's steps before its first request, so that no request waits for a compile.

The steps read the engine's own pages, because kernel variants depend on the pages' addresses. They write to none.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from rocm_attn.batch.padding import PaddedShape, PaddingPolicy
from rocm_attn.capture.prewarm import MOST_TOKENS, eager_steps
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.errors import DeviceFault
from rocm_attn.external import Bounds, ExternalAttention
from rocm_attn.hip_graphs.size_ladder import SizeLadder
from rocm_attn.machine.compile_watch import compile_watch
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.named_pages import name_pages
from rocm_attn.problem import AllKeys, Indexer, Problem
from rocm_attn.step.external_step import ONE_EACH, BoolCells, Boundaries, DeviceSpans, ExternalStep
from rocm_attn.step.protocols import LayerCalls

# Chooses the keys of a step's tokens in a layer that has an indexer: the calls, the layer, its problem, the tokens.
Choose = Callable[[LayerCalls, int, Problem, ZeroInputs, int], None]


def by_own_indexer(layers: LayerCalls, layer: int, problem: Problem, inputs: ZeroInputs, num_tokens: int) -> None:
    """Stores index keys and selects by them."""
    assert isinstance(problem.indexer, Indexer)
    k, q, weights = inputs.of_index(problem.indexer, problem.dtype, num_tokens)
    layers.store_index(layer, k)
    layers.select(layer, q, weights)


@dataclass(frozen=True, slots=True, eq=False)
class StepsAhead:
    """The steps that an engine makes.

    own_form: a step -> the same step as the engine makes it. The given one has int32 lengths, boundaries unless each
              sequence has one new token, and no rows
    most_new: new tokens of a sequence, at most
    stores:   whether the layers store K and V by our kernels
    choose:   how they choose keys
    tree_tokens: tokens of a tree of drafts that a step verifies in each sequence, with a mask of cells; 0: none does
    """

    own_form: Callable[[ExternalStep], ExternalStep]
    most_new: int = MOST_TOKENS
    stores: bool = True
    choose: Choose = by_own_indexer
    tree_tokens: int = 0


@torch.inference_mode(False)  # engines build their layers in either mode
def run_ahead(attention: ExternalAttention, ahead: StepsAhead) -> int:
    """Runs steps that together need every kernel of the engine's steps; returns their number.

    Bind the engine's pages before, and its own tables again afterwards. One layer of each kind runs, over zeros. None
    runs over page 0 alone, which belongs to no request: vLLM measures graphs over one block if it serves one sequence.
    """
    bounds, tables = attention.bounds, attention.tables
    if bounds.num_pages == 1:
        return 0
    pages = torch.ones(num_pages(bounds.kv_len, tables.page_size), dtype=torch.int64, device=attention.device)
    name_pages(tables, pages, pages, bounds.num_seqs)
    inputs, done = ZeroInputs(attention.device), 0
    nowhere = torch.full((_most_tokens(bounds),), -1, dtype=torch.int64, device=attention.device)
    for shape, q_len in _steps(bounds, ahead.most_new):
        own = ahead.own_form(_new_step(q_len, shape.num_seqs, attention.device))
        for step in _each_kind(attention, own, q_len, ahead.tree_tokens):
            attention.begin(step)
            num_tokens = step.shape.num_tokens
            attention.fill(nowhere[:num_tokens])
            with torch.inference_mode():  # an engine's pages may be made in it, and are written in no other
                _attend(attention, step, ahead, inputs)
            done += 1
    attention.check_device()
    return done


def log_run_ahead(log: logging.Logger, attention: ExternalAttention, ahead: StepsAhead) -> None:
    """Logs the time that run_ahead takes, and how many kernels Triton compiles in it.

    It does nothing if the layers do not run on a GPU. Without memory for it, kernels are compiled by the first steps.
    """
    if not attention.kernels().selections[0].target.is_gpu:
        return
    watch, started = compile_watch(), time.perf_counter()
    compiled_before = watch.num_compiled
    try:
        done = run_ahead(attention, ahead)
    except torch.OutOfMemoryError as error:  # an engine may leave little
        log.warning("the kernels of later steps were not run ahead: %s", error)
    except DeviceFault as error:
        log.error("running the kernels of later steps ahead met a fault of the device: %s", error)
    else:
        compiled, seconds = watch.num_compiled - compiled_before, time.perf_counter() - started
        log.info("ran %d steps ahead: %d kernels compiled, %.1f s", done, compiled, seconds)


def run_nothing(attention: ExternalAttention, ahead: StepsAhead) -> None:
    """Runs no step ahead: in the place of log_run_ahead."""


def _steps(bounds: Bounds, most_new: int) -> Iterator[tuple[PaddedShape, list[int]]]:
    """Shapes, and new tokens of sequences."""
    most_tokens = _most_tokens(bounds)
    steps = eager_steps(
        PaddingPolicy(SizeLadder(tuple(_num_seqs(bounds.num_seqs))), SizeLadder((1,))),
        max_seqs=bounds.num_seqs,
        max_kv_len=min(bounds.kv_len, most_new),
        most_tokens=most_tokens,
    )
    # Two new tokens in each of many sequences are more than the engine runs.
    return ((shape, q_len) for shape, q_len in steps if shape.num_tokens <= most_tokens)


def _most_tokens(bounds: Bounds) -> int:
    return max(bounds.num_seqs, min(bounds.num_tokens, MOST_TOKENS))


def _num_seqs(most: int) -> Iterator[int]:
    """Numbers of sequences, at most an eighth apart, and the most.

    How the parts of a row are summed changes where its programs are a power of two, so at any number of sequences.
    """
    number = 1
    while number < most:
        yield number
        number += max(1, number // 8)
    yield most


def _new_step(q_len: Sequence[int], padded_seqs: int, device: torch.device) -> ExternalStep:
    """Returns a step of sequences without other tokens than these new ones. Sequence i has row i."""
    decodes = max(q_len) == 1
    starts = torch.tensor([0, *accumulate(q_len)], dtype=torch.int32, device=device)
    return ExternalStep(
        num_seqs=len(q_len),
        padded_seqs=padded_seqs,
        padded_tokens=padded_seqs if decodes else sum(q_len),
        kv_len=torch.tensor([*q_len, *[0] * (padded_seqs - len(q_len))], dtype=torch.int32, device=device),
        q=ONE_EACH if decodes else Boundaries(starts),
        rows=None,
        min_q_len=min(q_len),
        max_q_len=max(q_len),
        max_kv_len=max(q_len),
    )


def _each_kind(
    attention: ExternalAttention, step: ExternalStep, q_len: Sequence[int], tree_tokens: int
) -> Iterator[ExternalStep]:
    """A step in each causality that there is, and with each mask that it may have.

    q_len: of its sequences; tree_tokens: of StepsAhead
    """
    for causality in attention.options.causalities:
        yield replace(step, causality=causality)
    problems = attention.kernels(attention.options.causalities[0]).problems
    if not step.shape.kind.decodes and any(problem.custom_mask for problem in problems):
        none = torch.empty(0, 3, dtype=torch.int32, device=attention.device)
        yield replace(step, mask=DeviceSpans(none))
    if step.min_q_len > 1 and step.padded_tokens <= tree_tokens * step.padded_seqs:
        yield replace(step, mask=_cells_of(q_len, attention.device))


def _cells_of(q_len: Sequence[int], device: torch.device) -> BoolCells:
    """Returns a mask of sequences without other tokens than their new ones, that hides none."""
    cells = torch.ones(sum(new * new for new in q_len), dtype=torch.bool, device=device)
    return BoolCells(cells, torch.cat([torch.arange(new) for new in q_len]).to(device))


def _attend(attention: ExternalAttention, step: ExternalStep, ahead: StepsAhead, inputs: ZeroInputs) -> None:
    """Runs the layers of a step, one of each kind."""
    kinds, layers, num_tokens = attention.kernels(step.causality), attention.layers, step.shape.num_tokens
    for kind, selection in enumerate(kinds.selections):
        layer, problem = kinds.of_layer.index(kind), selection.problem
        q, k, v, out = inputs.of(problem, num_tokens)
        if ahead.stores:
            layers.store(layer, k, v)
        attend = layers.attend
        if not isinstance(problem.indexer, AllKeys):
            attend = layers.attend_selected
            if isinstance(problem.indexer, Indexer):
                ahead.choose(layers, layer, problem, inputs, num_tokens)
        attend(layer, q, out)
        if problem.wants_lse:
            attend(layer, q, out, inputs.of_lse(problem, num_tokens))
