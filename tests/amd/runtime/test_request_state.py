"""Tensors by which a forward keeps its own state: each sequence's row, its tokens, and the values that pads get."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import VOCABULARY, Requests, Tiny
from tests.amd.worlds.world import padded_to

pytestmark = pytest.mark.fast(interpreted=0)

# New tokens of each sequence, by the kind of step.
STEPS = {
    "decode": [1, 1, 1],
    "extend": [2, 5, 3],
    "mixed": [1, 6, 0, 1],
    "no new token": [0, 0],
    "no sequence": [],
}


def by_hand(rows: Sequence[int], q_len: Sequence[int], step: Part) -> dict[str, list[int]]:
    """Returns the expected contents of a step's tensors, one sequence and one token after the other."""
    num_seqs, num_tokens = step.row_of_seq.shape[0], step.token_ids.shape[0]
    new_of_pad = 1 if step.plan.shape.kind.decodes else 0
    pads = num_seqs - len(rows)
    q_indptr, seq_of_token, row_of_token = [0], [], []
    for seq, (row, new) in enumerate(zip([*rows, *[0] * pads], [*q_len, *[new_of_pad] * pads], strict=True)):
        q_indptr.append(q_indptr[-1] + new)
        for _ in range(new):
            seq_of_token.append(seq)
            row_of_token.append(row)
    while len(seq_of_token) < num_tokens:
        seq_of_token.append(num_seqs - 1)
        row_of_token.append(0)
    return {
        "row_of_seq": [*rows, *[0] * pads],
        "q_indptr": q_indptr,
        "seq_of_token": seq_of_token,
        "row_of_token": row_of_token,
    }


def held(step: Part) -> dict[str, list[int]]:
    names = ("row_of_seq", "q_indptr", "seq_of_token", "row_of_token")
    return {name: getattr(step, name).tolist() for name in names}


def served(device: torch.device, provider: str, count: int, custom_mask: bool = False) -> tuple[Tiny, Requests]:
    """Returns requests of eight tokens, whose rows are not in order."""
    tiny = Tiny.build(device, provider, (2, 4), (16,), custom_mask=custom_mask)
    requests = tiny.admitted(4)
    tiny.runtime.table.free(requests.rows[0])
    requests.rows = [*requests.rows[:0:-1], tiny.runtime.table.admit()][:count]
    requests.kv_len = [0] * count
    if count:
        requests.run(tiny.runner(graphs=False), [8] * count)
    return tiny, requests


@pytest.mark.parametrize("pad_to", [None, 4, 7])
@pytest.mark.parametrize("q_len", STEPS.values(), ids=STEPS)
def test_a_step_says_which_row_each_sequence_and_each_token_has(
    q_len: list[int], pad_to: int | None, provider: str, device: torch.device
) -> None:
    tiny, requests = served(device, provider, len(q_len))
    batch = requests.batch(q_len)
    step = tiny.runtime.step(batch, tiny.runtime.plan(batch, padded_to(pad_to))).parts[0]
    assert held(step) == by_hand(requests.rows, q_len, step)
    assert all(tensor.dtype == torch.int32 for tensor in (step.row_of_seq, step.q_indptr, step.seq_of_token))
    tiny.runtime.end_step()


# Prompts, extend steps with as many sequences as they are padded to, mixed and decode steps: three requests come first.
SERVED = [[5, 2, 7], [2, 2], [3, 4], [1, 1, 1], [1, 4, 1], [1], [1, 1], [2, 2, 2, 9], [1, 1, 1, 1]]


@pytest.mark.fast(1)
def test_a_forward_counts_the_tokens_of_each_request_by_their_rows(
    graphs: bool, provider: str, device: torch.device
) -> None:
    """Penalties need this. Graphs were tried on the other rows, and pads have counted at row 0."""
    tiny = Tiny.build(device, provider, (2, 4), (8, 16))
    seen = torch.zeros(9, VOCABULARY, device=tiny.runtime.device)
    bias = torch.zeros(9, device=tiny.runtime.device)

    def forward(step: Part) -> Tensor:
        seen.index_put_((step.row_of_token, step.token_ids), torch.ones_like(step.token_ids).float(), accumulate=True)
        return torch.stack([bias[step.row_of_seq], tiny.forward(step)[:, 0]], 1)

    recorder = recorder_for(tiny.runtime.device) if graphs else None
    runner = StepRunner(tiny.runtime, forward, recorder)
    runner.capture_all()
    requests = tiny.admitted(4)
    seen.zero_()
    bias.copy_(torch.arange(9))
    want = torch.zeros_like(seen)
    for q_len in SERVED:
        batch = requests.batch(q_len)
        out = runner.run(batch)
        assert out[:, 0].tolist() == requests.rows[: len(q_len)]
        for row, ids in zip(requests.rows, np.split(batch.token_ids, np.cumsum(q_len)[:-1]), strict=False):
            for token in ids.tolist():
                want[row, token] += 1
    assert torch.equal(seen[requests.rows], want[requests.rows])
    assert seen[0, 1:].sum() == 0
    assert runner.counters.replays == (len(SERVED) if graphs else 0)
