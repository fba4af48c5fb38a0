"""Operations of recurrent layers that SGLang lacks on a CPU without its compiled kernels, in torch.

They take and give what SGLang 0.5.23 passes, and are written from its Triton kernels for GPUs, in the folder
sglang/kernels/ops: attention/fla/fused_recurrent.py and chunk.py for gated delta nets, mamba/causal_conv1d_triton.py
for convolutions, attention/fla/fused_norm_gate.py for norms, mamba/triton_ops/mamba_ssm.py and ssd_combined.py for
Mamba2, elementwise/elementwise.py for the shared expert, mamba/mamba_state_scatter_triton.py for accepted drafts.
Tokens come one after the other. SGLang's own attention and ours run over the same ones, so that texts differ by
attention alone. Steps that verify drafts are there for chains in gated delta nets.
"""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_NORM_EPSILON = 1e-6
# Tokens of a chunk of a delta net: CHUNK_SIZE of attention/fla/chunk_delta_h.py.
_CHUNK = 64
# The slot of a graph's pads, which is none: PAD_SLOT_ID of mamba/causal_conv1d_triton.py.
_PAD = -1
_GATING, _UPDATE = "fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"


def give_kernels() -> None:
    """Puts the operations where SGLang looks for compiled ones, before it does."""
    import sgl_kernel  # type: ignore[import-not-found]  # of SGLang's environment

    mamba: Any = ModuleType("sgl_kernel.mamba")
    mamba.causal_conv1d_fn_cpu, mamba.causal_conv1d_update_cpu = convolve, convolve_one
    mamba.chunk_gated_delta_rule_cpu = delta_rule
    sys.modules[mamba.__name__] = sgl_kernel.mamba = mamba
    operations: Any = torch.ops.sgl_kernel  # an empty namespace, which looks names up as attributes
    setattr(operations, _GATING, gates)
    setattr(operations, _UPDATE, delta_rule_of_ones)


def replace_triton_kernels() -> None:
    """Replaces Triton kernels in SGLang's modules; its mixer of Mamba2 imports no others, and on a CPU not all."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.models import qwen2_moe

    # SGLang keeps states from within a step on GPUs alone, because the kernel that copies them is Triton's.
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    hybrid_linear_attn_backend.track_mamba_states_if_needed = track
    hybrid_linear_attn_backend.track_mamba_states_all_layers = track_all
    hybrid_linear_attn_backend.scatter_mamba_states_after_mtp_verify = keep_accepted
    # It pins memory for that, which torch refuses without a GPU.
    torch.Tensor.pin_memory = not_pinned  # type: ignore[method-assign,assignment]  # for this process

    fused_norm_gate.rms_norm_gated = normalise
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated

    for name in ("", "_triton"):
        setattr(mamba, f"causal_conv1d_fn{name}", convolve)
        setattr(mamba, f"causal_conv1d_update{name}", convolve_one)
    mamba.mamba_chunk_scan_combined, mamba.selective_state_update = scan, scan_one


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor | None,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    activation: str | None,
    **_: Any,
) -> Tensor:
    """A causal convolution over the tokens of each sequence, [channels, T]. Slots get the last inputs."""
    out, kept = torch.zeros_like(x), weight.shape[1] - 1
    for seq, (first, end) in enumerate(pairwise(query_start_loc.tolist())):
        if cache_indices[seq] == _PAD:
            continue
        slot = conv_states[int(cache_indices[seq])]
        goes_on = has_initial_state is not None and bool(has_initial_state[seq])
        rows = torch.cat([slot if goes_on else torch.zeros_like(slot), x[:, first:end]], 1)
        out[:, first:end] = functional.conv1d(rows[None], weight[:, None], bias, groups=len(weight))[0]
        slot.copy_(rows[:, -kept:].clone())
    return functional.silu(out) if activation in ("silu", "swish") else out


def convolve_one(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The same for one token of each sequence, [S, channels], or for drafts, [S, channels, drafts].

    Drafts change no slot. The inputs after each of them go to intermediate_conv_window, [rows, drafts, channels, n].
    """
    if intermediate_conv_window is not None and intermediate_state_indices is not None:
        assert retrieve_parent_token is None, "a tree of drafts"
        out = torch.empty_like(x)
        for seq, (slot, row) in enumerate(
            zip(conv_state_indices.tolist(), intermediate_state_indices.tolist(), strict=False)
        ):
            state = states[slot][None].clone()
            for draft in range(x.shape[2]):
                of_draft = {"conv_state_indices": torch.zeros(1, dtype=torch.int64)}
                out[seq, :, draft] = convolve_one(x[seq, :, draft][None], state, weight, bias, activation, **of_draft)[
                    0
                ]
                intermediate_conv_window[row, draft] = state[0]
        return out
    places = torch.arange(len(x) + 1)
    with_states = torch.ones(len(x), dtype=torch.bool)
    return convolve(
        x.T,
        weight,
        bias,
        conv_states=states,
        has_initial_state=with_states,
        cache_indices=conv_state_indices,
        query_start_loc=places,
        activation=activation,
    ).T


def gates(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of decays and the betas of a gated delta net, [1, T, heads]."""
    decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    after_each: Tensor | None = None,
    rows: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Outputs [1, T, heads of v, v_dim]. Slots [heads of v, v_dim, k_dim] are read, and get the state after all.

    Also returns the states before each chunk of a sequence, one sequence after the other, [1, chunks, ...].
    after_each, rows: if given, slots stay, and row rows[i] gets the state of sequence i after each of its tokens
    """
    out, before_chunks = torch.zeros_like(v), list[Tensor]()
    group = v.shape[2] // q.shape[2]
    q, k = (_normal(each[0].float()).repeat_interleave(group, 1) for each in (q, k))
    for seq, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        slot = initial_state[int(initial_state_indices[seq])]
        state = slot.float().clone()
        for token in range(first, end):
            if (token - first) % _CHUNK == 0:
                before_chunks.append(state.clone())
            state *= g[0, token].exp()[:, None, None]
            change = beta[0, token][:, None] * (v[0, token].float() - torch.einsum("hvk,hk->hv", state, k[token]))
            state += change[:, :, None] * k[token][:, None, :]
            out[0, token] = torch.einsum("hvk,hk->hv", state, q[token]) * q.shape[-1] ** -0.5
            if after_each is not None and rows is not None:
                after_each[int(rows[seq]), token - first] = state
        if after_each is None:
            slot.copy_(state)
    return out, None, torch.stack(before_chunks)[None]


def delta_rule_of_ones(
    *, A_log: Tensor, dt_bias: Tensor, a: Tensor, b: Tensor, cu_seqlens: Tensor, **named: Any
) -> Tensor:
    """The same for one token of each sequence, or for drafts.

    Drafts change no slot. The states after each of them go to intermediate_states_buffer, [rows, drafts, ...].
    """
    decay, beta = gates(A_log, a, b, dt_bias)
    source, slots, after = named["initial_state_source"], named["initial_state_indices"], {}
    if named.get("disable_state_update"):
        assert named["retrieve_parent_token"] is None, "a tree of drafts"
        after = {"after_each": named["intermediate_states_buffer"], "rows": named["intermediate_state_indices"]}
    states = {"initial_state": source, "initial_state_indices": slots, **after}
    out, _, _ = delta_rule(named["q"], named["k"], named["v"], decay, beta, cu_seqlens=cu_seqlens, **states)
    return out


def keep_accepted(
    caches: Any,
    slots: Tensor,
    last: Tensor,
    tracked: Tensor | None,
    tracked_at: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Gives each sequence's slot, in all layers, its state after the last accepted draft; -1: after none.

    tracked, tracked_at: other slots that get a state, and the drafts that it is after
    """
    rows = range(len(last)) if src_indices_raw is None else src_indices_raw.tolist()
    parts = [(caches.temporal, caches.intermediate_ssm)]
    parts += zip(caches.conv, caches.intermediate_conv_window, strict=True)
    for to, drafts in ((slots, last), (tracked, tracked_at)):
        if to is None or drafts is None:
            continue
        for row, slot, draft in zip(rows, to.tolist(), drafts.tolist(), strict=False):
            for kept, each in parts:
                if draft >= 0 and slot >= 0:
                    kept[:, slot] = each[:, row, draft]


def normalise(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **named: Any) -> Tensor:
    """An RMS norm, times the gate's silu."""
    assert bias is None
    assert activation in ("silu", "swish")
    rows = x.float()
    normal: Tensor = rows * (rows.square().mean(-1, keepdim=True) + named["eps"]).rsqrt()
    return (normal * weight * functional.silu(gate)).to(x)


def add_gated(x: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> None:
    """Adds the shared expert's output, times its gate, to that of the others."""
    out += (x.float() @ weight.float()).sigmoid()[:, None] * shared


def _normal(rows: Tensor) -> Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    out: Tensor,
    chunk_size: int,
    track_seq_idx: Tensor | None,
    track_end_locs: Tensor | None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Writes out [1, T, heads, dim]. Returns states [..., heads, dim, state_dim] of three kinds.

    [1, chunks]: before each chunk of the batch, in the sequence that has the chunk's first token
    [S]:         after each sequence's tokens
    [1, n]:      of sequences track_seq_idx, before their tokens track_end_locs; none if these are not given
    """
    bounds = [*pairwise(cu_seqlens.tolist())]
    states = torch.zeros(len(bounds), *x.shape[2:], b.shape[-1])
    dt = functional.softplus(dt[0].float() + dt_bias)
    asked = set() if track_end_locs is None else {*track_end_locs.tolist()}
    before = dict[int, Tensor]()
    for seq, (first, end) in enumerate(bounds):
        if initial_states is not None:
            states[seq] = initial_states[seq]
        for token in range(first, end):
            if token % chunk_size == 0 or token in asked:
                before[token] = states[seq].clone()
            out[0, token] = _step(states[seq], x[0, token], dt[token], a, b[0, token], c[0, token], D)
    chunks = torch.stack([before[token] for token in range(0, x.shape[1], chunk_size)])[None]
    if track_seq_idx is None or track_end_locs is None or not len(track_end_locs):
        return chunks, states, None
    return chunks, states, torch.stack([before[token] for token in track_end_locs.tolist()])[None]


def scan_one(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    *,
    state_batch_indices: Tensor,
    out: Tensor,
    **_: Any,
) -> None:
    """The same for one token of each sequence. Terms of heads are repeated over dims; slots are read and written."""
    dt = functional.softplus(dt[..., 0].float() + dt_bias[:, 0])
    rows = out.view(x.shape)
    for seq, slot in enumerate(state_batch_indices.tolist()):
        if slot == _PAD:
            continue
        rows[seq] = _step(state[slot], x[seq], dt[seq], a[:, 0, 0], b[seq], c[seq], d[:, 0])


def _step(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Brings a token to a state in place, and returns its output, [heads, dim]."""
    b, c = (each.float().repeat_interleave(len(x) // len(each), 0) for each in (b, c))
    new = state.float() * (dt * a).exp()[:, None, None] + (dt[:, None] * x.float())[:, :, None] * b[:, None, :]
    state.copy_(new)
    return torch.einsum("hdn,hn->hd", new, c) + d.float()[:, None] * x.float()


def track(
    inputs: Tensor, states: Tensor, slots: Tensor, mask: Tensor, targets: Tensor, num_seqs: int, **_: Any
) -> None:
    """Copies a layer's slots of the sequences in the mask to others: [slots, ...]."""
    source, target = slots[:num_seqs][mask[:num_seqs]].long(), targets[:num_seqs][mask[:num_seqs]].long()
    for part in (inputs, states):
        part[target] = part[source]


def track_all(inputs: Tensor, states: Tensor, *given: Any, **named: Any) -> None:
    """The same in all layers: [layers, slots, ...]."""
    for of_layer in zip(inputs, states, strict=True):
        track(*of_layer, *given, **named)


def not_pinned(memory: Tensor, device: Any = None) -> Tensor:
    return memory
