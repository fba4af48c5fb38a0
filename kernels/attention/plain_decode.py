"""Paged decode as plainly as it can be written: the first kernel to read. Runtimes run decode.py, which is faster.

    out[token] = softmax(scale * q[token] . K^T) V      K, V: the keys that the sequence's only new token sees

A program serves one sequence and one KV head: it walks the sequence's keys block by block, finds each key's page in the
block table, and keeps a running maximum, sum and accumulator (online softmax, in base 2). decode.py shares a sequence
out among programs and merges their parts, keeps eight-bit pages, and adds sinks, slopes and caps. Both are compared in
tests/amd/kernels/test_paged_decode.py.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.scores import LOG2_E, Scores
from rocm_attn.kernels.attention.softmax import LN_2
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_KEYS_OF_A_BLOCK = 32
# tl.dot multiplies no fewer rows or columns.
_LEAST = 16


@triton.jit
def _plain_decode_kernel(
    q, k_pages, v_pages, table, row_of_seq, kv_len, q_indptr, out, lse, scale, window_left, table_width,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_row, out_token, out_head,
    lse_token, lse_head,
    RATIO: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, K_COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr,
):  # fmt: skip
    seq, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.load(q_indptr + seq).to(tl.int64)
    # Pads, and sequences with several new tokens, are not this kernel's: they have no rows and no keys.
    is_mine = tl.load(q_indptr + seq + 1) - token == 1
    length = tl.where(is_mine, tl.load(kv_len + seq), 0)
    first = tl.where(window_left < 0, 0, tl.maximum(length - 1 - window_left, 0))

    row = tl.arange(0, ROWS)
    head, is_row = kv_head * RATIO + row, row < tl.where(is_mine, RATIO, 0)
    k_column, v_column = tl.arange(0, K_COLUMNS), tl.arange(0, V_COLUMNS)
    is_k, is_v = (k_column < HEAD_DIM)[None, :], (v_column < V_HEAD_DIM)[None, :]
    q_at = q + token * q_token + (head * q_head)[:, None] + k_column[None, :]
    queries = tl.load(q_at, mask=is_row[:, None] & is_k, other=0.0)
    pages_of_row = table + tl.load(row_of_seq + seq).to(tl.int64) * table_row

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, V_COLUMNS), tl.float32)
    for start in range(first // KEYS * KEYS, length, KEYS):
        key = start + tl.arange(0, KEYS)
        page_no = key // PAGE_SIZE
        is_seen = (key >= first) & (key < length) & (page_no < table_width)
        # 64 bits before a stride is multiplied: pools are larger than 2 GiB.
        page = tl.load(pages_of_row + page_no, mask=is_seen, other=0).to(tl.int64)
        offset = (key % PAGE_SIZE).to(tl.int64)
        k_at = k_pages + (page * k_page + offset * k_token + kv_head * k_head)[:, None] + k_column[None, :]
        v_at = v_pages + (page * v_page + offset * v_token + kv_head * v_head)[:, None] + v_column[None, :]
        # Memory that no key lies in may hold NaN, so what is masked is read as 0, in V as in K: 0 * NaN is NaN.
        k = tl.load(k_at, mask=is_seen[:, None] & is_k, other=0.0)
        v = tl.load(v_at, mask=is_seen[:, None] & is_v, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        weights, kept = tl.exp2(scores - larger[:, None]), tl.exp2(maximum - larger)
        total = total * kept + tl.sum(weights, 1)
        accumulator = accumulator * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = larger

    # A sequence without keys has the maximum -inf: its result is 0, and its logarithm -inf.
    total = tl.where(total > 0.0, total, 1.0)
    out_at = out + token * out_token + (head * out_head)[:, None] + v_column[None, :]
    result = (accumulator / total[:, None]).to(out.dtype.element_ty)
    tl.store(out_at, result, mask=is_row[:, None] & is_v)
    tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def launch_plain_decode(args: AttendArgs, *, scores: Scores) -> None:
    """Attends for every sequence with exactly one new token; other tokens of out and lse stay unchanged.

    Raises ValueError for a problem that no kernel serves. Sinks, slopes, caps and eight-bit pages are not served, nor
    keys that begin after the first page of a row; lse is needed.
    """
    args.check("plain_decode")
    queries, form, lse = args.queries, args.pages.format, args.lse
    assert lse is not None
    assert args.sinks is args.slopes is queries.first_page is None
    assert scores.soft_cap == 0 and not form.encoding.is_fp8  # noqa: PT018
    num_kv_heads, ratio = args.heads
    launch(
        _plain_decode_kernel, (queries.num_seqs, num_kv_heads),
        args.q, args.pages.k, args.pages.v, args.table, queries.row_of_seq, queries.kv_len, queries.q_indptr,
        args.out, lse, scores.scale * LOG2_E, scores.visibility.window_left, args.table.shape[1],
        *args.read_strides, *args.written_strides,
        RATIO=ratio, PAGE_SIZE=form.page_size, HEAD_DIM=form.head_dim, V_HEAD_DIM=form.v_head_dim,
        ROWS=max(_LEAST, next_power_of_2(ratio)), KEYS=_KEYS_OF_A_BLOCK,
        K_COLUMNS=max(_LEAST, next_power_of_2(form.head_dim)), V_COLUMNS=max(_LEAST, next_power_of_2(form.v_head_dim)),
        num_warps=4,
    )  # fmt: skip
