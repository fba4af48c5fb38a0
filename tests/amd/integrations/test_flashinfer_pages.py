"""Appending to pages, and merging states, by FlashInfer's names."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadTensor, Unsupported, WrongState
from rocm_attn.integrations import flashinfer
from tests.amd.integrations.batches import (
    DIM,
    KV_HEADS,
    Q_HEADS,
    SIZES,
    check,
    indptr,
    ints,
    new_batch,
    queries,
    wanted,
    workspace,
)
from tests.amd.integrations.oracle import Array, Scores

OLD, NEW = (3, 0, 6), (1, 7, 2)
LENS = tuple(old + new for old, new in zip(OLD, NEW, strict=True))


def test_positions_of_new_tokens_follow_from_lengths(device: torch.device) -> None:
    append_indptr = indptr([1, 2, 3, 4], device)
    seqs, places = flashinfer.get_batch_indices_positions(append_indptr, ints([5] * 4, device), 12)
    assert seqs.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1]
    assert places.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0]
    given = torch.empty_like(seqs), torch.empty_like(places)
    found = flashinfer.get_batch_indices_positions(append_indptr, ints([5] * 4, device), 12, *given)
    assert found[0] is given[0]
    assert found[1] is given[1]
    assert found[0].equal(seqs)
    assert found[1].equal(places)
    assert flashinfer.get_batch_indices_positions(ints([0], device), ints([], device), 2)[0].tolist() == [-1, -1]
    with pytest.raises(BadTensor, match=r"positions is torch.int32"):
        flashinfer.get_batch_indices_positions(append_indptr, ints([5] * 4, device), 9, positions=given[1])
    with pytest.raises(BadTensor, match=r"names 3 sequences and seq_lens is .2."):
        flashinfer.get_batch_indices_positions(ints([0, 1, 2, 3], device), ints([1, 1], device), 3)


@pytest.mark.parametrize(("page_size", "layout"), [(4, "NHD"), (5, "HND")])
def test_appended_tokens_are_where_attention_looks_for_them(page_size: int, layout: str, device: torch.device) -> None:
    batch = new_batch(LENS, page_size, layout, device=device)
    cache = torch.full_like(batch.cache, 7.0)
    seqs, places, rows = _appended(batch.k, batch.v, device)
    flashinfer.append_paged_kv_cache(
        *rows, seqs, places, cache, batch.indices, batch.indptr, batch.last_page_len, layout
    )
    is_kv = batch.cache == batch.cache
    assert cache[is_kv].equal(batch.cache[is_kv])
    assert (cache[~is_kv] == 7.0).all(), "what no token has stays"


def _appended(k: list[Array], v: list[Array], device: torch.device) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Appends every token of every sequence."""
    seqs, places = flashinfer.get_batch_indices_positions(indptr(LENS, device), ints(LENS, device), sum(LENS))
    rows = [torch.from_numpy(np.concatenate(side)).float().to(device) for side in (k, v)]
    return seqs, places, (rows[0], rows[1])


def test_tokens_without_a_place_are_written_nowhere(device: torch.device) -> None:
    batch = new_batch(LENS, 4, device=device)
    cache = torch.full_like(batch.cache, 7.0)
    rows = torch.ones((9, KV_HEADS, DIM), device=device)
    # Sequences have 1, 2 and 2 pages, and those of the last one do not exist.
    seqs, places = ints([-1, 3, 0, 0, 1, 0, 2, 2, 2], device), ints([0, 0, 4, -1, 8, 999, 9, 0, 4], device)
    indices = batch.indices.clone()
    indices[3], indices[4] = cache.shape[0], -1
    flashinfer.append_paged_kv_cache(rows, rows, seqs, places, cache, indices, batch.indptr, batch.last_page_len)
    assert (cache == 7.0).all()
    flashinfer.append_paged_kv_cache(rows, rows, seqs, places, cache, ints([], device), batch.indptr, ints([], device))
    assert (cache == 7.0).all()


def test_what_cannot_be_appended_is_refused(device: torch.device) -> None:
    batch = new_batch(LENS, 4, device=device)
    seqs, places, (k, v) = _appended(batch.k, batch.v, device)
    lists = batch.indices, batch.indptr, batch.last_page_len
    for rows, message in [
        ((k[:-1], v), "the first side of new tokens is torch.float32 .18, 2, 16."),
        ((k, v.half()), "the second side of new tokens is torch.float16"),
        ((k, v[:, :1]), "the second side of new tokens is"),
    ]:
        with pytest.raises(BadTensor, match=message):
            flashinfer.append_paged_kv_cache(*rows, seqs, places, batch.cache, *lists)
    for at, message in [
        ((seqs, places[:1]), "positions is torch.int32 .1.; it must be integers, one for each of 19 new tokens"),
        ((seqs[:1], places), "positions is torch.int32 .19.; it must be integers, one for each of 1 new tokens"),
        ((seqs, places.float()), "positions is torch.float32"),
        ((seqs[None], places), "batch_indices is torch.int32 .1, 19."),
    ]:
        with pytest.raises(BadTensor, match=message):
            flashinfer.append_paged_kv_cache(k, v, *at, batch.cache, *lists)
    scattered = torch.zeros_like(batch.cache[:, 0]).transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(BadTensor, match="the elements of a head must be contiguous"):
        flashinfer.append_paged_kv_cache(k, v, seqs, places, (scattered, batch.cache[:, 1]), *lists)
    codes = batch.cache.to(torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match="cannot be appended to"):
        flashinfer.append_paged_kv_cache(k.to(codes.dtype), v.to(codes.dtype), seqs, places, codes, *lists)
    with pytest.raises(BadTensor, match="are None; give both"):
        flashinfer.append_paged_mla_kv_cache(k[:, 0], v[:, 0], seqs, places, None, None, *lists)


def test_latent_rows_are_appended_to_both_caches(device: torch.device) -> None:
    batch = new_batch(LENS, 4, device=device)
    seqs, places, (k, v) = _appended(batch.k, batch.v, device)
    ckv, kpe = torch.cat((k[:, 0], v[:, 0]), -1), k[:, 1]
    pool = torch.full((len(batch.indices), 4, 3 * DIM), 7.0, device=device)
    caches = pool[..., : 2 * DIM], pool[..., 2 * DIM :]
    lists = batch.indices, batch.indptr, batch.last_page_len
    flashinfer.append_paged_mla_kv_cache(ckv, kpe, seqs, places, *caches, *lists)
    page = batch.indices.long()[batch.indptr.long()[seqs.long()] + places.long() // 4]
    assert pool[page, places.long() % 4].equal(torch.cat((ckv, kpe), -1))
    assert int((pool != 7.0).any(-1).sum()) == sum(LENS)


def parts(device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], tuple[Array, Array]]:
    """Returns states over three parts of the keys of one sequence, and attention over all of them."""
    batch = new_batch((12,), 4, device=device)
    k, v = (torch.from_numpy(side[0]).float().to(device) for side in (batch.k, batch.v))
    q = queries(5, device=device)
    states = []
    for keys in (slice(0, 3), slice(3, 4), slice(4, 12)):
        state = flashinfer.single_prefill_with_kv_cache(q, k[keys], v[keys], sm_scale=0.3, return_lse=True)
        assert isinstance(state, tuple)
        states.append(state)
    return states, wanted(batch, q, [5], [Scores(0.3, causal=False)])


def test_merged_states_are_attention_over_all_keys(device: torch.device) -> None:
    states, expected = parts(device)
    check(flashinfer.merge_state(*flashinfer.merge_state(*states[0], *states[1]), *states[2]), expected)
    v, s = (torch.stack(each, 1) for each in zip(*states, strict=True))
    check(flashinfer.merge_states(v, s), expected)
    v = v.transpose(2, 3).contiguous().transpose(2, 3)
    check(flashinfer.merge_states(v, s), expected)
    with pytest.raises(BadTensor, match="it is written, so its last stride must be 1"):
        flashinfer.merge_state_in_place(v[:, 0], s[:, 0], *states[1])
    out, lse = (each.double().cpu().numpy() for each in states[0])
    check(flashinfer.merge_states(v[:, :1], s[:, :1]), (out, lse))
    merged = states[2][0].clone(), states[2][1].clone()
    flashinfer.merge_state_in_place(*merged, *states[0])
    flashinfer.merge_state_in_place(*merged, *states[1], mask=torch.ones(5, dtype=torch.bool, device=device))
    check(merged, expected)


def test_a_mask_leaves_states_as_they_are(device: torch.device) -> None:
    states, expected = parts(device)
    v, s = flashinfer.merge_state(*states[0], *states[1])
    s[1] = float("-inf")  # nothing was seen: then v counts for nothing, and stays
    before = v.clone(), s.clone()
    mask = torch.tensor([True, False, True, False, False], device=device)
    flashinfer.merge_state_in_place(v, s, *states[2], mask)
    assert v[~mask].equal(before[0][~mask])
    assert s[~mask].equal(before[1][~mask])
    at = mask.cpu().numpy()
    check((v[mask], s[mask]), (expected[0][at], expected[1][at]))


def test_states_that_do_not_fit_are_refused(device: torch.device) -> None:
    v, s = torch.zeros((3, Q_HEADS, DIM), device=device), torch.zeros((3, Q_HEADS), device=device)
    with pytest.raises(BadTensor, match="the sides are"):
        flashinfer.merge_state(v, s, v[:2], s[:2])
    with pytest.raises(BadTensor, match=r"they must be .tokens, heads, dim. and .tokens, heads."):
        flashinfer.merge_state(v, s[:2], v, s)
    with pytest.raises(BadTensor, match=r"it is written, so it must be torch.float32"):
        flashinfer.merge_state_in_place(v, s.double(), v, s)
    with pytest.raises(BadTensor, match=r"mask is .2."):
        flashinfer.merge_state_in_place(v, s, v, s, torch.ones(2, device=device))
    with pytest.raises(BadTensor, match="tokens, sides, heads, dim"):
        flashinfer.merge_states(v, s)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_levels_of_shared_kv_are_attention_over_all_of_them(layout: str, device: torch.device) -> None:
    # Pages 0 to 5 of one cache: a shared prefix of 8 tokens, and each sequence's own tokens.
    batch = new_batch((8, 3, 6), 4, layout, device=device)
    own, q_lens = (3, 6), (2, 4)
    shared, unique = batch.indices[:2], batch.indices[2:]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), layout)
    wrapper.plan(
        [ints([0, sum(q_lens)], device), indptr(q_lens, device)],
        [ints([0, 2], device), ints([0, 1, 3], device)],
        [shared, unique],
        [ints([4], device), ints([3, 2], device)],
        Q_HEADS,
        KV_HEADS,
        DIM,
        4,
        causal=True,
        sm_scale=0.3,
        q_data_type=torch.float32,
    )
    q = queries(sum(q_lens), device=device)
    whole = new_batch(own, 4, device=device)
    for side in (batch.k, batch.v):
        mine = whole.k if side is batch.k else whole.v
        mine[:] = [np.concatenate((side[0], each)) for each in side[1:]]
    out, _ = wanted(whole, q, q_lens, [Scores(0.3)] * 2)
    found = wrapper.run(q, batch.cache)
    torch.testing.assert_close(found.cpu().double(), torch.from_numpy(out), atol=2e-5, rtol=2e-5)
    with pytest.raises(BadBatch, match="one of each kind per level"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, torch.empty(16, device=device))
    with pytest.raises(BadBatch, match="one of each kind per level"):
        wrapper.plan([], [], [], [], Q_HEADS, KV_HEADS, DIM, 4)
    with pytest.raises(WrongState, match=r"call plan.. before run"):  # not the older plan
        wrapper.run(q, batch.cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_prefix_in_tensors_of_its_own_is_seen_by_all(layout: str, device: torch.device) -> None:
    prefix = new_batch((5,), 4, device=device, dtype=torch.float16, seed=3)
    batch = new_batch((3, 6), 4, layout, device=device, dtype=torch.float16)
    k, v = (torch.from_numpy(side[0]).half().to(device) for side in (prefix.k, prefix.v))
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    whole = new_batch((3, 6), 4, device=device, dtype=torch.float16)
    whole.k[:] = [np.concatenate((prefix.k[0], own)) for own in batch.k]
    whole.v[:] = [np.concatenate((prefix.v[0], own)) for own in batch.v]
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    decode.begin_forward(*batch.lists, *SIZES, 4)
    q = queries(2, device=device, dtype=torch.float16)
    out, lse = wanted(whole, q, [1, 1], [Scores(DIM**-0.5)] * 2)
    check((decode.forward(q, k, v, batch.cache), torch.from_numpy(lse)), (out, lse), 2e-3)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), layout)
    prefill.begin_forward(indptr((2, 4), device), *batch.lists, *SIZES, 4)
    q = queries(6, device=device, dtype=torch.float16)
    out, lse = wanted(whole, q, [2, 4], [Scores(0.3)] * 2)
    found = prefill.forward(q, k, v, batch.cache, causal=True, sm_scale=0.3)
    check((found, torch.from_numpy(lse)), (out, lse), 2e-3)
