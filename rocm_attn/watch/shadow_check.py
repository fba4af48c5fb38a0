"""shadow_check: one layer of one step over an engine's storage against the oracle, on demand.

The pages are looked up in the table that the layer's kernel has read, so a table or a slot that is wrong shows as well
as a kernel that is.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import WrongState
from rocm_attn.external import ExternalAttention
from rocm_attn.watch.few_sequences import MOST_SEQS, MOST_TOKENS, LayerOfStep


def shadow_check(
    attention: ExternalAttention,
    layer: int,
    q: Tensor,
    out: Tensor,
    *,
    most_seqs: int = MOST_SEQS,
    most_tokens: int = MOST_TOKENS,
    seed: int = 0,
) -> list[int]:
    """Sequences of the step that is running, among a few, whose last new tokens are not the oracle's in a layer.

    For after attend(layer, q, out), outside of graphs: it waits for the device. Not for masked steps.

    most_seqs:   sequences that are looked at, chosen by seed
    most_tokens: of each, so many of its last new tokens
    Raises WrongState, BadTensor.
    """
    run = attention.gate.running()
    problem = run.core.layers.problem(layer)
    if run.plan.shape.kind is StepKind.MASKED:
        raise WrongState("the step has a mask, which only its engine can compare; look at another step")
    kind = run.core.kinds.of_layer[layer]
    step, kernel = run.step.of_kind[kind], run.plan.kernels[kind]
    q_len, kv_len = step.q_len.tolist(), step.kv_len.tolist()

    def pages_of(seq: int) -> Tensor:
        return step.table[int(step.row_of_seq[seq]), : -(-kv_len[seq] // problem.page_size)].long()

    of_step = LayerOfStep(
        problem,
        attention.pages.layer(layer),
        run.core.head_weights.of(layer),
        q_len,
        kv_len,
        pages_of,
        problem.window_left,
        kernel.row.rounds_products,
    )
    seqs = np.random.default_rng(seed).permutation(int(step.counts[0]))[:most_seqs].tolist()
    return sorted(of_step.wrong_seqs(q, out, seqs, most_tokens))
