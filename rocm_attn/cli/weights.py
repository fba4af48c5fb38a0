"""A model's weights on one rank, and where the number is from, for a model that is not loaded."""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rocm_attn.capture.step_times import NOT_COUNTED, Matrices
from rocm_attn.cli.arguments import config_at, runner_config
from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.machine.distributions import installing
from rocm_attn.models.config import ModelConfig

NOT_KNOWN = -1


@dataclass(frozen=True, slots=True)
class Weights:
    """num_bytes: on one rank, or NOT_KNOWN; source: where they are from, or why not; matrices: or NOT_COUNTED"""

    num_bytes: int
    source: str
    matrices: Matrices = NOT_COUNTED


def weights_of(options: argparse.Namespace) -> Weights:
    """The weights of options.config on one of options.tp ranks. Raises BadModel if there is no such file."""
    if options.weights_gib is not None:
        return Weights(int(options.weights_gib * 2**30), "--weights-gib")
    path = config_at(options.config)
    on_disk = sum(file.stat().st_size for file in path.parent.glob("model*.safetensors"))
    try:
        config = runner_config(path)
    except (BadModel, Unsupported) as refused:
        if on_disk:
            return Weights(-(-on_disk // options.tp), f"the files in {path.parent}, over {options.tp} ranks")
        return Weights(NOT_KNOWN, f"{refused}; give --weights-gib")
    if options.weights_counted_in is None:
        return Weights(NOT_KNOWN, f"rocm-serve counts them, and is not installed; {installing('rocm_serve')}")
    count: Callable[[ModelConfig, torch.dtype, int], Matrices]
    count = importlib.import_module(options.weights_counted_in).matrices_of
    matrices = count(config.on_one_of(options.tp), getattr(torch, options.dtype), options.tp)
    return Weights(matrices.num_bytes, f"counted from {path.name} in {options.dtype}", matrices)
