"""A program that was written for FlashInfer runs with only its import changed."""

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from rocm_attn.integrations import flashinfer
from tests.amd.integrations.oracle import Scores, attention

Q_HEADS, KV_HEADS, DIM, PAGE_SIZE = 4, 2, 16, 4


def generate(flashinfer: ModuleType, prompts: list[Tensor], num_steps: int, device: torch.device) -> list[Tensor]:
    """Returns attention's output for every token of every prompt, and for num_steps tokens after it.

    prompts: of each request [tokens, q_heads + 2 kv_heads, dim]
    """
    workspace = torch.empty(1024, dtype=torch.uint8, device=device)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    room = 8
    cache = torch.zeros(room * len(prompts), 2, PAGE_SIZE, KV_HEADS, DIM, device=device)
    kv_len = torch.zeros(len(prompts), dtype=torch.int32)
    outs: list[list[Tensor]] = [[] for _ in prompts]
    rows, q_lens = torch.cat(prompts), torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    for _ in range(1 + num_steps):
        q, k, v = torch.split(rows, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
        kv_len += q_lens
        pages = (kv_len + PAGE_SIZE - 1) // PAGE_SIZE
        kv_indptr = torch.cat((torch.zeros(1), pages.cumsum(0))).int().to(device)
        kv_indices = torch.cat([torch.arange(count) * len(prompts) + i for i, count in enumerate(pages.tolist())]).int()
        kv_indices, last = kv_indices.to(device), ((kv_len - 1) % PAGE_SIZE + 1).int().to(device)
        q_indptr = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int().to(device)
        seq_lens = flashinfer.get_seq_lens(kv_indptr, last, PAGE_SIZE)
        seqs, positions = flashinfer.get_batch_indices_positions(q_indptr, seq_lens, len(rows))
        flashinfer.append_paged_kv_cache(k, v, seqs, positions, cache, kv_indices, kv_indptr, last)
        sizes = Q_HEADS, KV_HEADS, DIM, PAGE_SIZE
        if q_lens.max() == 1:
            decode.plan(kv_indptr, kv_indices, last, *sizes, q_data_type=torch.float32, window_left=9)
            out = decode.run(q, cache)
        else:
            prefill.plan(
                q_indptr, kv_indptr, kv_indices, last, *sizes, causal=True, q_data_type=torch.float32, window_left=9
            )
            out = prefill.run(q, cache)
        for request, its in enumerate(torch.split(out, q_lens.tolist())):
            outs[request].append(its)
        last_out = torch.stack([each[-1][-1] for each in outs])
        rows = torch.cat((last_out, last_out[:, :KV_HEADS] + 1, last_out[:, KV_HEADS:] - 1), 1)
        q_lens = torch.ones_like(q_lens)
    return [torch.cat(each) for each in outs]


NUM_STEPS = 1


def expected(
    prompt: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Returns the outputs of the program's model, one token after the other, each with all earlier rows."""
    rows = list(prompt)
    outs: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []
    for token in range(len(prompt) + NUM_STEPS):
        if token == len(rows):
            last = outs[-1]
            rows.append(np.concatenate((last, last[:KV_HEADS] + 1, last[KV_HEADS:] - 1)))
        seen = np.stack(rows[: token + 1])
        q, k, v = np.split(seen, (Q_HEADS, Q_HEADS + KV_HEADS), axis=1)
        out, _ = attention(q[-1:], k, v, Scores(DIM**-0.5, window_left=9))
        outs.append(out[0])
    return np.stack(outs)


def test_a_program_runs_unchanged(device: torch.device) -> None:
    random = np.random.default_rng(0)
    prompts = [random.standard_normal((tokens, Q_HEADS + 2 * KV_HEADS, DIM)) for tokens in (5, 1, 10)]
    found = generate(flashinfer, [torch.from_numpy(each).float().to(device) for each in prompts], NUM_STEPS, device)
    for prompt, out in zip(prompts, found, strict=True):
        torch.testing.assert_close(out.cpu().double(), torch.from_numpy(expected(prompt)), atol=1e-4, rtol=1e-4)
