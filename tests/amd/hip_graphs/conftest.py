"""One fixture for every recorder of this machine, so that the same test covers both."""

import pytest
import torch

from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.hip_graphs.torch_recorder import TorchRecorder
from rocm_attn.kernels.launch import observe_launches
from tests.amd.hip_graphs.recorders import Lab

# A real recorder exists if there is a GPU; otherwise only the fake one.
RECORDERS = ["fake", pytest.param("torch", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["fake"]


@pytest.fixture(params=RECORDERS)
def lab(request: pytest.FixtureRequest) -> Lab:
    if request.param == "torch":
        device = torch.device("cuda", torch.cuda.current_device())
        return Lab(TorchRecorder(device), device)
    return Lab(FakeRecorder(observe_launches), torch.device("cpu"))


@pytest.fixture
def fake() -> FakeRecorder:
    return FakeRecorder(observe_launches)
