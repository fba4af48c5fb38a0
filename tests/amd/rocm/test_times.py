"""Times of one layer of attention, replayed as a graph; for the report, on a correct result."""

import math
from dataclasses import asdict

import pytest
import torch

from rocm_attn.providers.tiles import layer_of
from rocm_lab.bench.batch_spec import BatchSpec, Group
from rocm_lab.bench.ceilings import Ceilings
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.kernels import OK, KernelOptions, Race
from rocm_lab.bench.suites import SuiteCase
from tests.amd.rocm.models import Measured, layer

pytestmark = pytest.mark.gpu

# More than any current GPU has: a time that implies more did not measure this work, and is a wrong result.
IMPOSSIBLE = Ceilings(copied_per_s=20e12, read_per_s=20e12, flops_per_s=5e15)
NO_METER = EnergyMeter(lambda: math.nan, "", "not counted")


# Decodes from a launch that does little to one that HBM bounds; and prompts.
SHAPES = BatchSpec.parse(
    "1d8k+1d64k+64d4k+256d2k+1d256+1d2k+8d1k+16d8k+32d2k+128d8k+1x2k+8x512+4k+1x512+4x2k+16x256+768+1x8k"
).groups


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("model", ["Llama-3-8B", "Llama-3-70B on one of 8 GPUs", "gpt-oss-120b", "Gemma-3-4B"])
def test_one_layer(model: str, shape: Group, device: torch.device, measured: Measured) -> None:
    problem, batch = layer(model), BatchSpec((shape,))
    race = Race({"triton": OwnProvider("triton")}, device, IMPOSSIBLE, KernelOptions(), NO_METER)
    ((row,),) = race.rows([SuiteCase(problem, batch)])
    assert row.status == OK, row.reason
    measured("layer", asdict(layer_of(problem)))
    measured("shape", [shape.num_seqs, shape.kv_len, shape.new])
    measured("kernel", row.kernel)
    measured("us", round(row.us, 2))
    measured("GB/s of K and V", round(row.work.kv_bytes / row.us / 1e3, 1))
    measured("TFLOP/s", round(row.work.flops / row.us / 1e6, 2))
