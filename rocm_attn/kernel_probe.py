"""A probe of kernels of other libraries: each runs the model's own shape against the reference before it serves.

A library may be built without a variant, or with a wrong one, and says so only by its results. The probe takes whole
steps of a small runtime: several sequences, prompts, chunks over a prefix, mixed and padded steps, NaN wherever nothing
was stored. Verdicts are kept on disk by arch and versions, so that a process after the first one does not run it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_attn.head_weights import HeadWeights
from rocm_attn.numerics import BOUNDS
from rocm_attn.padding import StepKind
from rocm_attn.plan import LayerKernel
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.aiter import library
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import Selection
from rocm_attn.reference import attend_sequence
from rocm_attn.step_batch import StepBatch

# Makes an AttentionRuntime, by the keywords of its constructor; untyped, because a runtime asks for kernels itself.
MakeRuntime = Callable[..., Any]

# New tokens of three sequences, step by step. Together they cross pages, tiles and partitions of 256 keys, and every
# kind of step is met twice: on short and on long sequences.
_STEPS: tuple[tuple[int, ...], ...] = (
    (5, 2, 17),
    (1, 1, 1),
    (3, 2, 9),
    (1, 0, 4),
    (70, 2, 251),
    (1, 1, 1),
    (1, 33, 1),
)
_PAD_TO = 4
# The longest sequence gets 284 tokens in these steps.
_MAX_KV_LEN = 512

# Of new tokens, the last ones that are compared: the reference takes float64 for each of them and each key.
_MOST_COMPARED = 96


def _steps(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """_STEPS and, where a window is longer than they get, steps that get beyond it."""
    if problem.window_left < _MAX_KV_LEN // 2:
        return _STEPS
    return (*_STEPS, (1, 2, problem.window_left), (1, 1, 1), (1, 3, 2))


def wrong_kernels(
    selections: Sequence[Selection], device: torch.device, make_runtime: MakeRuntime
) -> Mapping[str, str]:
    """Name of a kernel of another library -> why it is not to be used, for those among the selections that are wrong.

    Every kernel runs on the device, unless a verdict for it is on disk.
    """
    wrong: dict[str, str] = {}
    for selection in selections:
        foreign = {kernel.row.name for kernel in selection.kernels.values() if kernel.row.provider == "aiter"}
        if foreign:
            wrong.update(_verdict(selection, device, make_runtime))
    return wrong


def _verdict(selection: Selection, device: torch.device, make_runtime: MakeRuntime) -> Mapping[str, str]:
    place = _place(selection, device)
    if place is not None and place.is_file():
        return _read(place)
    wrong = _Probe.of(selection, device, make_runtime).run()
    if place is not None:
        _write(place, wrong)
    return wrong


def _place(selection: Selection, device: torch.device) -> Path | None:
    """The file of a selection's verdict; none where AITER's version is not known, and may change unseen."""
    version = library.version()
    if not version:
        return None
    facts = {
        "arch": selection.target.arch,
        "compute_units": selection.target.compute_units,
        "device": device.type,
        "aiter": version,
        "torch": torch.__version__,
        "kernels": sorted(kernel.bound.describe() for kernel in selection.kernels.values()),
        "steps": _STEPS,
    }
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "rocm_attn" / "probes" / f"{name}.json"


def _read(place: Path) -> Mapping[str, str]:
    verdict: dict[str, str] = json.loads(place.read_text())
    return verdict


def _write(place: Path, wrong: Mapping[str, str]) -> None:
    """Keep a verdict, whole or not at all; where the disk cannot be written, the next process probes again."""
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(dict(wrong)))
        os.replace(part, place)
    except OSError:
        return


@dataclass
class _Probe:
    """A small runtime, and all that its three sequences have stored, in order: [tokens, kv_heads, dim]."""

    runtime: Any
    problem: Problem
    weights: HeadWeights
    rows: list[int]
    k: list[Tensor]
    v: list[Tensor]
    generator: torch.Generator

    @classmethod
    def of(cls, selection: Selection, device: torch.device, make_runtime: MakeRuntime) -> _Probe:
        problem = selection.problem
        num_seqs = len(_STEPS[0])
        max_kv_len = _MAX_KV_LEN + max(0, problem.window_left)
        num_pages = 1 + num_seqs * -(-max_kv_len // problem.page_size)
        runtime = make_runtime(
            [problem],
            device=device,
            num_pages=num_pages,
            max_num_seqs=num_seqs,
            max_kv_len=max_kv_len,
            target=selection.target,
            capture_sizes=(_PAD_TO,),
            selections=(_for_a_pool_of(selection, PoolSize(num_pages, max_kv_len, _PAD_TO)),),
        )
        stored = runtime.pool.layer(0)
        stored.k[1:] = float("nan")
        stored.v[1:] = float("nan")
        rows = [runtime.table.admit() for _ in range(num_seqs)]
        generator = torch.Generator().manual_seed(0)
        weights = HeadWeights.random(problem, generator).to(runtime.device)
        runtime.head_weights.set(0, weights)
        probe = cls(runtime, problem, weights, rows, [], [], generator)
        probe.k = [probe._random(0, problem.num_kv_heads, problem.head_dim) for _ in rows]
        probe.v = [k[..., : problem.v_head_dim] for k in probe.k]
        return probe

    def run(self) -> Mapping[str, str]:
        """Name -> what was wrong, of the first kernel that is; the rest is not looked at before it is replaced."""
        kv_len = np.zeros(len(self.rows), np.int32)
        for q_len in _steps(self.problem):
            kv_len = kv_len + np.array(q_len, np.int32)
            for row, length in zip(self.rows, kv_len.tolist(), strict=True):
                self.runtime.table.reserve(row, length)
            batch = StepBatch(np.array(self.rows, np.int32), kv_len, np.array(q_len, np.int32))
            step = self.runtime.begin_step(batch, _PAD_TO)
            try:
                kernel, difference = step.plan.kernels[0].row.name, self._difference(step, q_len)
            finally:
                self.runtime.end_step()
            if difference and kernel in library.ENTRY_POINTS:
                return {kernel: f"switched off by its probe: {difference} {_in_words(step, kv_len)}"}
        return {}

    def _difference(self, step: Any, q_len: Sequence[int]) -> str:
        """What is wrong with a running step's output; empty when nothing is."""
        problem, num_tokens = self.problem, step.token_ids.shape[0]
        q = self._random(num_tokens, problem.num_q_heads, problem.head_dim)
        k = self._random(num_tokens, problem.num_kv_heads, problem.head_dim)
        v = k[..., : problem.v_head_dim]
        if problem.pool is not PoolKind.LATENT:
            v = self._random(num_tokens, problem.num_kv_heads, problem.v_head_dim)
        for rows in (q, k, v):
            rows[step.num_tokens :] = float("nan")
        out = torch.full_like(q[..., : problem.v_head_dim], float("nan"))
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if problem.wants_lse else None
        try:
            self.runtime.store_and_attend(0, q, k, v, out, lse)
            first = 0
            for seq, new in enumerate(q_len):
                token = slice(first, first + new)
                self.k[seq] = torch.cat([self.k[seq], k[token]])
                self.v[seq] = torch.cat([self.v[seq], v[token]])
                token = slice(max(first, first + new - _MOST_COMPARED), first + new)
                want, want_lse = attend_sequence(q[token], self.k[seq], self.v[seq], problem, self.weights)
                if not self._close(out[token], want) or not (lse is None or self._close(lse[token], want_lse)):
                    return f"sequence {seq} of {len(q_len)} is wrong"
                first += new
        # No variant was built for the shape, or building it failed. The others: v0.1.20 calls one of the two reductions
        # of pa_decode_gluon with an argument that it does not take, or with a module that is not there.
        except (RuntimeError, TypeError, AttributeError) as error:
            return f"it raised {str(error).splitlines()[0]!r}" if str(error) else f"it raised {type(error).__name__}"
        return "" if bool((out[first:] == 0).all()) else "a padded token is not zero"

    def _close(self, result: Tensor, reference: Tensor) -> bool:
        bound = BOUNDS[self.problem.dtype]
        return bool(torch.isclose(result.double(), reference, atol=bound.atol, rtol=bound.rtol).all())

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.runtime.device, self.problem.dtype)


def _for_a_pool_of(selection: Selection, pool: PoolSize) -> Selection:
    """The same kernels, bound for a pool of another size."""
    kernels = {
        kind: LayerKernel(kernel.row, kernel.row.bind(selection.problem, selection.target, pool))
        for kind, kernel in selection.kernels.items()
    }
    return replace(selection, kernels=kernels)


def _in_words(step: Any, kv_len: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> str:
    kind = step.plan.shape.kind
    named = (
        "a prefill" if kind is StepKind.PREFILL else f"a {kind.value}" if kind is not StepKind.EXTEND else "an extend"
    )
    return f"in {named} step of lengths {', '.join(map(str, kv_len.tolist()))}"
