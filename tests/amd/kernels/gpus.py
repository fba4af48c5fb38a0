"""Which GPU the tests run on, where what they test is of one architecture."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_hopper import TRITONS

# NVIDIA's sm_90, as H100 and H200 are.
IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)

# Of tests of Hopper's own kernels, which are in Gluon: it changes from release to release of Triton.
OF_HOPPERS_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_HOPPER or Release.of(triton_version()) not in TRITONS,
        reason=f"Hopper's own kernels run on sm_90 with Triton {' or '.join(map(str, TRITONS))}",
    ),
]
