"""Which GPU the tests run on, where what they test is of one architecture."""

from __future__ import annotations

import torch

# NVIDIA's sm_90, as H100 and H200 are.
IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
