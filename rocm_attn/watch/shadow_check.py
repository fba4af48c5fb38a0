"""shadow_check: compares one layer's attention in an engine's step with the reference, on demand.

It looks the pages up in the table that the layer's kernel has read, so it finds wrong tables and slots, too.
"""

import numpy as np
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadSetting, WrongState
from rocm_attn.external import ExternalAttention
from rocm_attn.machine.settings import require_kind, whole_number
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
    """Compares a few sequences of the running step with the reference, in one layer; returns those that differ.

    Call it after attend(layer, q, out), outside of graphs: it waits for the device. Masked steps are not supported.

    most_seqs:   how many sequences are compared at most, chosen by seed
    most_tokens: how many of the last new tokens of each are compared at most
    Raises WrongState, BadTensor, BadSetting.
    """
    require_kind("attention", attention, ExternalAttention, BadSetting)
    most_seqs, most_tokens = (
        whole_number("most_seqs", most_seqs, least=0),
        whole_number("most_tokens", most_tokens, least=0),
    )
    seed = whole_number("seed", seed, least=0)
    run = attention.gate.running()
    problem = run.core.layers.problem(layer)
    run.core.layers.check_rows(problem, run.plan.shape.num_tokens, q, out, None)
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
