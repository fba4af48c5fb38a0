"""A stand-in for kernels of other libraries: attention through CSR page lists, dense tables and int64 lengths.

It takes its batch size from the padded shape, as such kernels do, and reads pages ahead of a sequence's last one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs, Queries
from rocm_attn.kernels.metadata.step_tensors import Need, StepTensors
from rocm_attn.kernels.refs.attention import paged_extend
from rocm_attn.machine import choices
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers import select
from rocm_attn.providers.contract import KernelEntry, PoolSize, Provider, StepBounds
from rocm_attn.providers.scores import scores_of
from rocm_attn.providers.torch_ref import TORCH


@dataclass(frozen=True, slots=True)
class CsrSchedule:
    """A schedule with a CSR of its own, from int64 lengths."""

    page_size: int

    def words(self, shape: PaddedShape) -> int:
        return shape.num_seqs + 1

    def build(self, queries: Queries, step: StepTensors, bounds: StepBounds, words: Tensor) -> None:
        num_seqs = bounds.shape.num_seqs
        words[:1].zero_()
        words[1 : num_seqs + 1] = torch.cumsum((step.kv_len_int64 + self.page_size - 1) // self.page_size, 0)


@dataclass(frozen=True, slots=True)
class CsrKernel:
    """A kernel that reads even sequences through page lists and last-page lengths, odd ones through dense rows and
    int64 lengths.

    So every form of the metadata affects the result.
    """

    problem: Problem

    @property
    def schedule(self) -> CsrSchedule:
        return CsrSchedule(self.problem.page_size)

    def describe(self) -> str:
        return f"csr({self.problem})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return shape.num_tokens

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        device = args.q.device
        num_seqs, page_size = bounds.shape.num_seqs, self.problem.page_size
        page_no = torch.arange(step.block_table.shape[1], device=device)
        at = (args.schedule[:-1, None] + page_no).clamp(max=len(step.page_list) - 1)
        pages = step.page_indptr.diff()
        even = torch.arange(num_seqs, device=device) % 2 == 0
        listed_len = torch.where(pages > 0, (pages - 1) * page_size + step.last_page_len, 0)
        args.workspace.fill_(float("nan"))
        table = torch.where(even[:, None], step.page_list[at], step.block_table)
        queries = Queries(
            row_of_seq=torch.arange(num_seqs, device=device),
            kv_len=torch.where(even, listed_len, step.kv_len_int64),
            q_indptr=step.q_indptr,
            num_tokens=args.q.shape[0],
            max_q_len=bounds.max_q_len,
            max_kv_len=table.shape[1] * page_size,
        )
        paged_extend(args._replace(table=table, queries=queries), scores=scores_of(self.problem))


def _bind(problem: Problem, target: Target, pool: PoolSize) -> CsrKernel:
    return CsrKernel(problem)


def csr_provider(name: str, min_kv_len: int) -> Provider:
    """Returns a provider of kernels that give padded sequences min_kv_len tokens of page 0."""
    rows = [
        KernelEntry(
            f"{name}.{kind.value}",
            kind,
            TORCH.entries[0].limits,
            _bind,
            min_kv_len=min_kv_len,
            clears_pads=min_kv_len == 0,
            needs=frozenset(Need),
        )
        for kind in StepKind
    ]
    return Provider(name, tuple(rows), TORCH.ops)


STAND_INS = {"csr": csr_provider("csr", 0), "csr_min_1": csr_provider("csr_min_1", 1)}


def put_in_stand_ins(put: Callable[[object, str, object], None]) -> None:
    """Registers them as providers. put: setattr, or a function whose changes a test undoes at its end"""
    put(select, "PROVIDERS", (*choices.PROVIDERS, *STAND_INS))
    put(select, "ENTRIES", {**select.ENTRIES, **{name: provider.entries for name, provider in STAND_INS.items()}})
