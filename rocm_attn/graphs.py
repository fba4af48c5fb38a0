"""Which recorder turns a device's steps into something that can be replayed."""

from __future__ import annotations

import torch

from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.kernels.launch import observe_launches


def recorder_for(device: torch.device) -> Recorder:
    """HIP or CUDA graphs on a GPU; on a CPU a recorder that replays torch operations and kernel launches itself."""
    if device.type == "cuda":
        from rocm_attn.hip_graphs.torch_recorder import TorchRecorder

        return TorchRecorder(device)
    from rocm_attn.hip_graphs.fake_recorder import FakeRecorder

    return FakeRecorder(observe_launches)
