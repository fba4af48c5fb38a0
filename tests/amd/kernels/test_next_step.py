"""The next round of draft tokens, against a few lines of Python over lists."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from rocm_attn.kernels.metadata.error_word import ERROR_WORD, LENGTH_BEYOND_BOUND
from rocm_attn.kernels.refs import speculative as twins
from rocm_attn.kernels.speculative.arguments import EMITTED_WORDS, SpeculativeStep
from rocm_attn.kernels.speculative.next_step import launch_next_step
from tests.amd.kernels.attention_cases import ints

MOST = 1200  # tokens of a text, more than the kernel reads in one step
GARBAGE = 0x5A5A5A5A

NextRound = Callable[..., None]

by_both = pytest.mark.parametrize("next_step", [launch_next_step, twins.next_step], ids=["kernel", "twin"])


@dataclass(frozen=True)
class Text:
    """A sequence in a round: its tokens, the draft tokens after them, and the picks after its last one and these."""

    tokens: list[int]
    draft_tokens: list[int]
    picks: list[int]

    @property
    def taken(self) -> list[int]:
        right = 0
        while right < len(self.draft_tokens) and self.draft_tokens[right] == self.picks[right]:
            right += 1
        return self.picks[: right + 1]


def looked_up(tokens: list[int], num: int) -> tuple[list[int], int]:
    """Returns the next tokens that the text predicts, and the number of earlier tokens that matched."""
    best, most = 0, 0
    for place in range(2, len(tokens)):
        same = 0
        while same < min(4, place) and tokens[place - 1 - same] == tokens[len(tokens) - 1 - same]:
            same += 1
        if same >= max(2, most):
            best, most = place, same
    source = tokens[best:] if most else tokens[-1:]
    return [source[at % len(source)] for at in range(num)], most


def a_text(draw: random.Random, width: int, longest: int) -> Text:
    """Returns a text that repeats itself, draft tokens that are often right, and picks."""
    tokens = [draw.randrange(draw.choice([2, 3, 9])) for _ in range(draw.randrange(1, longest))]
    picks = [draw.randrange(3) for _ in range(width)]
    right = draw.randrange(width)
    draft_tokens = [*picks[:right], *(draw.randrange(3) for _ in range(width - 1 - right))]
    return Text(tokens, draft_tokens, picks)


def ran(next_step: NextRound, texts: list[Text], limit: list[int], device: torch.device) -> SpeculativeStep:
    """Returns the round after one of these texts, with a pad after them and rows in another order."""
    width = len(texts[0].picks)

    rows = list(range(len(texts), 0, -1))
    stored = torch.full((len(texts) + 2, MOST), GARBAGE, dtype=torch.int32, device=device)
    for row, text in zip(rows, texts, strict=True):
        stored[row, : len(text.tokens)] = ints(text.tokens, device)
    given = SpeculativeStep(
        counts=ints([len(texts), len(texts) * width, 7, 0], device),
        row_of_seq=ints([*rows, 0], device),
        kv_len=ints([*(len(text.tokens) + width - 1 for text in texts), 1], device),
        token_ids=ints(
            [token for text in texts for token in (text.tokens[-1], *text.draft_tokens)] + [GARBAGE] * 3, device
        ),
        texts=stored,
        limit=ints(limit, device),
        emitted=torch.full((len(texts), EMITTED_WORDS), GARBAGE, dtype=torch.int32, device=device),
    )
    next_step(ints([pick for text in texts for pick in text.picks] + [GARBAGE], device), given, width)
    return given


@pytest.mark.fast
@by_both
@pytest.mark.parametrize(("width", "longest"), [(1, 20), (2, 6), (5, 40), (9, 1150)])
def test_the_next_round_follows_from_the_picks_and_the_texts(
    next_step: NextRound, width: int, longest: int, device: torch.device
) -> None:
    draw = random.Random(width)
    texts = [a_text(draw, width, longest) for _ in range(12)]
    given = ran(next_step, texts, [MOST] * len(texts), device)
    for seq, text in enumerate(texts):
        tokens = text.tokens + text.taken
        draft_tokens, num_same = looked_up(tokens, width - 1)
        assert given.emitted[seq].tolist() == [len(text.taken), num_same, 0]
        assert given.token_ids[seq * width : (seq + 1) * width].tolist() == [tokens[-1], *draft_tokens]
        assert int(given.kv_len[seq]) == len(tokens) - 1 + width
        row = given.texts[len(texts) - seq].tolist()
        assert row[: len(tokens)] == tokens
        assert set(row[len(tokens) :]) == {GARBAGE}, "a token after the text was written"
    assert given.token_ids[-3:].tolist() == [GARBAGE] * 3
    assert given.counts.tolist() == [len(texts), len(texts) * width, 7, 0]
    assert given.texts[[0, -1]].eq(GARBAGE).all(), "the row of another sequence was written"
    assert int(given.kv_len[-1]) == 1


@by_both
def test_a_length_beyond_its_limit_is_cut_and_reported(next_step: NextRound, device: torch.device) -> None:
    texts = [Text([1, 2, 3], [4, 5], [4, 5, 6]), Text([1, 2, 3], [4, 5], [4, 5, 6])]
    given = ran(next_step, texts, [8, 7], device)
    assert given.kv_len.tolist() == [8, 7, 1]
    given = ran(next_step, texts, [8, 1], device)
    assert given.kv_len.tolist() == [8, 3, 1], "a step has all of its new tokens"
    assert int(given.counts[ERROR_WORD]) == LENGTH_BEYOND_BOUND
    assert int(given.emitted[1, 2]) == LENGTH_BEYOND_BOUND


@by_both
def test_an_error_of_the_round_is_reported_and_stays(next_step: NextRound, device: torch.device) -> None:
    """Only the runtime clears the word, after it has read it."""
    text = Text([1, 2, 3], [4, 5], [4, 5, 6])

    def of_a_wrong_round(picked: torch.Tensor, given: SpeculativeStep, width: int) -> None:
        given.counts[ERROR_WORD] = 64
        next_step(picked, given, width)

    given = ran(of_a_wrong_round, [text], [MOST], device)
    assert int(given.counts[ERROR_WORD]) == 64
    assert int(given.emitted[0, 2]) == 64
