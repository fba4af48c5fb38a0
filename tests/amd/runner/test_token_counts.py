"""Tokens that are counted on the device: with one that the host does not know, and anew if a step was lost."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_attn.kernels.sampling.parameter_columns import IN_PROMPT
from rocm_serve.sampling.token_counts import CountedText, TokenCounts

VOCAB, MOST = 9, 3
CPU = torch.device("cpu")


def counted(prompt: list[int], new: list[int]) -> list[int]:
    """By definition."""
    counts = np.bincount(np.array(new, np.int64), minlength=VOCAB)
    counts[sorted(set(prompt))] += IN_PROMPT
    found: list[int] = counts.tolist()
    return found


token = st.integers(0, VOCAB - 1)
prompts = st.lists(st.lists(token, min_size=1, max_size=5), min_size=5, max_size=5)
# The texts of a step; for each, whether its last token is unknown, the number of its lost tokens, and its new tokens.
steps = st.lists(
    st.dictionaries(st.integers(0, 4), st.tuples(st.booleans(), st.integers(0, 2), token), min_size=1, max_size=MOST),
    max_size=12,
)


@given(prompts, steps)
def test_each_texts_row_has_the_counts_of_its_tokens(
    prompts: list[list[int]], steps: list[dict[int, tuple[bool, int, int]]]
) -> None:
    """Five texts share three rows. In each step one gets a token or has lost some: none comes before the next pick."""
    counts = TokenCounts(CPU, VOCAB, MOST)
    news: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        texts, picked = [], torch.full((MOST,), VOCAB - 1, dtype=torch.int32)
        for place, (number, (is_pending, lost, last)) in enumerate(step.items()):
            new = news[number]
            if lost:
                del new[max(0, len(new) - lost) :]
            else:
                new.append(last)
            picked[place] = last
            is_pending = is_pending and not lost
            known = [*prompts[number], *(new[:-1] if is_pending else new)]
            texts.append(CountedText(number, known, len(prompts[number]), place if is_pending else -1))
        rows = counts.rows(texts, picked)
        assert len(set(rows)) == len(rows)
        for row, number in zip(rows, step, strict=True):
            assert counts.table[row].tolist() == counted(prompts[number], news[number])
