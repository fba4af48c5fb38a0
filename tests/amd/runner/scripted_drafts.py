"""Drafts that a test writes: mostly the tokens of the final text, with mistakes and branches of every kind."""

import random
from collections.abc import Mapping, Set
from collections.abc import Sequence as Many

from rocm_serve.engine import Engine
from rocm_serve.request import Sequence
from rocm_serve.speculation.drafts import LAST_TOKEN, DraftTree
from rocm_serve.speculation.speculation import Drafter


class ScriptedDrafter(Drafter):
    """Knows the texts, and makes mistakes.

    texts:    all tokens of each request, including the prompt's, or those of the longest text that it may get
    branches: true if drafts are trees
    mistakes: share of the drafts that are wrong
    """

    def __init__(
        self, texts: Many[Many[int]], vocabulary: int, *, seed: int = 0, branches: bool = False, mistakes: float = 0.2
    ) -> None:
        self._texts = texts
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._branches = branches
        self._mistakes = mistakes

    def draft(self, decoding: Many[tuple[Sequence, int]], alive: Set[int]) -> Mapping[int, DraftTree]:
        """Does the same as `Drafter.draft`."""
        assert {each.number for each, _ in decoding} <= set(alive)
        drafts = {each.number: self._tree(each, self._random.randint(0, most)) for each, most in decoding}
        return {number: tree for number, tree in drafts.items() if len(tree)}

    def _tree(self, sequence: Sequence, num: int) -> DraftTree:
        text = self._texts[sequence.number]
        token_ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for draft in range(num):
            parent = self._random.randint(LAST_TOKEN, draft - 1) if self._branches else draft - 1
            depth = 1 if parent == LAST_TOKEN else depths[parent] + 1
            place = len(sequence.token_ids) + depth - 1
            right = place < len(text) and self._random.random() >= self._mistakes
            token_ids.append(text[place] if right else self._random.randrange(self._vocabulary))
            parents.append(parent)
            depths.append(depth)
        return DraftTree(tuple(token_ids), tuple(parents))


class EveryOtherStep(ScriptedDrafter):
    """All drafts are right except the first one of a tree, which is a branch of its own; every other step has none."""

    _num_requested = 0

    def draft(self, decoding: Many[tuple[Sequence, int]], alive: Set[int]) -> Mapping[int, DraftTree]:
        """Does the same as `Drafter.draft`."""
        self._num_requested += 1
        return {} if self._num_requested % 2 == 0 else super().draft(decoding, alive)

    def _tree(self, sequence: Sequence, num: int) -> DraftTree:
        text, first = self._texts[sequence.number], len(sequence.token_ids)
        right = tuple(text[first : first + num])
        if not self._branches or len(right) < num or num < 2:
            return DraftTree.chain(right)
        beside = (right[0] + 1) % self._vocabulary
        return DraftTree((beside, *right[:-1]), (LAST_TOKEN, LAST_TOKEN, *range(1, num - 1)))


def with_drafter(engine: Engine, drafter: ScriptedDrafter) -> Engine:
    engine._speculation._drafter = drafter
    engine._speculation.has_speculative_steps = False  # rounds belong to the engine's own drafter
    return engine
