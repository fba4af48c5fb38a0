"""Paged decode for CDNA, in Gluon: decode.py's results, with keys and values that go straight to the matrix units.

    out[token] = softmax(scores of q[token] . K^T) V      K, V: the keys that the sequence's last token sees (scores.py)

A program is one wave. Its rows, the programs that share them and the parts that they leave are those of paged decode:
the schedule is decode_schedule.py's, and merge.py adds up the parts that several programs hold of a row. key_blocks.py
says how a wave reads keys. Nothing is written to LDS but the results of a row at its end.

Pages are loaded whole if a key of them is seen: elements that no row sees may be NaN, and get weights of zero and
values of zero.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange, Logits, RowOutputs, TableLine
from rocm_attn.kernels.attention.coded import coded_scales, row_scale, scaled_values
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.decode_geometry import has_whole_rows
from rocm_attn.kernels.attention.decode_schedule import (
    SEQ_KV_LEN,
    heads_of_row,
    next_row,
    words_of_program,
    words_of_seq,
    work_at,
)
from rocm_attn.kernels.attention.key_rows import near
from rocm_attn.kernels.attention.merge import launch_merge
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2, add_sink, visible_blocks
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.cdna.codes import in_word
from rocm_attn.kernels.cdna.key_blocks import (
    ChunkBlocks,
    ChunkSide,
    attend_key_blocks,
    query_operands,
    word_offsets,
)
from rocm_attn.kernels.cdna.key_layouts import (
    CHUNK,
    ROWS,
    CdnaGeometry,
    key_words,
    product_layout,
    query_layout,
    value_words,
)
from rocm_attn.kernels.cdna.key_scales import has_scales, scale_sides
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES
from rocm_attn.kernels.tuning.tiles import DecodeTiles

# The number of each arch's matrix units in Gluon.
_CDNA = {"gfx942": 3, "gfx950": 4}


class RowHeads(NamedTuple):
    """Query heads of a row of work: the first one (int64), and their number."""

    first: Any
    num: Any


@gluon.jit
def _lines(L: gl.constexpr, G: gl.constexpr):
    """Each of ROWS lines' query head in its row, or ROWS if it has none, and which of the row's KV heads it reads.

    If rows read two KV heads, each has half of the lines.
    """
    R: gl.constexpr = G.rows
    HALF: gl.constexpr = ROWS // R.HEADS_PER_ROW
    line = gl.arange(0, ROWS, layout=L)
    half = line // HALF
    if HALF > R.GQA_RATIO and R.HEADS_PER_ROW > 1:
        line = gl.where(line % HALF < R.GQA_RATIO, half * R.GQA_RATIO + line % HALF, ROWS)
    return line, half


@gluon.jit
def _load_query(q, heads, G: gl.constexpr):
    """query_operands of a row's q, which is zero in the columns of other KV heads. q: HeadRows of the row's token"""
    Q: gl.constexpr = query_layout(G)
    line, half = _lines(gl.SliceLayout(1, Q), G)
    column = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(0, Q))
    own = (column // G.HEAD_DIM)[None, :] == half[:, None]
    at = q.at + (heads.first + line.to(gl.int64))[:, None] * q.head + (column % G.HEAD_DIM)[None, :]
    query = gl.load(at, mask=own & (line < heads.num)[:, None], other=0.0)
    # q has come before the loop: otherwise each of its rounds would wait for it, and so for loads that follow it.
    query = gl.inline_asm_elementwise("", "=v,0", [query], dtype=query.dtype, is_pure=False, pack=2)
    return query_operands(query, G)


@gluon.jit
def _by_line(acc, G: gl.constexpr):
    """An accumulator of key_blocks.py as [ROWS, COLUMNS]: a lane has eight neighbouring elements."""
    acc = gl.reshape(acc, [8, G.COLUMNS // 8, ROWS])
    return gl.reshape(gl.permute(acc, (2, 1, 0)), [ROWS, G.COLUMNS])


@gluon.jit
def _places_of_lines(L: gl.constexpr, heads, G: gl.constexpr):
    """The elements of _by_line: query head in its row, column of its KV head, and whether it is a head's own."""
    line, half = _lines(gl.SliceLayout(1, L), G)
    column = gl.arange(0, G.COLUMNS, layout=gl.SliceLayout(0, L))
    own = (column // G.HEAD_DIM)[None, :] == half[:, None]
    return line, (column % G.HEAD_DIM)[None, :], own & (line < heads.num)[:, None]


@gluon.jit
def _store_whole(softmax, to, sinks, token, heads, G: gl.constexpr):
    """Stores the results of a row that one program has finished alone."""
    acc, maximum, total = softmax
    P: gl.constexpr = product_layout(G)
    head, _ = _lines(gl.SliceLayout(0, P), G)
    is_head = head < heads.num
    if sinks is not None:
        sink = gl.load(sinks + heads.first + head, mask=is_head, other=float("-inf"))
        maximum, total, decay = add_sink(maximum, total, sink)
        acc = acc * decay[None, :]
    value = _by_line(acc / total[None, :], G).to(to.out.at.dtype.element_ty)
    L: gl.constexpr = value.type.layout
    line, column, is_out = _places_of_lines(L, heads, G)
    out = to.out.at + token * to.out.token + heads.first * to.out.head
    gl.store(out + line.to(gl.int64)[:, None] * to.out.head + column, value, mask=is_out)
    if to.lse is not None:
        lse = to.lse.at + token * to.lse.token + heads.first * to.lse.head
        gl.store(lse + head.to(gl.int64) * to.lse.head, (maximum + gl.log2(total)) * LN_2, mask=is_head)


@gluon.jit
def _store_nothing(to, token, heads, G: gl.constexpr):
    """Stores the results of a sequence without keys."""
    P: gl.constexpr = product_layout(G)
    zeros = _by_line(gl.full([G.COLUMNS, ROWS], 0.0, gl.float32, layout=P), G).to(to.out.at.dtype.element_ty)
    L: gl.constexpr = zeros.type.layout
    line, column, is_out = _places_of_lines(L, heads, G)
    out = to.out.at + token * to.out.token + heads.first * to.out.head
    gl.store(out + line.to(gl.int64)[:, None] * to.out.head + column, zeros, mask=is_out)
    if to.lse is not None:
        S: gl.constexpr = gl.SliceLayout(0, P)
        head, _ = _lines(S, G)
        lse = to.lse.at + token * to.lse.token + heads.first * to.lse.head
        nothing = gl.full([ROWS], float("-inf"), gl.float32, layout=S)
        gl.store(lse + head.to(gl.int64) * to.lse.head, nothing, mask=head < heads.num)


@gluon.jit
def _store_part(softmax, to, part, heads, G: gl.constexpr):
    """Stores the program's part of a row that others have parts of."""
    R: gl.constexpr = G.rows
    P: gl.constexpr = product_layout(G)
    acc = _by_line(softmax.acc, G)
    L: gl.constexpr = acc.type.layout
    line, column, is_out = _places_of_lines(L, heads, G)
    gl.store(to.parts + (part * R.Q_ROWS + line)[:, None] * G.HEAD_DIM + column, acc, mask=is_out)
    head, _ = _lines(gl.SliceLayout(0, P), G)
    sums = to.sums + (part * R.Q_ROWS + head) * 2
    gl.store(sums, softmax.maximum, mask=head < heads.num)
    gl.store(sums + 1, softmax.total, mask=head < heads.num)


@gluon.jit(do_not_specialize=["num_programs", "width"])
def _cdna_decode_kernel(
    q,
    k_pages,
    v_pages,
    k_scale: tl.const,
    v_scale: tl.const,
    table: tl.const,
    row_of_seq: tl.const,
    q_indptr: tl.const,
    schedule: tl.const,
    partials,
    out,
    lse,
    sinks,
    first_page,
    qk_scale,
    tanh_scale,
    window_left: gl.constexpr,
    num_programs,
    width,
    q_token,
    q_head,
    kp_page,
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: gl.constexpr,
):
    R: gl.constexpr = G.rows
    KEYS: gl.constexpr = R.KEY_BLOCK
    A_PAGE: gl.constexpr = G.PAGE_SIZE // CHUNK
    if G.SAME_OFFSETS:
        vp_page, vp_token, vp_head = kp_page, kp_token, kp_head
    program = gl.program_id(0)
    if G.WHOLE_ROWS:
        seq = program // R.ROWS
        row = program % R.ROWS
        done = 0
        kv_len = gl.load(words_of_seq(schedule, num_programs, seq) + SEQ_KV_LEN)
        _, _, blocks_of_row = visible_blocks(kv_len, window_left, KEYS, R.WINDOWED)
        work = gl.where(kv_len < 0, 0, blocks_of_row + (R.ROW_COST + R.ROW_END))
    else:
        words = words_of_program(schedule, program)
        seq, row, done, work, kv_len = work_at(words)
    k_offsets = word_offsets(near(kp_token), near(kp_head), key_words(G), G)
    v_offsets = word_offsets(near(vp_token), near(vp_head), value_words(G), G)
    sums = partials + num_programs * (2 * R.Q_ROWS * G.HEAD_DIM)
    to = RowOutputs(
        HeadRows(out, out_token, out_head), None if lse is None else HeadRows(lse, lse_token, lse_head), partials, sums
    )

    while work > 0:
        first_key, window_block, num_blocks = visible_blocks(kv_len, window_left, KEYS, R.WINDOWED)
        row_cost = gl.where(kv_len < 0, 0, num_blocks + (R.ROW_COST + R.ROW_END))
        take = gl.minimum(work, row_cost - done)
        first_block = gl.maximum(done - R.ROW_COST, 0)
        end_block = gl.minimum(done + take - R.ROW_COST, num_blocks)
        first_kv_head, first_head, num_heads = heads_of_row(row, R)
        heads = RowHeads(first_head, num_heads)
        if (kv_len == 0) & (done == 0):
            _store_nothing(to, gl.load(q_indptr + seq).to(gl.int64), heads, G)
        if end_block > first_block:
            token = gl.load(q_indptr + seq).to(gl.int64)
            line = TableLine(table + gl.load(row_of_seq + seq).to(gl.int64) * table_row, width)
            if first_page is not None:
                skipped = gl.load(first_page + seq)
                line = TableLine(line.at + skipped, width - skipped)
            blocks = KeyRange(window_block + first_block, window_block + end_block)
            last_key = gl.minimum(blocks.end * KEYS, kv_len) - 1
            query, factor = _load_query(HeadRows(q + token * q_token, q_token, q_head), heads, G)
            qk_scaled, tanh_scaled = coded_scales(
                qk_scale, tanh_scale, row_scale(k_scale, first_kv_head, G.CODING) * factor, G.CAPPED, G.CODING
            )
            # Loaded here, since the loop's scalar registers are few.
            value_scale = row_scale(v_scale, first_kv_head, G.CODING)
            softmax = attend_key_blocks(
                query,
                ChunkSide(k_pages + first_kv_head * kp_head, kp_page, kp_token, k_offsets),
                ChunkSide(v_pages + first_kv_head * vp_head, vp_page, vp_token, v_offsets),
                ChunkBlocks(
                    line,
                    blocks,
                    KeyRange(first_key, kv_len),
                    gl.minimum(last_key // CHUNK, line.width * A_PAGE - 1),
                    scale_sides(k_scale, v_scale, first_kv_head, G) if has_scales(G) else None,
                ),
                Logits(qk_scaled, tanh_scaled, None),
                G,
            )
            softmax = scaled_values(softmax, value_scale, G.CODING)
            if G.WHOLE_ROWS or end_block - first_block == num_blocks:
                _store_whole(softmax, to, sinks, token, heads, G)
            else:
                # Part 2p of program p goes to a row begun by an earlier program, 2p + 1 to one that goes on.
                _store_part(softmax, to, 2 * program + (first_block == 0).to(gl.int32), heads, G)
        if G.WHOLE_ROWS:
            work = 0
        else:
            work -= take
            done = 0
            seq, row, kv_len = next_row(schedule, num_programs, work, seq, row, R.ROWS, kv_len)


def launch_cdna_decode(args: AttendArgs, *, arch: str, scores: Scores, cut: DecodeCut, tiles: DecodeTiles) -> None:
    """Does the same as `launch_paged_decode`, without slopes, over near pages of whole chunks in q's dtype.

    arch: one of cdna_tiles.ARCHS
    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("decode on CDNA")
    queries, pages, table = args.queries, args.pages, args.table
    geometry = _geometry(args, arch, scores, cut, tiles)
    launch(
        _cdna_decode_kernel,
        (queries.num_seqs * cut.rows if geometry.WHOLE_ROWS else cut.programs,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        pages.k_scale,
        pages.v_scale,
        table,
        queries.row_of_seq,
        queries.q_indptr,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        queries.first_page,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.visibility.window_left,
        cut.programs,
        table.shape[1],
        *args.read_strides,
        *args.written_strides,
        G=geometry,
        num_warps=tiles.num_warps,
        **tiles.options(),
    )
    if not geometry.WHOLE_ROWS:
        launch_merge(args, cut, geometry.rows)


def _geometry(args: AttendArgs, arch: str, scores: Scores, cut: DecodeCut, tiles: DecodeTiles) -> CdnaGeometry:
    """Checks the schedule and the pages, and returns the values that the launch is compiled for."""
    num_kv_heads, gqa_ratio = args.heads
    num_seqs, head_dim, pages = args.queries.num_seqs, args.q.shape[2], args.pages
    cut.check(args.schedule, num_seqs)
    assert cut == DecodeCut.of(
        tiles, num_kv_heads=num_kv_heads, programs=cut.programs, window_left=scores.visibility.window_left
    ), "the schedule was cut for another launch"
    args.check_workspace(cut.partials_words(gqa_ratio=gqa_ratio, v_head_dim=head_dim, tiles=tiles))
    assert cut.row_cost + cut.row_end >= 1, "some program must write the zeros of a row without keys"
    assert args.slopes is None, "no slopes are served"
    encoding = pages.format.encoding
    assert encoding in (EXTEND_CODES[arch], Encoding.of(args.q.dtype)), (
        "the arch's codes or pages in q's dtype are served"
    )
    assert not encoding.is_fp8 or head_dim == 128, "codes of heads of 128 are served"
    assert pages.format.head_dim == pages.format.v_head_dim, "rows of K and of V that are equally long are served"
    assert pages.format.page_size % CHUNK.value == 0, "pages of whole chunks are served"
    assert pages.is_near
    assert tiles.q_rows(gqa_ratio) <= ROWS.value
    assert tiles.head_blocks == tiles.num_stages == 1
    geometry = CdnaGeometry(
        rows=cut.row_cut(tiles, gqa_ratio),
        CDNA=_CDNA[arch],
        HEAD_DIM=head_dim,
        COLUMNS=head_dim * tiles.heads_per_row,
        PAGE_SIZE=pages.format.page_size,
        CHUNKS=tiles.key_block // CHUNK.value,
        SAME_OFFSETS=args.same_offsets,
        WHOLE_ROWS=has_whole_rows(
            num_seqs * cut.rows, num_programs=cut.programs, window_left=scores.visibility.window_left, head_dim=head_dim
        ),
        CAPPED=scores.soft_cap > 0,
        CODING=pages.coding,
    )
    for side in (pages.raw_k, pages.raw_v):
        assert not any(stride % in_word(geometry.CODING) for stride in side.stride()[:3]), "words are read"
        assert side.data_ptr() % 4 == 0, "words are read"
    return geometry
