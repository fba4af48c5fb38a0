"""Speeds that others have published for AITER's kernels, with the predictions of cost.py for the same ones.

All speeds of decode are independent: nothing in cost.py was fitted to them or to other speeds of that kernel. No speed
of extend in this table was used, but cost.py knows measured speeds of the same kernels in assembly: their share of the
peak is asm_flops, from the same README without a mask, and _TILE_START was fitted to these. So extend checks masks,
heads, lengths and, by the second source, another machine, but no share that follows from static figures.

decode   AITER's in Gluon, 64 query heads of 64 on 8 KV heads in bfloat16, pages of 16. The call of SGLang on an MI350X
         (facebookexperimental/triton#2778, whose first table is read as one of 8 KV heads: 32 parts of a sequence are
         256 programs there), and that of an earlier benchmark on gfx950 (#2281).
extend   AITER's in assembly, heads of 128 in bfloat16, causal, no cached tokens. Its own table (aiter,
         op_tests/cpp/mha/README.md at e4048607): all steps of 8 KV heads and 16k tokens at most, but for 10k, with 1.5
         tiles or more for each CU; fewer leave CUs idle, which ours share out. And the same kernels as somebody else
         timed them on an MI300X (midiareshadi/attn-dsl-bench, results/raw/sweep_v1.csv).

MI350X and MI355X differ in clocks alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_lab.cost.cost import (
    FIGURES,
    GPUS,
    CostShape,
    Loop,
    Prediction,
    Range,
    WorkCut,
    decode_prediction,
    extend_prediction,
)

_KEYS_OF_AN_ITERATION = 256
_TOKENS_OF_A_TILE = 256
# Elements of a key and of a value, their type, tokens of a page, the scale of scores.
_ROWS = (128, torch.bfloat16, 16)


@dataclass(frozen=True, slots=True)
class Published:
    """A published speed, and the prediction for the same kernel.

    kernel, gpu, source: in words
    speed:               decode: bytes of K and V per second; extend: operations per second
    """

    kernel: str
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
# (sequences, query heads, new tokens of each) -> TFLOP/s on an MI300X and on an MI355X.
_ASSEMBLY = {
    (4, 32, 1024): (334.005, 720.995),
    (4, 64, 1024): (326.51, 638.705),
    (8, 32, 1024): (311.385, 623.93),
    (8, 64, 1024): (321.865, 626.57),
    (1, 64, 2048): (392.425, 936.435),
    (4, 32, 2048): (419.435, 809.835),
    (4, 64, 2048): (425.735, 899.845),
    (8, 32, 2048): (412.99, 894.45),
    (8, 64, 2048): (452.03, 963.165),
    (1, 32, 4096): (467.805, 949.325),
    (1, 64, 4096): (474.385, 1046.085),
    (4, 32, 4096): (486.73, 1130.115),
    (4, 64, 4096): (513.79, 1174.92),
    (8, 32, 4096): (513.1, 1166.875),
    (8, 64, 4096): (509.255, 1190.295),
    (1, 32, 8192): (522.68, 1247.73),
    (1, 64, 8192): (518.29, 1300.105),
    (4, 32, 8192): (547.09, 1318.92),
    (4, 64, 8192): (540.515, 1319.225),
    (8, 32, 8192): (537.36, 1316.805),
    (8, 64, 8192): (550.67, 1311.955),
    (1, 64, 16384): (541.55, 1392.485),
}
# New tokens of each of 16 sequences -> TFLOP/s.
_SWEEP = {1024: 225.1, 2048: 314.5, 4096: 408.8, 8192: 446.3, 16384: 494.4}


def published_decodes() -> Iterator[Published]:
    """Published speeds of AITER's decode."""
    problem, arch = Problem(64, 8, 64, torch.bfloat16, 16, v_head_dim=64, scale=64**-0.5), "gfx950"
    figures = FIGURES.gluon_decode
    tiles = DecodeTiles(_KEYS_OF_AN_ITERATION, 4, 1, programs_per_cu=figures.programs)
    loop = Loop("AITER in Gluon", tiles, figures, 1)
    for gpu, source, speeds in (
        ("MI350X", "triton#2778", _SGLANG),
        (GPUS[arch].name, "triton#2281", _EARLIER),
    ):
        for (num_seqs, kv_len), speed in speeds.items():
            found = decode_prediction(problem, known_target(arch), CostShape(num_seqs, kv_len), loop)
            yield Published("AITER in Gluon", gpu, source, problem, speed * 1e12, found)


def published_extends() -> Iterator[Published]:
    """Published speeds of AITER's forward kernels in assembly."""
    readme, sweep = "AITER", "attn-dsl-bench"
    for (num_seqs, heads, tokens), speeds in _ASSEMBLY.items():
        for arch, speed in zip(GPUS, speeds, strict=True):
            yield _in_assembly(arch, readme, Problem(heads, 8, *_ROWS), CostShape(num_seqs, tokens, tokens), speed)
    for tokens, speed in _SWEEP.items():
        yield _in_assembly("gfx942", sweep, Problem(16, 16, *_ROWS), CostShape(16, tokens, tokens), speed)


def _in_assembly(arch: str, source: str, problem: Problem, shape: CostShape, speed: float) -> Published:
    gpu = GPUS[arch]
    share = Range.between(*(flops / gpu.matrix_ops for flops in gpu.asm_flops))
    num = shape.num_seqs * problem.num_q_heads * -(-shape.q_len // _TOKENS_OF_A_TILE)
    tiles = WorkCut(num, _TOKENS_OF_A_TILE, programs=1)
    found = extend_prediction(problem, known_target(arch), shape, share, tiles)
    return Published("AITER in assembly", gpu.name, source, problem, speed * 1e12, found)
