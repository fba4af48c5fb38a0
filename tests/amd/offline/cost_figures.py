"""Write the static figures that `rocm-attn explain --cost` predicts from.

    [AITER_SOURCE=CHECKOUT] python -m tests.amd.offline.cost_figures

compiles the ranked rows of the tuning table with the Triton at hand, which must be the newest supported, and needs
llvm-mca (see mca.py). Without a checkout of AITER the figures of its code objects stay as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from rocm_attn.cli import cost_figures
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from tests.amd.offline.code_objects import FORWARD, forward_loop
from tests.amd.offline.tile_candidates import estimate
from tests.amd.offline.tuning_table import chosen_layers

FILE = Path(cost_figures.__file__)
_HEAD = '''"""Static figures of the rows of the tuning table, compiled: `python -m tests.amd.offline.cost_figures`.

CODE_OBJECTS: of AITER's forward kernels in assembly, cycles of the matrix and of the vector unit in an iteration
"""

from __future__ import annotations

from rocm_attn.cli.static_figures import DecodeFigures, ExtendFigures
from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
'''


def main() -> None:
    """Compile, write, and have ruff put it in order."""
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    decode, extend = [], []
    for row, tiles in chosen_layers():
        found = estimate(row, tiles, whole=False, given_programs=True)
        cost = found.cost
        if cost is None:
            raise ValueError(f"{tiles} of {row} has no cost")
        cycles, who = cost.cycles, f"{row.arch!r}, {row.dims[0]}, {tiles!r}"
        if isinstance(tiles, DecodeTiles):
            clocks = max(cost.issue, cost.lds, cost.loads)
            decode.append(
                f"DecodeFigures({who}, {cost.programs}, {cycles.own:.0f}, {cycles.latencies:.2f}, {clocks:.1f})"
            )
        else:
            extend.append(f"ExtendFigures({who}, {cycles.matrix:.0f}, {cycles.vector:.0f})")
    lines = [
        _HEAD,
        f"DECODE: tuple[DecodeFigures, ...] = ({', '.join(decode)},)",
        f"EXTEND: tuple[ExtendFigures, ...] = ({', '.join(extend)},)",
        f"CODE_OBJECTS: dict[str, tuple[float, float]] = {_code_objects()!r}",
    ]
    FILE.write_text("\n".join(lines) + "\n")
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", FILE], check=True)


def _code_objects() -> dict[str, tuple[float, float]]:
    """Arch -> cycles of the matrix unit and of the vector unit."""
    aiter = os.environ.get("AITER_SOURCE")
    if not aiter:
        return cost_figures.CODE_OBJECTS
    loops = {arch: forward_loop(Path(aiter), arch) for arch in FORWARD}
    return {arch: (loop.matrix, float(loop.vector)) for arch, loop in loops.items()}


if __name__ == "__main__":
    main()
