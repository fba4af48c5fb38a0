"""GPUs by the names that people use: the arch of each, and its memory. Imports only the standard library.

Bytes are those that the driver reports as the GPU's whole memory, where public logs of rocm-smi have them, and
otherwise the gigabytes of the vendor's data sheet, each of 10**9 bytes: no driver reports less.
"""

from __future__ import annotations

from dataclasses import dataclass

_RSMI, _SHEET = "rocm-smi --showmeminfo vram", "data sheet"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. memory_bytes: of its own memory; source: where they are from"""

    arch: str
    memory_bytes: int
    source: str


GPUS: dict[str, Gpu] = {
    "mi300x": Gpu("gfx942", 206_141_652_992, _RSMI),
    "mi308x": Gpu("gfx942", 192 * 10**9, _SHEET),
    "mi300a": Gpu("gfx942", 128 * 10**9, _SHEET),
    "mi325x": Gpu("gfx942", 256 * 10**9, _SHEET),
    "mi350x": Gpu("gfx950", 309_220_868_096, _RSMI),
    "mi355x": Gpu("gfx950", 309_220_868_096, _RSMI),
    "h100": Gpu("sm_90", 80 * 10**9, _SHEET),
    "h200": Gpu("sm_90", 141 * 10**9, _SHEET),
    "a100": Gpu("sm_80", 80 * 10**9, _SHEET),
}


def arch_named(name: str) -> str:
    """The arch of a GPU's name, in any case, as MI300X; any other text is returned unchanged."""
    gpu = GPUS.get(name.lower())
    return name if gpu is None else gpu.arch
