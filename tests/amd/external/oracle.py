"""Reference attention of a sequence's new tokens, with log-sum-exps to base e. It shares no code with the project."""

from typing import Any

import numpy as np

from tests.amd.integrations.oracle import Array, Scores
from tests.amd.integrations.oracle import attention as of_scores


def attention(q: Array, k: Array, v: Array, *, scale: float, **rules: Any) -> tuple[Array, Array]:
    """Returns the output rows and log-sum-exps of a sequence's new tokens, which are its last ones.

    q: [new, q_heads, dim]; k: [tokens, kv_heads, dim]; v: [tokens, kv_heads, v_dim]
    rules: of Scores
    """
    out, lse = of_scores(q, k, v, Scores(scale, **rules))
    return out, lse * np.log(2)
