"""RankComparison: lets several ranks compare their requests and tokens when they meet before a step."""

from collections.abc import Iterable
from itertools import chain
from zlib import crc32

import numpy as np

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.machine.agreement import Meetings


class RankComparison:
    """Lets ranks check that they got the same requests and picked the same tokens.

    meetings: of the ranks; with one rank nothing is recorded
    """

    def __init__(self, meetings: Meetings, *, has_ranks: bool) -> None:
        self._meetings, self._has_ranks = meetings, has_ranks
        self._read_ids: list[int] = []  # since the last step was launched

    def note(self, token_ids: Iterable[Iterable[int]]) -> None:
        """Records tokens that were read, of each sequence of a step."""
        if self._has_ranks:
            self._read_ids += chain.from_iterable(token_ids)

    def before_step(self, *words: Int32Array) -> None:
        """Makes the ranks compare the tokens read so far and these words of the step that is launched next."""
        if self._has_ranks:
            everything = np.concatenate((*words, np.array(self._read_ids, np.int32)))
            self._meetings.digest = crc32(everything.tobytes())
            self._read_ids.clear()
