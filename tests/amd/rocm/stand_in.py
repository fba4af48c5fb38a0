"""A report of an MI300X that does not exist, with planted constants, tiles and differences.

It is written from docs/rocm.md, docs/cost.md and the figures of the compiler, and shares no code with what reads it.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from rocm_attn.kernels.attention.cuts import merge_shape
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_lab.cost.static_figures import FILE

UNITS, CLOCK = 304, 2.1e9
TRITON = "3.6.0"
# Query heads, KV heads, head dim.
LAYERS = ((32, 8, 128), (8, 1, 128), (64, 8, 64), (8, 4, 256))
# Sequences, tokens of each, new ones among them.
DECODES = (
    *((1, 8192, 1), (1, 65536, 1), (64, 4096, 1), (256, 2048, 1), (1, 256, 1), (1, 2048, 1)),
    *((8, 1024, 1), (16, 8192, 1), (32, 2048, 1), (128, 8192, 1)),
)
SEARCHED = ((1, 16384, 1), (64, 4096, 1))
ROUNDS = 15


@dataclass(frozen=True, slots=True)
class Gpu:
    """Numbers of the GPU: bytes per second, seconds, seconds.

    noise: standard deviation of a time, relative to it
    """

    hbm: float = 3.3e12
    latency: float = 1.7e-6
    launches: float = 11e-6
    noise: float = 0.0


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
    """Builds the report of a GPU. content: what the file holds; a test may change it"""

    def __init__(self, gpu: Gpu, seed: int = 0, candidates: tuple[Candidate, ...] = CANDIDATES) -> None:
        self._gpu, self._random = gpu, random.Random(seed)
        self._figures = json.loads(FILE.read_text())
        tests = {f"times[{layer}-{shape}]": self._time(layer, shape) for layer in LAYERS for shape in DECODES}
        tests["tiles"] = _passed({"tile trials": [self._search(LAYERS[0], candidates)]})
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
        return seconds * math.exp(self._random.gauss(0, self._gpu.noise))

    def _figures_of(self, head_dim: int) -> dict[str, Any]:
        """The figures of the kernel that serves heads of this dim with Triton 3.6.0."""
        wanted = ("gfx942", head_dim, "triton.decode")
        rows = self._figures["decodes"]
        return dict(next(each for each in rows if (each["arch"], each["head_dim"], each["kernel"]) == wanted))

    def _time(self, layer: tuple[int, int, int], shape: tuple[int, int, int]) -> dict[str, Any]:
        tiles, name = DecodeTiles(**self._figures_of(layer[2])["tiles"]), "triton.decode"
        seconds = self.decode_seconds(layer, shape)
        measured = {"layer": layer_fields(layer), "shape": list(shape), "kernel": f"{name}: {name}(a layer, {tiles})"}
        return _passed({**measured, "us": round(self._noisy(seconds) * 1e6, 5)})

    def decode_seconds(self, layer: tuple[int, int, int], shape: tuple[int, int, int]) -> float:
        """docs/cost.md, "Decode"."""
        (q_heads, kv_heads, dim), (seqs, tokens, _), found = layer, shape, self._figures_of(layer[2])
        tiles, figures = found["tiles"], found["figures"]
        together = tiles.get("heads_per_row", 1)
        rows, programs = seqs * kv_heads // together, UNITS * tiles["programs_per_cu"]
        blocks = math.ceil(tokens / tiles["key_block"])
        iterations = math.ceil(rows * blocks / programs) * tiles["programs_per_cu"] / figures["programs"]
        # A part of a row costs two blocks more, and a row has one part more than it needs.
        parts = math.ceil(blocks / math.ceil(rows * (blocks + 2) / programs)) + 1
        step = merge_shape(rows, programs, q_heads // kv_heads * together, dim).parts
        ends = 2 + 1 + math.ceil(parts / step)
        gpu, a_key = self._gpu, kv_heads * seqs * tokens
        own = 4 * figures["own"] / CLOCK + figures["latencies"] * gpu.latency
        largest = max(a_key * 4 * dim / gpu.hbm, iterations * own, a_key * figures["units"] / UNITS / CLOCK)
        return float(largest + ends * gpu.latency + gpu.launches)

    def _search(self, layer: tuple[int, int, int], candidates: tuple[Candidate, ...]) -> dict[str, Any]:
        in_use = self._figures_of(layer[2])["tiles"]
        all_of = [Candidate((), 1.0, rounds=0), *candidates]
        return {
            "table": "decode",
            "layer": layer_fields(layer),
            "max_rows": 1 << 62,
            "shapes": [list(shape) for shape in SEARCHED],
            "in_use": {"table": "decode", "tiles": asdict(DecodeTiles(**in_use))},
            "candidates": [self._candidate(layer, in_use, each) for each in all_of],
        }

    def _candidate(self, layer: tuple[int, int, int], in_use: dict[str, Any], candidate: Candidate) -> dict[str, Any]:
        tiles = DecodeTiles(**{**in_use, **dict(candidate.changes)})
        given = {"table": "decode", "tiles": asdict(tiles), "wrong": candidate.wrong, "spilled": candidate.spilled}
        if not candidate.rounds:
            return given
        # A slower GPU slows both tiles of a round.
        us: dict[str, list[list[float]]] = {"in_use_us": [], "us": []}
        for _ in range(candidate.rounds):
            slow = self._noisy(1.0)
            for name, ratio in (("in_use_us", 1.0), ("us", candidate.ratio)):
                us[name].append(
                    [self._noisy(slow * ratio * self.decode_seconds(layer, shape) * 1e6) for shape in SEARCHED]
                )
        return {**given, **us}


def _passed(measured: dict[str, Any]) -> dict[str, Any]:
    return {"outcome": "passed", "seconds": 1.0, "measured": measured}


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
