"""Tiles of paged decode: a row for each arch and kind of problem. See tiles.py for where its numbers come from."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rocm_attn.kernels.tuning.tiles import Codes, DecodeRow, DecodeTiles, NoTiles, names_of, next_power_of_2, no_row

_TWO_AN_SM = DecodeTiles(
    64,
    4,
    3,
    2,
    transposed=True,
    row_cost=1,
    row_end=1,
    early=True,
    side_by_side=True,
    most_rounds=4,
    merge_group=8,
)
_TWO_OF_256 = DecodeTiles(32, 4, 3, 2, dim_block=128, row_cost=1, row_end=1, early=True, side_by_side=True)


class Alone(NamedTuple):
    """Tiles of steps without a window that have no more rows than programs of these run at a time.

    fill: the least part of those programs that must have a row
    """

    tiles: DecodeTiles
    fill: float


# Keyed by the tiles of all other steps. One program per SM, with twice as many keys and warps.
ALONE = {
    # Rows that are alike have a program each, and nothing is merged. llama70b 16 x 4k takes 66.8 us where the others
    # take 68.8, one KV head 128 x 8k 127.4 and 129.5, 124 x 2k 37.3 and 37.5; ragged 16 125.4 and 124.9. With 120 rows
    # 15 x 4k takes 67.7 and 66.4, with 16 (one KV head, 16 x 4k) 17.1 and 14.8. Merged within the launch llama70b 16 x
    # 4k takes 72.1 us instead of 70.1, one KV head 128 x 8k 137.7 and 133.9; with four warps 72.3 and 138.1, with six
    # blocks of 64 keys 98.8 and more.
    _TWO_AN_SM: Alone(
        DecodeTiles(128, 8, 3, 1, transposed=True, row_cost=1, row_end=1, early=True, side_by_side=True), 0.93
    ),
    # gemma 1 x 128k: 242 us where the others take 260; 16 x 4k 124.6 and 126.5, 4 x 8k 68.3 and 72.8, ragged 16 236 and
    # 235. With one KV head 1 x 128k 39.9 and 48.0, ragged 64 76.6 and 81.9, 1 x 8k 10.0 and 9.4. With more rows than
    # programs 256 x 2k takes 1005 and 989.
    _TWO_OF_256: Alone(DecodeTiles(64, 8, 3, 1, dim_block=128, early=True), 0.0),
}

# The first row that serves wins. In the comments llama8b is (32 query heads, 8 KV heads, 128), gptoss (64, 8, 64) and
# gemma (8, 4, 256); the floor is the time to read K and V once.
DECODE_ROWS = (
    # gptoss 64 x 4k: 74 us, with scales of tokens 78, in bfloat16 129. In a run where these take 77.5: 78.2 if the
    # start of a row has a cost, 78.5 with 4 stages, 95 with 2, 81 if rows that are alike are not cut alike, 89 and more
    # with whole rows of four warps, 77.6 if the program that ends last with a row adds up its parts. An SM holds 8
    # programs of these registers; 12 take 83. Up to 56 bytes spill if there is a window. In order 78.2 instead of 77.6
    # side by side; with pages fetched ahead for all of a sequence's rows 87 and more.
    DecodeRow(
        "sm_90",
        2,
        64,
        16,
        DecodeTiles(16, 1, 3, 8, heads_per_row=2, row_cost=0, row_end=2, paired=True, early=True, side_by_side=True),
        (Codes.BY_ROW, Codes.BY_TOKEN),
    ),
    # llama8b 64 x 4k: with scales of tokens 140 us, in bfloat16 253. At 128 x 8k with one KV head 75; 77 if a row's
    # start has a cost and with 4 stages, with blocks of 32 keys 81.
    DecodeRow(
        "sm_90",
        2,
        128,
        16,
        DecodeTiles(16, 1, 3, 8, row_cost=0, row_end=2, paired=True, early=True),
        (Codes.BY_ROW, Codes.BY_TOKEN),
    ),
    # gemma 64 x 4k: 153 us with 4 KV heads, 234 not in pairs.
    DecodeRow("sm_90", 2, 256, 16, DecodeTiles(16, 2, 3, 4, paired=True, early=True), (Codes.BY_ROW,)),
    # KV heads of few elements, read as one. 32 query heads of 16 on 8, 64 x 4k: 42 us, 54 one by one, 44 eight at a
    # time in the tiles of 40; 16 on 8, 10 x 2422..37523, a window of 4096: 12.4 and 16.7, 13.1 in the tiles of 32.
    DecodeRow(
        "sm_90",
        2,
        16,
        16,
        DecodeTiles(64, 4, 3, 2, transposed=True, heads_per_row=4, row_cost=1, row_end=1, early=True),
        (Codes.NONE,),
    ),
    # 12 query heads of 24 on 3, 36 x 1737..22258: 53 us, 78 one by one; 32 on 8, 64 x 4k: 60 and 129; 20 on 10, 3 x
    # 25k: 34 and 40; of 32, 32 on 8: 71 and 79.
    DecodeRow("sm_90", 2, 24, 16, DecodeTiles(32, 2, 3, 4, heads_per_row=5, early=True), (Codes.NONE,), any_dim=True),
    DecodeRow("sm_90", 2, 32, 16, DecodeTiles(32, 2, 3, 4, heads_per_row=4, early=True), (Codes.NONE,), any_dim=True),
    # 12 on 3, 64 x 4k: 31 us, 35 as one block of 128 columns; 18 on 6, 20 x 5156..14827, a window of 4096: 24.5 and 26.
    DecodeRow(
        "sm_90",
        2,
        24,
        16,
        DecodeTiles(32, 2, 3, 4, heads_per_row=3, dim_block=64, early=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    DecodeRow("sm_90", 2, 40, 16, DecodeTiles(32, 2, 3, 4, heads_per_row=3, early=True), (Codes.NONE,), any_dim=True),
    # 32 query heads of 16 on 4 KV heads, 64 x 4k: 29.5 us, 33.1 in the tiles below; but 40 on 4: 32.9 and 26.8, 64 on
    # 4: 30.8 and 25.2, 120 on 12, 35 x 517: 13.6 and 11.8.
    DecodeRow("sm_90", 2, 16, 16, DecodeTiles(32, 2, 3, 4, heads_per_row=2, early=True), (Codes.NONE,)),
    DecodeRow(
        "sm_90", 2, 16, 64, DecodeTiles(64, 4, 3, 2, heads_per_row=4, row_cost=1, row_end=1, early=True), (Codes.NONE,)
    ),
    DecodeRow("sm_90", 2, 24, 16, DecodeTiles(32, 2, 3, 4, heads_per_row=2, early=True), (Codes.NONE,), any_dim=True),
    # 64 query heads of 24 on 4 KV heads, 64 x 4k: 36 us, 51 as one block of 64 columns; 120 on 10, 9 x 11.8k..20.7k:
    # 50.6 and 53.7, with five programs per SM 65.
    DecodeRow(
        "sm_90",
        2,
        24,
        32,
        DecodeTiles(32, 2, 3, 4, heads_per_row=2, dim_block=32, row_cost=1, row_end=1, early=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    # For heads that the rows above cannot read as one. 30 query heads of 16 on 5 KV heads, 84 x 1.4k: 21 us, 32 in the
    # tiles of 32 elements; 18 on 3, 60 x 421..1182: 10 and 14.
    DecodeRow("sm_90", 2, 16, 16, DecodeTiles(32, 1, 3, 16, early=True), (Codes.NONE,)),
    # 30 query heads of 40 on 3 KV heads, 113 x 1984..5803: 68 us, 95 one by one; on 10, 4 x 18k..26k: 50 and 65.
    DecodeRow("sm_90", 2, 40, 32, DecodeTiles(32, 2, 3, 4, heads_per_row=3, early=True), (Codes.NONE,), any_dim=True),
    # 32 query heads of 40 on 8 KV heads, ragged 64: 135 us if programs work side by side, 149 if they do not.
    # With 200 registers 256 x 2k takes 185 us instead of 214, ragged 64 128 and 132.
    DecodeRow(
        "sm_90",
        2,
        40,
        16,
        DecodeTiles(32, 2, 3, 4, heads_per_row=2, max_registers=200, early=True, side_by_side=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    # 80 query heads of 40 on 8 KV heads, 64 x 4k: 106 us, 118 as one block of 128 columns; but 32 on 8: 105 and 98.
    # Side by side ragged 64 takes 139 us instead of 152 in order.
    DecodeRow(
        "sm_90",
        2,
        40,
        32,
        DecodeTiles(32, 2, 3, 4, heads_per_row=2, dim_block=64, early=True, side_by_side=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    # gptoss 64 x 4k: 127 us, 128 without early launches; 145 with one KV head per row. In up to four rounds 256 x 2k
    # takes 259.5 us, in one 262.2, and 128 x 8k 494 and 506. Side by side ragged 256 takes 298, in order 302.
    DecodeRow(
        "sm_90",
        2,
        64,
        16,
        replace(_TWO_AN_SM, heads_per_row=2),
    ),
    # 20 query heads of 24 elements on 10 KV heads, 3 x 25k: 39 us, 48 with 4 programs per SM, 52 in the tiles of 16 and
    # 46 in those of 48.
    DecodeRow("sm_90", 2, 32, 16, DecodeTiles(64, 4, 3, 6, dim_block=32, early=True), (Codes.NONE,)),
    # 32 query heads of 48 on 8 KV heads, 64 x 4k: 119 us; 132 one by one, 140 with eight programs per SM, 168 in blocks
    # of 32 columns and four warps. 60 of 40 on 5, 2 x 10k: 14.6 one by one, 15.5 with eight. Side by side and with 200
    # registers 64 x 4k takes 117 us and 256 x 2k 223; without 119 and 230, side by side alone 117 and 237.
    DecodeRow(
        "sm_90",
        2,
        48,
        16,
        DecodeTiles(32, 2, 3, 4, heads_per_row=2, dim_block=64, max_registers=200, early=True, side_by_side=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    DecodeRow("sm_90", 2, 48, 16, DecodeTiles(32, 2, 3, 4, early=True), (Codes.NONE,)),
    # 64 query heads on 4 KV heads, ragged 64: 97 us, in order 104, and 100 if a row's cost is all at its start.
    DecodeRow(
        "sm_90",
        2,
        64,
        16,
        DecodeTiles(32, 2, 3, 4, row_cost=1, row_end=1, early=True, side_by_side=True),
        (Codes.NONE,),
    ),
    # 32 query heads on one KV head, 64 x 4k: 30 us; 40 of 48 on 2, 32 x 4k: 33, in the tiles of 80 36.
    DecodeRow("sm_90", 2, 64, 32, DecodeTiles(64, 4, 3, 2, dim_block=32, early=True), (Codes.NONE,)),
    # Rows of 144 bytes lie across lines that hold a part of another KV head's. 96 query heads of 72 on 16 KV heads,
    # 29 x 1399..4045: 112 us, 132 one by one, 135 as one block of 128 columns; 32 on 8, 64 x 4k: 176, 186 and 200. Side
    # by side 64 x 4k takes 169 us instead of 174, ragged 64 231 and 243; of 24 on 6 126 and 137, 171 and 181.
    DecodeRow(
        "sm_90",
        2,
        72,
        16,
        DecodeTiles(32, 2, 3, 4, heads_per_row=2, dim_block=128, early=True, side_by_side=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    # 32 query heads of 80 on 8 KV heads, 64 x 4k: 175 us; 188 one by one, 227 in blocks of 32 columns and four warps,
    # 229 in the tiles of 128. With 200 registers 256 x 2k takes 342 us instead of 370; 32 on 32, 64 x 4k: 665, 680.
    DecodeRow(
        "sm_90",
        2,
        80,
        16,
        DecodeTiles(32, 4, 3, 2, heads_per_row=2, dim_block=128, max_registers=200, early=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    # Two at a time rows of up to 32 query heads take 92 us of 64 x 4k (64 query heads of 72 on 4 KV heads; 109 one by
    # one), but longer where they are few: 32 on 2, 5 x 6930: 16.8 and 14.3; of 80, 24 on 2, 3 x 195..259: 6.6 and 4.8.
    # Side by side 64 on 4 take 102 us instead of 108 in order, ragged 64 140 and 160; of 80, 24 on 3, 76 and 89,
    # 100 and 116.
    DecodeRow("sm_90", 2, 72, 16, DecodeTiles(32, 2, 3, 4, dim_block=64, early=True, side_by_side=True), (Codes.NONE,)),
    DecodeRow("sm_90", 2, 80, 16, DecodeTiles(32, 2, 3, 4, early=True, side_by_side=True), (Codes.NONE,)),
    # 80 query heads of 80 on 4 KV heads, 64 x 4k: 97 us, 118 one by one; of 72, 11 x 9.9k..24.6k: 74 and 100. Side by
    # side 64 x 4k takes 95.7.
    DecodeRow(
        "sm_90",
        2,
        80,
        64,
        DecodeTiles(32, 4, 3, 2, heads_per_row=2, dim_block=128, early=True, side_by_side=True),
        (Codes.NONE,),
        any_dim=True,
    ),
    # llama70b 64 x 4k: 247 us, 250 without early launches; 331 with 1 program per SM, 380 with blocks of 128 keys. 16 x
    # 4k: 69, 70 if a row's cost is all at its start, 71 without early launches too. Pages of 8 take 1.02 of the time of
    # those of 32. Heads of 96 as equal blocks: 217 to 281 us where these tiles take 214 (32 KV heads, 16 x 4k).
    # In rounds 64 x 4k takes 248 us, in one 254, 128 x 8k 958 and 982, 96 x 4k 366 and 377, 256 x 2k 493 and 498. But
    # rows that differ, or of which no program has a whole number, are shared by the programs of one round (cuts.py):
    # ragged 64 336 and, by those of four, 342. Merged within the launch 64 x 4k takes 245 us instead of 255, 16 x 4k 71
    # and 73; with one KV head 16 x 4k 20 and 15 (cuts.py). Heads of 256 then take 274 and 247, of 80 231 and 210: they
    # have no group. In groups of 8 pages of 1 take 253 us for 64 x 4k and in groups of 16 257, for ragged 64 336 and
    # 344, and 32 KV heads of 96 839 and 861 for 64 x 4k; others take as long. Side by side ragged 64 takes 338, in
    # order 345, ragged 256 1399 and 1429, heads of 112 380 and 391.
    DecodeRow("sm_90", 2, 128, 16, _TWO_AN_SM),
    # 32 query heads of 72 on one KV head, 64 x 4k: 34 us, 39 transposed as one block of 128 columns; 20 on one: 32 and
    # 38. 3 x 1472..11635: 11.0 with all programs, and 9.6 with 132.
    DecodeRow("sm_90", 2, 80, 32, DecodeTiles(32, 2, 3, 4, dim_block=64, early=True, fewer_of_few=4), (Codes.NONE,)),
    # 64 query heads on one KV head, 64 x 4k: of 64 elements 32 us, of 96 40; 47 and 59 as one block. In blocks of 32
    # keys 31 and 43. 128 heads of 72 on 2, 1 x 2821: 7.0, and 9.0 with two programs per SM; but 64 on one, 64 x 4k: 40
    # and 36.
    DecodeRow("sm_90", 2, 96, 64, DecodeTiles(64, 4, 3, 2, dim_block=32, early=True, fewer_of_few=2), (Codes.NONE,)),
    # 64 query heads on one KV head, 64 x 4k: 48 us; 60 as one block. 128 on 4: 180 us, 212 without the registers, and
    # 182 if a row's cost is all at its start; then 256 x 2k takes 333 instead of 310.
    DecodeRow(
        "sm_90",
        2,
        128,
        64,
        DecodeTiles(32, 4, 3, 2, dim_block=64, row_cost=1, row_end=1, max_registers=200, early=True, side_by_side=True),
        (Codes.NONE,),
    ),
    DecodeRow("sm_90", 2, 128, 64, DecodeTiles(32, 4, 2, 2, early=True)),
    # 32 query heads of 144 on 8 KV heads, 64 x 4k: 329 us, 348 in the tiles below; 48 on 6, 86 x 317: 32 and 40; 24 of
    # 160 on 3, 5 x 12.7k..19k: 49 and 54. Side by side ragged 64 takes 441 instead of 455 in order, of 160 478 and
    # 499. With 200 registers and a row's cost at its end 24 of 160 on 3, ragged 64, take 183 instead of 193, but
    # 48 of 144 on 6, 64 x 4k, 283 instead of 253.
    DecodeRow(
        "sm_90", 2, 160, 16, DecodeTiles(32, 2, 3, 4, dim_block=128, early=True, side_by_side=True), (Codes.NONE,)
    ),
    # 64 query heads of 192 on 8 KV heads, 64 x 4k: 387 us, 401 with fewer registers; 399 as one block of 256 columns.
    # Ragged 64 510 us, 514 if a row's cost is all at its start, and with two programs per SM.
    DecodeRow(
        "sm_90",
        2,
        192,
        16,
        DecodeTiles(32, 4, 3, 3, dim_block=64, row_cost=1, row_end=1, max_registers=200, early=True),
        (Codes.NONE,),
    ),
    # gemma 64 x 4k: 492 us, 499 if a row's cost is all at its start (side by side 567) and 496 in order; ragged 64 646,
    # 661 and 656. 16 query heads of 240 on 8 KV heads, 64 x 4k: 529, 588 and 530; 32 of 208 on 8 453, 498 and 466.
    # gemma as one block takes as long, transposed 602.
    DecodeRow("sm_90", 2, 256, 16, _TWO_OF_256, (Codes.NONE,)),
    DecodeRow("sm_90", 2, 256, 16, DecodeTiles(32, 4, 3, 2, early=True)),
    # 64 query heads of 160 on one KV head, 38 x 14k: 104 us, 273 as one block. Heads of 192, 38 x 4k: 48 and 95.
    DecodeRow("sm_90", 2, 192, 64, DecodeTiles(32, 4, 3, 2, dim_block=32, early=True), (Codes.NONE,)),
    # 64 query heads on one KV head, 38 x 4k: 61 us; 99 as one block.
    DecodeRow("sm_90", 2, 256, 64, DecodeTiles(32, 4, 2, 2, dim_block=64, early=True), (Codes.NONE,)),
    # With blocks of 32 keys up to 112 bytes of registers spill.
    DecodeRow("sm_90", 2, 256, 64, DecodeTiles(16, 8, 2, 1, early=True), (Codes.BY_TOKEN,)),
    DecodeRow("sm_90", 2, 256, 64, DecodeTiles(32, 8, 2, 1, early=True)),
    # 20 query heads on 5 KV heads, 18 x 2.7k: with 320 elements 83 us, with 384 98; 125 and 126 as one block of 512.
    # Heads of 320, 256 x 2k: 776 us, 786 in order.
    DecodeRow(
        "sm_90", 2, 384, 16, DecodeTiles(32, 4, 3, 2, dim_block=64, early=True, side_by_side=True), (Codes.NONE,)
    ),
    # 32 query heads on 4 KV heads, 16 x 4k: 135 us, and 24 on 6, 2 x 10.7k: 71; 142 and 73 as one block. 32 on 4,
    # ragged 64: 661 us, 675 in order.
    DecodeRow(
        "sm_90", 2, 512, 32, DecodeTiles(16, 4, 3, 2, dim_block=64, early=True, side_by_side=True), (Codes.NONE,)
    ),
    # A head is one block of 512 columns; with 64 query heads a row spills.
    DecodeRow("sm_90", 2, 512, 16, DecodeTiles(32, 8, 3, 1, early=True)),
    DecodeRow("sm_90", 2, 512, 32, DecodeTiles(32, 8, 2, 1, early=True)),
    DecodeRow("sm_90", 4, 128, 16, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("sm_90", 4, 256, 16, DecodeTiles(16, 8, 2, 2)),
    DecodeRow("sm_90", 4, 512, 16, DecodeTiles(16, 8, 1, 1)),
    DecodeRow("sm_", 2, 128, 16, DecodeTiles(32, 4, 2, 2)),
    DecodeRow("sm_", 2, 256, 16, DecodeTiles(32, 4, 2, 1)),
    DecodeRow("sm_", 2, 512, 16, DecodeTiles(16, 8, 2, 1)),
    DecodeRow("sm_", 4, 128, 16, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("sm_", 4, 256, 16, DecodeTiles(16, 8, 1, 1)),
    # Two blocks in flight, with the loads of scales, spill up to 38 SGPRs, with scales of heads 1. 91 to 196 VGPRs,
    # 2 to 32 KiB of LDS.
    DecodeRow("gfx942", 2, 128, 16, DecodeTiles(32, 4, 1, 3), (Codes.BY_TOKEN,)),
    DecodeRow("gfx942", 2, 128, 32, DecodeTiles(16, 4, 1, 3), (Codes.BY_TOKEN,)),
    DecodeRow("gfx942", 2, 256, 32, DecodeTiles(16, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx942", 2, 256, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_ROW,)),
    DecodeRow("gfx942", 2, 128, 32, DecodeTiles(16, 4, 2, 3), (Codes.BY_ROW,)),
    DecodeRow("gfx942", 2, 256, 32, DecodeTiles(16, 4, 2, 2), (Codes.BY_ROW,)),
    # One wave waits for no other at a barrier, and eight programs per CU keep 128 KiB of K and V in flight: loads may
    # take 3.4 us before HBM idles, where they may take 2.4 in four waves of 32 keys. 177 to 212 VGPRs, 8 KiB of LDS.
    DecodeRow("gfx942", 2, 64, 16, DecodeTiles(16, 1, 2, 8, heads_per_row=2), (Codes.NONE,)),
    DecodeRow("gfx942", 2, 128, 16, DecodeTiles(16, 1, 2, 8), (Codes.NONE,)),
    # 1.8 us; one wave would have 3.3, and spills up to 9 registers of odd head dims. 120 VGPRs, 9 KiB of LDS.
    DecodeRow("gfx942", 2, 128, 32, DecodeTiles(16, 4, 2, 4), (Codes.NONE,)),
    # 3.2 us; four waves of 32 keys 1.5. In one wave up to 137 registers spill. 200 to 224 VGPRs, 16 KiB of LDS.
    DecodeRow("gfx942", 2, 256, 16, DecodeTiles(16, 2, 2, 4), (Codes.NONE,)),
    DecodeRow("gfx942", 2, 256, 32, DecodeTiles(16, 4, 2, 2), (Codes.NONE,)),
    # 154 to 242 VGPRs, 33 KiB of LDS: one workgroup of 8 waves, 2 per SIMD. 4 waves spill scalar registers.
    DecodeRow("gfx942", 2, 512, 32, DecodeTiles(16, 8, 2, 1), (Codes.NONE, Codes.BY_ROW)),
    DecodeRow("gfx942", 4, 128, 32, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("gfx942", 4, 256, 32, DecodeTiles(16, 8, 1, 1)),
    # Two blocks in flight spill up to 63 SGPRs. 90 to 252 VGPRs, 2 to 32 KiB of LDS.
    DecodeRow("gfx950", 2, 128, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 128, 32, DecodeTiles(16, 4, 1, 3), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 256, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 256, 32, DecodeTiles(16, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 512, 32, DecodeTiles(16, 8, 1, 1), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 64, 16, DecodeTiles(32, 4, 2, 3, heads_per_row=2), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 128, 16, DecodeTiles(32, 4, 2, 3), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 128, 32, DecodeTiles(16, 4, 2, 3), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 256, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 256, 32, DecodeTiles(16, 4, 1, 2), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 512, 32, DecodeTiles(16, 8, 1, 1), (Codes.BY_ROW,)),
    # Like on gfx942, in blocks of 32 keys: loads may take 3.6 us before HBM idles, in four waves 1.9. Without
    # waves_per_eu Triton 3.6 takes up to 268 VGPRs, which leave room for half as many waves. 187 to 230, 17 KiB of LDS.
    DecodeRow("gfx950", 2, 64, 16, DecodeTiles(32, 1, 2, 8, heads_per_row=2, waves_per_eu=2)),
    DecodeRow("gfx950", 2, 128, 16, DecodeTiles(32, 1, 2, 8, waves_per_eu=2)),
    # 1.9 us; four waves 0.7.
    DecodeRow("gfx950", 2, 128, 32, DecodeTiles(16, 1, 2, 8, waves_per_eu=2)),
    # 3.9 us; four waves of 32 keys 1.8. Triton 3.6 takes 332 VGPRs: 1.8 us. With waves_per_eu it spills up to 15.
    DecodeRow("gfx950", 2, 256, 16, DecodeTiles(16, 1, 2, 8)),
    # 1.4 us; two programs per CU 0.9, one wave 1.8, of which up to 61 registers spill with Triton 3.6.
    DecodeRow("gfx950", 2, 256, 32, DecodeTiles(16, 4, 2, 3)),
    # 166 to 200 VGPRs, 67 KiB of LDS: one workgroup of 8 waves, 2 per SIMD.
    DecodeRow("gfx950", 2, 512, 32, DecodeTiles(16, 8, 2, 1)),
    DecodeRow("gfx950", 4, 128, 32, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("gfx950", 4, 256, 32, DecodeTiles(16, 8, 1, 1)),
    DecodeRow("interpreter", 2, 64, 16, DecodeTiles(16, 1, 1, 3, heads_per_row=2, paired=True), (Codes.BY_ROW,)),
    DecodeRow(
        "interpreter",
        2,
        64,
        16,
        DecodeTiles(16, 1, 1, 3, heads_per_row=2, paired=True, side_by_side=True),
        (Codes.BY_TOKEN,),
    ),
    DecodeRow("interpreter", 2, 512, 16, DecodeTiles(16, 1, 1, 3, paired=True), (Codes.BY_ROW,)),
    DecodeRow("interpreter", 2, 512, 16, DecodeTiles(16, 1, 1, 3, paired=True), (Codes.BY_TOKEN,)),
    DecodeRow("interpreter", 2, 64, 16, DecodeTiles(16, 1, 1, 3, transposed=True, heads_per_row=2)),
    DecodeRow(
        "interpreter",
        2,
        512,
        16,
        DecodeTiles(
            16, 1, 1, 3, transposed=True, row_cost=1, row_end=1, side_by_side=True, most_rounds=2, merge_group=8
        ),
    ),
    DecodeRow("interpreter", 4, 512, 64, DecodeTiles(16, 1, 1, 3, most_rounds=2)),
)


def decode_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
) -> DecodeTiles:
    """The tiles of paged decode. Raises NoTiles."""
    for name in names_of(arch):
        rows = [
            row
            for row in DECODE_ROWS
            if row.arch == name
            and row.item_bytes == dtype.itemsize
            and codes in row.codes
            and max(head_dim, v_head_dim) <= row.max_head_dim
            and (row.tiles.heads_per_row == 1 or _pairs(row, gqa_ratio, num_kv_heads, head_dim, v_head_dim))
            and not (row.tiles.dim_block and row.tiles.columns(head_dim) != row.tiles.columns(v_head_dim))
        ]
        for row in rows:
            if gqa_ratio * row.tiles.heads_per_row <= row.max_q_rows:
                return row.tiles
        if rows:
            # Among rows for the most query heads, the one with the fewest columns.
            last = min(rows, key=lambda row: (len(row.codes), -row.max_q_rows, row.max_head_dim))
            return replace(last.tiles, head_blocks=-(-gqa_ratio // last.max_q_rows))
    raise NoTiles(no_row("decode", DECODE_ROWS, arch, dtype, (head_dim, v_head_dim), codes))


def _pairs(row: DecodeRow, gqa_ratio: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> bool:
    """True if the KV heads can be read as rows of row.tiles.heads_per_row."""
    heads = row.tiles.heads_per_row
    fits = num_kv_heads % heads == 0 and gqa_ratio * heads <= row.max_q_rows
    return fits and head_dim == v_head_dim and (row.any_dim or head_dim == next_power_of_2(head_dim))
