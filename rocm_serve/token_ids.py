"""Many token ids at once: as an array, which no step, message or check goes through one by one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from rocm_attn.errors import BadRequest


def packed(token_ids: Sequence[int]) -> array[int]:
    """Returns the ids as int32. Raises BadRequest for one that no vocabulary has."""
    try:
        return array("i", token_ids)
    except OverflowError as error:
        raise BadRequest("a token id is beyond 32 bits; give ids of the model's vocabulary") from error


def least_and_largest(token_ids: Sequence[int]) -> tuple[int, int]:
    """Returns both, of at least one id. An array is read in place."""
    ids = np.asarray(token_ids)
    return int(ids.min()), int(ids.max())
