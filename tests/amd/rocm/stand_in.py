"""A report of an MI300X that does not exist, with planted tiles and differences.

It is written from docs/rocm.md, and shares no code with what reads it.
"""

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from rocm_attn.kernels.tuning.tiles import DecodeTiles

UNITS = 304
TRITON = "3.6.0"
# Query heads, KV heads, head dim; and the tiles that serve it with Triton 3.6.0.
LAYER = (32, 8, 128)
IN_USE = DecodeTiles(key_block=16, num_warps=1, num_stages=2, programs_per_cu=8)
# Sequences, tokens of each, new ones among them.
SEARCHED = ((1, 16384, 1), (64, 4096, 1))
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tiles that differ from the row in use. ratio: of their time; wrong: why they are not right"""

    changes: tuple[tuple[str, int], ...]
    ratio: float
    wrong: str = ""
    rounds: int = ROUNDS
    spilled: int = 0


CANDIDATES = (
    Candidate((("num_stages", 3),), 0.9),
    Candidate((("num_stages", 1),), 1.25),
    Candidate((("key_block", 32),), 0.98),
    Candidate((("num_warps", 2),), 0.5, wrong="wrong: a sequence of 65 tokens, 1 of them new is off by 7.0"),
    Candidate((("programs_per_cu", 4),), 0.8, rounds=3),
    Candidate((("row_cost", 1),), 0.85, spilled=200),
)


class Report:
    """Builds the report of a GPU.

    noise:   standard deviation of a time, relative to it
    content: what the file holds; a test may change it
    """

    def __init__(self, candidates: tuple[Candidate, ...] = CANDIDATES, noise: float = 0.0) -> None:
        self._noise, self._random = noise, random.Random(0)
        measured = {"tile trials": [self._search(candidates)]}
        tests = {"tiles": {"outcome": "passed", "seconds": 1.0, "measured": measured}}
        self.content: dict[str, Any] = {
            "summary": [],
            "started": "2026-11-26T10:15:00+00:00",
            "commit": "0123456789ab",
            "environment": {
                "versions": {"triton": TRITON, "torch": "2.10.0", "rocm": "7.2.4", "rocm-attn": "0.1.0", "aiter": None},
                "devices": [
                    {"device": "cuda:0", "name": "AMD Instinct MI300X", "arch": "gfx942", "compute_units": UNITS}
                ],
            },
            "kernels": [kernel("_decode_kernel"), kernel("_extend_kernel", num_waves=4, waves=2)],
            "tests": tests,
        }

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self._random.gauss(0, self._noise))

    def _search(self, candidates: tuple[Candidate, ...]) -> dict[str, Any]:
        all_of = [Candidate((), 1.0, rounds=0), *candidates]
        return {
            "table": "decode",
            "layer": layer_fields(LAYER),
            "max_rows": 1 << 62,
            "shapes": [list(shape) for shape in SEARCHED],
            "in_use": {"table": "decode", "tiles": asdict(IN_USE)},
            "candidates": [self._candidate(each) for each in all_of],
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        tiles = {**asdict(IN_USE), **dict(candidate.changes)}
        given = {"table": "decode", "tiles": tiles, "wrong": candidate.wrong, "spilled": candidate.spilled}
        if not candidate.rounds:
            return given
        # A slower GPU slows both tiles of a round.
        us: dict[str, list[list[float]]] = {"in_use_us": [], "us": []}
        for _ in range(candidate.rounds):
            slow = self._noisy(1.0)
            for name, ratio in (("in_use_us", 1.0), ("us", candidate.ratio)):
                us[name].append([self._noisy(slow * ratio * tokens / 100) for _, tokens, _ in SEARCHED])
        return {**given, **us}


def failed(*kernels: str) -> dict[str, Any]:
    """A test that failed, with "module:name" of the kernels that it launched."""
    return {"outcome": "failed", "seconds": 1.0, "measured": {}, "message": "AssertionError", "kernels": list(kernels)}


def kernel(name: str, *, num_waves: int = 1, waves: int = 2, **driver: int) -> dict[str, Any]:
    """A launched kernel with these waves of a SIMD. driver: what the driver states otherwise"""
    static = dict.fromkeys(("agprs", "vgpr_spills", "sgpr_spills", "scratch_bytes", "matrix_ops", "buffer_loads"), 0)
    static |= {
        "vgprs": 180,
        "sgprs": 60,
        "lds_bytes": 0,
        "code_bytes": 4096,
        "global_loads": 3,
        "waves_per_simd": waves,
    }
    stated = {"registers": 180, "scratch_bytes": 0, "programs_per_cu": waves * 4 // num_waves}
    return {
        "kernel": f"rocm_attn.kernels.attention.decode:{name}",
        "arch": "gfx942",
        "sha256": "00" * 32,
        "num_waves": num_waves,
        "lds_bytes": 0,
        "static": static,
        "driver": {**stated, **driver},
    }


def layer_fields(layer: tuple[int, int, int]) -> dict[str, Any]:
    """A layer in bfloat16 with pages of 16."""
    q_heads, kv_heads, dim = layer
    return {
        "num_q_heads": q_heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "v_head_dim": dim,
        "dtype": "bfloat16",
        "kv_encoding": "LIKE_Q",
        "kv_scales": "NONE",
        "page_size": 16,
        "window_left": -1,
        **dict.fromkeys(("soft_cap", "sinks", "alibi"), False),
        "causal": True,
    }
