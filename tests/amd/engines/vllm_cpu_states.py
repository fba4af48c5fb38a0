"""Operations of recurrent layers that vLLM lacks on a CPU, in torch: a plug-in for each of its processes.

Gated delta nets in float32, where vLLM's operation takes bfloat16 alone, and what a Mamba2 layer does for states that
are kept from within a chunk of a prompt. They are written from vLLM's kernels for GPUs
(third_party/flash_linear_attention/ops/fused_recurrent.py; causal_conv1d.py, ssd_combined.py and ssd_checkpoint.py of
layers/mamba/ops), over vLLM's metadata and its own states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.amd.engines.sglang_cpu_states import convolve, convolve_one, scan, scan_one

ZERO = "_zero_block_ids"
_DELTA_NET, _SCAN, _STORE = "cpu_gdn_attention_core", "_mamba_chunk_scan_combined_fwd", "store_prefill_checkpoint"
_NORM_EPSILON = 1e-6


def register() -> None:
    """Replaces the operations for layers that are made from now on."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    # Torch reads the operation's signature from these.
    delta_net.__annotations__["layer_name"] = LayerNameType
    setattr(gdn_attention, _DELTA_NET, delta_net)
    from vllm.model_executor.layers.mamba import mamba_mixer2

    try:
        from vllm.model_executor.layers.mamba.ops import ssd_checkpoint, ssd_combined
    except ImportError:  # 0.26 keeps no states from within chunks, and has its mixer of Mamba2 for GPUs alone
        for name, operation in (
            ("causal_conv1d_fn", convolve),
            ("causal_conv1d_update", _of_first_slots(convolve_one, "conv_state_indices")),
            ("mamba_chunk_scan_combined_varlen", scan_prompts),
            ("selective_state_update", _of_first_slots(scan_one, "state_batch_indices")),
        ):
            setattr(mamba_mixer2, name, operation)
        return
    setattr(ssd_combined, _SCAN, _with_states_of_chunks(getattr(ssd_combined, _SCAN)))

    # The layer's module has the name of its own, if it was imported before.
    for module in (ssd_checkpoint, mamba_mixer2):
        setattr(module, _STORE, store_checkpoint)


def scan_prompts(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, out: Tensor, initial_states: Tensor | None, **named: Any
) -> Tensor:
    """Writes out [T, heads, dim], and returns the states after each prompt: 0.26's mamba_chunk_scan_combined_varlen."""
    more = {"track_seq_idx": None, "track_end_locs": None, "initial_states": initial_states, "out": out[None], **named}
    return scan(x[None], dt[None], A, B[None], C[None], **more)[1]


def _of_first_slots(operation: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns an operation on one token of each sequence, which uses the first of its slots; others are for drafts."""
    return lambda *given, **named: operation(*given, **{**named, name: named[name][:, 0]})


@cache
def zero_right_pages() -> Any:
    """Repairs the pages that vLLM zeroes for new blocks on a CPU, once in a process, and returns its own function.

    It zeroes page b for block b, also where a block has several pages: then those of other blocks, and of states.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    own = getattr(CPUModelRunner, ZERO)

    def zero(runner: Any, block_ids: list[int]) -> None:
        pages = max(
            layer.kv_cache.shape[0] // runner.kv_cache_config.num_blocks
            for layer in runner.compilation_config.static_forward_context.values()
            if isinstance(getattr(layer, "kv_cache", None), Tensor)
        )
        own(runner, [block * pages + page for block in block_ids for page in range(pages)])

    setattr(CPUModelRunner, ZERO, zero)
    return own


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of a step.

    tokens: the places of its new tokens
    source: the slot of the state before them; -1: it begins
    targets: the slots that take the state after each of its first tokens; one alone takes that after the last
    before:  the first of the inputs that the convolution's buffer keeps for it
    """

    tokens: list[int]
    source: int
    targets: list[int]
    before: int = 0


def sequences(metadata: Any) -> Iterator[Sequence]:
    """The sequences of a step, as GDNAttentionMetadata names them."""
    if metadata.non_spec_state_indices_tensor is not None:
        starts = metadata.non_spec_query_start_loc.tolist()
        places = metadata.non_spec_token_indx
        slots = metadata.non_spec_state_indices_tensor.tolist()
        has_state = metadata.has_initial_state
        for seq, (first, end) in enumerate(pairwise(starts)):
            tokens = list(range(first, end)) if places is None else places[first:end].tolist()
            if tokens:
                begins = has_state is not None and not bool(has_state[seq])
                yield Sequence(tokens, -1 if begins else slots[seq], [slots[seq]])
    if metadata.num_spec_decodes:
        starts = metadata.spec_query_start_loc.tolist()
        places = metadata.spec_token_indx
        alone = not (metadata.num_prefills or metadata.num_decodes)
        for seq in range(metadata.num_spec_decodes):
            first, end = starts[seq : seq + 2]
            tokens = list(range(first, end)) if alone else places[first:end].tolist()
            slots, last = metadata.spec_state_indices_tensor[seq].tolist(), int(metadata.num_accepted_tokens[seq]) - 1
            if tokens:
                yield Sequence(tokens, slots[last], slots[: len(tokens)], last)


def delta_net(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
    """Computes a layer's outputs and states: vLLM's cpu_gdn_attention_core."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if not isinstance(context.attn_metadata, dict):  # vLLM measures memory
        return
    inputs, states = layer.kv_cache[:2]
    kept = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
    weight = kept.reshape(-1, kept.shape[-1])
    decay = -layer.A_log.exp() * functional.softplus(a.float() + layer.dt_bias)
    beta = b.float().sigmoid()
    for seq in sequences(context.attn_metadata[layer.prefix]):
        rows = _convolve(seq, mixed_qkv[seq.tokens], inputs, weight)
        core_attn_out[seq.tokens] = _recur(layer, seq, rows, decay[seq.tokens].exp(), beta[seq.tokens], states)


def _convolve(seq: Sequence, x: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Returns the inputs convolved, and keeps those that the next step needs. inputs: [slots, kept ones, channels]"""
    width = weight.shape[1]
    kept = inputs[seq.targets[0]]
    prior = kept[seq.before : seq.before + width - 1] if seq.source >= 0 else x.new_zeros(width - 1, x.shape[1])
    rows = torch.cat([prior, x])
    out = functional.conv1d(rows.T[None], weight[:, None], groups=len(weight))[0].T
    if len(seq.targets) > 1 or seq.before:  # drafts, any of which the next step may go on after
        kept[: width - 1 + len(x) - 1] = rows[1:].clone()
    else:
        kept[: width - 1] = rows[-(width - 1) :].clone()
    return functional.silu(out)


def _recur(layer: Any, seq: Sequence, rows: Tensor, decay: Tensor, beta: Tensor, states: Tensor) -> Tensor:
    """Returns the outputs, and writes states. states: [slots, heads of v, v_dim, k_dim]"""
    heads, v_dim, k_dim = states.shape[1:]
    key_dim = (rows.shape[1] - heads * v_dim) // 2
    q, k, v = torch.split(rows, [key_dim, key_dim, heads * v_dim], dim=1)
    q, k = (
        _normal(each.reshape(len(rows), -1, k_dim)).repeat_interleave(heads * k_dim // key_dim, 1) for each in (q, k)
    )
    v = v.reshape(len(rows), heads, v_dim)
    state = states.new_zeros(states.shape[1:]) if seq.source < 0 else states[seq.source].clone()
    out = torch.empty_like(v)
    for token in range(len(rows)):
        state *= decay[token, :, None, None]
        change = beta[token, :, None] * (v[token] - torch.einsum("hvk,hk->hv", state, k[token]))
        state += change[:, :, None] * k[token, :, None]
        out[token] = torch.einsum("hvk,hk->hv", state, q[token]) * k_dim**-0.5
        if len(seq.targets) > 1:
            states[seq.targets[token]] = state
    if len(seq.targets) == 1:
        states[seq.targets[0]] = state
    return out


def _normal(rows: Tensor) -> Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()


def _with_states_of_chunks(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns vLLM's scan, which returns the states after all chunks too, as on a GPU, if they are asked for."""

    def scanned(
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, out: Tensor, **named: Any
    ) -> Tensor:
        if not named["return_intermediate_states"]:
            return scan(x, dt, a, b, c, chunk_size, out, **named)
        states: list[Tensor] = []
        first, seq_before = named.pop("initial_states"), -1
        for (begin, end), seq in zip(
            pairwise(named["cu_chunk_seqlens"].tolist()), named["seq_idx"].tolist(), strict=True
        ):
            if seq == seq_before:
                before = states[-1]
            else:
                before = torch.zeros(1, *x.shape[1:], b.shape[-1]) if first is None else first[seq : seq + 1]
            tokens, seq_before = slice(begin, end), seq
            each = {**named, "cu_seqlens": torch.tensor([0, end - begin]), "initial_states": before}
            states.append(scan(x[tokens], dt[tokens], a, b[tokens], c[tokens], chunk_size, out[tokens], **each))
        return torch.cat(states)

    return scanned


def store_checkpoint(
    checkpoint: Any,
    chunk_idx: Tensor,
    x: Tensor,
    conv_state: Tensor,
    chunk_states: Tensor,
    ssm_state: Tensor,
    query_start_loc: Tensor,
    *,
    state_len: int,
) -> None:
    """Writes states from within chunks of prompts to their blocks: vLLM's store_prefill_checkpoint."""
    rows = zip(checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist(), strict=True)
    for row, (offset, block) in enumerate(rows):
        if offset:
            end = int(query_start_loc[row]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[int(chunk_idx[row])]
