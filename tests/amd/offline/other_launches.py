"""Launches of kernels that no layer of a row needs: those of metadata, of engines, of picks and of drafts."""

from dataclasses import replace

import torch

from rocm_attn.kernels.attention.merge_states import launch_merge_states
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.move_rows import launch_export_rows, launch_import_rows
from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens, page_words
from rocm_attn.kernels.cache.page_rows import key_rows
from rocm_attn.kernels.metadata.check_pages import launch_check_pages
from rocm_attn.kernels.metadata.chunk_starts import launch_chunk_starts
from rocm_attn.kernels.metadata.draft_steps import launch_draft_steps
from rocm_attn.kernels.metadata.engine_tensors import (
    Q_BOUNDARIES,
    Q_EACH_ONE,
    EngineLengths,
    EngineRows,
    GatherSource,
    LengthBounds,
    PublishedLengths,
)
from rocm_attn.kernels.metadata.gather_table import launch_gather_table
from rocm_attn.kernels.metadata.pack_mask import launch_pack_mask
from rocm_attn.kernels.metadata.page_watch import PageWatch
from rocm_attn.kernels.metadata.place_spans import launch_place_spans
from rocm_attn.kernels.metadata.place_trees import launch_place_trees
from rocm_attn.kernels.metadata.publish_engine import launch_publish_engine
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, NO_PADS, OWN_TABLE, StepTensors, TableTerms
from rocm_attn.kernels.metadata.take_slots import launch_take_slots
from rocm_attn.kernels.metadata.watch_pages import launch_watch_pages
from rocm_attn.kernels.sampling.cut_rows import launch_cut_rows
from rocm_attn.kernels.sampling.likeliest import launch_likeliest
from rocm_attn.kernels.sampling.parameter_columns import NUM_COLUMNS
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from rocm_attn.kernels.sampling.shape_rows import launch_shape_rows
from rocm_attn.kernels.speculative.accept_drawn import launch_accept_drawn
from rocm_attn.kernels.speculative.accept_sampled import launch_accept_sampled
from rocm_attn.kernels.speculative.arguments import EMITTED_WORDS, Accepted, Probabilities, SpeculativeStep, Verified
from rocm_attn.kernels.speculative.move_paths import launch_move_paths
from rocm_attn.kernels.speculative.next_step import launch_next_step
from rocm_attn.kernels.speculative.paths import AcceptedPaths
from rocm_attn.problem import Problem
from rocm_attn.providers.triton import TRITON

# Tokens of a sequence, at most.
KV_LEN = 256


def launch_merges(problem: Problem) -> None:
    """Merges sides of a layer's dtype."""
    out = torch.empty(16, problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype)
    lse = torch.empty(16, problem.num_q_heads)
    launch_merge_states(out, lse, out, lse, out, lse)


def launch_whole_fill(page_size: int) -> None:
    """Launches a fill with all inputs that kernels of other libraries read; no kernel of this project needs it."""
    num_seqs, width = 16, 64
    nothing, of_seq, of_boundary = (torch.empty(size, dtype=torch.int32) for size in (0, num_seqs, num_seqs + 1))
    step = StepTensors.of(
        nothing,
        counts=torch.empty(4, dtype=torch.int32),
        row_of_seq=of_seq,
        kv_len=of_seq,
        q_len=of_seq,
        table=torch.empty(num_seqs + 1, width, dtype=torch.int32),
        q_indptr=of_boundary,
        last_token_of_seq=of_seq,
        seq_of_token=of_seq,
        row_of_token=of_seq,
        position_of_token=of_seq,
        last_key_of_token=of_seq,
        slot_of_token=of_seq,
        page_indptr=of_boundary,
        page_list=torch.empty(num_seqs * width, dtype=torch.int32),
        last_page_len=of_seq,
        block_table=torch.empty(num_seqs, width, dtype=torch.int32),
        kv_len_int64=torch.empty(num_seqs, dtype=torch.int64),
        mask_start=of_seq,
        mask_indptr=torch.empty(num_seqs + 1, dtype=torch.int64),
    )
    for terms in (OWN_TABLE, TableTerms(null_page=False, short_kv=True)):
        TRITON.ops().fill(replace(step, terms=terms), page_size=page_size, window_left=ALL_KEYS, chunk=ALL_KEYS)


def launch_head_of_graph() -> None:
    """Launches the kernel that takes the inputs of a step that a graph replays, with prefixes and without."""
    nothing, of_seq, slots = (torch.empty(size, dtype=torch.int32) for size in (0, 16, (2, 512)))
    for prefixes in (nothing, of_seq):
        names = ("counts", "row_of_seq", "kv_len", "q_len", "token_ids")
        of_step = {**dict.fromkeys(names, of_seq), "prefix_len": prefixes, "group_end": prefixes}
        TRITON.ops().take_inputs(slots, of_seq, StepTensors.of(nothing, **of_step))


def launch_of_engines(page_size: int) -> None:
    """Launches the kernels that read an engine's tensors: slot tables of both types, and lists of pages."""
    num_seqs, width = 16, 64
    of_seq, counts, slot = (torch.empty(size, dtype=torch.int32) for size in (num_seqs, 4, 8))
    to = PublishedLengths(counts, of_seq, of_seq, of_seq, of_seq, of_seq, 0, 0, gathered=True)
    rows = EngineRows(num_seqs, of_seq)
    bounds = LengthBounds(rows, KV_LEN, 1, 1, num_seqs, page_size, causal=True)
    table = torch.empty(num_seqs + 1, width, dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        given = torch.empty(num_seqs * width, dtype=dtype)
        launch_publish_engine(slot, counts, EngineLengths(given, None, None, Q_EACH_ONE), bounds, to)
        of_lists = replace(bounds, rows=EngineRows(num_seqs, of_seq, given))
        for each in (of_lists, replace(of_lists, num_cells=64)):
            launch_publish_engine(slot, counts, EngineLengths(given, given, given, Q_BOUNDARIES), each, to)
        launch_gather_table(
            GatherSource(given.view(-1, width), True, None, given), of_seq, of_seq, table, page_size=page_size
        )
        launch_gather_table(GatherSource(given, csr_indptr=given), of_seq, of_seq, table, page_size=page_size)
        step = StepTensors.of(of_seq, counts=counts, row_of_seq=of_seq, kv_len=of_seq, q_len=of_seq, table=table)
        for passes, null_page in ((False, True), (True, True), (True, False)):
            of_terms = replace(step, terms=TableTerms(null_page=null_page))
            launch_check_pages(of_terms, counts, page_size=page_size, window_left=1, spans_pass=passes)
        for slot_map in (None, given):
            launch_take_slots(given, slot_map, replace(step, slot_of_token=of_seq), page_size=page_size)
        k = torch.empty(num_seqs, 2, 128, dtype=torch.bfloat16)
        pages = torch.empty(width, page_size, 2, 128, dtype=torch.bfloat16)
        TRITON.ops().store_kv(k, k, of_seq, counts, LayerPages.plain(pages, pages), null_page=False)
        cells, indptr = torch.empty(num_seqs, dtype=torch.uint8), torch.empty(num_seqs + 1, dtype=torch.int64)
        masked = ("kv_len", "q_len", "seq_of_token", "mask_words", "mask_positions", "window_start")
        of_mask = StepTensors.of(of_seq[:0], counts=counts, mask_indptr=indptr, **dict.fromkeys(masked, of_seq))
        launch_pack_mask(cells, given, window_left=1, to=of_mask)
    names = ("row_of_seq", "kv_len", "q_len", "seq_of_token", "position_of_token", "slot_of_token")
    of_step = dict.fromkeys(names, of_seq)
    watch = PageWatch.of(num_seqs, width, width, table.device)
    for terms in (OWN_TABLE, TableTerms(null_page=False)):
        step = StepTensors.of(of_seq[:0], NO_PADS, terms, counts=counts, table=table, **of_step)
        launch_watch_pages(step, of_seq, watch, page_size=page_size)
    launch_moves(page_size)
    launch_picks(num_seqs)
    launch_speculative(page_size)


def launch_picks(num_seqs: int) -> None:
    """Launches picks of tokens of narrow and of wide logits, and the other options of rows."""
    terms, words = torch.empty(num_seqs, 3), torch.empty(num_seqs, 2, dtype=torch.int32)
    tokens, requested = torch.empty(num_seqs, dtype=torch.int32), torch.empty(num_seqs, NUM_COLUMNS, dtype=torch.int32)
    counts, masks = (torch.empty(num_seqs, columns, dtype=torch.int32) for columns in (32000, 1000))
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(num_seqs, 32000, dtype=dtype)
        launch_pick_rows(logits, terms, tokens, words, num_drawing=1)
        launch_shape_rows(logits, requested, counts, masks, torch.empty(num_seqs, 32000))
        launch_likeliest(logits, words, tokens, torch.empty(num_seqs, 41, dtype=torch.int32))
    launch_cut_rows(requested, torch.empty(num_seqs, 32000))


def launch_speculative(page_size: int) -> None:
    """Launches acceptance of drafts, and moves of accepted tokens: whole rows, separate heads, and scales of tokens."""
    num_seqs, num_nodes, vocab = 16, 8, 4096
    tokens, words = num_seqs * num_nodes, torch.empty(num_seqs + 1, dtype=torch.int32)
    ids, of_seq = torch.empty(tokens, dtype=torch.int32), words[:num_seqs]
    given = Verified(ids, words, of_seq, ids.view(num_seqs, num_nodes))
    accepted = Accepted.empty(num_seqs, num_nodes, torch.device("cpu"))
    rows, uniform = torch.empty(tokens, vocab), torch.empty(tokens)
    launch_accept_drawn(ids, given, accepted)
    launch_accept_sampled(Probabilities(rows, rows, uniform, uniform), given, accepted)
    table = torch.empty(num_seqs + 1, 64, dtype=torch.int32)
    reported = torch.empty(num_seqs, EMITTED_WORDS, dtype=torch.int32)
    launch_next_step(ids, SpeculativeStep(of_seq, of_seq, of_seq, ids, table, of_seq, reported), num_nodes)
    paths = AcceptedPaths(accepted.path, accepted.num_accepted, accepted.kv_len, of_seq, table, 0)
    step = StepTensors.of(
        torch.empty(0, dtype=torch.int32),
        counts=of_seq,
        kv_len=of_seq,
        q_len=of_seq,
        token_ids=ids,
        mask_start=of_seq,
        mask_words=ids,
        mask_positions=ids,
        window_start=ids,
    )
    launch_place_trees(given.parents, 0, 0, 1, step)
    launch_place_spans(ids[:6].view(2, 3), replace(step, span_begin=ids, span_end=ids))
    launch_chunk_starts(of_seq, chunk=4 * page_size, page_size=page_size, in_chunk=of_seq, first_page=of_seq)
    launch_draft_steps([step], given.parents, 2)
    for side in _sides_that_move(page_size):
        launch_move_paths(AlikePages.of([side, side]), paths)


def _sides_that_move(page_size: int) -> tuple[torch.Tensor, ...]:
    """Whole rows, separate heads, and scales of tokens."""
    pages = torch.empty(64, page_size, 2, 128, dtype=torch.int64)
    scale_values = torch.empty(64, 2, page_size, dtype=torch.int32).transpose(1, 2)[:, :, None, None]
    return page_words(key_rows(pages)), page_words(key_rows(pages[..., :64])), scale_values


def launch_moves(page_size: int) -> None:
    """Launches moves of tokens between pages and rows: whole rows, separate heads, and scales of tokens."""
    for side in _sides_that_move(page_size):
        rows, words = torch.empty(1 << 20, dtype=side.dtype), torch.empty(16, dtype=torch.int64)
        for launch in (launch_export_rows, launch_import_rows):
            launch(AlikePages.of([side, side]), MovedTokens(words, rows, 0, 0, 3 * page_size, 3 * page_size, 3))
