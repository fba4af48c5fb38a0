"""Prefill by FlashInfer's names equals FlashInfer's definition; packbits and segment_packbits give its bytes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.errors import BadBatch, BadSetting, BadTensor, Unsupported
from rocm_attn.integrations import flashinfer
from tests.amd.integrations.batches import (
    DIM,
    SIZES,
    SLOPES,
    check,
    indptr,
    ints,
    new_batch,
    queries,
    wanted,
    workspace,
)
from tests.amd.integrations.oracle import Array, Scores

KV_LENS, Q_LENS = (1, 19, 9, 6), (1, 3, 9, 2)


def random_mask(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> tuple[Tensor, list[Array]]:
    """Returns the cells of a batch, and those of each sequence. Every token sees its first key."""
    random = np.random.default_rng(2)
    of_seqs = [random.random((q_len, kv_len)) < 0.6 for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    for cells in of_seqs:
        cells[:, :1] = True
    return torch.from_numpy(np.concatenate([cells.reshape(-1) for cells in of_seqs])), [
        cells.astype(np.float64) for cells in of_seqs
    ]


CASES = [
    ("causal", KV_LENS, Q_LENS, Scores(0.3), {}),
    ("causal, windows and a cap", KV_LENS, Q_LENS, Scores(0.3, window_left=4, cap=2.0), {}),
    ("all keys", KV_LENS, Q_LENS, Scores(0.3, causal=False), {}),
    ("all keys of a window", KV_LENS, Q_LENS, Scores(0.3, causal=False, window_left=4), {}),
    ("more new tokens than KV", (1, 0, 4, 6), (3, 2, 9, 1), Scores(0.3, causal=False), {}),
    ("causal, more new tokens than KV", (1, 0, 4, 6), (3, 2, 9, 1), Scores(0.3), {}),
    ("sequences without new tokens", (4, 0, 9, 5), (2, 0, 0, 1), Scores(0.3), {}),
    ("one each, all keys of a window", (4, 9), (1, 1), Scores(0.3, causal=False, window_left=3), {}),
    ("ALiBi", KV_LENS, Q_LENS, Scores(0.3, causal=False, slopes=SLOPES), {"pos_encoding_mode": "ALIBI"}),
    ("the same in any batch", KV_LENS, Q_LENS, Scores(0.3), {"fixed_split_size": 4}),
]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kv_lens", "q_lens", "scores", "more"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
@pytest.mark.parametrize(("page_size", "layout"), [(4, "NHD"), (16, "HND")])
def test_new_tokens_are_the_last_of_their_sequence(
    kv_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    scores: Scores,
    more: dict[str, Any],
    page_size: int,
    layout: str,
    device: torch.device,
) -> None:
    batch = new_batch(kv_lens, page_size, layout, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
    said: dict[str, Any] = {"causal": scores.causal, "window_left": scores.window_left, "logits_soft_cap": scores.cap}
    said |= {"sm_scale": 0.3, "q_data_type": torch.float32, **more}
    wrapper.plan(indptr(q_lens, device), *batch.lists, *SIZES, page_size, **said)
    q = queries(sum(q_lens), device=device)
    check(wrapper.run(q, batch.cache, return_lse=True), wanted(batch, q, q_lens, [scores] * len(q_lens)))


@pytest.mark.parametrize(
    ("kv_lens", "q_lens"),
    [((1, 0, 4), (3, 2, 5)), ((4, 3), (0, 1))],
    ids=["without KV: it begins at the entry of the one after it", "without new tokens before the only one"],
)
def test_a_sequence_without_tokens_is_no_fault_of_later_plans(
    kv_lens: tuple[int, ...], q_lens: tuple[int, ...], device: torch.device
) -> None:
    scores = [Scores(0.3, causal=False)] * len(kv_lens)
    batch, q = new_batch(kv_lens, 4, device=device), queries(sum(q_lens), device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    for _ in range(4):
        wrapper.plan(indptr(q_lens, device), *batch.lists, *SIZES, 4, sm_scale=0.3, q_data_type=torch.float32)
        check(wrapper.run(q, batch.cache, return_lse=True), wanted(batch, q, q_lens, scores))


def test_a_plan_keeps_its_lengths_when_the_caller_writes_the_next_ones(device: torch.device) -> None:
    """The first run begins a step of its own, because of its sinks. int64 lists on the host need no conversion."""
    batch, q = new_batch(KV_LENS, 4, device=device), queries(sum(Q_LENS), device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    lists = [each.cpu().long() for each in (indptr(Q_LENS, device), batch.indptr, batch.last_page_len)]
    wrapper.plan(*lists[:2], batch.indices, lists[2], *SIZES, 4, causal=True, sm_scale=0.3, q_data_type=torch.float32)
    for each in lists:
        each.fill_(1)
    sinks = torch.full((SIZES[0],), -float("inf"), device=device)
    found = wrapper.run(q, batch.cache, return_lse=True, sinks=sinks)
    check(found, wanted(batch, q, Q_LENS, [Scores(0.3)] * len(KV_LENS)))


@pytest.mark.fast
@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_says_what_is_seen(window: int, packed: bool, device: torch.device) -> None:
    cells, of_seqs = random_mask(Q_LENS, KV_LENS)
    batch = new_batch(KV_LENS, 4, device=device)
    scores = [Scores(0.3, window_left=window, shown=shown) for shown in of_seqs]
    said: dict[str, Any] = {"causal": True, "sm_scale": 0.3, "window_left": window, "q_data_type": "float32"}
    if packed:
        bits = [np.packbits(shown.reshape(-1) != 0, bitorder="little") for shown in of_seqs]
        said["packed_custom_mask"] = torch.from_numpy(np.concatenate(bits)).to(device)
    else:
        said["custom_mask"] = cells.to(device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr(Q_LENS, device), *batch.lists, *SIZES, 4, **said)
    q = queries(sum(Q_LENS), device=device)
    check(wrapper.run(q, batch.cache, return_lse=True), wanted(batch, q, Q_LENS, scores))


def test_each_window_has_the_cells_of_its_own(device: torch.device) -> None:
    """A masked step has its window in its cells: another one after the plan, or in the next plan, needs others."""
    cells, of_seqs = random_mask(Q_LENS, KV_LENS)
    batch, q = new_batch(KV_LENS, 4, device=device), queries(sum(Q_LENS), device=device)
    ones = [torch.full((size,), -7, dtype=torch.int32, device=device) for size in (5, 5, 24, 4)]
    for wrapper in (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device)),
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *ones),
    ):
        for planned, of_call in ((-1, 3), (2, 6)):
            said: dict[str, Any] = {"custom_mask": cells.to(device), "q_data_type": "float32", "window_left": planned}
            wrapper.plan(indptr(Q_LENS, device), *batch.lists, *SIZES, 4, sm_scale=0.3, **said)
            found = {planned: wrapper.run(q, batch.cache, return_lse=True)}
            found[of_call] = wrapper.forward_return_lse(q, batch.cache, sm_scale=0.3, window_left=of_call)
            for window, its in found.items():
                check(
                    its, wanted(batch, q, Q_LENS, [Scores(0.3, window_left=window, shown=shown) for shown in of_seqs])
                )


def test_a_captured_prefill_with_a_mask_may_have_no_new_tokens(device: torch.device) -> None:
    buffers = [torch.full((size,), -7, dtype=torch.int32, device=device) for size in (3, 3, 24, 2)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, *buffers)
    batch = new_batch((5, 2), 4, device=device)
    for q_lens in ((1, 1), (0, 0)):
        mask = torch.ones(sum(q * kv for q, kv in zip(q_lens, (5, 2), strict=True)), dtype=torch.bool, device=device)
        wrapper.plan(indptr(q_lens, device), *batch.lists, *SIZES, 4, custom_mask=mask, q_data_type="float32")
        out = wrapper.run(queries(sum(q_lens), device=device), batch.cache)
        assert isinstance(out, Tensor)
        assert len(out) == sum(q_lens)


def test_a_mask_of_another_size_is_refused(device: torch.device) -> None:
    batch = new_batch(KV_LENS, 4, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    cells = random_mask(Q_LENS, KV_LENS)[0].to(device)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"custom_mask": cells[1:]}, "custom_mask has 150 cells; the batch has 151"),
        ({"packed_custom_mask": cells[:20].to(torch.uint8)}, "packed_custom_mask is torch.uint8 .20."),
        ({"packed_custom_mask": cells[:21]}, "packed_custom_mask is torch.bool"),
        ({"custom_mask": cells.tolist()}, "custom_mask is a list; give a tensor"),
        ({"packed_custom_mask": 1}, "packed_custom_mask is a int; give a tensor"),
    ]
    for more, message in cases:
        with pytest.raises(BadTensor, match=message):
            wrapper.plan(indptr(Q_LENS, device), *batch.lists, *SIZES, 4, **more)


@pytest.mark.fast
@pytest.mark.parametrize("scores", [Scores(0.3), Scores(0.3, causal=False, window_left=4)], ids=["causal", "window"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_k_and_v_are_read_where_they_lie(scores: Scores, layout: str, device: torch.device) -> None:
    batch = new_batch(KV_LENS, 4, device=device)
    k, v = (torch.from_numpy(np.concatenate(side)).float().to(device) for side in (batch.k, batch.v))
    if layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
    said: dict[str, Any] = {"causal": scores.causal, "window_left": scores.window_left, "sm_scale": 0.3}
    wrapper.plan(indptr(Q_LENS, device), indptr(KV_LENS, device), *SIZES, q_data_type=torch.float32, **said)
    q = queries(sum(Q_LENS), device=device)
    out, lse = wanted(batch, q, Q_LENS, [scores] * len(Q_LENS))
    check(wrapper.run(q, k, v, return_lse=True), (out, lse))
    found = wrapper.run(q, k, v, return_lse=True, lse_base="ln", lse_layout="HN")
    check(found, (out, (lse * np.log(2)).T))
    cpu = torch.device("cpu")
    copies = {"qo_indptr_cpu": indptr(Q_LENS, cpu), "kv_indptr_cpu": indptr(KV_LENS, cpu)}
    unread = torch.zeros(len(Q_LENS) + 1, dtype=torch.int32, device=device)
    wrapper.plan(unread, unread, *SIZES, q_data_type=torch.float32, **said, **copies)
    check(wrapper.run(q, k, v, return_lse=True), (out, lse))
    with pytest.raises(BadTensor, match=r"kv_indptr_cpu is torch.int64 \[.\] on cpu; it must be the indptr on the CPU"):
        wrapper.plan(*(indptr(lens, device) for lens in (Q_LENS, KV_LENS)), *SIZES, kv_indptr_cpu=torch.zeros(3).long())


@pytest.mark.parametrize("base", ["log2", "ln"])
def test_a_log_sum_exp_is_written_to_memory_of_either_layout(base: str, device: torch.device) -> None:
    batch = new_batch(KV_LENS, 4, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(indptr(Q_LENS, device), *batch.lists, *SIZES, 4, causal=True, sm_scale=0.3, q_data_type="float32")
    q = queries(sum(Q_LENS), device=device)
    out, lse = wanted(batch, q, Q_LENS, [Scores(0.3)] * len(Q_LENS))
    lse = lse if base == "log2" else lse * np.log(2)
    room = torch.full((*lse.shape, 2), 7.0, device=device)  # heads with gaps between them
    for layout, given in {"HN": torch.empty(lse.shape[::-1], device=device), "NH": room[..., 0]}.items():
        found = wrapper.run(q, batch.cache, lse=given, return_lse=True, lse_base=base, lse_layout=layout)
        assert isinstance(found, tuple)
        assert found[1] is given
        check(found, (out, lse if layout == "NH" else lse.T))
    assert (room[..., 1] == 7).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_sequence_needs_no_plan(layout: str, device: torch.device) -> None:
    batch = new_batch((9,), 4, device=device)
    k, v = (torch.from_numpy(side[0]).float().to(device) for side in (batch.k, batch.v))
    if layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    for tokens, scores in ((3, Scores(0.3)), (3, Scores(0.3, causal=False)), (12, Scores(0.3, causal=False, cap=5.0))):
        q = queries(tokens, device=device)
        found = flashinfer.single_prefill_with_kv_cache(
            q, k, v, causal=scores.causal, kv_layout=layout, sm_scale=0.3, logits_soft_cap=scores.cap, return_lse=True
        )
        check(found, wanted(batch, q, [tokens], [scores]))
    q = queries(1, device=device)
    found = flashinfer.single_decode_with_kv_cache(q[0], k, v, layout, sm_scale=0.3, window_left=4, return_lse=True)
    out, lse = wanted(batch, q, [1], [Scores(0.3, window_left=4)])
    check(found, (out[0], lse[0]))
    for name in ("q", "k", "v"):
        given: dict[str, Any] = {"q": q, "k": k, "v": v, name: None}
        with pytest.raises(BadTensor, match=f"{name} is a NoneType; give a tensor"):
            flashinfer.single_prefill_with_kv_cache(**given, kv_layout=layout)
        with pytest.raises(BadTensor, match=f"{name} is a NoneType; give a tensor"):
            flashinfer.single_decode_with_kv_cache(**given, kv_layout=layout)


def test_scales_and_sinks_are_those_of_the_call(device: torch.device) -> None:
    batch = new_batch(KV_LENS, 4, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        indptr(Q_LENS, device), *batch.lists, *SIZES, 4, causal=True, q_data_type="float32", o_data_type="float64"
    )
    q, sinks = queries(sum(Q_LENS), device=device), np.array([0.5, -1.0, 2.0, 0.0])
    for _ in range(2):
        found = wrapper.run(
            q,
            batch.cache,
            q_scale=0.5,
            k_scale=torch.tensor(3.0),
            v_scale=2.0,
            sinks=torch.from_numpy(sinks).float().to(device),
            return_lse=True,
        )
        out, lse = wanted(batch, q, Q_LENS, [Scores(1.5 * DIM**-0.5, sinks=sinks)] * len(Q_LENS))
        check(found, (out * 2, lse))
        assert isinstance(found, tuple)
        assert found[0].dtype == torch.float64
        check(wrapper.run_return_lse(q, batch.cache), wanted(batch, q, Q_LENS, [Scores(DIM**-0.5)] * len(Q_LENS)))


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        (torch.int32, BadSetting, "the output's dtype is torch.int32; it must be one of floats"),
        ("float8_e4m3fn", Unsupported, "outputs in torch.float8_e4m3fn are not served"),
    ],
)
def test_outputs_of_whole_numbers_or_eight_bits_are_refused(
    dtype: Any, error: type[Exception], message: str, device: torch.device
) -> None:
    batch = new_batch(KV_LENS, 4, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    with pytest.raises(error, match=message):
        wrapper.plan(indptr(Q_LENS, device), *batch.lists, *SIZES, 4, q_data_type=torch.float32, o_data_type=dtype)
    q, k = queries(3, device=device), torch.zeros((5, 2, DIM), device=device)
    with pytest.raises(error, match=message):
        flashinfer.single_prefill_with_kv_cache(q, k, k, o_dtype=dtype)


def test_a_token_that_sees_nothing_has_the_log_sum_exp_of_its_sinks(device: torch.device) -> None:
    batch, sinks = new_batch((2, 0, 5), 4, device=device), np.array([0.5, -1.0, 2.0, 0.0])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    plan = indptr((4, 1, 2), device), *batch.lists, *SIZES, 4
    wrapper.plan(*plan, causal=True, q_data_type="float32")
    q, of_call = queries(7, device=device), torch.from_numpy(sinks).float().to(device)
    found = wrapper.run(q, batch.cache, sinks=of_call, v_scale=torch.ones(1, 1, 1, 1, device=device), return_lse=True)
    check(found, wanted(batch, q, (4, 1, 2), [Scores(DIM**-0.5, sinks=sinks)] * 3))
    wrapper.plan(*plan, causal=True, q_data_type="float32", pos_encoding_mode="ALIBI")
    with pytest.raises(Unsupported, match="ALIBI with sinks is not served"):
        wrapper.run(q, batch.cache, sinks=of_call)


def test_fp8_pages_have_a_scale_for_k_and_one_for_v(device: torch.device) -> None:
    batch = new_batch(KV_LENS, 4, device=device, dtype=torch.float16)
    codes = batch.cache.to(torch.float8_e4m3fn)
    for side, scale_value in ((batch.k, 0.5), (batch.v, 3.0)):
        side[:] = [torch.from_numpy(rows).half().to(codes.dtype).double().numpy() * scale_value for rows in side]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    said: dict[str, Any] = {"q_data_type": torch.float32, "kv_data_type": torch.float8_e4m3fn, "causal": True}
    wrapper.plan(indptr(Q_LENS, device), *batch.lists, *SIZES, 4, **said)
    q = queries(sum(Q_LENS), device=device)
    found = wrapper.run(q, codes, k_scale=0.5, v_scale=torch.tensor(3.0, device=device), return_lse=True)
    check(found, wanted(batch, q, Q_LENS, [Scores(DIM**-0.5)] * len(Q_LENS)))


# NumPy's packbits is what FlashInfer's docstring refers to.
@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 257])
def test_bytes_are_those_of_numpy(count: int, bitorder: str, device: torch.device) -> None:
    x = np.random.default_rng(count).integers(0, 2, count)
    expected = np.packbits(x, bitorder="big" if bitorder == "big" else "little")
    found = flashinfer.packbits(torch.from_numpy(x * 3).to(device), bitorder)
    assert found.dtype == torch.uint8
    assert found.tolist() == expected.tolist()


def test_each_segment_begins_a_byte(device: torch.device) -> None:
    # The example of FlashInfer's docstring.
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool, device=device)
    packed, first = flashinfer.segment_packbits(x, torch.tensor([0, 4, 7, 11], device=device), bitorder="big")
    assert list(map(bin, packed.tolist())) == ["0b10110000", "0b100000", "0b11010000"]
    assert first.tolist() == [0, 1, 2, 3]
    random = np.random.default_rng(0)
    lens = [0, 17, 8, 0, 1, 40]
    bits = [random.integers(0, 2, count) for count in lens]
    packed, first = flashinfer.segment_packbits(
        torch.from_numpy(np.concatenate(bits)).to(device), indptr(lens, device), "little"
    )
    assert packed.tolist() == np.concatenate([np.packbits(each, bitorder="little") for each in bits]).tolist()
    assert first.tolist() == [0, 0, 3, 4, 4, 5, 10]


def test_wrong_inputs_are_refused(device: torch.device) -> None:
    x = torch.ones(9, device=device)
    with pytest.raises(BadSetting, match="bitorder is 'bit'; it must be big or little"):
        flashinfer.packbits(x, "bit")
    with pytest.raises(BadTensor, match=r"x is \[3, 3\]; it must have one dimension"):
        flashinfer.packbits(x.view(3, 3))
    wrong: list[Tensor] = [ints(each, device) for each in ([0, 8], [1, 9], [0, 5, 4, 9], [])]
    for boundaries in wrong:
        with pytest.raises(BadBatch, match="must begin at 0, never fall, and end at 9"):
            flashinfer.segment_packbits(x, boundaries)
