"""Attention to chosen blocks equals FlashInfer's definition, and reads no key of another block."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor, Unsupported, WrongState
from rocm_attn.integrations import flashinfer
from tests.amd.integrations.batches import DIM, KV_HEADS, NAN, Q_HEADS, check, indptr, ints, workspace
from tests.amd.integrations.oracle import Array, Scores, attention

SIZES = Q_HEADS, KV_HEADS, DIM


def rows_of(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float().to(device)


def wanted(q: Tensor, k: Tensor, v: Tensor, shown: Array, scale: float, cap: float = 0.0) -> tuple[Array, Array]:
    """Returns the reference over all keys, of which each query sees those of shown [queries, keys]."""
    rows, keys, values = (each.cpu().double().nan_to_num(0).numpy() for each in (q, k, v))
    return attention(rows, keys, values, Scores(scale, causal=False, cap=cap, shown=shown))


# rows, columns: of a block. 12 is no power of two, and 96 more than the tokens of a page.
@pytest.mark.parametrize(("rows", "columns", "masked"), [(4, 8, False), (3, 12, True), (16, 1, True), (1, 96, False)])
def test_each_row_of_blocks_sees_the_columns_that_it_names(
    rows: int, columns: int, masked: bool, device: torch.device
) -> None:
    random = np.random.default_rng(rows)
    num_rows, num_columns = 5, 6
    queries, keys = num_rows * rows - rows // 2, num_columns * columns
    chosen = random.integers(0, 2, (num_rows, num_columns)).astype(bool)
    chosen[1], chosen[:, 2] = False, False  # a row without a column, and a column that no row names
    chosen[0, 0] = True
    order = [random.permutation(np.flatnonzero(row)) for row in chosen]
    nnz = sum(map(len, order))
    mask = random.integers(0, 2, (nnz, rows, columns)).astype(bool) if masked else np.ones((nnz, rows, columns), bool)
    shown = np.zeros((queries, keys))
    block = 0
    for row, names in enumerate(order):
        for column in names:
            cells = mask[block, : queries - row * rows]
            shown[row * rows : row * rows + len(cells), column * columns : (column + 1) * columns] = cells
            block += 1
    q = rows_of((queries, Q_HEADS, DIM), 1, device)
    k, v = (rows_of((keys, KV_HEADS, DIM), seed, device) for seed in (2, 3))
    for side in (k, v):
        side[2 * columns : 3 * columns] = NAN
    wrapper: Any = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    lists = indptr([len(names) for names in order], device), ints(np.concatenate(order).tolist(), device)
    blocks = *lists, queries, keys, rows, columns
    given: dict[str, Any] = {"mask": torch.from_numpy(mask).to(device)} if masked else {}
    dtypes: dict[str, Any] = {"q_data_type": torch.float32, "o_data_type": None}
    wrapper.plan(*blocks, *SIZES, sm_scale=0.3, logits_soft_cap=5.0, **given, **dtypes)
    expected = wanted(q, k, v, shown, 0.3, 5.0)
    check(wrapper.run(q, k, v, return_lse=True), expected)
    found = wrapper.forward(q, k, v, sm_scale=0.2)
    assert isinstance(found, Tensor)
    other, lse = wanted(q, k, v, shown, 0.2)
    check((found, torch.from_numpy(lse)), (other, lse))
    if masked:
        # Each row's cells as FlashInfer packs them: a row of queries after the other, over the keys that it names.
        sizes = [len(names) * columns * min(rows, queries - row * rows) for row, names in enumerate(order)]
        of_rows = [
            each.transpose(1, 0, 2).reshape(rows, -1)[: queries - row * rows].ravel()
            for row, each in enumerate(np.split(mask, np.cumsum([len(names) for names in order])[:-1]))
        ]
        packed, _ = flashinfer.segment_packbits(
            torch.from_numpy(np.concatenate(of_rows)).to(device), indptr(sizes, device), "little"
        )
        wrapper.plan(*blocks, *SIZES, sm_scale=0.3, logits_soft_cap=5.0, packed_mask=packed, **dtypes)
        check(wrapper.run(q, k, v, return_lse=True), expected)


def test_outputs_are_float16_unless_another_dtype_is_asked_for(device: torch.device) -> None:
    wrapper: Any = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(ints([0, 1], device), ints([1], device), 2, 8, 2, 4, *SIZES, q_data_type="float32")
    q, k = rows_of((2, Q_HEADS, DIM), 0, device), rows_of((8, KV_HEADS, DIM), 1, device)
    found = wrapper.run(q, k, k)
    assert isinstance(found, Tensor)
    assert found.dtype == torch.float16


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_each_kv_head_may_choose_blocks_of_other_sizes(kv_heads: int, device: torch.device) -> None:
    random = np.random.default_rng(kv_heads)
    row_sizes = np.array([[3, 0, 5, 2], [1, 4, 2, 3]])[:kv_heads]
    col_sizes = np.array([[7, 1, 0, 12, 4], [4, 4, 9, 1, 6]])[:kv_heads]
    queries, keys = 10, 24
    chosen = random.integers(0, 2, (kv_heads, 4, 5)).astype(bool)
    chosen[:, 3] = False
    chosen[0, :, 0], chosen[0, 2, 3] = False, True
    q = rows_of((Q_HEADS, queries, DIM), 1, device)
    k, v = (rows_of((kv_heads, keys, DIM), seed, device) for seed in (2, 3))
    for side in (k, v):
        side[0, :7] = NAN
    wrapper: Any = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    sizes = [torch.from_numpy(each).int().to(device) for each in (row_sizes, col_sizes)]
    mask = torch.from_numpy(chosen).to(device)
    wrapper.plan(mask, *sizes, Q_HEADS, kv_heads, DIM, sm_scale=0.3, q_data_type="float32")
    outs, lses = [], []
    group = Q_HEADS // kv_heads
    for head in range(kv_heads):
        shown = np.repeat(np.repeat(chosen[head], row_sizes[head], 0), col_sizes[head], 1).astype(np.float64)
        its = q[head * group : (head + 1) * group].transpose(0, 1)
        out, lse = wanted(its, k[head, :, None], v[head, :, None], shown, 0.3)
        outs.append(out.transpose(1, 0, 2))
        lses.append(lse.T)
    expected = np.concatenate(outs), np.concatenate(lses)
    check(wrapper.run(q, k, v, return_lse=True), expected)
    own = torch.empty((kv_heads * queries, group, DIM), device=device)
    own_lse = torch.empty((kv_heads * queries, group), device=device)
    check(wrapper.run(q, k, v, out=own, lse=own_lse, return_lse=True), expected)
    found = wrapper.forward(q, k, v, sm_scale=0.3)
    assert isinstance(found, Tensor)
    check((found, torch.from_numpy(expected[1])), expected)
    check(
        (torch.unflatten(own, 0, (kv_heads, -1)).transpose(1, 2).flatten(0, 1), torch.from_numpy(expected[1])), expected
    )


def test_wrong_blocks_are_refused(device: torch.device) -> None:
    wrapper: Any = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    lists = ints([0, 1, 2], device), ints([0, 1], device)
    q, k = rows_of((8, Q_HEADS, DIM), 0, device), rows_of((8, KV_HEADS, DIM), 1, device)
    with pytest.raises(WrongState, match=r"call plan.. before run"):
        wrapper.run(q, k, k)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((*lists, 8, 9, 4, 4), {}, BadBatch, "8 queries and 9 keys in blocks of 4 x 4"),
        ((*lists, 9, 8, 4, 4), {}, BadBatch, r"indptr is \[0, 1, 2\]...; it must begin at 0.* have 4 entries"),
        ((ints([0, 2, 1], device), lists[1], 8, 8, 4, 4), {}, BadBatch, "never fall"),
        ((ints([0, 1, 3], device), lists[1], 8, 8, 4, 4), {}, BadBatch, "end within the 2 indices"),
        ((lists[0], ints([0, 2], device), 8, 8, 4, 4), {}, BadBatch, "indices name blocks outside of 0 to 1"),
        ((lists[0], torch.tensor([0, 2**62], device=device), 8, 512, 4, 256), {}, BadBatch, "outside of 0 to 1"),
        ((lists[0], ints([0, -(2**30)], device), 8, 512, 4, 256), {}, BadBatch, "outside of 0 to 1"),
        ((*lists, 8, 8, 4, 4), {"mask": torch.ones(3, 4, 4)}, BadTensor, r"mask is .3, 4, 4.; it must be .2, 4, 4."),
        ((*lists, 8, 8, 4, 4), {"causal": True}, Unsupported, "causal is not served over chosen blocks"),
        ((*lists, 8, 8, 4, 4), {"block_mask": k}, Unsupported, "block_mask is not served: .*use VariableBlock"),
        ((*lists, 8, 8, 4, 4), {"q_scale": k}, Unsupported, "q_scale is not served: scales of blocks"),
    ]
    for blocks, more, error, message in wrong:
        with pytest.raises(error, match=message):
            wrapper.plan(*blocks, *SIZES, q_data_type="float32", **more)
    wrapper.plan(*lists, 8, 8, 4, 4, *SIZES, q_data_type="float32")
    with pytest.raises(BadTensor, match=r"k is \[7, 2, 16\]; it must be \[8, kv_heads, head_dim\]"):
        wrapper.run(q, k[:7], k)
    with pytest.raises(BadTensor, match=r"q is torch\.float32"):
        wrapper.run(q[:7], k, k)
    with pytest.raises(Unsupported, match="scale_k is not served"):
        wrapper.run(q, k, k, scale_k=k)


def test_wrong_blocks_of_heads_are_refused(device: torch.device) -> None:
    wrapper: Any = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    mask, rows, columns = torch.ones(2, 2, 3, device=device), ints([2, 2], device), ints([4, 0, 4], device)
    sizes = rows.expand(2, 2), columns.expand(2, 3)
    wrong: list[tuple[tuple[Tensor, ...], tuple[int, int], dict[str, Any], type[Exception], str]] = [
        ((mask[0], *sizes), (4, 2), {}, BadTensor, r"block_mask_map is \[2, 3\]"),
        ((mask, sizes[0][:1], sizes[1]), (4, 2), {}, BadTensor, r"block_row_sz \[1, 2\]"),
        ((mask, *sizes), (3, 2), {}, BadBatch, "num_qo_heads is 3; it must be a multiple of num_kv_heads, 2"),
        (
            (mask, ints([2, 2, 2, 1], device).view(2, 2), sizes[1]),
            (4, 2),
            {},
            BadBatch,
            r"block_row_sz has sums \[4, 3\]",
        ),
        ((mask, sizes[0], ints([9, -1, 0] * 2, device).view(2, 3)), (4, 2), {}, BadBatch, "no size negative"),
        ((mask, *sizes), (4, 2), {"causal": True}, Unsupported, "causal is not served over chosen blocks"),
    ]
    for blocks, heads, more, error, message in wrong:
        with pytest.raises(error, match=message):
            wrapper.plan(*blocks, *heads, DIM, q_data_type="float32", **more)
    wrapper.plan(mask, *sizes, 4, 2, DIM, q_data_type="float32")
    q, k = rows_of((4, 4, DIM), 0, device), rows_of((2, 8, DIM), 1, device)
    with pytest.raises(BadTensor, match=r"k is \[1, 8, 16\]; it must be \[2, tokens, head_dim\]"):
        wrapper.run(q, k[:1], k)
    with pytest.raises(BadTensor, match=r"q is torch\.float32"):
        wrapper.run(q[:, :3], k, k)
    with pytest.raises(BadTensor, match="the KV cache has pages 0 to 13"):
        wrapper.run(q, k[:, :7], k[:, :7])
