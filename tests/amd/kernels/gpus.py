"""The GPU of the tests, for tests that need one architecture."""

import pytest
import torch

from rocm_attn.machine.releases import Release, triton_version
from rocm_attn.providers.triton_hopper import TRITONS

# NVIDIA's sm_90: H100 and H200.
IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)

# Marks of tests of Hopper's own kernels, which are in Gluon: it changes between releases of Triton.
OF_HOPPERS_KERNELS = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_HOPPER or Release.of(triton_version()) not in TRITONS,
        reason=f"Hopper's own kernels run on sm_90 with Triton {' or '.join(map(str, TRITONS))}",
    ),
]
