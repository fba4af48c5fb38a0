"""Hybrid: a runtime of one attention layer and recurrent layers of every kind, and requests whose tokens are ids.

The reference is that of rocm_lab.soak.recurrences: it knows no slots, no chunks and no kept tokens. Each output follows
from the request's tokens alone.
"""

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
from rocm_lab.soak.oracle import Tokens
from rocm_lab.soak.recurrences import RecurrentRows
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
        generator = torch.Generator().manual_seed(seed)
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
        drawn = [RecurrentRows.random(form, VOCABULARY, 1, 0, generator) for form in layers]
        self.layers = [each.to(device) for each in drawn]
        self._oracle = [each.for_oracle() for each in drawn]
        self._kv = torch.randn(VOCABULARY, 2, 16, generator=generator).to(device)
        self._q = torch.randn(VOCABULARY, 6, 16, generator=generator).to(device)
        self.runner = StepRunner(self.runtime, self.forward, recorder_for(device) if graphs else None)
        self.random = np.random.default_rng(seed)

    def forward(self, part: Part) -> PerToken:
        """The outputs of all recurrent layers side by side, [T, ...]."""
        ids = part.token_ids.long()
        out = torch.empty_like(self._q[ids])
        part.layers.store_and_attend(0, self._q[ids], self._kv[ids], self._kv[ids], out)
        return PerToken(torch.cat([self.recur(part, number) for number in range(len(self.layers))], 1))

    def recur(self, part: Part, number: int) -> Tensor:
        """The outputs of a recurrent layer, [T, heads * v_dim]."""
        layer, ids = self.layers[number], part.token_ids.long()
        return layer.recur(part, number, ids, layer.convolve(part, number, ids)).flatten(1)

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
            tokens = Tokens(ids, len(each.ids), [], None)
            given = [layer.answer(each.ids, tokens).out.reshape(len(ids), -1) for layer in self._oracle]
            rows.append(torch.from_numpy(np.concatenate(given, 1)))
        return torch.cat(rows).to(self.runtime.device)

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
