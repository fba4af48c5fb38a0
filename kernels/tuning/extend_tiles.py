"""Tiles of paged extend: rows for each arch and kind of problem. See tiles.py for where its numbers come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rocm_attn.kernels.tuning.tiles import ANY_ROWS, Codes, ExtendRow, ExtendTiles, NoTiles, names_of, no_row

# For few new tokens on Hopper. 64 x 8 heads of 192, 16 x 5 new of 2505: 72 us, 78 launched early alone, 80 without
# both; 32 x 8 of 128, 16 x 5 of 4101: 73.7, 76.5 and 78.4. If rows may be cut into more than three parts alike: 12 x 4
# of 64, 8 x 5 of 1005: 11.8 us, 14.7 without; 64 x 8 of 128, 2 x 5 of 4005: 22.0 and 26.9.
_TOGETHER: dict[str, Any] = {"early": True, "alike_keys": 256}
# 32 x 8 heads of 32, 32 x 12 new of 2000: 28.5 us, 29.3 if each key has its page number loaded. With heads of 128 it
# gains nothing: 162.9 and 162.4 at 32 x 8, 64 x 5 of 2505.
_BY_NUMBER = {**_TOGETHER, "by_number": True}
_TWO_OF_16 = ExtendTiles(
    64,
    128,
    4,
    3,
    2,
    programs_per_cu=2,
    share_stages=3,
    one_launch=True,
    merge_stages=4,
    heads_per_row=2,
    **_TOGETHER,
)

EXTEND_ROWS = (
    # KV heads of few elements, read as one. 8 x 8 heads of 16, 69 x 3 new of 33..560: 13.9 us, 15.0 by 64 keys
    # of rows that are shared sooner, 15.2 one by one; 64 x 3 of 4096: 45, 48 and 95. Then 44, launched early 42.2, in
    # equal parts 39.3, and with page numbers loaded once per page 40.7.
    ExtendRow(
        "sm_90",
        2,
        16,
        ExtendTiles(
            16,
            128,
            4,
            3,
            2,
            programs_per_cu=2,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            split_keys=1024,
            heads_per_row=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=4,
    ),
    # 4 query heads of 24 on one KV head, 13 x 4 new of 6367: 13 us; in the tiles of 64 18.
    ExtendRow(
        "sm_90",
        2,
        32,
        ExtendTiles(
            16,
            64,
            4,
            3,
            2,
            programs_per_cu=4,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    # For windows. 96 x 16 heads of 16, a window of 4096, 15 x 4 new of 6067: 42.6 us, 46.2 in the tiles below.
    ExtendRow(
        "sm_90",
        2,
        16,
        _TWO_OF_16,
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
        max_window=ANY_ROWS - 1,
    ),
    # 96 x 16 heads of 16, 15 x 4 new of 6067: 47 us, 48 in two launches, 61 one by one, 45.5 four at a time in blocks
    # of 128 rows; but 32 x 8, 64 x 8 of 1000: 19.6, 23.4 in two launches and 28.4 four at a time. The first,
    # of 46 us in another run, takes 44.3 launched early, 39.5 in equal parts, and 37.6 with page numbers loaded once
    # per page; 39.9 and 39.4 if the last part has 1 and 512 keys fewer instead of 256, 42.3 with three programs per
    # SM, 39.0 in blocks of 64 keys and three.
    ExtendRow(
        "sm_90",
        2,
        16,
        replace(_TWO_OF_16, by_number=True),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # 48 x 12 heads of 24, 26 x 6 new of 591..6547, a window of 4096: 52 us, 60 with two programs per SM, 76 one by one;
    # 16 x 2, 10 x 3 of 5000: 16.4 and 19.6.
    ExtendRow(
        "sm_90",
        2,
        24,
        ExtendTiles(
            64,
            64,
            4,
            3,
            2,
            programs_per_cu=3,
            share_stages=3,
            merge_stages=4,
            heads_per_row=2,
            **_BY_NUMBER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # 96 x 16 heads of 16, 15 x 4 new of 6067: 60 us; in the tiles of 64 72, with three programs per SM 96. 32 x 8 of
    # 32, 32 x 12 of 2000: 31 us, 37 in two launches.
    ExtendRow(
        "sm_90",
        2,
        32,
        ExtendTiles(
            64,
            128,
            4,
            3,
            2,
            programs_per_cu=2,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            **_BY_NUMBER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # For short sequences, 64 x 5 new tokens of 2505, compared with FA3. 12 x 4 heads: 49 us and 56.
    ExtendRow(
        "sm_90",
        2,
        64,
        ExtendTiles(16, 128, 4, 3, 2, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4, **_TOGETHER),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    ExtendRow(
        "sm_90",
        2,
        64,
        ExtendTiles(64, 64, 4, 3, 2, programs_per_cu=2, share_stages=3, merge_stages=4, **_BY_NUMBER),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # gptoss 1 x 2048 new + 6144 cached: 634 us, 646 with sinks; 657 with 4 warps, 791 and 847 with blocks of 32 keys
    # and 4 warps. With a window of 1024: 161; 184 with 4 warps, 174 with blocks of 32. If blocks of V are narrower
    # than K's, the code that Triton 3.6 generates for blocks of 64 keys reads beyond the pages.
    ExtendRow(
        "sm_90",
        2,
        64,
        ExtendTiles(
            128, 64, 8, 3, max_registers=128, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4
        ),
        alike=True,
        codes=(Codes.NONE,),
    ),
    ExtendRow("sm_90", 2, 64, ExtendTiles(128, 64, 8, 3), alike=True, codes=(Codes.BY_ROW, Codes.BY_TOKEN)),
    # 16 x 8 heads of 96, 64 x 5 new of 2505: 137 us, 171 if each key has its page number loaded.
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(16, 64, 4, 3, 2, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4, **_BY_NUMBER),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(
            32,
            64,
            4,
            3,
            2,
            dim_block=32,
            programs_per_cu=2,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # 2 x 2 heads of 80, 4 x 27..64 new: 5.5 us, in Hopper's 8.7; 32 x 8 of 80, 16 x 16 of 8192: 116 and 117, in
    # blocks of 32 columns 126; of 96, 64 x 16 of 2505: 152 and 158. Page numbers loaded once per page would spill
    # up to 24 bytes with Triton 3.9, and take 105 instead of 107 us at 16 x 16 of 8192.
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(64, 64, 4, 3, 2, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4, **_TOGETHER),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # For windows. 64 x 8 heads of 80, a window of 128, 2048 new of 8192: 48 us, 67 in the tiles below; 32 x 8 of 96, of
    # 512: 57 and 75; 80 x 8 of 72, of 1024, 4 x 76..150 new: 15.8 and 19.2; 40 x 2 of 80, of 128, 35 x 1..123 new of
    # 457..635: 8.3 and 11.1.
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(
            64,
            64,
            4,
            3,
            2,
            dim_block=32,
            programs_per_cu=2,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_window=2047,
    ),
    # 32 x 32 heads of 96, 777 new of 5778: 153 us where blocks of 128 columns took 266. With 128 registers at most, of
    # which two programs fit an SM, layers with other options for scores spill up to 48 bytes.
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(128, 64, 8, 3, 2, dim_block=32, programs_per_cu=1, share_stages=3, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # llama8b 1 x 2048 + 6144: 694 us, though up to 152 bytes spill; 844 in (128, 64, 8, 2), 758 in tiles of bfloat16.
    ExtendRow("sm_90", 2, 128, ExtendTiles(128, 64, 4, 2), alike=True, codes=(Codes.BY_ROW,)),
    # 820 us, though 8 bytes spill; 1230 in (128, 32, 8, 3), 931 in the tiles of bfloat16.
    ExtendRow("sm_90", 2, 128, ExtendTiles(64, 128, 4, 2), alike=True, codes=(Codes.BY_TOKEN,)),
    # With two stages 16 bytes spill.
    ExtendRow("sm_90", 2, 256, ExtendTiles(128, 32, 8, 1), codes=(Codes.BY_TOKEN,)),
    ExtendRow(
        "sm_90",
        2,
        128,
        ExtendTiles(32, 64, 4, 3, 2, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4, **_TOGETHER),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    ExtendRow(
        "sm_90",
        2,
        128,
        ExtendTiles(
            64,
            64,
            4,
            3,
            2,
            dim_block=64,
            programs_per_cu=2,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # llama8b 1 x 2048 new + 6144 cached: 530 us, with a window of 4096 of 32k 362, though 8 to 32 bytes spill; 552 and
    # 409 in blocks of 32 keys, 589 and 541 in (128, 32, 4, 3), one program per SM. 16 new after 100k: 132, 173, 2766.
    ExtendRow(
        "sm_90",
        2,
        128,
        ExtendTiles(
            128,
            64,
            8,
            2,
            2,
            dim_block=64,
            max_registers=128,
            programs_per_cu=1,
            share_stages=3,
            rows_at_once=2,
            merge_stages=4,
        ),
        alike=True,
        codes=(Codes.NONE,),
    ),
    ExtendRow(
        "sm_90",
        2,
        192,
        ExtendTiles(
            64,
            32,
            4,
            3,
            2,
            dim_block=64,
            programs_per_cu=2,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # 64 x 8 heads of 192, 777 new of 5778: 401 us, in (128, 32, 8, 2) of 256 columns 847; 580 with two stages. Shares
    # with three spill up to 80 bytes with Triton 3.9.
    ExtendRow(
        "sm_90",
        2,
        192,
        ExtendTiles(128, 64, 8, 3, 2, dim_block=64, programs_per_cu=1, share_stages=2, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
    ),
    ExtendRow(
        "sm_90",
        2,
        256,
        ExtendTiles(16, 64, 4, 2, 2, programs_per_cu=1, share_stages=2, one_launch=True, merge_stages=4, **_BY_NUMBER),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    ExtendRow(
        "sm_90",
        2,
        256,
        # gemma, 16 x 16 new of 4112: 200 us, 254 without, though 48 bytes spill with Triton 3.6.
        ExtendTiles(
            32,
            64,
            4,
            2,
            2,
            dim_block=64,
            programs_per_cu=1,
            share_stages=2,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # No row is shared: programs with shares spill up to 48 bytes.
    ExtendRow("sm_90", 2, 256, ExtendTiles(128, 32, 8, 2)),
    # 32 x 4 heads of 320, 29 x 2 new of 1290..3319: 120 us; 155 in blocks of 32 keys, 170 in tiles of 128 rows.
    ExtendRow(
        "sm_90",
        2,
        384,
        ExtendTiles(
            16,
            64,
            4,
            2,
            2,
            dim_block=64,
            programs_per_cu=1,
            share_stages=2,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    # 24 x 4 heads of 320, 37 x 5 new of 38..490: 34 us; 38 to 40 in tiles of 64 rows, 48 of 128.
    ExtendRow(
        "sm_90",
        2,
        384,
        ExtendTiles(
            32,
            64,
            4,
            2,
            2,
            dim_block=64,
            programs_per_cu=1,
            share_stages=2,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # 96 x 6 heads of 320, 5 x 3 new of 7000: 105 us; 113 in blocks of 64 keys and two launches, 14 x 2, 1 x 9 of 7970:
    # 30 and 33. Tiles of 128 rows take 1.2 of it.
    ExtendRow(
        "sm_90",
        2,
        320,
        ExtendTiles(
            64,
            32,
            8,
            3,
            2,
            dim_block=64,
            programs_per_cu=1,
            share_stages=3,
            one_launch=True,
            merge_stages=4,
            **_BY_NUMBER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # 40 x 2 heads of 320, 25 x 1..500 new of 1344..4596: 582 us, 711 with two stages; 824 of 5940: 584
    # and 754. Up to 112 bytes spill.
    ExtendRow(
        "sm_90",
        2,
        320,
        ExtendTiles(128, 32, 8, 3, 3, dim_block=64, programs_per_cu=1, share_stages=2),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=512,
    ),
    # For many new tokens, blocks of fewer query heads: the first of these 547 us.
    ExtendRow(
        "sm_90",
        2,
        320,
        ExtendTiles(128, 32, 8, 3, 3, dim_block=64, programs_per_cu=1, share_stages=2, fills=True),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # 40 x 2 heads of 320, 824 new of 5940: 453 us, in (32, 32, 8, 2) of 512 columns 3602; of 384 869 us, and 1953 in
    # blocks of 64 rows. Up to 240 bytes spill, of programs with shares alone.
    ExtendRow(
        "sm_90",
        2,
        384,
        ExtendTiles(128, 32, 8, 2, 2, dim_block=64, programs_per_cu=1, share_stages=2),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # 60 x 12 heads of 512, 8 x 3 new of 198..2398, a window of 1024: 63 us; 71 in blocks of 32 keys, 99 of 64 rows.
    ExtendRow(
        "sm_90",
        2,
        512,
        ExtendTiles(
            16,
            64,
            4,
            2,
            2,
            dim_block=64,
            programs_per_cu=1,
            share_stages=2,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    # 32 x 8 heads of 512, 16 x 8 new of 2508: 201 us; 267 in blocks of 32 keys, 285 in tiles of 64 rows.
    ExtendRow(
        "sm_90",
        2,
        512,
        ExtendTiles(
            32,
            64,
            4,
            2,
            2,
            dim_block=64,
            programs_per_cu=1,
            share_stages=2,
            one_launch=True,
            merge_stages=4,
            **_TOGETHER,
        ),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # 40 x 2 heads of 512, 824 new of 5940: 1277 us, though 32 bytes spill and up to 416 with Triton 3.9; 3789 in
    # (32, 32, 8, 2), and 1740 with 4 warps. Blocks of 128 rows do not fit.
    ExtendRow(
        "sm_90",
        2,
        512,
        ExtendTiles(64, 32, 8, 2, 2, dim_block=64, programs_per_cu=1, share_stages=2),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # Next to rows of up to 32 elements. Blocks of 64 rows spill if a head is one block of columns.
    ExtendRow(
        "sm_90",
        2,
        512,
        ExtendTiles(32, 32, 8, 2, programs_per_cu=1, share_stages=2, merge_stages=4),
        codes=(Codes.NONE,),
    ),
    ExtendRow("sm_90", 2, 512, ExtendTiles(32, 32, 8, 2), codes=(Codes.BY_ROW, Codes.BY_TOKEN)),
    ExtendRow("sm_90", 4, 128, ExtendTiles(32, 16, 4, 1)),
    ExtendRow("sm_90", 4, 256, ExtendTiles(16, 16, 4, 1)),
    ExtendRow("sm_90", 4, 512, ExtendTiles(16, 16, 8, 1)),
    ExtendRow("sm_", 2, 128, ExtendTiles(64, 32, 4, 2)),
    ExtendRow("sm_", 2, 256, ExtendTiles(32, 32, 4, 1)),
    ExtendRow("sm_", 2, 512, ExtendTiles(32, 16, 8, 1)),
    ExtendRow("sm_", 4, 128, ExtendTiles(32, 16, 8, 1)),
    ExtendRow("sm_", 4, 256, ExtendTiles(16, 16, 4, 1)),
    # With 4 waves up to 60 VGPRs spill, with 8 and blocks of 32 keys 3 with Triton 3.6. 123 to 256 VGPRs.
    ExtendRow("gfx942", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx942", 2, 128, ExtendTiles(128, 16, 8, 2, waves_per_eu=2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx942", 2, 256, ExtendTiles(128, 16, 8, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx942", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx942", 2, 128, ExtendTiles(128, 32, 8, 2, waves_per_eu=2), codes=(Codes.BY_ROW,)),
    # For whole rows. Programs with shares keep up to 18 SGPRs in lanes of VGPRs.
    # Blocks of 64 keys have fewer steps of the softmax per key, which bounds it, and need no single loads from LDS: 164
    # clocks where blocks of 32 take 188. 184 to 200 VGPRs, 16 KiB of LDS: 2 workgroups per CU.
    ExtendRow(
        "gfx942",
        2,
        64,
        ExtendTiles(128, 64, 4, 2, waves_per_eu=2, programs_per_cu=2, share_stages=2, share_block=32),
        codes=(Codes.NONE,),
    ),
    # Bound by the matrix units; blocks of 128 columns leave more waits. 220 to 233 VGPRs, 16 KiB of LDS: 2 workgroups a
    # CU. Without waves_per_eu up to 288 with Triton 3.6.
    ExtendRow(
        "gfx942",
        2,
        128,
        ExtendTiles(128, 32, 4, 2, waves_per_eu=2, dim_block=64, programs_per_cu=2),
        codes=(Codes.NONE,),
    ),
    # 110 to 190 VGPRs, 64 KiB of LDS: one workgroup of 8 waves, 2 per SIMD. Blocks of 32 keys: twice the issue cycles.
    ExtendRow("gfx942", 2, 256, ExtendTiles(128, 16, 8, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx942", 2, 256, ExtendTiles(128, 16, 8, 2, programs_per_cu=1)),
    # 171 to 214 VGPRs, 64 KiB of LDS: one workgroup of 8 waves, 2 per SIMD.
    ExtendRow("gfx942", 2, 512, ExtendTiles(64, 16, 8, 2), codes=(Codes.BY_ROW, Codes.BY_TOKEN)),
    ExtendRow("gfx942", 2, 512, ExtendTiles(64, 16, 8, 2, programs_per_cu=1)),
    ExtendRow("gfx942", 4, 128, ExtendTiles(64, 16, 4, 1, programs_per_cu=1)),
    ExtendRow("gfx942", 4, 256, ExtendTiles(32, 16, 8, 1, programs_per_cu=1)),
    # With blocks of 128 rows up to 69 VGPRs spill; with scales of heads and 4 waves, 2.
    ExtendRow("gfx950", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 128, ExtendTiles(64, 16, 4, 2, waves_per_eu=2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 256, ExtendTiles(64, 16, 8, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 512, ExtendTiles(32, 16, 8, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx950", 2, 128, ExtendTiles(128, 32, 8, 2, waves_per_eu=2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx950", 2, 256, ExtendTiles(128, 16, 8, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx950", 2, 512, ExtendTiles(32, 16, 8, 2), codes=(Codes.BY_ROW,)),
    # 142 clocks, in blocks of 32 keys 165. 174 to 192 VGPRs, 17 to 33 KiB of LDS: 2 workgroups per CU. With blocks of
    # 64 programs with shares keep up to 30 SGPRs in lanes of VGPRs.
    ExtendRow("gfx950", 2, 64, ExtendTiles(128, 64, 4, 2, waves_per_eu=2, programs_per_cu=2, share_block=32)),
    # Heads of 80 and 96 in blocks of 128 columns spill up to 72 registers with slopes and pages of one token. 169 to
    # 250 VGPRs, 29 to 49 KiB of LDS.
    ExtendRow(
        "gfx950",
        2,
        96,
        ExtendTiles(128, 64, 4, 2, waves_per_eu=2, dim_block=32, programs_per_cu=2, share_block=32),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # 165 clocks, in blocks of 32 keys 193. 224 to 256 VGPRs, 32 KiB of LDS (66 with Triton's asynchronous copies): 2
    # workgroups per CU. Blocks of 64 columns take 157, and up to 21 registers spill.
    ExtendRow("gfx950", 2, 128, ExtendTiles(128, 64, 4, 2, waves_per_eu=2, programs_per_cu=2, share_block=32)),
    # 328 clocks, in blocks of 16 keys and 8 waves 520: fewer waves read less of LDS. 304 VGPRs, 66 KiB of LDS: one
    # workgroup of 4 waves.
    ExtendRow("gfx950", 2, 256, ExtendTiles(128, 32, 4, 2, programs_per_cu=1, share_block=16)),
    # 193 to 226 VGPRs, 68 KiB of LDS: one workgroup of 8 waves, 2 per SIMD.
    ExtendRow("gfx950", 2, 512, ExtendTiles(64, 16, 8, 2, programs_per_cu=1)),
    ExtendRow("gfx950", 4, 128, ExtendTiles(64, 16, 4, 1, programs_per_cu=1)),
    ExtendRow("gfx950", 4, 256, ExtendTiles(32, 16, 8, 1, programs_per_cu=1)),
    # Costs so small that short steps also share rows.
    ExtendRow(
        "interpreter",
        2,
        512,
        ExtendTiles(16, 16, 1, 1, programs_per_cu=1, one_launch=True, row_keys=8, split_keys=4),
        max_rows=16,
    ),
    ExtendRow("interpreter", 2, 512, ExtendTiles(32, 16, 1, 1, programs_per_cu=1, row_keys=8, split_keys=4)),
    ExtendRow(
        "interpreter",
        4,
        512,
        ExtendTiles(16, 16, 1, 1, programs_per_cu=1, one_launch=True, row_keys=8, split_keys=4),
        max_rows=16,
    ),
    ExtendRow("interpreter", 4, 512, ExtendTiles(32, 16, 1, 1, programs_per_cu=1, row_keys=8, split_keys=4)),
)


def extend_rows(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
    window: int = ANY_ROWS,
) -> tuple[ExtendRow, ...]:
    """The tuning rows of paged extend. The first whose max_rows holds a step's rows serves it; the last one holds any.

    window: the most keys that a token sees, its own among them; ANY_ROWS: all. Raises NoTiles.
    """
    for name in names_of(arch):
        found: list[ExtendRow] = []
        for row in EXTEND_ROWS:
            if (
                row.arch == name
                and row.item_bytes == dtype.itemsize
                and codes in row.codes
                and max(head_dim, v_head_dim) <= row.max_head_dim
                and not (row.alike and row.tiles.columns(head_dim) != row.tiles.columns(v_head_dim))
                and gqa_ratio <= row.max_rows
                and window <= row.max_window
                and num_kv_heads % row.tiles.heads_per_row == 0
                and not (found and row.max_rows <= found[-1].max_rows)
            ):
                found.append(row)
                if row.max_rows == ANY_ROWS:
                    return tuple(found)
    raise NoTiles(no_row("extend", EXTEND_ROWS, arch, dtype, (head_dim, v_head_dim), codes))


def extend_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
) -> ExtendTiles:
    """The tiles of paged extend for sequences with any number of new tokens. Raises NoTiles."""
    rows = extend_rows(
        arch,
        gqa_ratio=gqa_ratio,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        codes=codes,
    )
    return rows[-1].tiles
