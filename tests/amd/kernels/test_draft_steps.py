"""The initial tensors of a round's draft steps, against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.kernels.metadata.draft_steps import launch_draft_steps
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT, Pads
from rocm_attn.kernels.refs.metadata import draft_steps
from tests.amd.kernels.attention_cases import GARBAGE, garbage
from tests.amd.kernels.draft_rounds import Launch, of_draft_steps

both = pytest.mark.parametrize("derive", [launch_draft_steps, draft_steps], ids=["kernel", "twin"])


def check(derive: Launch, prefix: list[int], pads: int, branches: int, steps: int, device: torch.device) -> None:
    """Derives the steps of these sequences twice, and compares all of it; nothing is written between their parts."""
    num_seqs, pad = len(prefix) + pads, Pads(7, 0)

    kv_len, token_ids = garbage(steps * (num_seqs + 2), device), garbage(steps * (num_seqs * branches + 1), device)
    masked = branches > 1
    mask_start = garbage(steps * (num_seqs + 3) * masked, device)
    parents = garbage(num_seqs * branches * steps * masked, device)
    kv_len[:num_seqs] = torch.tensor([length + branches for length in prefix] + [7] * pads, dtype=torch.int32)
    counts = torch.tensor([len(prefix), len(prefix) * branches, 5, 0], dtype=torch.int32, device=device)
    for _ in range(2):
        of_draft_steps(derive, pad)(
            counts,
            kv_len,
            token_ids,
            mask_start,
            parents,
            num_seqs=num_seqs,
            branches=branches,
            steps=steps,
        )
    lengths = [
        [length + (step + 1) * branches for length in prefix] + [7] * pads + [GARBAGE] * 2 for step in range(steps)
    ]
    assert kv_len.view(steps, -1).tolist() == lengths
    ids = [[GARBAGE if step == 0 else 0] * (num_seqs * branches) + [GARBAGE] for step in range(steps)]
    assert token_ids.view(steps, -1).tolist() == ids
    if masked:
        starts = [[*prefix, *[0] * pads, *[GARBAGE] * 3] for _ in range(steps)]
        assert mask_start.view(steps, -1).tolist() == starts
        line = [NO_PARENT] * branches + list(range((steps - 1) * branches))
        assert parents.tolist() == line * num_seqs


@both
@settings(max_examples=25)
@given(
    prefix=st.lists(st.integers(0, 90), max_size=5),
    pads=st.integers(1, 3),
    branches=st.integers(1, 5),
    steps=st.integers(1, 4),
)
def test_draft_steps_go_on_from_the_first_one(
    derive: Launch, kernel_device: torch.device, prefix: list[int], pads: int, branches: int, steps: int
) -> None:
    check(derive, prefix, pads, branches, steps, kernel_device)


@both
def test_draft_steps_of_many_sequences_are_derived_whole(derive: Launch, kernel_device: torch.device) -> None:
    """There are more sequences and tokens than a program writes."""
    check(derive, [at % 91 for at in range(300)], 5, 3, 3, kernel_device)
