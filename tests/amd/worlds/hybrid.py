"""Hybrid: a runtime of one attention layer and recurrent layers of every kind, and requests whose tokens are ids.

The reference is a recurrence in float64, token by token, written from the papers that Update names. It knows no
slots, no chunks and no kept tokens: each output follows from the request's tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.states.arguments import Update
from rocm_attn.paging.state_pool import RecurrentLayers
from rocm_attn.recurrence import Convolution, Recurrence
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.outputs import PerToken
from rocm_attn.step.step import Part
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.problems import small_problem

VOCABULARY = 50
KEPT = 3
PAGE_SIZE = 4

GATED_DELTA = Recurrence(
    4, 2, 8, 16, torch.float32, convolution=Convolution(2 * 2 * 8 + 4 * 16, 4), normalises=True, scale=0.4
)
CHANNELS = Recurrence(2, 2, 8, 8, torch.float32, channel_decay=True, normalises=True)
SUMS = Recurrence(
    4, 1, 16, 8, torch.float32, update=Update.SUM, convolution=Convolution(2 * 16 + 4 * 8, 3, silu=False), scale=1.0
)
ALL_KINDS = (GATED_DELTA, CHANNELS, SUMS)


@dataclass
class Inputs:
    """The inputs of a layer: a row of each tensor for each token id."""

    form: Recurrence
    generator: torch.Generator

    def __post_init__(self) -> None:
        form, device = self.form, self.generator.device

        def random(*shape: int) -> Tensor:
            return torch.randn(VOCABULARY, *shape, generator=self.generator, device=device)

        self.q, self.k = random(form.num_k_heads, form.k_dim), random(form.num_k_heads, form.k_dim)
        self.v = random(form.num_heads, form.v_dim)
        decays = (form.k_dim,) if form.channel_decay else ()
        self.decay = -random(form.num_heads, *decays).exp() / 4
        self.beta = random(form.num_heads).sigmoid()
        width, channels = form.convolution.width, form.convolution.channels
        self.weight = torch.randn(channels, width, generator=self.generator, device=device) / 2
        self.bias = torch.randn(channels, generator=self.generator, device=device) / 4

    def joined(self, ids: Tensor) -> Tensor:
        """The convolution's input: q, k and v side by side, [T, channels]."""
        return torch.cat([part[ids].flatten(1) for part in (self.q, self.k, self.v)], 1)

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of what the convolution gave."""
        form = self.form
        of_keys = form.num_k_heads * form.k_dim
        q, k, v = joined[:, :of_keys], joined[:, of_keys : 2 * of_keys], joined[:, 2 * of_keys :]
        heads = (-1, form.num_k_heads, form.k_dim)
        return q.reshape(heads), k.reshape(heads), v.reshape(-1, form.num_heads, form.v_dim)

    def forward(self, part: Part, layer: int) -> Tensor:
        """[T, heads * v_dim]"""
        ids = part.token_ids.long()
        q, k, v = self.q[ids], self.k[ids], self.v[ids]
        if self.form.convolution.channels:
            x = self.joined(ids)
            out = torch.empty_like(x)
            part.states.convolve(layer, x, self.weight, self.bias, out)
            q, k, v = self.split(out)
        result = torch.empty_like(v)
        part.states.recur(layer, q, k, v, self.decay[ids], self.beta[ids], result)
        return result.flatten(1)

    def wanted(self, ids: Sequence[int]) -> Tensor:
        """float64 [tokens, heads * v_dim]: all outputs of a request."""
        form, at = self.form, torch.tensor(ids, device=self.q.device)
        q, k, v = (part[at].double() for part in (self.q, self.k, self.v))
        if form.convolution.channels:
            x, width = self.joined(at).double(), form.convolution.width
            padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
            y = sum(padded[j : j + len(x)] * self.weight[:, j].double() for j in range(width)) + self.bias.double()
            assert isinstance(y, Tensor)
            q, k, v = self.split(y * y.sigmoid() if form.convolution.silu else y)
        if form.normalises:
            q, k = (rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (q, k))
        group, outputs = form.num_heads // form.num_k_heads, []
        state = torch.zeros(form.num_heads, form.k_dim, form.v_dim, dtype=torch.float64, device=q.device)
        for t in range(len(at)):
            decay = self.decay[at[t]].double().exp()
            state = state * (decay[:, :, None] if form.channel_decay else decay[:, None, None])
            key, query = k[t].repeat_interleave(group, 0), q[t].repeat_interleave(group, 0)
            new = v[t]
            if form.update is Update.DELTA:
                new = new - torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("hk,hv->hkv", key, self.beta[at[t]].double()[:, None] * new)
            outputs.append(form.scale * torch.einsum("hkv,hk->hv", state, query))
        return torch.stack(outputs).flatten(1)


@dataclass
class Told:
    """A request: its row, and the tokens that are stored."""

    row: int
    ids: list[int] = field(default_factory=list)


class Hybrid:
    """One attention layer and recurrent layers.

    graphs:   whether steps run as graphs where they can
    num_rows: rows of the request table
    """

    def __init__(
        self,
        device: torch.device,
        provider: str,
        *,
        graphs: bool = False,
        layers: Sequence[Recurrence] = ALL_KINDS,
        checkpoints: int = 4,
        page_size: int = PAGE_SIZE,
        num_rows: int = 8,
        guards: Guards | None = None,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        problem = small_problem(page_size)
        options = RuntimeOptions(
            num_pages=80,
            max_num_seqs=4,
            max_num_rows=num_rows,
            max_kv_len=96,
            provider=provider,
            capture_sizes=(1, 4),
            capture_tokens=(1, 8, 16),
            verify_tokens=KEPT,
            split_steps=True,
            deterministic=deterministic,
        )
        recurrent = RecurrentLayers(layers, kept=KEPT, checkpoints=checkpoints)
        self.runtime = build_runtime([problem], options, recurrent, device=device, guards=guards)
        states = self.runtime.states
        states.memory[2:].fill_(0xFF)  # NaN in every dtype
        self.inputs = [Inputs(form, generator) for form in layers]
        self._kv = torch.randn(VOCABULARY, 2, 16, generator=generator, device=device)
        self._q = torch.randn(VOCABULARY, 6, 16, generator=generator, device=device)
        self.runner = StepRunner(self.runtime, self.forward, recorder_for(device) if graphs else None)
        self.random = np.random.default_rng(seed)

    def forward(self, part: Part) -> PerToken:
        """The outputs of all recurrent layers side by side, [T, ...]."""
        ids = part.token_ids.long()
        out = torch.empty_like(self._q[ids])
        part.layers.store_and_attend(0, self._q[ids], self._kv[ids], self._kv[ids], out)
        return PerToken(torch.cat([each.forward(part, layer) for layer, each in enumerate(self.inputs)], 1))

    def admit(self) -> Told:
        """A request without tokens."""
        return Told(self.runtime.table.admit())

    def begun(self, *q_len: int) -> list[Told]:
        """Requests after one step with as many random tokens."""
        requests = [self.admit() for _ in q_len]
        self.step(requests, [self.ids(count) for count in q_len])
        return requests

    def ids(self, count: int) -> list[int]:
        """Random token ids."""
        found: list[int] = self.random.integers(1, VOCABULARY, count).tolist()
        return found

    def batch(self, requests: Sequence[Told], new: Sequence[Sequence[int]]) -> StepBatch:
        """The step that brings new tokens to requests, with room for them."""
        rows = np.array([each.row for each in requests], np.int32)
        q_len = np.array([len(ids) for ids in new], np.int32)
        kv_len = np.array([len(each.ids) for each in requests], np.int32) + q_len
        self.runtime.table.reserve_all(rows, kv_len)
        token_ids = np.array([token for ids in new for token in ids], np.int32)
        return StepBatch(rows, kv_len, q_len, token_ids)

    def run(self, requests: Sequence[Told], new: Sequence[Sequence[int]], halves: int = 1) -> Tensor:
        """Runs a step that brings new tokens to requests. Returns its outputs, [tokens, ...]."""
        out = self.runner.run(self.batch(requests, new), halves=halves).tensor
        for each, ids in zip(requests, new, strict=True):
            each.ids += ids
        return out

    def step(self, requests: Sequence[Told], new: Sequence[Sequence[int]], halves: int = 1) -> None:
        """run(), and compares each output with the reference."""
        self.check(self.run(requests, new, halves), requests, new)

    def check(self, out: Tensor, requests: Sequence[Told], new: Sequence[Sequence[int]]) -> None:
        """Compares the outputs of the last tokens of requests with the reference."""
        assert_attention_close(out, self.wanted(requests, new), torch.float32)

    def wanted(self, requests: Sequence[Told], new: Sequence[Sequence[int]]) -> Tensor:
        """float64 [tokens, ...]: the outputs of the last tokens of requests."""
        rows = []
        for each, ids in zip(requests, new, strict=True):
            all_rows = torch.cat([layer.wanted(each.ids) for layer in self.inputs], 1)
            rows.append(all_rows[len(all_rows) - len(ids) :])
        return torch.cat(rows)

    def is_right(self, out: Tensor, requests: Sequence[Told], new: Sequence[Sequence[int]]) -> bool:
        """True if check() passes."""
        try:
            self.check(out, requests, new)
        except AssertionError:
            return False
        return True

    def back(self, request: Told, kv_len: int) -> None:
        """Takes the tokens of a request from kv_len on back."""
        self.runtime.table.truncate(request.row, kv_len)
        del request.ids[kv_len:]
