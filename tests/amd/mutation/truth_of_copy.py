"""The truth test on a copy of the kernels, over pages beyond 2 GiB. A program: its argument is the copy's folder.

Prints "passed" or "missed". A kernel whose offsets wrap may end the process instead.
"""

import sys

import torch

import rocm_attn

# Before anything of the copy is imported.
if __name__ == "__main__":
    rocm_attn.__path__ = [sys.argv[1], *rocm_attn.__path__]

from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.problem import ALL_KEYS, Indexer, KVEncoding, Problem, Scales
from rocm_attn.selection.build import build_runtime
from rocm_attn.truth.check import NeedleCheck, TruthPlan

# Pages of 32 KiB, so that few of them reach beyond 2 GiB. Those of index keys are as large.
_HEADS, _DIM, _PAGE_SIZE = 2, 128, 128


def main(folder: str, *, selects: bool) -> None:
    """Print what came of it."""
    import rocm_attn.kernels.launch as copied

    assert (copied.__file__ or "").startswith(folder)
    indexing = Indexing(_DIM**-0.5, top=2, unit_keys=16, last=1)
    indexer = Indexer(2, _HEADS * _DIM, indexing, KVEncoding.E4M3FN, Scales.TOKEN)
    problem = Problem(
        _HEADS,
        _HEADS,
        _DIM,
        torch.float32,
        _PAGE_SIZE,
        v_head_dim=_DIM,
        scale=_DIM**-0.5,
        kv_encoding=KVEncoding.E4M3FN,
        kv_scales=Scales.LAYER,
        indexer=indexer if selects else ALL_KEYS,
    )
    pages = (17 << 27) // (_PAGE_SIZE * _HEADS * _DIM)
    plan = TruthPlan((260,), 250, 250, decode_steps=2, num_pages=pages, provider="triton", graphs=False)
    report = NeedleCheck(
        [problem], plan, lambda problems, options: build_runtime(problems, options, device="cpu")
    ).run()
    print("passed" if report.passed else "missed")


if __name__ == "__main__":
    main(sys.argv[1], selects=sys.argv[2] == "selects")
