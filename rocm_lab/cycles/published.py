"""Published clocks of loops on an MI355X, with which docs/cycles.md compares the count.

All are of the kernel "flash attention forward, rotated, four clusters" of ROCm/gfx950-gluon-tutorials: heads of 128,
16-bit, no mask, 16,320 tokens, 256 rows of q and 64 keys, 8 waves. An iteration takes two key blocks of two waves of a
SIMD: 4,096 clocks of products. They were measured by instruction traces (docs/mfma_efficiency.md there).
"""

from __future__ import annotations

from dataclasses import dataclass

_NOTES = "kernels/attention/note.md"


@dataclass(frozen=True, slots=True)
class Published:
    """One measured loop. name: of the page's line; what: how it differs from the others; source: where it is written"""

    name: str
    what: str
    clocks: int
    source: str


PUBLISHED = (
    Published("fav3", "no declared order", 6282, f"{_NOTES} 1.1, baseline"),
    Published("fav3-3", "3 vector instructions declared after each product", 5768, f"{_NOTES} 1.1, K=3"),
    Published("fav3-8", "8 of them, nothing packed", 5451, f"{_NOTES} 1.1, scalarize + uniform K=8"),
    Published("fav3-split", "products with vector, then with exp2", 5390, f"{_NOTES} 1.1, VALU/TRANS split"),
    Published("fav4-plain", "lazy rescale, no declared order", 5394, f"{_NOTES} 3.1, no llir scheduler"),
    Published("fav4-no-pause", "declared order, scale folded into q", 4423, f"{_NOTES} 3.1, opt5"),
    Published("fav4", "and a pause before the loads of LDS", 4373, "kernels/attention/README.md 8"),
    Published("fav4-scale", "the same, scale in the loop", 4438, "kernels/attention/README.md 8"),
)
