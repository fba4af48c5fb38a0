"""Target: the facts about a device that kernel choices depend on; detected once, or constructed by a test."""

import os
import re
from dataclasses import dataclass, replace

import torch

from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice
from rocm_attn.machine.aiter_marks import MARKS
from rocm_attn.machine.devices import require_there
from rocm_attn.machine.gpus import GPUS
from rocm_attn.machine.releases import NOT_KNOWN, Release, Releases, installed_releases, triton_version
from rocm_attn.machine.settings import interprets_kernels


@dataclass(frozen=True, slots=True)
class Target:
    """The facts about one kind of device that kernel choices depend on.

    arch:           "gfx942", "gfx950", "sm_90", ...; "cpu" without a GPU, "interpreter" under TRITON_INTERPRET=1
    compute_units:  CUs (AMD) or SMs (NVIDIA) that run programs at the same time; 1 on a CPU
    wave_size:      lanes of a wave or warp; 1 on a CPU
    lds_bytes:      LDS (AMD) or shared memory (NVIDIA) that one program may use
    fp8_dtype:      the FP8 dtype of the matrix units; None if they have none
    releases:       releases of ROCm, AITER and Triton; not known if they are not involved
    measured:       tile choices that the user has measured on the same kind of GPU (measured_choices.py)
    orders_by_barriers: True if a barrier also orders a program's reads and writes of global memory. On AMD it may order
                    shared memory only
    runs_at_once:   True if the two kernels of a mixed step are faster when they run at the same time, by measurement:
                    on an H200, 31 decodes with 2 x 700 new tokens take 0.91 to 0.95 of the time in turn
    shares_short_windows: True if several programs of the extend kernel share one row even with a short window; on sm_90
                    this costs more than it gains
    """

    arch: str
    compute_units: int
    wave_size: int
    lds_bytes: int
    fp8_dtype: torch.dtype | None
    releases: Releases = NOT_KNOWN
    measured: tuple[MeasuredTileChoice, ...] = ()
    orders_by_barriers: bool = False
    runs_at_once: bool = False
    shares_short_windows: bool = True

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def is_nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def is_gpu(self) -> bool:
        return self.is_amd or self.is_nvidia

    @property
    def is_interpreted(self) -> bool:
        """True for Triton's interpreter on a CPU."""
        return self.arch == "interpreter"


# The releases in the image (docker/Dockerfile), whose AITER has every mark; a choice without a machine is made for
# these.
IMAGE_RELEASES = Releases(rocm=Release.of("7.2.4"), aiter=Release.of("0.1.21.dev46"), marks=frozenset(MARKS))

# Compute units and LDS from the vendors' data sheets: MI300X 304 CUs and 64 KiB, MI355X 256 CUs and 160 KiB, H100 /
# H200 132 SMs and 227 KiB per block, A100 108 SMs and 163 KiB.
KNOWN_TARGETS: dict[str, Target] = {
    "gfx942": Target("gfx942", 304, 64, 64 << 10, torch.float8_e4m3fnuz, IMAGE_RELEASES),
    "gfx950": Target("gfx950", 256, 64, 160 << 10, torch.float8_e4m3fn, IMAGE_RELEASES),
    "sm_90": Target(
        "sm_90",
        132,
        32,
        227 << 10,
        torch.float8_e4m3fn,
        orders_by_barriers=True,
        runs_at_once=True,
        shares_short_windows=False,
    ),
    "sm_80": Target("sm_80", 108, 32, 163 << 10, None),
    "cpu": Target("cpu", 1, 1, 0, None),
    # Triton's interpreter on a CPU: a few programs, so that schedules split work, which run one after the other.
    "interpreter": Target("interpreter", 3, 1, 1 << 20, None, orders_by_barriers=True),
}


def known_target(arch: str) -> Target:
    """Returns the recorded target of an arch. Raises BadSetting, which lists the known ones."""
    if not isinstance(arch, str) or arch not in KNOWN_TARGETS:
        raise BadSetting(
            f"arch {arch!r} is not known; choose one of {', '.join(KNOWN_TARGETS)}, or a GPU: {', '.join(GPUS)}"
        )
    return KNOWN_TARGETS[arch]


def target_elsewhere(arch: str) -> Target:
    """The target written down for an arch for which code is compiled here, with the Triton that is installed.

    A cache's entries and measured tiles belong to one release. Raises BadSetting.
    """
    known = known_target(arch)
    return replace(known, releases=replace(known.releases, triton=Release.of(triton_version())))


def detect_target(device: torch.device) -> Target:
    """The target of a torch device. Asks the driver, so it is called once when a runtime is built."""
    if device.type == "cpu":
        # Triton reads the same variable when its kernels are imported.
        return KNOWN_TARGETS["interpreter" if interprets_kernels(os.environ) else "cpu"]
    require_there(device)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = re.split(r"[:\s]", properties.gcnArchName)[0]
        wave_size, lds_bytes = 64 if arch.startswith("gfx9") else 32, 64 << 10
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        wave_size, lds_bytes = 32, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    known = KNOWN_TARGETS.get(arch, Target(arch, 0, wave_size, lds_bytes, None))
    return replace(known, compute_units=properties.multi_processor_count, releases=installed_releases())
