"""Logits along a given continuation: the model's logits at every token, regardless of its own picks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model


def forced_logits(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], *, provider: str
) -> tuple[Tensor, int]:
    """Prompts in one extend step, then a decode step with graphs for each further token, all sequences together.

    continuations: of equal length n
    Returns float32 [prompts, n, vocab] on the CPU, and how many steps were replayed.
    """
    problems = loaded.config.attention.problems(dtype=loaded.weights.dtype, page_size=16)
    max_kv_len = max(map(len, prompts)) + len(continuations[0])
    runtime = build_runtime(
        problems,
        RuntimeOptions(
            num_pages=1 + len(prompts) * (max_kv_len // 16 + 1),
            max_num_seqs=len(prompts),
            max_kv_len=max_kv_len,
            provider=provider,
        ),
        device=loaded.weights.device,
    )
    model = Model(loaded.config, loaded.weights, runtime.head_weights, max_kv_len=max_kv_len)
    runner = StepRunner(runtime, model.forward, recorder_for(loaded.weights.device))
    rows = np.array([runtime.table.admit() for _ in prompts], np.int32)
    kv_len, q_len = np.zeros(len(prompts), np.int32), np.array([len(prompt) for prompt in prompts], np.int32)
    new = [token for prompt in prompts for token in prompt]
    logits = []
    for place in range(len(continuations[0])):
        kv_len = kv_len + q_len
        runtime.table.reserve_all(rows, kv_len)
        rows_of_logits = runner.run(StepBatch(rows, kv_len, q_len, np.array(new, np.int32)))
        # a copy: the next replay writes to the same memory
        logits.append(rows_of_logits.to("cpu", torch.float32, copy=True))
        new, q_len = [continuation[place] for continuation in continuations], np.ones(len(prompts), np.int32)
    return torch.stack(logits, 1), runner.counters.replays
