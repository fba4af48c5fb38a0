"""Batches by FlashInfer's conventions: lists of pages, page 0 among them, in NHD and HND."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.amd.integrations.oracle import Array, Scores, attention

Q_HEADS, KV_HEADS, DIM = SIZES = 4, 2, 16
SLOPES = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
TOLERANCE = 2e-5
NAN = float("nan")


def workspace(device: torch.device) -> Tensor:
    """Returns what every wrapper begins with."""
    return torch.empty(16, dtype=torch.uint8, device=device)


def ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def indptr(lens: Sequence[int], device: torch.device) -> Tensor:
    """Returns the start of each sequence, and the end of the last one."""
    return ints([0, *itertools.accumulate(lens)], device)


@dataclass(frozen=True)
class Batch:
    """KV of sequences of these lengths, in pages. Slots of no sequence are NaN.

    cache:   [pages, 2, page_size, kv_heads, dim], or with kv_heads before page_size
    k, v:    of each sequence, [kv_len, kv_heads, dim]
    """

    kv_lens: tuple[int, ...]
    page_size: int
    layout: str
    cache: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    k: list[Array]
    v: list[Array]

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last_page_len


def new_batch(
    kv_lens: Sequence[int],
    page_size: int,
    layout: str = "NHD",
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Returns random KV in pages in random order."""
    random = np.random.default_rng(seed)
    pages = [-(-kv_len // page_size) for kv_len in kv_lens]
    order = random.permutation(max(sum(pages), 1))
    cache = torch.full((len(order), 2, page_size, KV_HEADS, DIM), NAN, dtype=dtype)
    firsts = [0, *itertools.accumulate(pages)]
    k, v = [], []
    for seq, kv_len in enumerate(kv_lens):
        rows = torch.from_numpy(random.standard_normal((2, kv_len, KV_HEADS, DIM))).to(dtype)
        for token in range(kv_len):
            cache[order[firsts[seq] + token // page_size], :, token % page_size] = rows[:, token]
        k.append(rows[0].double().numpy())
        v.append(rows[1].double().numpy())
    if layout == "HND":
        cache = cache.transpose(2, 3).contiguous()
    last = [(kv_len - 1) % page_size + 1 if kv_len else 0 for kv_len in kv_lens]
    return Batch(
        tuple(kv_lens),
        page_size,
        layout,
        cache.to(device),
        indptr(pages, device),
        ints(order[: sum(pages)].tolist(), device),
        ints(last, device),
        k,
        v,
    )


def queries(num_tokens: int, *, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    rows = np.random.default_rng(seed).standard_normal((num_tokens, Q_HEADS, DIM))
    return torch.from_numpy(rows).to(dtype).to(device)


def wanted(batch: Batch, q: Tensor, q_lens: Sequence[int], scores: Sequence[Scores]) -> tuple[Array, Array]:
    rows = np.split(q.cpu().double().numpy(), list(itertools.accumulate(q_lens))[:-1])
    each = [attention(*of_seq) for of_seq in zip(rows, batch.k, batch.v, scores, strict=True)]
    return np.concatenate([out for out, _ in each]), np.concatenate([lse for _, lse in each])


def check(found: object, expected: tuple[Array, Array], tolerance: float = TOLERANCE) -> None:
    assert isinstance(found, tuple)
    for its, its_wanted in zip(found, expected, strict=True):
        assert isinstance(its, Tensor)
        torch.testing.assert_close(its.cpu().double(), torch.from_numpy(its_wanted), atol=tolerance, rtol=tolerance)


def check_out(found: Tensor, expected: Array) -> None:
    """Checks an output without its log-sum-exp."""
    check((found, found[..., 0]), (expected, found[..., 0].cpu().double().numpy()))
