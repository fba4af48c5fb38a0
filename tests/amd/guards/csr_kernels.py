"""A stand-in for kernels of other libraries: attention through CSR page lists, dense tables and int64 lengths.

It takes its batch size from the padded shape, as such kernels do, and reads pages ahead of a sequence's last one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.kernels.refs.attention import paged_extend
from rocm_attn.machine import choices
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers import select
from rocm_attn.providers.contract import AttendArgs, KernelRow, PoolSize, Provider, StepBounds
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.torch_ref import TORCH


@dataclass(frozen=True, slots=True)
class CsrKernel:
    """Even sequences are read through page lists and last-page lengths, odd ones through dense rows and int64 lengths.

    So every form of the metadata has its say. Its schedule is a CSR of its own.
    """

    problem: Problem

    def describe(self) -> str:
        return f"csr({self.problem})"

    def schedule_words(self, shape: PaddedShape) -> int:
        return shape.num_seqs + 1

    def workspace_words(self, shape: PaddedShape) -> int:
        return shape.num_tokens

    def schedule_key(self) -> Hashable:
        return self.problem.page_size

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        num_seqs = bounds.shape.num_seqs
        page_size = self.problem.page_size
        schedule[:1].zero_()
        schedule[1 : num_seqs + 1] = torch.cumsum((step.kv_len_int64 + page_size - 1) // page_size, 0)

    def attend(self, args: AttendArgs) -> None:
        step, device = args.step, args.q.device
        num_seqs, page_size = args.bounds.shape.num_seqs, self.problem.page_size
        page_no = torch.arange(step.block_table.shape[1], device=device)
        at = (args.schedule[:-1, None] + page_no).clamp(max=len(step.page_list) - 1)
        pages = step.page_indptr.diff()
        even = torch.arange(num_seqs, device=device) % 2 == 0
        listed_len = torch.where(pages > 0, (pages - 1) * page_size + step.last_page_len, 0)
        args.workspace.fill_(float("nan"))
        paged_extend(
            args.q,
            args.k_pages,
            args.v_pages,
            torch.where(even[:, None], step.page_list[at], step.block_table),
            torch.arange(num_seqs, device=device),
            torch.where(even, listed_len, step.kv_len_int64),
            step.q_indptr,
            None,
            args.out,
            args.lse,
            args.sinks,
            args.alibi_slopes,
            scores=scores_of(self.problem),
            max_q_len=args.bounds.max_q_len,
            tiles=None,
        )


def _bind(problem: Problem, target: Target, pool: PoolSize) -> CsrKernel:
    return CsrKernel(problem)


def csr_provider(name: str, min_kv_len: int) -> Provider:
    """Kernels that give padded sequences min_kv_len tokens of page 0."""
    rows = [
        KernelRow(
            provider=name,
            name=f"{name}.{kind.value}",
            kind=kind,
            limits=TORCH.rows[0].limits,
            min_kv_len=min_kv_len,
            masks_v=True,
            graph_safe=True,
            batch_invariant=False,
            needs=frozenset(Need),
            bakes=frozenset(),
            needs_host_lengths=False,
            bind=_bind,
        )
        for kind in StepKind
    ]
    return Provider(name, tuple(rows), TORCH.ops)


STAND_INS = {"csr": csr_provider("csr", 0), "csr_min_1": csr_provider("csr_min_1", 1)}


def put_in_stand_ins(put: Callable[[object, str, object], None]) -> None:
    """Make them providers. put: setattr, or what a test takes back at its end."""
    put(select, "PROVIDERS", (*choices.PROVIDERS, *STAND_INS))
    put(select, "ROWS", {**select.ROWS, **{name: provider.rows for name, provider in STAND_INS.items()}})
