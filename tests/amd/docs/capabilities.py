"""The tables of capabilities, generated from the code: python -m tests.amd.docs.capabilities writes it.

No cell is written by hand. Kernels are those that `select` takes, as build_runtime does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import Unsupported
from rocm_attn.machine.releases import Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import UNLIMITED_WINDOW, AllKeys, Indexer, Indexing, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import ENTRIES, Selection, select
from rocm_lab.page_parts import with_part
from tests.amd.docs.pages import DOCS

PAGE = DOCS / "capabilities.md"


def _problem(heads: tuple[int, int], dims: tuple[int, int], **others: object) -> Problem:
    requested: dict[str, object] = {"dtype": torch.bfloat16, "page_size": 16, "scale": dims[0] ** -0.5, **others}
    return Problem(heads[0], heads[1], dims[0], v_head_dim=dims[1], **requested)  # type: ignore[arg-type]  # of many kinds


def _latent(heads: int, **others: object) -> Problem:
    return _problem((heads, 1), (576, 512), page_size=1, pool=PoolKind.LATENT, **others)


def _eight_bit(encoding: KVEncoding, scales: Scales) -> dict[str, object]:
    return {"kv_encoding": encoding, "kv_scales": scales}


def layers(fp8: KVEncoding) -> dict[str, Problem]:
    """Returns the layers of the tables, in bfloat16 over pages of 16 tokens unless their names say otherwise.

    fp8: the encoding that the GPU's matrix units read
    """
    heads, plain = (32, 8), (128, 128)
    return {
        "dense": _problem(heads, plain),
        "dense, float16": _problem(heads, plain, dtype=torch.float16),
        "dense, float32": _problem(heads, plain, dtype=torch.float32),
        "dense, pages of 1 token": _problem(heads, plain, page_size=1),
        "dense, pages of 64": _problem(heads, plain, page_size=64),
        "dense, vectorised pages": _problem(heads, plain, pool=PoolKind.VECTORIZED),
        "dense, FP8 with a factor a layer": _problem(heads, plain, **_eight_bit(fp8, Scales.LAYER)),
        "dense, FP8 with a factor a KV head": _problem(heads, plain, **_eight_bit(fp8, Scales.HEAD)),
        "dense, FP8 with a factor a token": _problem(heads, plain, **_eight_bit(fp8, Scales.TOKEN)),
        "dense, E5M2 with a factor a layer": _problem(heads, plain, **_eight_bit(KVEncoding.E5M2, Scales.LAYER)),
        "dense, a window of 4,096": _problem(heads, plain, window_left=4095),
        "dense, soft cap 50": _problem(heads, plain, logits_soft_cap=50.0),
        "dense, ALiBi slopes": _problem(heads, plain, has_alibi_slopes=True),
        "dense, not causal": _problem(heads, plain, window_right=UNLIMITED_WINDOW),
        "64/8 heads of 64, sinks, a window of 128 (gpt-oss)": _problem(
            (64, 8), (64, 64), has_sinks=True, window_left=127
        ),
        "8/4 heads of 256, soft cap 50, a window of 4,096 (Gemma 2)": _problem(
            (8, 4), (256, 256), logits_soft_cap=50.0, window_left=4095
        ),
        "64/1 heads of 128 (MQA)": _problem((64, 1), plain),
        "16/16 heads of 80": _problem((16, 16), (80, 80)),
        "16/2 heads of 512": _problem((16, 2), (512, 512)),
        "16/16 heads of 192, V of 128": _problem((16, 16), (192, 128)),
        "MLA, 16 heads of 576/512 (DeepSeek, TP 8)": _latent(16),
        "MLA, 128 heads": _latent(128),
        "MLA, 16 heads, FP8 with a factor a layer": _latent(16, **_eight_bit(fp8, Scales.LAYER)),
        "MLA, 16 heads, 2,048 selected tokens (DeepSeek-V3.2)": _latent(
            16, indexer=Indexer(64, 128, Indexing(scale=128**-0.5, top=2048))
        ),
        "dense, 16 selected blocks of 128": _problem(
            heads, plain, indexer=Indexer(8, 128, Indexing(scale=128**-0.5, top=16, unit_keys=128))
        ),
    }


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a table: the target, and the provider whose kernels it lists."""

    title: str
    target: Target
    provider: str = "auto"

    @property
    def fp8(self) -> KVEncoding:
        return KVEncoding.E4M3FNUZ if self.target.fp8_dtype is torch.float8_e4m3fnuz else KVEncoding.E4M3FN


# Triton releases that the kernels for one vendor's archs run with; with other releases the plain kernels serve.
_HOPPERS, _CDNAS = (
    next(row.limits.tritons[-1] for row in ENTRIES["triton"] if row.limits.tritons and arch in row.limits.archs)
    for arch in ("sm_90", "gfx942")
)

MACHINES = (
    Machine("MI300X (gfx942)", known_target("gfx942")),
    Machine("MI355X (gfx950)", known_target("gfx950")),
    Machine("MI300X without AITER", known_target("gfx942"), "triton"),
    Machine(
        f"MI300X without AITER, Triton {_CDNAS}",
        replace(known_target("gfx942"), releases=Releases(triton=_CDNAS)),
        "triton",
    ),
    Machine(
        f"MI355X without AITER, Triton {_CDNAS}",
        replace(known_target("gfx950"), releases=Releases(triton=_CDNAS)),
        "triton",
    ),
    Machine(
        f"H100 and H200 (sm_90), Triton {_HOPPERS}", replace(known_target("sm_90"), releases=Releases(triton=_HOPPERS))
    ),
    Machine("A CPU", known_target("cpu")),
)

_STEPS = {
    "decode": StepKind.DECODE,
    "extend": StepKind.EXTEND,
    "mixed": StepKind.MIXED,
    "prefill": StepKind.PREFILL,
}
_EXTRAS = ("selects keys", "shared prefixes", "masks", "deterministic")


def chosen(problem: Problem, machine: Machine, *, deterministic: bool = False) -> Selection | None:
    """Returns the selection that serves a layer, or None if nothing does."""
    try:
        return select(problem, machine.target, machine.provider, deterministic=deterministic)
    except Unsupported:
        return None


def row(problem: Problem, machine: Machine) -> list[str]:
    """Returns the cells of a layer: the kernel of each kind of step, and whether optional kinds of step are served."""
    selection = chosen(problem, machine)
    if selection is None:
        return ["not served"] + ["-"] * (len(_STEPS) + len(_EXTRAS) - 1)
    kernels = [selection.kernels.get(kind) for kind in _STEPS.values()]
    extras = (
        selection.sparse,
        selection.kernels.get(StepKind.SHARED),
        isinstance(problem.indexer, AllKeys) and chosen(replace(problem, custom_mask=True), machine),
        chosen(problem, machine, deterministic=True),
    )
    return [f"`{kernel.entry.name}`" if kernel else "as extend" for kernel in kernels] + [
        "yes" if extra else "no" for extra in extras
    ]


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _of_machine(machine: Machine, like: Machine | None) -> str:
    """Returns the table of a machine. If another machine is given, it has only the rows that differ from that one's."""
    cells_of = {name: tuple(row(problem, machine)) for name, problem in layers(machine.fp8).items()}
    said = ""
    if like is not None:
        other = {name: tuple(row(problem, like)) for name, problem in layers(like.fp8).items()}
        cells_of = {name: cells for name, cells in cells_of.items() if cells != other[name]}
        said = f"The same as on the {like.title}, except for:\n\n"
    together: dict[tuple[str, ...], list[str]] = {}
    for name, cells in cells_of.items():
        together.setdefault(cells, []).append(name)
    columns = ["layer", *_STEPS, *_EXTRAS]
    lines = [["; ".join(names), *cells] for cells, names in together.items()]
    return f"## {machine.title}\n\n{said}{_table(columns, lines)}"


def _aiters_pages() -> str:
    """Returns the pages over which AITER alone serves a layer; --page-size auto and --pool auto choose among them."""
    lines = []
    machine = replace(MACHINES[0], provider="aiter")
    sizes = (1, 16, 32, 64, 128, 256, 512, 1024)
    # The vectors of a vectorised pool hold more than one token.
    kinds = {PoolKind.SPLIT: ("K and V pages", sizes), PoolKind.VECTORIZED: ("vectorised pages", sizes[1:])}
    for name, problem in layers(machine.fp8).items():
        if "pages" in name or problem.pool is PoolKind.LATENT:
            continue
        found = []
        for pool, (words, among) in kinds.items():
            served = [size for size in among if chosen(replace(problem, pool=pool, page_size=size), machine)]
            if served:
                found.append(f"{words} of {', '.join(map(str, served))}")
        lines.append([name, "; ".join(found) or "none"])
    return (
        "## Pages that AITER serves on an MI300X\n\nPage sizes at which AITER has a kernel for every kind of step.\n\n"
        + _table(["layer", "pages"], lines)
    )


def page() -> str:
    """Returns the text of docs/capabilities.md."""
    tables = [_of_machine(machine, MACHINES[0] if machine is MACHINES[1] else None) for machine in MACHINES]
    return with_part(PAGE.read_text(), "tables", "\n".join([*tables, _aiters_pages()]))


if __name__ == "__main__":
    PAGE.write_text(page())
