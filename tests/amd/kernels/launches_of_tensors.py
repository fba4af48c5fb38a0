"""The launches over a step as functions of plain tensors, for suites that copy and compare their arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.kernels.attention.scores import Visibility
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.given_inputs import GivenInputs
from rocm_attn.kernels.metadata.page_watch import PageWatch
from rocm_attn.kernels.metadata.step_tensors import NO_PADS, OWN_TABLE, Pads, StepTensors, TableTerms

Launch = Callable[..., None]

# Names of the tensors that fill reads and writes, in of_fill's order.
READ_BY_FILL = ("counts", "row_of_seq", "kv_len", "q_len", "table", "prefix_len", "group_end", "mask_start")
WRITTEN_BY_FILL = (
    "q_indptr",
    "last_token_of_seq",
    "seq_of_token",
    "row_of_token",
    "position_of_token",
    "slot_of_token",
    "page_indptr",
    "page_list",
    "last_page_len",
    "block_table",
    "kv_len_int64",
    "mask_indptr",
    "group_indptr",
    "suffix_kv_len",
    "suffix_page",
)
_PLACED = ("counts", "kv_len", "q_len", "mask_start", "mask_words", "mask_positions", "window_start")
SPANNED = ("counts", "kv_len", "q_len", "mask_start", "mask_positions", "span_begin", "span_end")
READ_BY_RANGES = (
    "counts",
    "kv_len",
    "seq_of_token",
    "position_of_token",
    "mask_start",
    "window_start",
    "span_begin",
    "span_end",
)
_CHECKED = ("q_len", "table", "span_begin", "span_end", "counts", "row_of_seq", "kv_len")
_PACKED = (
    "counts",
    "kv_len",
    "q_len",
    "seq_of_token",
    "mask_indptr",
    "mask_words",
    "mask_positions",
    "window_start",
)
_WATCHED = (
    "counts",
    "row_of_seq",
    "kv_len",
    "q_len",
    "seq_of_token",
    "position_of_token",
    "slot_of_token",
    "table",
)
_PUBLISHED = ("counts", "row_of_seq", "kv_len", "q_len", "prefix_len", "group_end", "token_ids")


def step_of(tensors: Mapping[str, Tensor], pads: Pads = NO_PADS) -> StepTensors:
    """Returns a step of these tensors, by name; all others are empty."""
    nothing = torch.empty(0, dtype=torch.int32, device=tensors["counts"].device)
    return StepTensors.of(nothing, pads, **tensors)


def fill_step(*tensors: Tensor) -> StepTensors:
    """Returns a step of READ_BY_FILL and WRITTEN_BY_FILL."""
    return step_of(dict(zip((*READ_BY_FILL, *WRITTEN_BY_FILL), tensors, strict=True)))


def of_fill(fill: Launch, terms: TableTerms = OWN_TABLE) -> Launch:
    """Returns fill(*READ_BY_FILL, *WRITTEN_BY_FILL, page_size=, ...)."""
    return lambda *tensors, **options: fill(replace(fill_step(*tensors), terms=terms), **options)


def of_pages(launch: Launch) -> Launch:
    """Returns launch(*tensors that it reads, K pages, V pages)."""
    return lambda *tensors: launch(*tensors[:-2], LayerPages.plain(*tensors[-2:]))


def _to_step(launch: Launch, num_given: int, names: Sequence[str], pads: Pads = NO_PADS) -> Launch:
    """Returns launch(num_given tensors, tensors of the step with these names, and numbers by name)."""

    def of_tensors(*tensors: Tensor, **numbers: int) -> None:
        to = step_of(dict(zip(names, tensors[num_given:], strict=True)), pads)
        launch(*tensors[:num_given], **numbers, to=to)

    return of_tensors


def of_publish(publish: Launch, pads: Pads) -> Launch:
    """Returns publish(slot, counts before, counts, row_of_seq, kv_len, q_len, prefix_len, group_end, token_ids)."""
    return _to_step(publish, 2, _PUBLISHED, pads)


def of_take_inputs(take: Launch, pads: Pads) -> Launch:
    """Returns take(slots, runs, counts, row_of_seq, kv_len, q_len, prefix_len, group_end, token_ids)."""
    return _to_step(take, 2, _PUBLISHED, pads)


def of_device_inputs(place: Launch, ahead: int = 0) -> Launch:
    """Returns place(slot, kv_len, q_len, token_ids, floor, stored, and outputs counts, kv_len, q_len, token_ids)."""

    def of_tensors(slot: Tensor, *tensors: Tensor) -> None:
        names = ("counts", "kv_len", "q_len", "token_ids")
        place(
            slot,
            GivenInputs(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], ahead),
            step_of(dict(zip(names, tensors[5:], strict=True))),
        )

    return of_tensors


def of_place_mask(place: Launch) -> Launch:
    """Returns place(bits, positions, *_PLACED, keys_before=, window_left=)."""
    return _to_step(place, 2, _PLACED)


def of_place_trees(place: Launch) -> Launch:
    """Returns place(parents, *_PLACED, nodes_before=, branches=, window_left=)."""
    return _to_step(place, 1, _PLACED)


def of_place_spans(place: Launch) -> Launch:
    """Returns place(spans, *SPANNED)."""
    return _to_step(place, 1, SPANNED)


def of_visible_ranges(write: Launch, visibility: Visibility) -> Launch:
    """Returns write(*READ_BY_RANGES, first, end)."""

    def of_tensors(*tensors: Tensor) -> None:
        *read, first, end = tensors
        write(step_of(dict(zip(READ_BY_RANGES, read, strict=True))), visibility, first, end)

    return of_tensors


def of_draft_steps(derive: Launch, pads: Pads = NO_PADS) -> Launch:
    """Returns derive(counts, kv_len, token_ids, mask_start, parents, num_seqs=, branches=, steps=).

    Tensors of the steps follow each other, each with a gap after it; parents has a line per sequence.
    """

    def of_tensors(counts: Tensor, *tensors: Tensor, num_seqs: int, branches: int, steps: int) -> None:
        *of_steps, parents = tensors
        names = ("kv_len", "token_ids", "mask_start")
        sizes = (num_seqs, num_seqs * branches, num_seqs if parents.numel() else 0)
        children = []
        for step in range(steps):
            views = {
                name: tensor.view(steps, -1)[step, :size]
                for name, tensor, size in zip(names, of_steps, sizes, strict=True)
            }
            children.append(step_of({"counts": counts, **views}, pads))
        derive(children, parents.view(num_seqs, -1), branches)

    return of_tensors


def of_check_pages(check: Launch, pads: Pads, terms: TableTerms) -> Launch:
    """Returns check(num_pages, *_CHECKED, page_size=, window_left=, spans_pass=)."""

    def of_tensors(num_pages: Tensor, *tensors: Tensor, **options: int) -> None:
        step = replace(step_of(dict(zip(_CHECKED, tensors, strict=True)), pads), terms=terms)
        check(step, num_pages, **options)

    return of_tensors


def of_pack_mask(pack_mask: Launch) -> Launch:
    """Returns pack_mask(cells, positions, *_PACKED, window_left=)."""
    return _to_step(pack_mask, 2, _PACKED)


def of_watch_pages(watch_pages: Launch, terms: TableTerms = OWN_TABLE) -> Launch:
    """Returns watch_pages(*_WATCHED, engine_row, entries, pages, rows, page_size=)."""

    def of_tensors(*tensors: Tensor, page_size: int) -> None:
        *of_step, engine_row, entries, pages, rows = tensors
        step = replace(step_of(dict(zip(_WATCHED, of_step, strict=True))), terms=terms)
        watch_pages(step, engine_row, PageWatch(entries, pages, rows), page_size=page_size)

    return of_tensors
