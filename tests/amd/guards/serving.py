"""Serving: requests over a runtime with chosen guards, eagerly or through graphs, step by step.

A step's q, k and v are in tensors of fixed addresses, so that the same steps run either way. Everything unwritten is
NaN: in pages, in padded tokens of k and v, and in the outputs before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs, Inputs
from rocm_attn.batch.padding import token_places
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.guards.registry import Guards
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.forked import run_forked
from tests.amd.runtime.stepping import Request, World, first_swa_page, padded_to, providers, small_problem

# Messages of torch and Triton for a kernel that has left its memory on a GPU.
DEVICE_FAULT = r"an illegal memory access|device-side assert|misaligned address"
ALL_ON = Guards()
# Kernels of this project, and the stand-in for other libraries' kernels.
PROVIDERS = [*providers(), "csr"]


def each_way(*names: str) -> pytest.MarkDecorator:
    """Parametrizes a test by these providers, eager and in graphs. Days omit only the stand-ins' eager steps.

    A guard may matter only in graphs, so `fast` must not leave out the graphs of any provider.
    """
    return pytest.mark.parametrize(
        ("provider", "graphs"),
        [
            pytest.param(
                name,
                graphs,
                id=f"{name}-{'graphed' if graphs else 'eager'}",
                marks=[pytest.mark.nightly] * (name not in providers() and not graphs),
            )
            for name in names
            for graphs in (False, True)
        ],
    )


in_each_way = each_way(*PROVIDERS)


class Serving:
    """One layer of attention for requests that come and go.

    q, k, v, out, lse: of the last step, at max_tokens
    places: the places that were used, the real tokens' first
    """

    def __init__(
        self,
        device: torch.device,
        guards: Guards = ALL_ON,
        *,
        graphs: bool,
        provider: str = "torch",
        problem: Problem | None = None,
        max_num_seqs: int = 5,
        num_pages: int = 64,
        swa_pages: int = 0,
        swa_kept: int = 0,
        max_kv_len: int = 64,
        capture_sizes: Sequence[int] = (8,),
        capture_tokens: Sequence[int] = (1,),
        split_steps: bool = False,
        shared_prefixes: bool = False,
        deterministic: bool = False,
        max_tokens: int = 256,
        pad_q: float = float("nan"),
    ) -> None:
        self.problem = problem = problem if problem is not None else small_problem()
        self.runtime = build_runtime(
            [problem],
            RuntimeOptions(
                num_pages=num_pages,
                swa_pages=swa_pages and num_pages + swa_pages,
                first_swa_page=first_swa_page(num_pages, swa_pages),
                swa_kept=swa_kept,
                max_num_seqs=max_num_seqs,
                max_kv_len=max_kv_len,
                provider=provider,
                capture_sizes=capture_sizes,
                capture_tokens=capture_tokens,
                split_steps=split_steps,
                shared_prefixes=shared_prefixes,
                deterministic=deterministic,
            ),
            device=device,
            guards=guards,
        )
        self.runtime.pool.layer(0).fill_nan(slice(1, None))
        self.world = World(self.runtime, [problem], torch.Generator().manual_seed(0))
        self._pad_q = pad_q

        def rows(heads: int, dim: int) -> Tensor:
            return torch.full((max_tokens, heads, dim), float("nan"), dtype=problem.dtype, device=self.runtime.device)

        self.q = rows(problem.num_q_heads, problem.head_dim)
        self.k = rows(problem.num_kv_heads, problem.head_dim)
        is_latent = problem.pool is PoolKind.LATENT
        self.v = self.k[..., : problem.v_head_dim] if is_latent else rows(problem.num_kv_heads, problem.v_head_dim)
        self.out = rows(problem.num_q_heads, problem.v_head_dim)
        self.lse = torch.full(self.out.shape[:2], float("nan"), device=self.runtime.device)
        self.places = np.arange(0)
        recorder = recorder_for(self.runtime.device) if graphs else None
        # Unchecked: some of these tests examine the results of wrong graphs, and all compare every step.
        self.runner = StepRunner(self.runtime, self._forward, recorder, check=NO_CHECK)

    @property
    def num_padded(self) -> int:
        """Number of padded tokens of the last step, of both halves if it had two."""
        return len(self.places)

    def admit(self, count: int) -> list[Request]:
        """Returns fresh requests."""
        return [self.world.admit() for _ in range(count)]

    def free(self, *requests: Request) -> None:
        """Frees rows and pages."""
        for request in requests:
            self.world.free(request)

    def run(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        pad_to: int | None = None,
        *,
        reserve: bool = True,
        halves: bool = False,
    ) -> None:
        """Runs one step with new random tokens.

        reserve: true if pages are reserved for them first
        halves:  true if the step is split in two
        """
        batch = self.world.batch(requests, q_len) if reserve else _batch(requests, q_len)
        self.run_batch(requests, q_len, batch, pad_to, halves=halves)

    def run_within_bounds(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        *,
        kv_room: Sequence[int],
        q_room: Sequence[int],
        inputs: Callable[[list[int]], Inputs],
    ) -> None:
        """Runs run(requests, q_len), but the host knows only bounds.

        kv_room, q_room: distance of the bounds above kv_len and q_len, at least as much for kv_len
        inputs:          kv_len -> the device's inputs
        """
        kv_len = [request.kv_len + new for request, new in zip(requests, q_len, strict=True)]
        rows = np.array([request.row for request in requests], np.int32)
        kv_bound = np.array(kv_len, np.int32) + np.array(kv_room, np.int32)
        q_bound = np.array(q_len, np.int32) + np.array(q_room, np.int32)
        self.runtime.table.reserve_all(rows, kv_bound)
        self.run_batch(requests, q_len, StepBatch(rows, kv_bound, q_bound, NO_TOKEN_IDS, inputs=inputs(kv_len)))

    def run_published(self, requests: Sequence[Request], q_len: Sequence[int]) -> None:
        """Runs run(requests, q_len), but only the device knows the lengths: no graph takes such inputs by itself."""

        def inputs(kv_len: list[int]) -> Inputs:
            return DeviceInputs(kv_len=torch.tensor(kv_len, dtype=torch.int32, device=self.runtime.device))

        no_room = [0] * len(requests)
        self.run_within_bounds(requests, q_len, kv_room=no_room, q_room=no_room, inputs=inputs)

    def run_batch(
        self,
        requests: Sequence[Request],
        q_len: Sequence[int],
        batch: StepBatch,
        pad_to: int | None = None,
        *,
        halves: bool = False,
    ) -> None:
        """Runs one step as described by a batch; it gives the requests q_len new tokens."""
        padding = self.runtime.padding
        shape = (padding.split_shape if halves else padding.shape)(batch, padded_to(pad_to))
        self.places = token_places(batch, shape)
        num_tokens = sum(q_len)
        real = torch.from_numpy(self.places[:num_tokens]).to(self.runtime.device)
        for tensor, pad in ((self.q, self._pad_q), (self.k, float("nan")), (self.v, float("nan"))):
            tensor.fill_(pad)
            tensor[real] = self.world.random(num_tokens, *tensor.shape[1:])
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.runner.run(batch, shape)
        self.world.remember(0, requests, q_len, self.k[real], self.v[real])

    def check(self, requests: Sequence[Request], q_len: Sequence[int]) -> None:
        """Checks that run(requests, q_len) equals the reference, and that padded tokens are zero and -inf."""
        used = torch.from_numpy(self.places).to(self.runtime.device)
        self.world.check(0, requests, q_len, self.q[used], self.out[used], self.lse[used])
        assert self.world.page_zero_is_zero()

    def step(
        self, requests: Sequence[Request], q_len: Sequence[int], pad_to: int | None = None, *, halves: bool = False
    ) -> None:
        """Runs and checks a step."""
        self.run(requests, q_len, pad_to, halves=halves)
        self.check(requests, q_len)

    def run_shared(self, requests: Sequence[Request], groups: Sequence[PrefixGroup], pad_to: int | None = None) -> None:
        """Runs one decode step by shared prefixes."""
        new = [1] * len(requests)
        batch = replace(self.world.batch(requests, new), prefixes=SharedPrefixes(groups))
        self.run_batch(requests, new, batch, pad_to)

    def is_right(self, requests: Sequence[Request], q_len: Sequence[int]) -> bool:
        """True if check passes."""
        try:
            self.check(requests, q_len)
        except AssertionError:
            return False
        return True

    def _forward(self, step: Part) -> Tensor:
        used = step.tokens
        step.layers.store_and_attend(0, self.q[used], self.k[used], self.v[used], self.out[used], self.lse[used])
        return self.out[used][step.last_token_of_seq.long()]


def _batch(requests: Sequence[Request], q_len: Sequence[int]) -> StepBatch:
    """Returns a step for which nothing was reserved."""
    kv_len = [request.kv_len + new for request, new in zip(requests, q_len, strict=True)]
    return StepBatch(np.array([request.row for request in requests]), np.array(kv_len), np.array(q_len), NO_TOKEN_IDS)


def run_elsewhere(code: str) -> CompletedProcess[str]:
    """Runs Python code in a separate process: with a guard off, a step on a GPU may fault, which ends its process."""
    code = f"from tests.amd.guards.csr_kernels import put_in_stand_ins\nput_in_stand_ins(setattr)\n{code}"
    return run_forked(code)
