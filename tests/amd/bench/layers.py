"""Small layers and data for tests of benchmarks."""

import torch

from rocm_attn.problem import PoolKind, Problem
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.step_data import StepData, random_steps

CPU = torch.device("cpu")
LAYER = Problem(4, 2, 16, torch.float32, 8, v_head_dim=16, scale=0.25)
LATENT = Problem(4, 1, 24, torch.float32, 8, v_head_dim=16, scale=0.25, pool=PoolKind.LATENT)


def one_step(batch: str, problem: Problem = LAYER) -> StepData:
    (data,) = random_steps(problem, BatchSpec.parse(batch), 1, CPU, seed=3)
    return data
