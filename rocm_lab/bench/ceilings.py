"""Bytes that a device copies and reads, and operations that it computes, per second, measured in the same process."""

from dataclasses import dataclass

import torch

from rocm_lab.bench.clocks import Clock, median_us

_GPU_BYTES, _CPU_BYTES = 1 << 30, 64 << 20
_GPU_SIZE, _CPU_SIZE = 8192, 512


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of a device, per second.

    copied_per_s: bytes read and written by a copy of a large tensor
    read_per_s:   bytes read by a reduction over one
    flops_per_s:  of a product of square matrices in the dtype
    """

    copied_per_s: float
    read_per_s: float
    flops_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """The higher one of the rates of copying and reading."""
        return max(self.copied_per_s, self.read_per_s)


def measured_ceilings(device: torch.device, dtype: torch.dtype, clock: Clock) -> Ceilings:
    """Measures a device. Needs 2 GiB of a GPU's memory for a moment."""
    on_gpu = device.type == "cuda"
    num_bytes, size = (_GPU_BYTES, _GPU_SIZE) if on_gpu else (_CPU_BYTES, _CPU_SIZE)
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy_us = median_us(clock, lambda: torch.neg(source, out=target))
    total = torch.empty((), dtype=torch.int32, device=device)
    read_us = median_us(clock, lambda: torch.amax(source, (0,), out=total))
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    product_us = median_us(clock, lambda: torch.mm(a, b, out=product))
    return Ceilings(2e6 * num_bytes / copy_us, 1e6 * num_bytes / read_us, 2e6 * size**3 / product_us)


def read_us(num_bytes: int, device: torch.device, clock: Clock) -> float:
    """Returns microseconds of a plain read. Bytes that fit the L2 are there, as they are for a kernel that is timed."""
    if num_bytes == 0:
        return 0.0
    memory, out = torch.zeros(-(-num_bytes // 4), device=device), torch.empty((), device=device)
    return median_us(clock, lambda: torch.sum(memory, 0, out=out))
