"""Speeds that others have published for AITER's decode, with the predictions of cost.py for the same kernel.

They are independent: nothing in cost.py was fitted to them or to other speeds of that kernel. No such speed of extend
was found: cost.py knows those of AITER's kernels in assembly.

AITER's decode in Gluon has 64 query heads of 64 on 8 KV heads in bfloat16, pages of 16. One source is the call of
SGLang on an MI350X (facebookexperimental/triton#2778, whose first table is read as one of 8 KV heads: 32 parts of a
sequence are 256 programs there), the other an earlier benchmark on gfx950 (#2281).

MI350X and MI355X differ in clocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_lab.bench.batch_spec import Group
from rocm_lab.cost.cost import GPUS, Loop, Prediction, decode_work
from rocm_lab.cost.static_figures import LoopFigures

_KEYS_OF_AN_ITERATION = 256
# Counts of paged_attention_decode_sliding_window on gfx950, with the tiles that AITER, 46 commits after v0.1.20,
# chooses for 64 sequences of 4,096 keys: compiled with Triton 3.9.0 and counted like ours (docs/amd_tuning.md).
_FIGURES = LoopFigures(programs=2, own=521.4, latencies=2.0, units=7.1)


@dataclass(frozen=True, slots=True)
class Published:
    """A published speed, and the prediction for the same kernel.

    gpu, source: in words
    speed:       bytes of K and V per second
    """

    gpu: str
    source: str
    layer: Problem
    speed: float
    prediction: Prediction

    @property
    def is_inside(self) -> bool:
        """True if the prediction's range holds the speed."""
        return self.prediction.speed.holds(self.speed)


# (sequences, tokens of each) -> TB/s.
_SGLANG = {
    (1, 8192): 0.790,
    (8, 8192): 4.048,
    (32, 8192): 5.154,
    (128, 8192): 5.677,
    (1, 32768): 1.156,
    (8, 32768): 4.922,
    (32, 32768): 5.599,
    (8, 131072): 5.621,
}
# The same keys and units.
_EARLIER = {(1, 8192): 0.2927, (8, 8192): 4.0281}


def published_decodes() -> Iterator[Published]:
    """Published speeds of AITER's decode."""
    problem, arch = Problem(64, 8, 64, torch.bfloat16, 16, v_head_dim=64, scale=64**-0.5), "gfx950"
    tiles = DecodeTiles(_KEYS_OF_AN_ITERATION, 4, 1, programs_per_cu=_FIGURES.programs)
    loop = Loop("AITER in Gluon", tiles, _FIGURES)
    for gpu, source, speeds in (
        ("MI350X", "triton#2778", _SGLANG),
        (GPUS[arch].name, "triton#2281", _EARLIER),
    ):
        for (num_seqs, kv_len), speed in speeds.items():
            shape = Group(num_seqs, 1, kv_len - 1)
            found = decode_work(problem, known_target(arch), shape, loop).predicted(shape, arch)
            yield Published(gpu, source, problem, speed * 1e12, found)
