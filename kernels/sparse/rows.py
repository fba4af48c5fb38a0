"""Rows of attention over a selection: the values that kernels are compiled for, the rows' heads, and their output."""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.cache.page_format import Coding


class SelectedGeometry(NamedTuple):
    """The values that attention over a selection is compiled for.

    ROWS, ROW_HEADS:      rows of a token, most query heads of a row
    IS_CUT:               whether a selection is cut in parts, which are merged
    PARTS, PART_KEYS:     parts of a selection and their keys in deterministic mode, where all steps of a layer have the
                          same; as values at run time they spill scalar registers of gfx942. 0: they are such values
    GQA_RATIO:            query heads that share a KV head
    HEAD_BLOCKS:          blocks that they are cut into
    SHARED:               whether all KV heads have one selection
    WIDTH, UNIT_TOKENS:   units of a selection, tokens of a unit
    HEAD_DIM, V_HEAD_DIM: elements of a K row and of a V row
    K_DIM:                elements of a K row; in latent pages only those that are V too
    CODED:                elements of a K row that are codes; in records, those in groups
    NEARER:               PageFormat.scales_nearer
    K_COLUMNS, V_COLUMNS: columns of a block of them and of a block of V, padding included
    REST:                 in latent pages, columns after V in a row, padding included; 0: there are none
    LATENT:               whether V is the beginning of K
    SAME_OFFSETS:         whether K and V of a token lie at the same place of their pages
    PAGE_SIZE:            tokens of a page
    QUERY_ROWS:           rows of the q block, a query head each, then padding
    KEY_BLOCK:            keys of a block
    EXACT:                whether results may not depend on which products and sums the compiler fuses
    BY_PAIRS:             if EXACT, whether weights of keys are added up pair by pair (softmax.sum_by_pairs)
    STAGES:               key blocks whose loads are in flight
    coding:               how elements of pages are encoded
    """

    ROWS: int
    ROW_HEADS: int
    IS_CUT: bool
    PARTS: int
    PART_KEYS: int
    GQA_RATIO: int
    HEAD_BLOCKS: int
    SHARED: bool
    WIDTH: int
    UNIT_TOKENS: int
    HEAD_DIM: int
    V_HEAD_DIM: int
    K_DIM: int
    CODED: int
    NEARER: int
    K_COLUMNS: int
    V_COLUMNS: int
    REST: int
    LATENT: bool
    SAME_OFFSETS: bool
    PAGE_SIZE: int
    QUERY_ROWS: int
    KEY_BLOCK: int
    EXACT: bool
    BY_PAIRS: bool
    STAGES: int
    coding: Coding


@triton.jit
def heads_of_row(row, G: tl.constexpr):
    """A row's KV head and its first query head (int64), and its number of query heads."""
    block_head = row % G.HEAD_BLOCKS * G.ROW_HEADS
    kv_head = (row // G.HEAD_BLOCKS).to(tl.int64)
    return kv_head, kv_head * G.GQA_RATIO + block_head, tl.minimum(G.ROW_HEADS, G.GQA_RATIO - block_head)


@triton.jit
def listed_keys(counts, token, kv_head, G: tl.constexpr):
    """Keys that a row's selection lists, and the number of the selection among all tokens'."""
    NUM_SETS: tl.constexpr = 1 if G.SHARED else G.ROWS // G.HEAD_BLOCKS
    selection = token * NUM_SETS + (0 if G.SHARED else kv_head)
    count = tl.minimum(tl.load(counts + selection), G.WIDTH)
    return tl.maximum(count, 0) * G.UNIT_TOKENS, selection
