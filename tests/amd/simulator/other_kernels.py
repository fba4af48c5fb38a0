"""Kernels of other projects on the simulator. Their code is not here: other_kernels.json says where it is and its hash.

    OTHER_KERNELS=~/triton:~/aiter:venv/lib/python3.12/site-packages \\
        python -m tests.amd.simulator.other_kernels rocm_lab/simulator/README.md

OTHER_KERNELS names clones and folders of installed packages that have the files. Each file is found by its hash, its
functions are compiled without the decorators that choose tiles or names, and every result is compared with float64. The
document has a table between two marks.
"""

import ast
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from rocm_lab.page_parts import with_part
from rocm_lab.simulator.launcher import ARCHS
from rocm_lab.simulator.report import KernelReport
from rocm_lab.simulator.simulate import simulate

VARIABLE = "OTHER_KERNELS"
_PINS = Path(__file__).with_suffix(".json")
_HEAD = """\
| kernel | of | arch | instructions | seconds | instructions a second | waits |
|---|---|---|---|---|---|---|
"""
F16, F32 = torch.float16, torch.float32

Run = Callable[..., KernelReport]


@dataclass(frozen=True, slots=True)
class Pin:
    """A kernel of another project.

    files:   with their paths in the repository, sha256 and the functions that are compiled
    assumed: names that the functions use -> Python of what they are there
    """

    repo: str
    revision: str
    kernel: str
    files: tuple[Mapping[str, Any], ...]
    assumed: Mapping[str, str]

    def source(self) -> str:
        """The functions as a module. Raises ValueError if no place has a file."""
        lines = ["import triton", "import triton.language as tl", *(f"{k} = {v}" for k, v in self.assumed.items())]
        for file in self.files:
            text = _text_of(self.revision, file["path"], file["sha256"])
            found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
            for name in file["functions"]:
                lines += ["", "", "@triton.jit", *text.splitlines()[found[name].lineno - 1 : found[name].end_lineno]]
        return "\n".join(lines) + "\n"


def pins() -> dict[str, Pin]:
    """The pinned kernels by name."""
    rows = json.loads(_PINS.read_text())
    return {row["kernel"]: Pin(**{**row, "files": tuple(row["files"])}) for row in rows}


def _text_of(revision: str, path: str, sha256: str) -> str:
    """A file's text, from the first place that has it with this hash."""
    places = [Path(place).expanduser() for place in os.environ.get(VARIABLE, "").split(os.pathsep) if place]
    for place in places:
        for name in (path, path.removeprefix("python/")):  # a wheel of SGLang has what its folder python has
            file = place / name
            if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256:
                return file.read_text()
        shown = subprocess.run(
            ["git", "-C", str(place), "show", f"{revision}:{path}"], capture_output=True, check=False
        )
        if shown.returncode == 0 and hashlib.sha256(shown.stdout).hexdigest() == sha256:
            return shown.stdout.decode()
    raise ValueError(f"no place in {VARIABLE} has {path} of {revision}; add a clone, or the folder of the package")


@cache
def kernel_named(name: str) -> Any:
    """The jitted function, imported from a file that lives as long as the process: Triton reads its source there."""
    path = Path(tempfile.mkdtemp(prefix="other-kernels-")) / f"{name.strip('_')}.py"
    path.write_text(pins()[name].source())
    return getattr(imported(path), name)


def imported(path: Path) -> ModuleType:
    """The module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(got: Tensor, want: Tensor, tolerance: float = 2e-3) -> None:
    """Raises AssertionError if results of float16 or float32 differ from float64."""
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def add(run: Run) -> None:
    x, y, out = torch.randn(1000), torch.randn(1000), torch.full((1000,), torch.nan)
    run("add_kernel", (8,), [x, y, out, 1000], BLOCK_SIZE=128)
    assert torch.equal(out, x + y)


def softmax(run: Run) -> None:
    x, out = 4 * torch.randn(9, 100), torch.full((9, 100), torch.nan)
    run("softmax_kernel", (4,), [out, x, 100, 100, 9, 100], BLOCK_SIZE=128, num_stages=2, num_warps=2)
    close(out, x.double().softmax(1), 1e-6)


def matmul(run: Run) -> None:
    a, b, c = torch.randn(70, 100).half(), torch.randn(100, 50).half(), torch.full((70, 50), torch.nan).half()
    tiles = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 2, "ACTIVATION": "leaky_relu"}
    run("matmul_kernel", (6,), [a, b, c, 70, 50, 100, *a.stride(), *b.stride(), *c.stride()], **tiles, num_warps=2)
    close(c, torch.nn.functional.leaky_relu(a.double() @ b.double(), 0.01), 1e-2)


def layer_norm(run: Run) -> None:
    x, w, b = torch.randn(5, 200).half(), torch.rand(200).half(), torch.randn(200).half()
    y, mean, rstd = torch.full_like(x, torch.nan), torch.empty(5), torch.empty(5)
    run("_layer_norm_fwd_fused", (5,), [x, y, w, b, mean, rstd, 200, 200, 1e-5], BLOCK_SIZE=128, num_warps=1)
    close(y, torch.nn.functional.layer_norm(x.double(), (200,), w.double(), b.double(), 1e-5), 1e-2)
    close(mean, x.double().mean(1), 1e-5)


def attention(run: Run) -> None:
    q, k, v = torch.randn(3, 1, 2, 128, 64).half()
    out, m = torch.full_like(q, torch.nan), torch.empty(2, 128)
    tiles = {"HEAD_DIM": 64, "BLOCK_M": 64, "BLOCK_N": 32, "FP8_OUTPUT": False, "STAGE": 3}
    arguments = [0.125, m, 1, 2, q, k, v, out, 128]
    run("_attn_fwd", (2, 2, 1), arguments, **tiles, warp_specialize=False, IS_HOPPER=False, num_warps=4, num_stages=1)
    scores = (q.double() @ k.double().mT * 0.125).masked_fill(~torch.ones(128, 128).tril().bool(), -torch.inf)
    close(out, scores.softmax(-1) @ v.double())


def rms_norm(run: Run) -> None:
    x, g, out, sigma = torch.randn(6, 300).half(), torch.rand(300).half(), torch.empty(6, 300).half(), torch.empty(6)
    arguments = [x, out, g, sigma, 300, 300, 6, 300, 1e-6]
    run("_rms_norm_kernel", (3,), arguments, BLOCK_SIZE=128, USE_BLOCKED=True, NUM_PRGMS=3, num_warps=2)
    close(sigma, (x.double().square().mean(1) + 1e-6).rsqrt(), 1e-5)
    close(out, x.double() * sigma.double()[:, None] * g.double(), 1e-2)


def gemm(run: Run) -> None:
    a, b, c = torch.randn(40, 96).half(), torch.randn(70, 96).half(), torch.full((40, 70), torch.nan).half()
    tiles = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "NUM_KSPLIT": 1}
    off = {"cache_modifier": None, "activation": None, "use_activation": False, "ADD_BIAS": False, "SKIP_REDUCE": False}
    strides = [*a.stride(), *reversed(b.stride()), 0, *c.stride()]
    whole = {"SPLITK_BLOCK_SIZE": 96, "EVEN_K": True, "EVEN_MN": False}
    run("_gemm_a16_w16_kernel", (9,), [a, b, None, c, 40, 70, 96, *strides], **tiles, **off, **whole, num_warps=2)
    close(c, a.double() @ b.double().T, 1e-2)


def delta_rule(run: Run) -> None:
    tokens, heads, dim = 7, 2, 32
    q, k, v = torch.randn(3, 1, tokens, heads, dim) / dim**0.5
    g, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
    out, state = torch.full_like(v, torch.nan), torch.zeros(1, heads, dim, dim)
    off = ["USE_GK", "USE_GV", "USE_QK_L2NORM_IN_KERNEL", "USE_INITIAL_STATE", "STATE_V_FIRST", "IS_VARLEN"]
    off += ["USE_GATE_IN_KERNEL", "HAS_DT_BIAS", "APPLY_BETA_SIGMOID", "ALLOW_NEG_EIGVAL"]
    sizes = {"H": heads, "HV": heads, "K": dim, "V": dim, "BK": dim, "BV": 16}
    run(
        "fused_recurrent_gated_delta_rule_fwd_kernel",
        (2 * heads,),
        [q, k, v, g, None, None, beta, None, None, out, None, state, None, 0.5, tokens],
        **sizes,
        **dict.fromkeys(off, False),
        **dict.fromkeys(("USE_G", "IS_BETA_HEADWISE", "STORE_FINAL_STATE"), True),
        num_warps=1,
    )
    held = torch.zeros(heads, dim, dim, dtype=torch.float64)
    for at in range(tokens):
        key, value, query = (rows[0, at].double() for rows in (k, v, q))
        held = held * g[0, at].double().exp()[:, None, None]
        change = beta[0, at].double()[:, None] * (value - torch.einsum("hkv,hk->hv", held, key))
        held = held + key[:, :, None] * change[:, None]
        close(out[0, at], 0.5 * torch.einsum("hkv,hk->hv", held, query), 1e-5)
    close(state[0], held, 1e-5)


def cache_pages(run: Run) -> None:
    tokens, heads, dim, block = 4, 2, 64, 16
    k, v = torch.randn(2, tokens, heads, dim).half()
    k_pages, v_pages = torch.zeros(2, 3, block, heads, dim).half()
    slots = torch.tensor([17, -1, 40, 0])
    strides = [heads * dim, heads * dim, block * heads * dim, dim, 0, 0, heads * dim]
    sizes = {"num_heads": heads, "head_size": dim, "block_size": block, "x": 1, "TILE_SIZE": 128}
    flags = {"USE_HEAD_MAJOR_LAYOUT": False, "INTERLEAVED_V_PACK_FACTOR": 0, "FP8_KV_CACHE": False}
    arguments = [k, v, k_pages, v_pages, slots, None, None, *strides]
    run("reshape_and_cache_kernel_flash", (tokens, 1), arguments, **sizes, **flags, num_warps=2)
    want = torch.zeros(3 * block, heads, dim).half()
    want[slots[[0, 2, 3]]] = k[[0, 2, 3]]
    assert torch.equal(k_pages.flatten(0, 1), want)
    want[slots[[0, 2, 3]]] = v[[0, 2, 3]]
    assert torch.equal(v_pages.flatten(0, 1), want)


def decode(run: Run) -> None:
    """Both kernels of a decode over pages of one token: parts of each sequence, and their sum."""
    batch, heads, kv_heads, dim, splits = 2, 4, 2, 64, 2
    lengths = [70, 33]
    q, indptr = torch.randn(batch, heads, dim).half(), torch.tensor([0, 70, 103], dtype=torch.int32)
    k, v = torch.randn(2, 150, kv_heads, dim).half()
    places, num_splits = torch.randperm(150)[:103].int(), torch.full((batch,), splits, dtype=torch.int32)
    part, lse = torch.full((batch, heads, splits, dim), torch.nan), torch.full((batch, heads, splits), torch.nan)
    out = torch.full_like(q, torch.nan)
    sizes = {"kv_group_num": 2, "BLOCK_DMODEL": dim, "BLOCK_DV": dim, "BLOCK_N": 8, "MIN_BLOCK_KV": 32, "PAGE_SIZE": 1}
    row = [kv_heads * dim, dim]
    arguments = [q, k, v, 0.125, indptr, places, part, lse, num_splits, *q.stride()[:2], *row, *row, *row, *row]
    more = {"logit_cap": 0.0, "Lk": dim, "Lv": dim, "xai_temperature_len": -1, "num_warps": 1}
    run("_fwd_kernel_stage1", (batch, heads, splits), [*arguments, *part.stride()[:3]], **sizes, **more)
    merged = [part, lse, out, 1.0, indptr, num_splits, None, *part.stride()[:3], *out.stride()[:2]]
    tiles = {"MAX_KV_SPLITS": splits, "MIN_BLOCK_KV": 32, "BLOCK_DV": dim, "Lv": dim, "HAS_SINK": False}
    run("_fwd_kernel_stage2", (batch, heads), merged, **tiles, num_warps=4)
    for seq, (end, length) in enumerate(zip(indptr[1:].tolist(), lengths, strict=True)):
        here = places[end - length : end].long()
        keys, values = (rows[here].double().repeat_interleave(2, 1) for rows in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[seq].double(), keys) * 0.125
        close(out[seq], torch.einsum("hn,nhd->hd", scores.softmax(-1), values))


CASES: tuple[Callable[[Run], None], ...] = (
    *(add, softmax, matmul, layer_norm, attention),
    *(rms_norm, gemm, delta_rule, cache_pages, decode),
)


def run_case(case: Callable[[Run], None], arch: str) -> list[tuple[KernelReport, float]]:
    """Runs a case; its kernels with the seconds of each without compiling. Raises if a result is wrong."""
    found: list[tuple[KernelReport, float]] = []

    def run(name: str, grid: tuple[int, ...], arguments: list[Any], **constants: Any) -> KernelReport:
        # The first launch compiles; it writes the same as the second.
        simulate(kernel_named(name), grid, arguments, arch, **constants)
        started = time.monotonic()
        report = simulate(kernel_named(name), grid, arguments, arch, **constants)
        found.append((report, time.monotonic() - started))
        return report

    torch.manual_seed(0)
    case(run)
    return found


def main(document: Path) -> None:
    """Runs every case on every arch, and writes the table."""
    known, rows = pins(), []
    for case in CASES:
        for arch in ARCHS:
            for report, seconds in run_case(case, arch):
                name = report.code.kernel
                pin = known[name]
                cells = [
                    f"`{name}`",
                    f"{pin.repo} {pin.revision[:10]}",
                    arch,
                    str(report.instructions),
                    f"{seconds:.2f}",
                    f"{report.instructions / seconds:.0f}",
                    report.waits.word.value,
                ]
                rows.append(f"| {' | '.join(cells)} |\n")
                print(rows[-1], end="", flush=True)
    said = f"Triton {triton.__version__}, one core.\n\n"
    document.write_text(with_part(document.read_text(), "other kernels", said + _HEAD + "".join(rows)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
