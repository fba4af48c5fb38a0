"""The largest possible steps of an engine, run with every page taken."""

import numpy as np
import torch

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.runtime import AttentionRuntime
from rocm_serve.engine import Engine


def run_largest_steps(served: Engine) -> None:
    """Runs with every page taken: a prompt with sequences that decode, many prompts, all decoding."""
    runtime, options = served.runtime, served.options
    table, num_seqs = runtime.table, options.max_batch_size
    served.forget_prefixes()
    for layer in range(len(runtime.kinds.problems)):
        runtime.pool.layer(layer).k.zero_()
        runtime.pool.layer(layer).v.zero_()
    rows = np.array([table.admit() for _ in range(num_seqs)], np.int32)
    each = min(served.max_kv_len, table.fewest_free_pages // num_seqs * table.page_size)
    others = (num_seqs - 1) * each // table.page_size
    longest = min(served.max_kv_len, (table.fewest_free_pages - others) * table.page_size)
    kv_len = np.array([longest] + [each] * (num_seqs - 1), np.int32)
    table.reserve_all(rows, kv_len)
    table.mark_stored(rows, kv_len)
    chunk = options.chunk
    share = chunk // num_seqs
    for q_len in ([max(1, chunk - num_seqs + 1)] + [1] * (num_seqs - 1), [share] * num_seqs, [1] * num_seqs):
        batch = StepBatch(rows, kv_len, q_len, token_ids=[1] * sum(q_len))
        _give_states(runtime, rows, batch.start)
        served._runner.run(batch).float()
    runtime.check_device()
    for row in rows.tolist():
        table.free(row)


def _give_states(runtime: AttentionRuntime, rows: Int32Array, num_tokens: Int32Array) -> None:
    """Gives recurrent layers states of zeros after a number of tokens of each row."""
    states = runtime.states
    if not states.is_empty:
        slots, headers = runtime.table.states.give(runtime.states, rows, num_tokens)
        states.memory[slots] = 0
        states.headers[slots] = torch.from_numpy(headers)
        states.headers[slots + 1] = 0
