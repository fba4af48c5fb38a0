"""Prompt lookup drafts the tokens that followed an earlier occurrence of the last tokens."""

import random
from array import array
from typing import Any

import pytest

from rocm_attn.errors import BadLogits
from rocm_serve.prefix_cache import CachedRow
from rocm_serve.request import Request, Sequence
from rocm_serve.sampling.sampling import Sampler
from rocm_serve.sampling.sampling_options import Sampling
from rocm_serve.speculation.drafts import LAST_TOKEN, DraftTree
from rocm_serve.speculation.ngrams import MOST_LOOKED_AT, NgramDrafter
from rocm_serve.speculation.speculation import _found_right


def sequence(*token_ids: int, number: int = 0) -> Sequence:
    return Sequence(number, Request(token_ids), frozenset(), Sampler(Sampling()), array("i", token_ids), CachedRow())


def drafts(*token_ids: int, most: int = 4, branches: int = 1) -> DraftTree | None:
    return NgramDrafter(branches).draft([(sequence(*token_ids), most)], {0}).get(0)


def test_what_came_after_the_last_tokens_comes_again() -> None:
    assert drafts(1, 2, 3, 4, 5, 6, 9, 1, 2, 3) == DraftTree.chain((4, 5, 6, 9))
    assert drafts(1, 2, 3, 4, 5, 6, 9, 1, 2, 3, most=2) == DraftTree.chain((4, 5))


def test_a_text_that_goes_round_in_a_circle_is_drafted_on_and_on() -> None:
    assert drafts(5, 7, 5, 7, 5, 7, most=5) == DraftTree.chain((5, 7, 5, 7, 5))
    assert drafts(4, 4, 4, most=3) == DraftTree.chain((4, 4, 4))


def test_branches_begin_with_different_tokens_and_the_last_one_comes_first() -> None:
    text = (1, 2, 10, 11, 12, 1, 2, 20, 21, 22, 1, 2, 10, 13, 14, 1, 2)
    tree = drafts(*text, most=6, branches=3)
    assert tree == DraftTree((10, 13, 14, 20, 21, 22), (LAST_TOKEN, 0, 1, LAST_TOKEN, 3, 4))
    assert drafts(*text, most=5, branches=2) == DraftTree((10, 13, 14, 20, 21), (LAST_TOKEN, 0, 1, LAST_TOKEN, 3))
    assert drafts(*text, most=3) == DraftTree.chain((10, 13, 14))


def test_a_sequence_is_looked_at_as_it_grows_and_forgotten_when_it_ends() -> None:
    drafter, growing = NgramDrafter(1), sequence(1, 2, 3)
    assert drafter.draft([(growing, 4)], {0}) == {}
    growing.token_ids.extend([4, 1, 2])
    assert drafter.draft([(growing, 2)], {0})[0] == DraftTree.chain((3, 4))
    growing.token_ids.extend([3, 9, 2, 3])
    assert drafter.draft([(growing, 1)], {0})[0] == DraftTree.chain((9,))
    assert drafter.draft([], {0}) == {}
    assert drafter._texts.keys() == {0}
    drafter.draft([], set())
    assert not drafter._texts


@pytest.mark.parametrize("num", [0, 1, 3])
def test_the_first_drafts_of_a_tree_are_a_tree(num: int) -> None:
    tree = DraftTree((5, 6, 7, 8), (LAST_TOKEN, 0, LAST_TOKEN, 2))
    assert tree.first(num) == DraftTree((5, 6, 7)[:num], (LAST_TOKEN, 0, LAST_TOKEN)[:num])
    assert tree.depths() == [1, 2, 1, 2]
    assert tree.first_branches() == [0, 0, 1, 1]
    assert (tree.after(LAST_TOKEN, 7), tree.after(0, 6), tree.after(0, 7)) == (2, 1, None)


def test_a_draft_goes_on_where_it_was_right_and_else_is_what_looking_through_the_whole_text_finds() -> None:
    chooser = random.Random(3)
    num_followed = 0
    for _ in range(60):
        drafter, growing = NgramDrafter(1), sequence(chooser.randrange(3))
        text, at = growing.token_ids, 0
        for _ in range(30):
            new = [chooser.randrange(3) for _ in range(chooser.randint(1, 3))]
            text.extend(new)
            follows = at > 0 and new == list(text[at : at + len(new)])
            num_followed += follows
            places = [
                (num, at) for num in (2, 3, 4) for at in range(num, len(text)) if text[at - num : at] == text[-num:]
            ]
            at = at + len(new) if follows else max(places)[1] if places else 0
            found = drafter.draft([(growing, 1)], {0})
            assert found == ({0: DraftTree.chain((text[at],))} if at else {})
    assert num_followed > 100


def test_a_step_looks_at_a_part_of_a_long_text() -> None:
    class Watched(array):  # type: ignore[type-arg]
        """Tokens of which only parts are read."""

        def __getitem__(self, place: Any) -> Any:
            read.append(len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1)
            return super().__getitem__(place)

        __iter__ = None  # type: ignore[assignment]

    read = list[int]()
    drafter, long = NgramDrafter(1), sequence(5)
    long.token_ids = Watched("i", [*range(3 * MOST_LOOKED_AT), 7, 8])
    found = []
    for _ in range(4):
        found.append(drafter.draft([(long, 2)], {0}))
        assert max(read) <= MOST_LOOKED_AT + 2
        read.clear()
    assert found[0] == found[3] == {0: DraftTree.chain((9, 10))}
    late = sequence(5)
    late.token_ids = array("i", [*range(3 * MOST_LOOKED_AT), 3 * MOST_LOOKED_AT - 9, 3 * MOST_LOOKED_AT - 8])
    drafter = NgramDrafter(1)
    assert [bool(drafter.draft([(late, 2)], {0})) for _ in range(3)] == [False, False, True]


def test_a_token_that_cannot_be_picked_ends_the_accepted_ones_and_fails_its_sequence_in_the_next_step() -> None:
    why = BadLogits("no number")
    drafts_of = DraftTree((5, 6, 7), (LAST_TOKEN, LAST_TOKEN, 1))
    assert _found_right([6, 1, 7, 2], drafts_of) == ([6, 7, 2], [1, 2])
    assert _found_right([6, 1, why, 2], drafts_of) == ([6], [])
    assert _found_right([6, 1, 7, why], drafts_of) == ([6, 7], [1])
    assert _found_right([why, 1, 7, 2], drafts_of) == (why, [])
