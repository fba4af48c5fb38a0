"""GPUs by the names that people use: the arch of each, its memory, and its rates. Imports only the standard library.

Bytes are those that the driver reports as the GPU's whole memory, where public logs of rocm-smi have them, and
otherwise the gigabytes of the vendor's data sheet, each of 10**9 bytes: no driver reports less.

Rates are those of the data sheets, without sparsity: MI300X, MI300A and MI325X (AMD CDNA 3), MI350X and MI355X (AMD
CDNA 4), H100 SXM, H200 SXM and A100 80GB SXM (NVIDIA). No sheet has the MI308X's matrices: they are those of 80 of the
MI300X's 304 compute units.
"""

from dataclasses import dataclass

_RSMI, _SHEET = "rocm-smi --showmeminfo vram", "data sheet"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a device, per second.

    bytes_per_s: that its memory gives
    flops_per_s: operations of products of matrices, of 16-bit elements if they are published
    source:      where they are from
    """

    bytes_per_s: float
    flops_per_s: float
    source: str = "data sheet"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. memory_bytes: of its own memory; source: where they are from"""

    arch: str
    memory_bytes: int
    source: str
    rates: Rates


GPUS: dict[str, Gpu] = {
    "mi300x": Gpu("gfx942", 206_141_652_992, _RSMI, Rates(5.3e12, 1307.4e12)),
    "mi308x": Gpu("gfx942", 192 * 10**9, _SHEET, Rates(5.3e12, 344e12)),
    "mi300a": Gpu("gfx942", 128 * 10**9, _SHEET, Rates(5.3e12, 980.6e12)),
    "mi325x": Gpu("gfx942", 256 * 10**9, _SHEET, Rates(6e12, 1307.4e12)),
    "mi350x": Gpu("gfx950", 309_220_868_096, _RSMI, Rates(8e12, 2306.9e12)),
    "mi355x": Gpu("gfx950", 309_220_868_096, _RSMI, Rates(8e12, 2516.6e12)),
    "h100": Gpu("sm_90", 80 * 10**9, _SHEET, Rates(3.35e12, 989.4e12)),
    "h200": Gpu("sm_90", 141 * 10**9, _SHEET, Rates(4.8e12, 989.4e12)),
    "a100": Gpu("sm_80", 80 * 10**9, _SHEET, Rates(2.039e12, 312e12)),
}
# Words of a driver's name that tell a slower relative of a GPU in the table.
_RELATIVES = {"pcie", "nvl", "40gb"}


def arch_named(name: str) -> str:
    """The arch of a GPU's name, in any case, as MI300X; any other text is returned unchanged."""
    gpu = GPUS.get(name.lower())
    return name if gpu is None else gpu.arch


def published_rates(driver_name: str) -> Rates | None:
    """The rates of a GPU by what its driver calls it, as AMD Instinct MI300X; None if they are not known."""
    words = set(driver_name.lower().replace("-", " ").split())
    return next((gpu.rates for name, gpu in GPUS.items() if name in words and not words & _RELATIVES), None)
