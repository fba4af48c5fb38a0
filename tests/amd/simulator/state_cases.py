"""Runs of recurrent states and convolutions on a simulated arch: tokens one by one, prompts in chunks, and both."""

from functools import partial

import torch

from rocm_attn.kernels.states.arguments import ConvolutionWeights, Update
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.recur import launch_recur
from rocm_attn.recurrence import Recurrence
from tests.amd.kernels.recurrent_gate_cases import GATED, assert_gates
from tests.amd.kernels.state_cases import ConvolutionRun, New, StateRun, assert_states, steps_of
from tests.amd.simulator.case import KernelCase
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.recurrent import Drawn, convolved

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16
DELTA = Recurrence(1, 1, 32, 16, BF16, scale=0.5, normalises=True)
CHANNELS = Recurrence(1, 1, 24, 16, FP16, channel_decay=True, scale=0.5)
PLAIN = Recurrence(2, 1, 16, 32, BF16, update=Update.SUM, scale=0.5)


def run_recurrence(layer: Recurrence) -> None:
    """A prompt of two chunks, then drafts of which one is rejected, next to a sequence that begins, and a pad."""
    generator = torch.Generator().manual_seed(0)
    tokens = [Drawn.of(layer, 80, generator) for _ in range(2)]
    run = StateRun.of(launch_recur, layer, tokens, 2, CPU)
    outs = steps_of(run, (New(0, 66), New(None, 1)), (New(1, 1), New(0, 2, 1)), (New(0, 1), New(1, 1)))
    assert_states(run, outs)


def run_convolution(dtype: torch.dtype) -> None:
    """A prompt of two tiles, then drafts of which one is rejected, next to a sequence that begins, and a pad."""
    generator, channels = torch.Generator().manual_seed(0), 40
    rows = [torch.randn(40, channels, generator=generator).to(dtype) for _ in range(2)]
    weight, bias = torch.randn(channels, 4, generator=generator).to(dtype) / 2, rows[0][0].clone()
    run = ConvolutionRun(2, 2, CPU, launch_convolve, ConvolutionWeights(weight, bias, silu=True), rows)
    outs = steps_of(run, (New(0, 18), New(None, 1)), (New(1, 1), New(0, 2, 1)), (New(0, 1), New(1, 1)))
    for x, found in zip(rows, outs, strict=True):
        assert_attention_close(found, convolved(x[: len(found)], weight, bias, silu=True), dtype)


def run_gates(dtype: torch.dtype) -> None:
    """Runs gates of each form, and gated norms of each form."""
    assert_gates((2, 40, 1), dtype, has_y=False)
    assert_gates((2, 6, 100), dtype, has_y=True)
    for case in GATED.values():
        case.assert_served(dtype)


def state_cases(arch: str) -> list[KernelCase]:
    """Every form of the recurrence, a convolution, and gates."""
    return [
        KernelCase("states-delta", arch, partial(run_recurrence, DELTA)),
        KernelCase("states-channels", arch, partial(run_recurrence, CHANNELS)),
        KernelCase("states-plain", arch, partial(run_recurrence, PLAIN)),
        KernelCase("convolution", arch, partial(run_convolution, BF16)),
        *(KernelCase(f"gates-{str(dtype)[6:]}", arch, partial(run_gates, dtype)) for dtype in (BF16, FP16)),
    ]
