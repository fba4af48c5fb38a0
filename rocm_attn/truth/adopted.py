"""Needle tests of an engine's layers, before its first step, over borrowed pages."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from rocm_attn.errors import DeviceFault
from rocm_attn.external import ExternalAttention
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.named_pages import name_pages
from rocm_attn.step.external_step import ONE_EACH, Boundaries, ExternalStep
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.truth.choosers import BY_INDEXERS, Choosers
from rocm_attn.truth.row_needles import RowNeedles
from rocm_attn.truth.verdict import TruthVerdict

Calls = Callable[[LayerCalls, Tensor], LayerCalls]


def as_they_are(layers: LayerCalls, slots: Tensor) -> LayerCalls:
    """Makes all calls of a step."""
    return layers


@torch.inference_mode(False)  # engines build their layers in either mode
def probe_adopted(
    attention: ExternalAttention,
    lend: Callable[[int], object],
    choosers: Choosers = BY_INDEXERS,
    calls: Calls = as_they_are,
) -> TruthVerdict:
    """Runs the steps of one sequence over pages of its own, and returns the verdict of this rank.

    Afterwards the tables and the pages are still those of the needles: bind the engine's own. All tokens of a row are
    on this rank.
    lend:     binds pages to every layer, as many as it is given, in the form of the engine's own
    choosers: of the layers with an indexer
    calls:    the calls of a step, the slots of its tokens -> the calls that are made, if an engine makes some itself
    """
    (core,) = attention.cores.values()
    page_size, bounds = attention.tables.page_size, attention.bounds
    most = min(bounds.kv_len, (bounds.num_pages - 1) * page_size)
    problems, weights = core.kinds.problems, core.head_weights.of
    needles = RowNeedles(problems, weights, attention.pages, attention.device, most, choosers)
    if reason := needles.why_none():
        return _verdict(attention, needles, reason)
    held = num_pages(needles.kv_len, page_size)
    lend(1 + held)
    return _run(attention, needles, _use_tables(attention, held), calls)


def _verdict(attention: ExternalAttention, needles: RowNeedles, reason: str, *, is_fault: bool = False) -> TruthVerdict:
    (core,) = attention.cores.values()
    layers = len(core.kinds.problems)
    return TruthVerdict(needles.wrong, needles.not_checked, reason, is_fault, layers, needles.num_keys)


def _run(attention: ExternalAttention, needles: RowNeedles, slots: Tensor, calls: Calls) -> TruthVerdict:
    """Runs the steps and judges them. slots: of the row's tokens"""
    device = attention.device
    steps = needles.steps(attention.bounds.num_tokens)
    layers = needles.layers(max(steps), 0)
    done = 0
    try:
        for new in steps:
            for layer in layers.values():
                layer.prepare([done], [new])
            attention.begin(
                ExternalStep(
                    num_seqs=1,
                    padded_seqs=1,
                    padded_tokens=new,
                    kv_len=torch.tensor([done + new], dtype=torch.int32, device=device),
                    q=ONE_EACH if new == 1 else Boundaries(torch.tensor([0, new], dtype=torch.int32, device=device)),
                    rows=None,
                    min_q_len=1,
                    max_q_len=new,
                    max_kv_len=done + new,
                )
            )
            here = slots[done : done + new]
            attention.fill(here)
            for number, layer in layers.items():
                layer.run(calls(attention.layers, here), number, new)
            needles.judge(layers, "decode" if new == 1 else "prompt")
            done += new
        attention.check_device()
    except DeviceFault as error:
        return _verdict(attention, needles, f"the truth probe met a fault of the device: {error}", is_fault=True)
    return _verdict(attention, needles, "")


def log_truth(
    log: logging.Logger,
    attention: ExternalAttention,
    lend: Callable[[int], object],
    choosers: Choosers = BY_INDEXERS,
    calls: Calls = as_they_are,
) -> None:
    """Logs the finding of probe_adopted, as an error if a layer is wrong. Without memory for it, none is looked for."""
    try:
        verdict = probe_adopted(attention, lend, choosers, calls)
    except torch.OutOfMemoryError as error:  # an engine may leave little, and needs none of it itself
        log.warning("no needles were sent through the layers: %s", error)
        return
    level = logging.ERROR if verdict.word == "wrong" else logging.INFO
    log.log(level, "needles through %d layers: %s; %s", verdict.num_layers, verdict.word, verdict.sentence)


def try_nothing(attention: ExternalAttention, lend: Callable[[int], object]) -> None:
    """Sends no needles through the layers: in the place of log_truth."""


def _use_tables(attention: ExternalAttention, held: int) -> Tensor:
    """Makes the tables of all spaces hold one row of pages, and returns the slots of its tokens, int64.

    Page 0 belongs to no row, and the pages of the row are in no order. held: the row's pages
    """
    generator = torch.Generator().manual_seed(0)
    # A space's own pages are others than those of the table.
    pages, own_pages = (1 + torch.randperm(held, generator=generator).to(attention.device) for _ in range(2))
    return name_pages(attention.tables, pages, own_pages)
