"""Torch twins of kernels/cache: same signatures, same results, fixed shapes, no host synchronisation."""

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens
from rocm_attn.kernels.cache.page_format import PageFormat, PoolKind, Scales
from rocm_attn.kernels.cache.page_rows import PageRows
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, NOT_FINITE
from rocm_attn.kernels.metadata.step_tensors import StepTensors

# The smallest scale of a token, as in codes.py.
_SMALLEST_SCALE = 2.0**-100


def store_kv(
    k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Twin of launch_store_kv.

    Shapes stay fixed: a dropped token repeats the write of one that is not dropped, or, if all are dropped, writes the
    content of slot 0 again.
    """
    keys, values, form = pages.keys, pages.values, pages.format
    page_size = form.page_size
    token = torch.arange(k.shape[0], device=k.device)
    live = (token < counts[1]) & (slot_of_token >= (page_size if null_page else 0))
    any_live, source = live.any(), torch.where(live, token, live.int().argmax())
    slot = torch.where(any_live, slot_of_token[source], 0)
    page, offset = slot // page_size, slot % page_size
    sides = [(keys, pages.k_scale, k), (values, pages.v_scale, v)][: 1 if form.kind is PoolKind.LATENT else 2]
    strange = torch.zeros_like(live)
    for side, scale, rows in sides:
        is_number = rows.isfinite()
        strange |= live & ~is_number.flatten(1).all(1)
        finite = torch.where(is_number, rows, 0)
        if pages.record is not None:
            _put(pages.record, (page, offset), RecordParts.of_rows(finite, form).at(source), any_live)
            continue
        written, scale_value = _in_pages(finite, scale, form)
        _write(side, page, offset, written[source], any_live)
        if form.scales is Scales.TOKEN:
            assert scale is not None
            scale[page, :, offset] = torch.where(any_live, scale_value[source], scale[page, :, offset])
    counts[ERROR_WORD].bitwise_or_(strange.any().to(torch.int32) * NOT_FINITE)


def fold_rows(pages: LayerPages, step: StepTensors, rows: Tensor, *, tokens: int, overlaps: bool) -> None:
    """Twin of launch_fold_rows. All tokens fold at once: for each one it gathers the values and gates of a span."""
    num_tokens, columns = rows.shape
    place = torch.arange(tokens * (1 + overlaps), device=rows.device)
    position = step.position_of_token.long()[:, None] - len(place) + 1 + place
    is_there = (position >= 0)[..., None]
    page_no, offset = position.clamp(min=0) // pages.format.page_size, position.clamp(min=0) % pages.format.page_size
    page = step.table.long()[step.row_of_token.long()[:, None], page_no.clamp(max=step.table.shape[1] - 1)]
    half = (place >= tokens)[None, :, None] if overlaps else torch.zeros_like(is_there[:1])
    values, gates = (
        torch.where(half, side[page, offset, 0, -columns:], side[page, offset, 0, :columns]).float()
        for side in (pages.k, pages.v)
    )
    weights = gates.masked_fill(~is_there, float("-inf")).softmax(1)
    folded = (weights * values.masked_fill(~is_there, 0)).sum(1)
    is_token = torch.arange(num_tokens, device=rows.device) < step.counts[1]
    ends = is_token & ((step.position_of_token + 1) % tokens == 0)
    rows.copy_(torch.where(ends[:, None], folded, 0))


def _in_pages(rows: Tensor, scale: Tensor | None, form: PageFormat) -> tuple[Tensor, Tensor]:
    """Finite rows [T, kv_heads, dim] as pages hold them, and the scales of their tokens [T, kv_heads]."""
    if not form.encoding.is_fp8:
        return rows, rows
    largest, rows = form.encoding.largest, rows.float()
    scale_value = torch.ones_like(rows[..., 0])
    if form.scales is Scales.TOKEN:
        # By the kernel's product: a quotient may be rounded to another side.
        scale_value = (rows.abs().amax(-1) * (1.0 / largest)).clamp(min=_SMALLEST_SCALE)
    elif scale is not None:
        scale_value = scale_value * scale
    codes = (rows * (1.0 / scale_value)[..., None]).clamp(-largest, largest).to(form.encoding.dtype)
    return codes.view(torch.uint8), scale_value


def _write(side: PageRows, page: Tensor, offset: Tensor, rows: Tensor, any_live: Tensor) -> None:
    """Writes rows to the places of tokens, or, if no token is live, their present content."""
    held = torch.empty_like(rows)
    side.read_tokens(page, offset, held)
    side.write_tokens(page, offset, torch.where(any_live, rows, held))


def _put(record: RecordParts, at: tuple[Tensor, Tensor], rows: RecordParts, any_live: Tensor) -> None:
    """Does the same as `_write`, for records."""
    held = record.at(*at)
    codes, scales, rest = (torch.where(any_live, *each) for each in zip(rows, held, strict=True))
    record.put(at, RecordParts(codes, scales, rest))


def zero_tails(step: StepTensors, pages: LayerPages) -> None:
    """Twin of launch_zero_tails.

    Shapes stay fixed: a sequence that is left alone repeats the work of one that is not, or, if all are left alone,
    writes the content of page 0 again.
    """
    keys, values, table, kv_len = pages.keys, pages.values, step.table, step.kv_len
    page_size = keys.page_size
    page_no = (kv_len - 1).clamp(min=0) // page_size
    page = table[step.row_of_seq.long(), page_no.clamp(max=table.shape[1] - 1).long()]
    live = (step.q_len > 0) & (kv_len > 0) & (page_no < table.shape[1]) & (page >= (1 if step.terms.null_page else 0))
    if step.pads.kv_len:
        live &= step.row_of_seq > 0
    any_live = live.any()
    source = torch.where(live, torch.arange(len(live), device=live.device), live.int().argmax())
    used = torch.where(any_live, (kv_len - page_no * page_size)[source], page_size)
    dead = torch.arange(page_size, device=page.device) >= used[:, None]
    page = torch.where(any_live, page[source], 0).long()
    keys.zero_tokens(page, dead)
    values.zero_tokens(page, dead)
    if pages.format.scales is Scales.TOKEN:
        for scale in (pages.k_scale, pages.v_scale):
            assert scale is not None
            scale[page] = scale[page].masked_fill(dead[:, None], 0)


def export_rows(pages: AlikePages, moved: MovedTokens) -> None:
    """Twin of launch_export_rows."""
    page, group, offset = _places_in_pages(pages, moved, moved.first, moved.end)
    for part, side in enumerate(pages.sides):
        moved.rows[_places_in_rows(pages, moved, part)] = side[page, group, offset].flatten(1)


def import_rows(pages: AlikePages, moved: MovedTokens) -> None:
    """Twin of launch_import_rows."""
    unread = max(0, moved.begin - moved.first)
    for part, side in enumerate(pages.sides):
        given = moved.rows[_places_in_rows(pages, moved, part)[unread:]].unflatten(1, side.shape[3:])
        side[_places_in_pages(pages, moved, moved.begin, moved.first)] = 0
        side[_places_in_pages(pages, moved, max(moved.begin, moved.first), moved.end)] = given
        side[_places_in_pages(pages, moved, moved.end, moved.until)] = 0


def _places_in_pages(pages: AlikePages, moved: MovedTokens, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Page, group and place in the group of the tokens [first, end); none if it ends before it begins."""
    token = torch.arange(first, max(first, end), device=moved.rows.device)
    offset, tokens = token % pages.page_size, pages.sides[0].shape[2]
    page = moved.words[token // pages.page_size - moved.begin // pages.page_size]
    return page, offset // tokens, offset % tokens


def _places_in_rows(pages: AlikePages, moved: MovedTokens, part: int) -> Tensor:
    """The places of a part's words in rows, int64 [n, row_words]."""
    num_rows = moved.end - moved.first
    word = torch.arange(num_rows * pages.row_words, device=moved.rows.device)
    return moved.words[moved.num_pages + part] + word.view(num_rows, pages.row_words)
