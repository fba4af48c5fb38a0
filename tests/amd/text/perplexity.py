"""Perplexity of a text as a runtime serves it: in chunks, with what each token is predicted from in pages."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.selection.build import build_runtime
from rocm_attn.selection.kv_formats import KVFormat
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.outputs import PerToken
from rocm_attn.step.step import Part
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model

CHUNK = 256


def perplexity(loaded: LoadedModel, tokens: Tensor, kv: KVFormat, *, provider: str) -> float:
    """exp of the mean loss of every token but the first, in one sequence. tokens: integer [tokens]"""
    device = loaded.weights.device
    runtime = build_runtime(
        loaded.config.attention.problems(dtype=loaded.weights.dtype, page_size=16, kv=kv),
        RuntimeOptions(num_pages=2 + len(tokens) // 16, max_num_seqs=1, max_kv_len=len(tokens), provider=provider),
        device=device,
    )
    model = Model(loaded.config, loaded.weights, runtime.head_weights, max_kv_len=len(tokens))

    def forward(step: Part) -> PerToken:
        every_token = torch.arange(len(step.token_ids), device=device)
        return PerToken(model.forward(replace(step, last_token_of_seq=every_token)))

    runner = StepRunner(runtime, forward, None)
    row, losses = np.array([runtime.table.admit()], np.int32), []
    for first in range(0, len(tokens) - 1, CHUNK):
        new = tokens[first : min(first + CHUNK, len(tokens) - 1)]
        kv_len = np.array([first + len(new)], np.int32)
        runtime.table.reserve_all(row, kv_len)
        batch = StepBatch(row, kv_len, np.array([len(new)], np.int32), new.numpy().astype(np.int32))
        logits = runner.run(batch).tensor
        of_tokens = logits[: len(new)].float().log_softmax(-1).cpu()
        losses.append(-of_tokens.gather(1, tokens[first + 1 : first + 1 + len(new), None].long()))
    return math.exp(float(torch.cat(losses).double().mean()))
