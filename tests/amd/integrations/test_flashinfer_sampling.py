"""Sampling by FlashInfer's names: the tokens that may be drawn, how often they are, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.errors import BadSetting, BadTensor
from rocm_attn.integrations import flashinfer
from rocm_attn.integrations.flashinfer import philox as philox_module
from rocm_attn.integrations.flashinfer.philox import philox, uniforms
from tests.amd.integrations.oracle import Array

ROWS, VOCAB, SAMPLES = 4, 23, 40_000
# Five standard deviations of a share of SAMPLES.
FIVE_SIGMA = 5 * 0.5 / SAMPLES**0.5


def probabilities(seed: int, device: torch.device) -> Tensor:
    """Returns float32 [ROWS, VOCAB] with some zeros and some ties."""
    weights = np.random.default_rng(seed).exponential(1, (ROWS, VOCAB)) ** 2
    weights[:, 3] = weights[:, 7]
    weights[:, [0, 11, VOCAB - 1]] = 0
    return torch.from_numpy(weights / weights.sum(1, keepdims=True)).float().to(device)


def kept(row: Array, top_k: int = VOCAB, top_p: float = 2.0, min_p: float = 0.0) -> list[bool]:
    """Returns which tokens the filters leave: each token by those that exceed it, as in FlashInfer's kernels.

    Source: include/flashinfer/sampling.cuh, 0.6.18.
    """
    found = []
    for x in row:
        larger = [y for y in row if y > x]
        found.append(len(larger) < top_k and (not larger or sum(larger) < top_p) and x >= min_p * max(row))
    return found


def shares(row: Array, left: list[bool]) -> Array:
    masked = np.where(left, row, 0)
    shared: Array = masked / masked.sum()
    return shared


def first_k(row: Array, top_k: int, top_p: float) -> list[bool]:
    """Returns which tokens are left if top_p is of what top_k leaves."""
    in_k = kept(row, top_k)
    return [a and b for a, b in zip(in_k, kept(shares(row, in_k), top_p=top_p), strict=True)]


Sampler = Callable[..., Any]
SAMPLERS: list[tuple[str, Sampler, Callable[[Array], list[bool]]]] = [
    ("all", flashinfer.sampling_from_probs, kept),
    ("top_k", lambda p, **more: flashinfer.top_k_sampling_from_probs(p, 5, **more), lambda row: kept(row, 5)),
    ("top_p", lambda p, **more: flashinfer.top_p_sampling_from_probs(p, 0.6, **more), lambda row: kept(row, top_p=0.6)),
    ("min_p", lambda p, **more: flashinfer.min_p_sampling_from_probs(p, 0.2, **more), lambda row: kept(row, min_p=0.2)),
    (
        "top_k_first",
        lambda p, **more: flashinfer.top_k_top_p_sampling_from_probs(p, 6, 0.7, **more),
        lambda row: first_k(row, 6, 0.7),
    ),
    (
        "joint",
        lambda p, **more: flashinfer.top_k_top_p_sampling_from_probs(p, 6, 0.7, filter_apply_order="joint", **more),
        lambda row: kept(row, 6, 0.7),
    ),
    (
        "logits",
        lambda p, **more: flashinfer.top_k_top_p_sampling_from_logits(p.log() + 3, 6, 0.7, **more),
        lambda row: first_k(row, 6, 0.7),
    ),
    ("all_logits", lambda p, **more: flashinfer.sampling_from_logits(p.log() - 9, **more), kept),
]


@pytest.mark.parametrize(("name", "sampler", "left"), SAMPLERS, ids=[name for name, *_ in SAMPLERS])
def test_tokens_are_drawn_as_often_as_they_are_likely(
    name: str, sampler: Sampler, left: Callable[[Array], list[bool]], device: torch.device
) -> None:
    probs = probabilities(1, device)
    indices = (torch.arange(ROWS * SAMPLES, device=device) % ROWS).int()
    generator = torch.Generator(device).manual_seed(7)
    drawn = sampler(probs, indices=indices, generator=generator)
    assert drawn.dtype == torch.int32
    for row, its in enumerate(probs.cpu().double().numpy()):
        counts = np.bincount(drawn[row::ROWS].cpu().numpy(), minlength=VOCAB)
        assert not counts[~np.array(left(its))].any()
        assert not counts[its == 0].any()
        assert np.abs(counts / SAMPLES - shares(its, left(its))).max() < FIVE_SIGMA
    again = torch.Generator(device).manual_seed(7)
    assert sampler(probs, indices=indices, generator=again).equal(drawn)
    # Seeds: one for all rows and one for each give the same numbers, and other offsets give others.
    one = sampler(probs, indices=indices, seed=5, offset=8)
    each = torch.full((len(indices),), 5, device=device), torch.full((1,), 8, device=device)
    assert sampler(probs, indices=indices, seed=each[0], offset=each[1]).equal(one)
    counts = np.bincount(one[::ROWS].cpu().numpy(), minlength=VOCAB)
    its = probs[0].cpu().double().numpy()
    assert np.abs(counts / SAMPLES - shares(its, left(its))).max() < FIVE_SIGMA
    assert not sampler(probs, indices=indices, seed=5, offset=12).equal(one)
    assert not sampler(probs, indices=indices, seed=6, offset=8).equal(one)
    assert sampler(probs, generator=again).shape == (ROWS,)


def test_limits_may_be_one_for_each_row(device: torch.device) -> None:
    probs = probabilities(2, device)
    rows = probs.cpu().double().numpy()
    top_k, top_p = torch.tensor([1, 3, 7, 99], device=device), torch.tensor([0.0, 0.3, 0.7, 1.5], device=device)
    renormed = flashinfer.top_k_renorm_probs(probs, top_k)
    masked = flashinfer.top_k_mask_logits(probs.log().half(), top_k)
    assert masked.dtype == torch.float16
    for row, k in enumerate(top_k.tolist()):
        expected = shares(rows[row], kept(rows[row], k))
        torch.testing.assert_close(renormed[row].cpu().double(), torch.from_numpy(expected), atol=1e-6, rtol=0)
        assert ((masked[row] > float("-inf")).cpu().numpy() == (expected > 0)).all()
    renormed = flashinfer.top_p_renorm_probs(probs.double(), top_p)
    assert renormed.dtype == torch.float32
    for row, p in enumerate(top_p.tolist()):
        expected = shares(rows[row], kept(rows[row], top_p=p))
        torch.testing.assert_close(renormed[row].cpu().double(), torch.from_numpy(expected), atol=1e-6, rtol=0)
    # Limits are of rows, as many as the samples, whose rows are chosen by indices.
    indices = torch.tensor([2, 2, 2, 0], device=device)
    limits = torch.tensor([VOCAB, VOCAB, 1, VOCAB], device=device)
    for seed in range(8):
        found = flashinfer.top_k_sampling_from_probs(probs, limits, indices, seed=seed, offset=0)
        assert isinstance(found, Tensor)
        assert found[:3].equal(probs[2].argmax().expand(3))
    assert flashinfer.top_k_renorm_probs(probs.half(), 2).dtype == torch.float16


def test_softmax_divides_by_temperatures(device: torch.device) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((3, VOCAB)) * 50).to(device, torch.float16)
    logits[1, 4] = float("-inf")
    for temperature in (None, 0.5, torch.tensor([0.25, 3.0, 0.0], device=device)):
        found = flashinfer.softmax(logits, temperature)
        each = [1.0] * 3 if temperature is None else torch.as_tensor(temperature).expand(3).tolist()
        for row, its in enumerate(logits.cpu().double().numpy()):
            if each[row] == 0:
                assert found[row].argmax() == its.argmax()
                assert found[row].max() == 1
                continue
            scaled = np.exp((its - its.max()) / each[row])
            expected = torch.from_numpy(scaled / scaled.sum())
            torch.testing.assert_close(found[row].cpu().double(), expected, atol=1e-6, rtol=0)
        assert found.dtype == torch.float32


def test_rows_without_a_distribution_are_reported(device: torch.device) -> None:
    probs = torch.zeros(4, VOCAB, device=device)
    probs[1, 5], probs[2, 3] = 0.25, float("nan")
    probs[3, VOCAB - 1] = 1.0
    samplers: list[Sampler] = [flashinfer.sampling_from_probs, SAMPLERS[1][1], SAMPLERS[2][1], SAMPLERS[4][1]]
    for sampler in samplers:
        tokens, valid = sampler(probs, return_valid=True)
        assert valid.tolist() == [False, True, False, True]
        assert tokens.tolist() == [0, 5, 0, VOCAB - 1]
        with pytest.raises(BadTensor, match="probs has NaN"):
            sampler(probs, check_nan=True)
    # A row that does not exist is not read: on a device that would be a fault.
    rows = torch.tensor([3, -1, 4], device=device)
    tokens, valid = flashinfer.sampling_from_probs(probs, rows, return_valid=True)
    assert valid.tolist() == [True, False, False]
    assert tokens.tolist() == [VOCAB - 1, 0, 0]
    none = flashinfer.top_p_sampling_from_probs(probs[:0], 0.5)
    assert isinstance(none, Tensor)
    assert none.shape == (0,)
    # Rows without a distribution change nothing for others, of which each has one token and hardly another.
    tokens = torch.arange(60, device=device) % (VOCAB - 1)
    many = torch.nn.functional.one_hot(tokens, VOCAB).float()
    many[:, -1] = 1e-7
    many[::3] = 0
    many[::6] = float("nan")
    expected = torch.where(torch.arange(60, device=device) % 3 == 0, 0, tokens)
    found = flashinfer.sampling_from_probs(many, seed=1, offset=0)
    assert isinstance(found, Tensor)
    assert found.equal(expected.int())
    with pytest.raises(BadTensor, match="logits has NaN"):
        flashinfer.sampling_from_logits(probs, check_nan=True)


def test_a_recording_draws_by_the_seeds_of_its_replay(device: torch.device) -> None:
    probs, seed, offset = probabilities(0, device), *torch.zeros((2, 1), dtype=torch.int64, device=device)
    top_k, top_p = torch.tensor([3, 5, 7, 50], device=device), torch.tensor([0.3, 0.5, 0.9, 1.0], device=device)

    def draw() -> Tensor:
        found = flashinfer.top_k_top_p_sampling_from_probs(probs, top_k, top_p, seed=seed, offset=offset)
        assert isinstance(found, Tensor)
        return found

    draw()
    recording, drawn = recorder_for(device).record(draw)
    seen = set()
    for step in range(10):
        probs.copy_(probabilities(step, device))
        offset.fill_(4 * step)
        recording.replay()
        assert drawn.equal(draw())
        seen.add(tuple(drawn.tolist()))
    assert len(seen) > 3


def test_words_are_those_of_philox(device: torch.device) -> None:
    # Random123's kat_vectors of philox4x32 with 10 rounds.
    vectors = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, words in vectors:
        found = philox(torch.tensor(counter, device=device), torch.tensor(key, device=device))
        assert found.tolist() == words
    seed, offset = torch.tensor([-2, 1 << 40], device=device), torch.tensor([6, (1 << 35) + 1], device=device)
    found = uniforms(seed, offset, 3)
    for row in range(2):
        for draw in range(3):
            number = int(offset[row]) + draw
            counter = [number // 4 & 0xFFFFFFFF, number // 4 >> 32, row, 0]
            key = [int(seed[row]) & 0xFFFFFFFF, int(seed[row]) >> 32 & 0xFFFFFFFF]
            word = int(philox(torch.tensor(counter), torch.tensor(key))[number % 4])
            assert found[row, draw] == np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33)


@pytest.mark.parametrize(("word", "number", "token"), [(0, 2.0**-33, 1), (0xFFFFFFFF, 1.0, VOCAB - 2)])
def test_the_ends_of_numbers_draw_tokens_that_may_be_drawn(
    word: int, number: float, token: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(philox_module, "philox", lambda counter, key: torch.full_like(counter, word))
    seed = torch.zeros(ROWS, dtype=torch.int64, device=device)
    assert (uniforms(seed, seed, 2) == number).all()
    # The first token and the last have no probability.
    drawn = flashinfer.sampling_from_probs(probabilities(4, device), seed=0, offset=0)
    assert isinstance(drawn, Tensor)
    assert (drawn == token).all()


def chain(draft: Array, ids: list[int], target: Array, uniform: list[float]) -> tuple[list[int], int, int]:
    """Returns tokens and counts of one chain, by the numbers that FlashInfer's kernel would take, in order.

    Source: ChainSpeculativeSampling of include/flashinfer/sampling.cuh, 0.6.18.
    """
    numbers, n = iter(uniform), len(ids)
    pos, tokens = n, [-1] * (n + 1)
    for i in range(n):
        if next(numbers) * draft[i][ids[i]] < target[i][ids[i]]:
            tokens[i] = ids[i]
        else:
            pos = i
            break
    accepted = pos + sum(next(numbers) * draft[i][ids[i]] < target[i][ids[i]] for i in range(pos, n))
    rest = np.maximum(target[pos] - (draft[pos] if pos < n else 0), 0)
    limit, so_far = next(numbers) * rest.sum(), 0.0
    for token, weight in enumerate(rest):
        so_far += weight
        if so_far > limit:
            tokens[pos] = token
            break
    return tokens, accepted, pos


def test_chains_are_verified_as_by_flashinfers_kernel(device: torch.device) -> None:
    rows, drafts, vocab = 300, 3, 6
    random = np.random.default_rng(0)
    draft, target = (
        random.dirichlet(np.ones(vocab), (rows, drafts)),
        random.dirichlet(np.ones(vocab), (rows, drafts + 1)),
    )
    ids = random.integers(0, vocab, (rows, drafts))
    sides = [torch.from_numpy(each).float().to(device) for each in (draft, target)]
    draft, target = (side.cpu().double().numpy() for side in sides)
    seed, offset = torch.full((1,), 3, device=device), torch.full((1,), 4, device=device)
    numbers = uniforms(seed.expand(rows), offset.expand(rows), drafts + 2).cpu().double().tolist()
    before = [torch.arange(rows, dtype=torch.int32, device=device) for _ in range(2)]
    token_ids = torch.from_numpy(ids).int().to(device)
    accepted_to, emitted_to = before
    found = flashinfer.chain_speculative_sampling(
        sides[0], token_ids, sides[1], accepted_to, emitted_to, seed=seed, offset=offset
    )
    assert found[1] is before[0]
    assert found[2] is before[1]
    for row in range(rows):
        tokens, accepted, emitted = chain(draft[row], ids[row].tolist(), target[row], numbers[row])
        assert found[0][row].tolist() == tokens
        assert [int(found[1][row]) - row, int(found[2][row]) - row] == [accepted, emitted]
    # A draft that the vocabulary does not have is rejected, and equal sides leave the target's own distribution.
    wrong = torch.full_like(token_ids, vocab)
    sides[1][..., 0] = 0
    after, _, kept_drafts = flashinfer.chain_speculative_sampling(sides[1][:, :3].contiguous(), wrong, sides[1])
    assert (kept_drafts == 0).all()
    assert ((after[:, 0] > 0) & (after[:, 0] < vocab)).all()


def test_wrong_inputs_are_refused(device: torch.device) -> None:
    probs = probabilities(0, device)
    sample = flashinfer.sampling_from_probs
    seed = torch.zeros(3, dtype=torch.int64, device=device)
    wrong: tuple[Any, ...] = "3", None, [1.0]
    text, nothing, numbers = wrong
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: sample(probs[0]), BadTensor, "probs is torch.float32 .23.; it must be floats of .rows, vocab."),
        (lambda: sample(probs.int()), BadTensor, "probs is torch.int32"),
        (
            lambda: sample(probs, indices=seed + 0.5),
            BadTensor,
            r"indices are torch.float32 \[3\]; they must be integers",
        ),
        (lambda: sample(probs, seed=1), BadSetting, "give both as int, both as tensors, or neither"),
        (lambda: sample(probs, seed=1, offset=seed), BadSetting, "not of one kind"),
        (lambda: sample(probs, seed=seed, offset=seed), BadTensor, r"it must be torch.int64 \[1\] or \[4\]"),
        (lambda: sample(probs, seed=seed[:1].int(), offset=seed[:1]), BadTensor, "seed or offset is torch.int32"),
        (lambda: sample(nothing), BadTensor, "probs is a NoneType; give a tensor"),
        (lambda: flashinfer.top_k_mask_logits(numbers, 1), BadTensor, "logits is a list; give a tensor"),
        (
            lambda: flashinfer.top_p_renorm_probs(probs, nothing),
            BadSetting,
            "top_p is None; it must be a number, or a t",
        ),
        (lambda: flashinfer.top_k_renorm_probs(probs, text), BadSetting, "top_k is '3'; it must be a number, or a ten"),
        (lambda: flashinfer.top_k_renorm_probs(probs, 0), BadSetting, "top_k is 0; it must be at least 1"),
        (
            lambda: flashinfer.top_k_renorm_probs(probs, seed),
            BadTensor,
            r"top_k is \[3\]; it must be a number, or \[4\], one for each row",
        ),
        (lambda: flashinfer.top_p_renorm_probs(probs, -0.1), BadSetting, "top_p is -0.1; it must be at least 0"),
        (lambda: flashinfer.softmax(probs, 0.0), BadSetting, "temperature is 0.0; it must be at least 1.175"),
        (
            lambda: flashinfer.top_k_top_p_sampling_from_probs(probs, 2, 0.5, filter_apply_order="top_p_first"),
            BadSetting,
            "filter_apply_order is 'top_p_first'; it must be top_k_first or joint",
        ),
        (
            lambda: flashinfer.chain_speculative_sampling(probs[None], seed[None], probs[None]),
            BadTensor,
            r"draft_probs are \[1, 4, 23\] for draft_token_ids \[1, 3\]",
        ),
        (
            lambda: flashinfer.chain_speculative_sampling(probs[None, :3], seed[None], probs[None, :3]),
            BadTensor,
            r"target_probs are \[1, 3, 23\]; they must be \[1, 4, 23\]",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
