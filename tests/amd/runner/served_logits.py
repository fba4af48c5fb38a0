"""Logits of given tokens served by a runtime: in chunks, over pages, eager or replayed, many sequences per step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.selection.build import build_runtime
from rocm_attn.selection.kv_formats import AS_COMPUTED, KVFormat
from rocm_attn.step.options import RuntimeOptions
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.model import Model


def served_logits(
    loaded: LoadedModel,
    texts: Sequence[Tensor],
    prompt_lens: Sequence[int],
    *,
    chunk: int,
    page_size: int,
    graphs: bool,
    provider: str = "torch",
    kv: KVFormat = AS_COMPUTED,
) -> tuple[list[dict[int, Tensor]], int]:
    """Every text's prompt in chunks, then token after token; all texts in each step.

    texts:       integer [tokens] each
    prompt_lens: of each text
    Returns place in the text -> float32 [vocab] for each text, and how many steps were replayed.
    """
    longest = max(map(len, texts))
    runtime = build_runtime(
        loaded.config.attention.problems(dtype=loaded.weights.dtype, page_size=page_size, kv=kv),
        RuntimeOptions(
            num_pages=1 + len(texts) * -(-longest // page_size),
            max_num_seqs=len(texts),
            max_kv_len=longest,
            provider=provider,
        ),
        RecurrentLayers(loaded.config.attention.recurrences(loaded.weights.dtype)),
        device=loaded.weights.device,
    )
    model = Model(loaded.config, loaded.weights, runtime.head_weights, max_kv_len=longest, ranks=loaded.ranks)
    runner = StepRunner(runtime, model.forward, recorder_for(loaded.weights.device) if graphs else None)
    rows = [runtime.table.admit() for _ in texts]
    logits: list[dict[int, Tensor]] = [{} for _ in texts]
    prompt_lens = [min(*each) for each in zip(prompt_lens, map(len, texts), strict=True)]
    stored = [0] * len(texts)
    while any(done < len(text) for done, text in zip(stored, texts, strict=True)):
        q_len = [max(1, min(chunk, num - done)) for done, num in zip(stored, prompt_lens, strict=True)]
        running = [number for number, text in enumerate(texts) if stored[number] < len(text)]
        kv_len = [stored[number] + q_len[number] for number in running]
        batch = StepBatch(
            rows=np.array([rows[number] for number in running], np.int32),
            kv_len=np.array(kv_len, np.int32),
            q_len=np.array([q_len[number] for number in running], np.int32),
            token_ids=np.concatenate(
                [texts[number][stored[number] : end].numpy() for number, end in zip(running, kv_len, strict=True)]
            ).astype(np.int32),
        )
        runtime.table.reserve_all(batch.rows, batch.kv_len)
        for number, end, row in zip(running, kv_len, runner.run(batch), strict=True):
            stored[number] = end
            # a copy: the next replay writes to the same memory
            logits[number][end - 1] = row.to("cpu", torch.float32, copy=True)
    return logits, runner.counters.replays
