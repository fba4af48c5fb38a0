"""The compiles of recurrent states: the layers of published models, on an arch, below 2 GiB of slots or above."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.states.arguments import (
    HEADER_WORDS,
    ConvolutionSlots,
    ConvolutionWeights,
    RecurrenceRule,
    RecurrentSlots,
    RecurrentTokens,
    StatePlaces,
)
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.places import launch_state_places
from rocm_attn.kernels.states.recur import launch_recur
from tests.amd.offline.matrix import LARGE_POOL_BYTES, SMALL_POOL_BYTES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ARCHS = ("gfx942", "gfx950", "sm_90")
_WIDTH, _MOST_KEPT, _NUM_SEQS = 4, 4, 16


@dataclass(frozen=True, slots=True)
class StateRow:
    """A layer with a recurrence.

    heads:     v heads, k heads
    dims:      dk, dv
    on_oldest: as in matrix.Row
    """

    arch: str
    name: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype = BF16
    channels: bool = False
    delta: bool = True
    normalises: bool = True
    is_large: bool = False
    on_oldest: bool = False

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}{'-above_2gib' * self.is_large}"

    def launch(self) -> None:
        """Launches a step with prompts, one of a few tokens, and convolutions of both."""
        (heads, k_heads), (dk, dv) = self.heads, self.dims
        state_bytes = LARGE_POOL_BYTES if self.is_large else SMALL_POOL_BYTES
        num_slots = state_bytes // (heads * dk * dv * 4) + 1
        channels = (dk,) * self.channels
        kept = (num_slots, _MOST_KEPT)
        slots = RecurrentSlots(
            torch.empty(num_slots, heads, dk, dv),
            torch.empty(*kept, k_heads, dk, dtype=self.dtype),
            torch.empty(*kept, heads, dv, dtype=self.dtype),
            torch.empty(*kept, heads, *channels),
            torch.empty(*kept, heads),
        )
        width = 2 * k_heads * dk + heads * dv
        # Above 2 GiB other layers' inputs lie between.
        inputs = torch.empty(
            num_slots, (_WIDTH - 1 + _MOST_KEPT) * (16 if self.is_large else 1), width, dtype=self.dtype
        )
        convolved = ConvolutionSlots(inputs[:, : _WIDTH - 1 + _MOST_KEPT])
        for q_len in (1, 128):
            num_tokens = _NUM_SEQS * q_len
            at = torch.empty(_NUM_SEQS, dtype=torch.int32)
            places = StatePlaces(at, at, at, torch.empty(_NUM_SEQS + 1, dtype=torch.int32), num_tokens, q_len)
            of_step = dict.fromkeys(("row_of_seq", "kv_len", "q_len"), at)
            step = StepTensors.of(at, counts=torch.empty(4, dtype=torch.int32), **of_step)
            tags, headers = (
                torch.empty(*shape, dtype=torch.int32) for shape in ((_NUM_SEQS, 1), (num_slots, HEADER_WORDS))
            )
            launch_state_places(step, tags, headers, places, kept=_MOST_KEPT)
            q, v = (torch.empty(num_tokens, *of, dtype=self.dtype) for of in ((k_heads, dk), (heads, dv)))
            tokens = RecurrentTokens(
                q,
                torch.empty_like(q),
                v,
                torch.empty(num_tokens, heads, *channels),
                torch.empty(num_tokens, heads),
                torch.empty_like(v),
            )
            form = RecurrenceRule(self.delta, dk**-0.5, self.normalises)
            workspace = torch.empty(slots.workspace_words(num_tokens, _NUM_SEQS))
            launch_recur(tokens, form, slots, places, workspace, deterministic=False)
            x = torch.empty(num_tokens, width, dtype=self.dtype)
            weights = torch.empty(width, _WIDTH, dtype=self.dtype), torch.empty(width, dtype=self.dtype)
            launch_convolve(x, torch.empty_like(x), ConvolutionWeights(*weights, True), convolved, places)


def _layers(arch: str) -> tuple[StateRow, ...]:
    return (
        StateRow(arch, "qwen3_next", (32, 16), (128, 128), on_oldest=True),
        StateRow(arch, "kimi_linear", (32, 32), (128, 128), channels=True, on_oldest=True),
        StateRow(arch, "mamba_2", (80, 8), (128, 64), delta=False, normalises=False),
        StateRow(arch, "wide_states", (24, 1), (256, 64), FP16, delta=False, normalises=False),
        StateRow(arch, "exact", (32, 16), (128, 128), FP32),
        StateRow(arch, "small", (4, 2), (24, 40), FP16, channels=True),
    )


ROWS = (
    *(row for arch in ARCHS for row in _layers(arch)),
    *(StateRow(arch, "qwen3_next", (32, 16), (128, 128), is_large=True) for arch in ARCHS[:2]),
)
