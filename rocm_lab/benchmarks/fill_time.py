"""Device time of fill: the index tensors of a decode step over 32k tokens, for the forms that kernels may need.

python -m rocm_lab.benchmarks.fill_time --out rocm_lab/benchmarks/results/fill_time_h200.json

Each fill is compared with its torch twin first. A CUDA graph holds FILLS of them, one after the other; the time of one
is the median of rounds of replays, so it includes the gap between two launches of a graph. Everything that fits stays
in the L2, like the last step's table when a server runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.attention.decode_schedule import launch_decode_schedule
from rocm_attn.kernels.metadata.fill import launch_fill
from rocm_attn.kernels.metadata.step_tensors import FIELDS, Need, StepTensors
from rocm_attn.kernels.refs import metadata as refs
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TritonDecode
from rocm_lab.benchmarks.script import parser_of, printed, write
from rocm_lab.benchmarks.timing import ROUNDS, medians_in_turn

KV_LEN = 32_768
NUM_SEQS = (1, 8, 64, 256)
FILLS = 20


@dataclass(frozen=True, slots=True)
class Form:
    """The tensors that are filled in addition to the index tensors of every step."""

    name: str
    page_size: int
    needs: frozenset[Need] = frozenset()
    with_schedule: bool = False


FORMS = (
    Form("no list", 16),
    Form("no list, with the decode schedule", 16, with_schedule=True),
    Form("page list of pages of 16", 16, frozenset({Need.PAGE_LIST})),
    Form("page list of pages of 1", 1, frozenset({Need.PAGE_LIST})),
    Form("block table of pages of 16", 16, frozenset({Need.BLOCK_TABLE})),
    Form("everything, pages of 16", 16, frozenset(Need)),
)


def decode_step(form: Form, num_seqs: int, device: torch.device) -> StepTensors:
    """Returns a decode step of num_seqs sequences of KV_LEN tokens, whose pages lie anywhere."""
    width = KV_LEN // form.page_size
    pages = 1 + torch.randperm(num_seqs * width, device=device).to(torch.int32)

    def outputs(need: Need, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape if need in form.needs else (0, *shape[1:]), dtype=dtype, device=device)

    def ints(size: int, value: int = -1) -> Tensor:
        return torch.full((size,), value, dtype=torch.int32, device=device)

    return StepTensors.of(
        ints(0),
        counts=torch.tensor([num_seqs, num_seqs, 1, 0], dtype=torch.int32, device=device),
        row_of_seq=1 + torch.randperm(num_seqs, device=device).to(torch.int32),
        kv_len=ints(num_seqs, KV_LEN),
        q_len=ints(num_seqs, 1),
        table=torch.cat([torch.zeros_like(pages[:width]), pages]).view(-1, width),
        prefix_len=ints(num_seqs, 0),
        group_end=torch.arange(1, num_seqs + 1, dtype=torch.int32, device=device),
        q_indptr=ints(num_seqs + 1),
        last_token_of_seq=ints(num_seqs),
        seq_of_token=ints(num_seqs),
        row_of_token=ints(num_seqs),
        position_of_token=ints(num_seqs),
        slot_of_token=ints(num_seqs),
        page_indptr=outputs(Need.PAGE_LIST, num_seqs + 1),
        page_list=outputs(Need.PAGE_LIST, num_seqs * width),
        last_page_len=outputs(Need.PAGE_LIST, num_seqs),
        block_table=outputs(Need.BLOCK_TABLE, num_seqs, width),
        kv_len_int64=outputs(Need.KV_LEN_INT64, num_seqs, dtype=torch.int64),
        mask_start=ints(num_seqs, 0),
        mask_indptr=outputs(Need.MASK, num_seqs + 1, dtype=torch.int64),
        group_indptr=outputs(Need.PREFIXES, num_seqs + 1),
        suffix_kv_len=outputs(Need.PREFIXES, num_seqs),
        suffix_page=outputs(Need.PREFIXES, num_seqs),
    )


def schedule_launch(step: StepTensors, device: torch.device) -> Callable[[], None]:
    """The schedule of a layer of Llama 3.1 8B."""
    problem = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
    kernel = select(problem, detect_target(device), "triton").kernels[StepKind.DECODE].bound
    assert isinstance(kernel, TritonDecode)
    num_seqs = step.kv_len.shape[0]
    cut = kernel.cut.of_step(num_seqs)
    queries = Queries(step.row_of_seq, step.kv_len, step.q_indptr, num_seqs, max_q_len=1, max_kv_len=KV_LEN)
    schedule = torch.empty(cut.words(num_seqs), dtype=torch.int32, device=device)
    return lambda: launch_decode_schedule(queries, schedule, cut)


def require_equal_to_twin(step: StepTensors, page_size: int) -> None:
    """Raises if the kernel and its torch twin differ."""
    launch_fill(step, page_size=page_size)
    filled = {name: getattr(step, name).clone() for name in FIELDS}
    refs.fill(step, page_size=page_size)
    wrong = [name for name, tensor in filled.items() if not torch.equal(tensor, getattr(step, name))]
    if wrong:
        raise RuntimeError(f"the kernel and its twin disagree on {', '.join(wrong)}")


def measure(form: Form, num_seqs: int, device: torch.device) -> dict[str, str | int | float]:
    """One row: the fill, and an elementwise kernel that reads and writes as many entries as its list or table has."""
    step = decode_step(form, num_seqs, device)
    require_equal_to_twin(step, form.page_size)
    launches: list[Callable[[], None]] = [lambda: launch_fill(step, page_size=form.page_size)]
    if form.with_schedule:
        launches.append(schedule_launch(step, device))

    def launch() -> None:
        for each in launches:
            each()

    entries = step.page_list.numel() + step.block_table.numel()
    source, target = torch.ones(2, max(entries, 1), dtype=torch.int32, device=device)

    def copy() -> None:
        torch.neg(source, out=target)

    us, copy_us = medians_in_turn([[launch] * FILLS, [copy] * FILLS])
    return {
        "form": form.name,
        "num_seqs": num_seqs,
        "us": round(us, 2),
        "bytes": 2 * entries * 4,
        "copy_us": round(copy_us, 2),
    }


def main() -> None:
    options = parser_of(__doc__).parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    rows = printed(measure(form, num_seqs, device) for form in FORMS for num_seqs in NUM_SEQS)
    write(options.out, kv_len=KV_LEN, fills=FILLS, rounds=ROUNDS, rows=rows)


if __name__ == "__main__":
    main()
