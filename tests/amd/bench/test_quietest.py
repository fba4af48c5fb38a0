"""Several passes of a benchmark of host times, merged into one result."""

from __future__ import annotations

from typing import Any

import pytest

from rocm_lab.benchmarks.quietest import quietest


def of(median: float, batch: float, commit: str = "1", num_seqs: int = 4) -> dict[str, Any]:
    """Returns the result of a pass."""
    return {
        "machine": {"commit": commit},
        "rows": [{"num_seqs": num_seqs, "step_us_median": median, "batch_us_median": batch}],
    }


def test_of_each_number_the_smallest_counts_and_all_passes_are_kept() -> None:
    row = {"num_seqs": 4, "step_us_median": 2.0, "batch_us_median": 7.0, "passes_us": [3.0, 2.0]}
    assert quietest([of(3.0, 7.0), of(2.0, 8.0)]) == {"machine": {"commit": "1"}, "rows": [row]}


@pytest.mark.parametrize("other", [{"commit": "2"}, {"num_seqs": 5}], ids=str)
def test_passes_of_something_else_are_no_result(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one machine, commit and benchmark"):
        quietest([of(3.0, 7.0), of(2.0, 8.0, **other)])
