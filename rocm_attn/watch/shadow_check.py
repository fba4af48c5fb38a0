"""shadow_check: compares one layer of one step over an engine's storage with the reference, on demand.

The pages are looked up in the table that the layer's kernel has read, so that a wrong table or slot shows as well as a
wrong kernel.
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
    """Sequences of the running step, among a few, whose last new tokens differ from the reference in a layer.

    For use after attend(layer, q, out), outside of graphs: it waits for the device. Not for masked steps.

    most_seqs:   sequences that are compared, chosen by seed
    most_tokens: last new tokens of each sequence that are compared
    Raises WrongState, BadTensor.
    """
    run = attention.gate.running()
    problem = run.core.layers.problem(layer)
    if run.plan.shape.kind is StepKind.MASKED:
        raise WrongState("the step has a mask, which only its engine can compare; check another step")
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
        kernel.entry.rounds_products,
    )
    seqs = np.random.default_rng(seed).permutation(int(step.counts[0]))[:most_seqs].tolist()
    return sorted(of_step.wrong_seqs(q, out, seqs, most_tokens))
