"""The compiles of recurrent states: the layers of published models, on an arch, below 2 GiB of slots or above."""

from dataclasses import dataclass, replace

import torch

from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.states.arguments import ConvolutionWeights, GatedForm, RecurArgs, StatePlaces, Update
from rocm_attn.kernels.states.convolve import launch_convolve
from rocm_attn.kernels.states.gated_norm import launch_gated_norm
from rocm_attn.kernels.states.gates import launch_gates
from rocm_attn.kernels.states.places import launch_state_places
from rocm_attn.kernels.states.recur import launch_recur
from rocm_attn.paging.state_pool import SLOTS_OF_ROW, RecurrentLayers, StatePool, slot_bytes
from rocm_attn.recurrence import Convolution, Recurrence, rule_of
from tests.amd.offline.matrix import CPU, LARGE_POOL_BYTES, SMALL_POOL_BYTES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ARCHS = ("gfx942", "gfx950", "sm_90")
_MOST_KEPT, _NUM_SEQS = 4, 16


@dataclass(frozen=True, slots=True)
class StateRow:
    """A layer with a recurrence. Its convolution is over all rows of q, k and v. on_oldest: as in matrix.Row"""

    arch: str
    name: str
    form: Recurrence
    is_large: bool = False
    on_oldest: bool = False

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}{'-above_2gib' * self.is_large}"

    @property
    def dtype(self) -> torch.dtype:
        return self.form.dtype

    def launch(self) -> None:
        """Launches a step with prompts, one of a few tokens, and convolutions of both."""
        channels = 2 * self.form.num_k_heads * self.form.k_dim + self.form.num_heads * self.form.v_dim
        form = replace(self.form, convolution=Convolution(channels))
        layers, inputs = RecurrentLayers([form], kept=_MOST_KEPT), ZeroInputs(CPU)
        of_slots = LARGE_POOL_BYTES if self.is_large else SMALL_POOL_BYTES
        pool = StatePool(layers, num_rows=of_slots // (SLOTS_OF_ROW * slot_bytes(layers)) + 1, device=CPU)
        slots = pool.state[0]
        for q_len in (1, 128):
            num_tokens = _NUM_SEQS * q_len
            at = torch.empty(_NUM_SEQS, dtype=torch.int32)
            places = StatePlaces(at, at, at, torch.empty(_NUM_SEQS + 1, dtype=torch.int32), num_tokens, q_len)
            of_step = dict.fromkeys(("row_of_seq", "kv_len", "q_len"), at)
            step = StepTensors.of(at, counts=torch.empty(4, dtype=torch.int32), **of_step)
            launch_state_places(step, pool.tags, pool.headers, places, kept=_MOST_KEPT)
            rule = rule_of(form)
            workspace = torch.empty(slots.workspace_words(rule, num_tokens, _NUM_SEQS))
            tokens = inputs.of_recurrence(form, num_tokens)
            launch_recur(RecurArgs(tokens, rule, slots, places, workspace), deterministic=False)
            x, weight, bias, out = inputs.of_convolution(form, num_tokens)
            launch_convolve(x, out, ConvolutionWeights(weight, bias, True), pool.convolution[0], places)
        self._launch_gates()

    def _launch_gates(self) -> None:
        """Launches the gates of a few tokens, and gated norms of each form."""
        form, sums = self.form, self.form.update is Update.SUM
        heads, dim, num_tokens = form.num_heads, form.v_dim, 4
        channels = form.k_dim if form.channel_decay else 1
        x, y, rows = (torch.empty(num_tokens, num, dtype=form.dtype) for num in (heads * channels, heads, heads * dim))
        bias, factor = torch.empty(heads * channels), torch.empty(heads, 1)
        launch_gates(x, None if sums else y, bias, factor, torch.empty(x.shape), torch.empty(y.shape))
        groups = form.num_k_heads if sums else heads
        weight = torch.empty(heads * dim if sums else dim)
        of_heads = rows.view(num_tokens, heads, dim)
        for gate in (GatedForm(1e-6, not form.channel_decay, sums), GatedForm(1e-6)):
            skip = factor if sums else None
            launch_gated_norm(of_heads, rows, weight, skip, of_heads, rows, num_groups=groups, form=gate)


_QWEN3_NEXT = Recurrence(32, 16, 128, 128, BF16, normalises=True)
_LAYERS = {
    "qwen3_next": _QWEN3_NEXT,
    "kimi_linear": Recurrence(32, 32, 128, 128, BF16, channel_decay=True, normalises=True),
    "mamba_2": Recurrence(80, 8, 128, 64, BF16, Update.SUM),
    "wide_states": Recurrence(24, 1, 256, 64, FP16, Update.SUM),
    "exact": replace(_QWEN3_NEXT, dtype=FP32),
    "small": Recurrence(4, 2, 24, 40, FP16, channel_decay=True, normalises=True),
}
ROWS = (
    *(
        StateRow(arch, name, form, on_oldest=name in ("qwen3_next", "kimi_linear"))
        for arch in ARCHS
        for name, form in _LAYERS.items()
    ),
    *(StateRow(arch, "qwen3_next", _QWEN3_NEXT, is_large=True) for arch in ARCHS[:2]),
)
