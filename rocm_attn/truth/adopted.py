"""probe_adopted: needles through the layers of an engine, before its first step, over pages that are lent for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocm_attn.errors import DeviceFault
from rocm_attn.external import ExternalAttention
from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.step.external_step import ONE_EACH, Boundaries, ExternalStep
from rocm_attn.truth.row_needles import RowNeedles
from rocm_attn.truth.verdict import TruthVerdict


def probe_adopted(attention: ExternalAttention, lend: Callable[[int], None]) -> TruthVerdict:
    """Runs the steps of one sequence, and returns the verdict of this rank.

    Afterwards the table and the pages are still those of the needles: bind the engine's own. All layers live in one
    space, attend to all tokens of their rows, and have no indexer.
    lend: binds pages to every layer, as many as it is given, in the form of the engine's own
    """
    (core,) = attention.cores.values()
    bounds, device, problems = attention.bounds, attention.device, core.kinds.problems
    page_size = problems[0].page_size
    room = min(bounds.kv_len, (bounds.num_pages - 1) * page_size)
    needles = RowNeedles(problems, core.head_weights.of, attention.pages.layer, device, room)

    def verdict(reason: str, *, is_fault: bool = False) -> TruthVerdict:
        return TruthVerdict(needles.wrong, needles.not_checked, reason, is_fault, len(problems), needles.num_keys)

    if reason := needles.why_none():
        return verdict(reason)
    held = num_pages(needles.kv_len, page_size)
    lend(1 + held)
    # Page 0 belongs to no one, and the pages of the row are in no order.
    places = 1 + torch.randperm(held, generator=torch.Generator().manual_seed(0)).to(device)
    table = torch.zeros(1, num_pages(bounds.kv_len, page_size), dtype=torch.int32, device=device)
    table[0, :held] = places
    attention.tables.use(table)
    steps = needles.steps(bounds.num_tokens)
    layers = needles.layers(max(steps), 0)
    done = 0
    try:
        for new in steps:
            for layer in layers:
                layer.prepare([done], [new])
            positions = torch.arange(done, done + new, device=device)
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
            attention.fill(places[positions // page_size] * page_size + positions % page_size)
            for number, layer in enumerate(layers):
                layer.run(attention.layers, number, new)
            needles.judge(layers, "decode" if new == 1 else "prompt")
            done += new
        attention.check_device()
    except DeviceFault as error:
        return verdict(f"the truth probe met a fault of the device: {error}", is_fault=True)
    return verdict("")
