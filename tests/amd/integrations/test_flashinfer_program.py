"""A program that was written for FlashInfer runs with only its import changed."""

from __future__ import annotations

import numpy as np
import torch

from rocm_attn.integrations import flashinfer
from tests.amd.integrations.oracle import Scores, attention
from tests.amd.integrations.program import DIM, KV_HEADS, Q_HEADS, generate

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
