"""Latent decode for CDNA, in Gluon: latent/decode.py's results for one new token.

    out[token, head] = softmax(scores of q[token, head] . (c | r)^T) c       c | r: rows of 512 + 64 elements

A program is four waves. Its rows, the programs that share them and the parts that they leave are those of latent
decode: the schedule is decode_schedule.py's, and merge.py adds up the parts that several programs hold of a row.
latent_blocks.py says how the waves read keys for up to 16 query heads; at the end of a row they add up what each of
them has, by LDS. latent_heads.py says how they do for more, and latent_codes.py over codes. If a token has more heads
than a program holds, programs take a block of them each; those that read the same keys lie on one die, since launches
go to dies in turn, and their numbers differ by the number of compute units over the number of blocks: a multiple of the
dies of MI300X and MI355X.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.any_alignment import begin_at_16
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, HeadsOfToken, RowOutputs
from rocm_attn.kernels.attention.coded import coded_scales, row_scale
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.decode_schedule import (
    next_row,
    words_of_program,
    work_at,
)
from rocm_attn.kernels.attention.merge import launch_merge
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.cache.codes import is_coded
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.cdna.codes import in_word
from rocm_attn.kernels.cdna.extend_steps import here
from rocm_attn.kernels.cdna.latent_blocks import (
    REST,
    ROWS,
    V_DIM,
    WAVES,
    CdnaLatentGeometry,
    LatentLine,
    attend_latent_blocks,
    load_query,
    total_layout,
    value_layout,
)
from rocm_attn.kernels.cdna.latent_codes import (
    allocate_codes,
    attend_codes,
    load_coded_queries,
    store_coded_heads,
)
from rocm_attn.kernels.cdna.latent_heads import (
    allocate,
    attend_heads,
    load_queries,
    store_heads,
    store_sums,
)
from rocm_attn.kernels.cdna.latent_layouts import shares_rows
from rocm_attn.kernels.latent.cuts import latent_partials_words, latent_row_cut
from rocm_attn.kernels.latent.key_loop import read_strides
from rocm_attn.kernels.latent.limits import check_plain_latents
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_CODES, EXTEND_UNITS
from rocm_attn.kernels.tuning.latent_tiles import cdna_latent_tiles

# Columns of a part of the accumulator in which waves add it up, so that all of their parts fit into LDS.
PART = gl.constexpr(128)
_PART_COLUMNS = [[0, 0, 1 << i] for i in range(7)]


@constexpr_function
def _part_in_lds() -> gl.constexpr:
    """A part of the accumulators of all waves, [WAVES, ROWS, PART], in LDS."""
    rows = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]]
    bits = [*_PART_COLUMNS, *rows, [1, 0, 0], [2, 0, 0]]
    return gl.PaddedSharedLayout([[PART.value, 4]], bits, [], [WAVES.value, ROWS.value, PART.value])


@constexpr_function
def _part_of_waves() -> gl.constexpr:
    """The layout in which a wave adds up the parts of all waves, of some query heads."""
    registers = [*_PART_COLUMNS[:2], [1, 0, 0], [2, 0, 0], [0, 8, 0]]
    lanes, waves = [*_PART_COLUMNS[2:], [0, 1, 0]], [[0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [WAVES.value, ROWS.value, PART.value])


@gluon.jit
def _parts_of(acc):
    """The accumulators' parts of PART columns, each [WAVES, ROWS, PART]."""
    acc = gl.reshape(acc, [WAVES, 8, 2, 2, V_DIM // 32, ROWS])
    even, odd = gl.split(gl.permute(acc, (0, 5, 4, 1, 2, 3)))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def store_row(state, to, token, part, is_whole, G: gl.constexpr):
    """Adds up the waves' states and stores the results of a row, or the program's part of a row that others share."""
    R: gl.constexpr = G.rows
    X: gl.constexpr = gl.SliceLayout(0, _part_of_waves())
    H: gl.constexpr = gl.SliceLayout(1, X)
    maximum = gl.max(state.maximum, 0)
    # A wave that had no key: 0.
    scale = gl.exp2(state.maximum - maximum[None, :])
    total = state.total * gl.convert_layout(scale, gl.SliceLayout(1, total_layout()))[:, None, :]
    total = gl.convert_layout(gl.sum(gl.sum(total, 1), 0), H)
    maximum = gl.convert_layout(maximum, H)
    parts = _parts_of(state.acc * gl.convert_layout(scale, gl.SliceLayout(1, value_layout(G)))[:, None, :])
    head = gl.arange(0, ROWS, layout=H)
    is_head = head < R.GQA_RATIO
    divisor = store_sums(maximum, total, to, HeadsOfToken(token, head, is_head), part, is_whole, G)
    lds = gl.allocate_shared_memory(gl.float32, [WAVES, ROWS, PART], _part_in_lds())
    column = gl.arange(0, PART, layout=gl.SliceLayout(0, X))[None, :]
    for i in gl.static_range(V_DIM // PART):
        lds.store(gl.reshape(parts[i], [WAVES, ROWS, PART]))
        value = gl.sum(lds.load(_part_of_waves()), 0)
        if is_whole:
            out = to.out.at + token * to.out.token + head.to(gl.int64)[:, None] * to.out.head
            result = (value / divisor[:, None]).to(to.out.at.dtype.element_ty)
            gl.store(out + (i * PART + column), result, mask=is_head[:, None])
        else:
            gl.store(
                to.parts + (part * R.Q_ROWS + head)[:, None] * V_DIM + (i * PART + column), value, mask=is_head[:, None]
            )


@gluon.jit
def store_nothing(to, token, first_head, num_heads, G: gl.constexpr):
    """Stores the results of a sequence without keys, for some heads."""
    X: gl.constexpr = gl.SliceLayout(0, _part_of_waves())
    for tile in gl.static_range(G.HEADS // ROWS):
        head = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, X))
        if shares_rows(G):
            # Offsets are computed here, and not kept in registers that are few.
            head = here(head)
        is_head = head < num_heads
        zeros = gl.full([ROWS, PART], 0.0, to.out.at.dtype.element_ty, layout=X)
        column = gl.arange(0, PART, layout=gl.SliceLayout(0, X))[None, :]
        out = to.out.at + token * to.out.token + (first_head + head).to(gl.int64)[:, None] * to.out.head
        for i in gl.static_range(V_DIM // PART):
            gl.store(out + (i * PART + column), zeros, mask=is_head[:, None])
        if to.lse is not None:
            lse = to.lse.at + token * to.lse.token + (first_head + head).to(gl.int64) * to.lse.head
            gl.store(lse, gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, X)), mask=is_head)


@gluon.jit
def _work_of(launched, num_programs, G: gl.constexpr):
    """The number of a program in the schedule, its first query head, and the number of its heads."""
    R: gl.constexpr = G.rows
    OF_BLOCK: gl.constexpr = (R.GQA_RATIO + G.HEAD_BLOCKS - 1) // G.HEAD_BLOCKS
    if G.HEAD_BLOCKS == 1:
        program, first_head, num_heads = launched, 0, R.GQA_RATIO
    else:
        program = launched % num_programs
        first_head = launched // num_programs * OF_BLOCK
        num_heads = gl.minimum(R.GQA_RATIO - first_head, OF_BLOCK)
    return program, first_head, num_heads


@gluon.jit(do_not_specialize=["num_programs"])
def _cdna_latent_decode_kernel(
    q,
    pages,
    table: tl.const,
    row_of_seq: tl.const,
    q_indptr: tl.const,
    schedule: tl.const,
    partials,
    out,
    lse,
    scale: tl.const,
    qk_scale,
    num_programs,
    q_token,
    q_head,
    p_page,
    p_token,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: gl.constexpr,
):
    R: gl.constexpr = G.rows
    program, first_head, num_heads = _work_of(gl.program_id(0), num_programs, G)
    words = words_of_program(schedule, program)
    seq, row, done, work, kv_len = work_at(words)
    sums = partials + num_programs * (2 * R.Q_ROWS * V_DIM)
    to = RowOutputs(
        HeadRows(out, out_token, out_head), None if lse is None else HeadRows(lse, lse_token, lse_head), partials, sums
    )
    if is_coded(G.CODING.ENCODING):
        lds = allocate_codes(G)
    elif shares_rows(G):
        lds = allocate(q.dtype.element_ty, G)
    while work > 0:
        num_blocks = (kv_len + R.KEY_BLOCK - 1) // R.KEY_BLOCK
        row_cost = gl.where(kv_len < 0, 0, num_blocks + R.ROW_COST)
        take = gl.minimum(work, row_cost - done)
        first_block = gl.maximum(done - R.ROW_COST, 0)
        end_block = done + take - R.ROW_COST
        token = gl.load(q_indptr + seq).to(gl.int64)
        # The program that begins a sequence without keys writes its zeros.
        if (kv_len == 0) & (done == 0):
            store_nothing(to, token, first_head, num_heads, G)
        if end_block > first_block:
            rows = LatentLine(
                pages.to(gl.pointer_type(gl.int32)),
                p_page // in_word(G.CODING),
                p_token // in_word(G.CODING),
                table + gl.load(row_of_seq + seq).to(gl.int64) * table_row,
                gl.minimum(end_block * R.KEY_BLOCK, kv_len) - 1,
            )
            # Part 2p of program p goes to a row begun by an earlier program, 2p + 1 to one that goes on.
            part = 2 * program + (first_block == 0).to(gl.int32)
            is_whole = end_block - first_block == num_blocks
            at = q + token * q_token + tl.cast(first_head, gl.int64) * q_head
            if is_coded(G.CODING.ENCODING):
                queries, factor = load_coded_queries(lds, HeadRows(at, q_token, q_head), num_heads, G)
                of_rows = row_scale(scale, 0, G.CODING)
                scaled, _ = coded_scales(qk_scale, None, of_rows * factor, False, G.CODING)
                state = attend_codes(lds, queries, rows, first_block, end_block, kv_len, scaled, G)
                store_coded_heads(lds, state, to, token, first_head, num_heads, part, is_whole, of_rows, G)
            elif not shares_rows(G):
                of_token = HeadRows(q + token * q_token, q_token, q_head)
                query = (load_query(of_token, 0, V_DIM, G), load_query(of_token, V_DIM, REST, G))
                state = attend_latent_blocks(query, rows, first_block, end_block, kv_len, qk_scale, G)
                store_row(state, to, token, part, is_whole, G)
            else:
                queries = load_queries(lds, HeadRows(at, q_token, q_head), num_heads, G)
                DTYPE: gl.constexpr = q.dtype.element_ty
                state = attend_heads(lds, queries, rows, first_block, end_block, kv_len, qk_scale, DTYPE, G)
                store_heads(lds, state, to, token, first_head, num_heads, part, is_whole, G)
        work -= take
        done = 0
        seq, row, kv_len = next_row(schedule, num_programs, work, seq, row, R.ROWS, kv_len)


def launch_cdna_latent_decode(args: AttendArgs, *, arch: str, scores: Scores, cut: DecodeCut) -> None:
    """Like `launch_latent_decode`, but for one new token, without windows, caps, sinks, masks, over rows of 512 + 64
    elements in q's dtype, or in the codes that the arch's hardware reads, with a scale of the layer and q in bfloat16.

    arch: one of cdna_tiles.EXTEND_ARCHS
    cut:  of latent_decode_cut, for cdna_latent_tiles

    Raises ValueError for heads, dims, pages or dtypes that the kernel does not serve.
    """
    queries, table, pages = args.queries, args.table, args.pages
    geometry = _geometry(args, arch, scores, cut)
    launch(
        _cdna_latent_decode_kernel,
        (cut.programs * geometry.HEAD_BLOCKS,),
        args.q,
        pages.raw_k,
        table,
        queries.row_of_seq,
        queries.q_indptr,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        pages.k_scale,
        scores.base_2_scale,
        cut.programs,
        *read_strides(args),
        *args.written_strides,
        G=geometry,
        num_warps=WAVES.value,
    )
    launch_merge(args, cut, geometry.rows)


def _geometry(args: AttendArgs, arch: str, scores: Scores, cut: DecodeCut) -> CdnaLatentGeometry:
    """Checks the arguments and returns the values that the launch is compiled for."""
    check_plain_latents(args, scores, "latent decode on CDNA")
    num_heads, pages = args.q.shape[1], args.pages
    encoding = pages.format.encoding
    tiles = cdna_latent_tiles(num_heads, pages.format.page_size, is_coded=encoding.is_fp8)
    if encoding.is_fp8:
        assert encoding is EXTEND_CODES[arch], "other codes have no tiles"
        assert pages.format.scales is Scales.LAYER, "the limits refuse other scales"
        assert args.q.dtype == torch.bfloat16, "q is the sum of two codes"
    v_in_lds = encoding.is_fp8 and EXTEND_UNITS[arch].TRANSPOSES and begin_at_16(pages.raw_k)
    in_words = 4 // pages.raw_k.itemsize
    assert pages.raw_k.data_ptr() % 4 == 0, "words of 4 bytes are read"
    assert not any(stride % in_words for stride in pages.raw_k.stride()[:2]), "words of 4 bytes are read"
    cut.check(args.schedule, args.queries.num_seqs)
    assert cut.key_block == tiles.key_block, "the schedule was cut for other tiles"
    assert cut.tokens.MOST == 1, "the schedule was cut for more tokens"
    args.check_workspace(latent_partials_words(cut, num_heads=num_heads, v_head_dim=V_DIM.value))
    return CdnaLatentGeometry(
        rows=latent_row_cut(cut, num_heads),
        HEADS=tiles.query_rows,
        HEAD_BLOCKS=tiles.head_blocks(num_heads),
        PAGE_SIZE=pages.format.page_size,
        # Codes of V in registers leave room for one block of K.
        BLOCKS=1 if encoding.is_fp8 and not v_in_lds else tiles.num_stages,
        UNITS=EXTEND_UNITS[arch],
        CODING=pages.coding,
        V_IN_LDS=v_in_lds,
    )
