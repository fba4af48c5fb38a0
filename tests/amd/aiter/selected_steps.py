"""Steps of unified_attention_sparse_mla over poisoned memory, for the stand-in and for AITER's own kernel."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.sparse.arguments import Indexing, SelectedArgs, SelectedKeys
from rocm_attn.machine.target import Target
from rocm_attn.problem import EarlierSelection, PoolKind, Problem
from rocm_attn.providers.aiter.selected import SELECTED_ENTRIES
from rocm_attn.providers.contract import PoolSize
from tests.amd.kernels.sparse_cases import SelectedCase, Step, build_selected
from tests.amd.tolerances import assert_attention_close

(ROW,) = SELECTED_ENTRIES

# Prompts' last tokens, a first token and a decode, over pages in a random order; three tiles of 16, and a padded tail.
_STEP = Step([70, 1, 35], [2, 1, 1], tail=2)
_CASE = SelectedCase(_STEP, (16, 1), (576, 512), latent=True, width=40, dtype=torch.bfloat16)

CASES = {
    **{f"page{size}": replace(_CASE, step=replace(_STEP, page_size=size)) for size in (1, 16, 32, 64)},
    **{f"heads{heads}": replace(_CASE, heads=(heads, 1)) for heads in (8, 24, 128)},
    "page1-heads8": replace(_CASE, step=replace(_STEP, page_size=1), heads=(8, 1)),
    "fp16": replace(_CASE, dtype=torch.float16),
    "all_keys": replace(_CASE, width=70, dense=True),
    "one_key": replace(_CASE, width=1),
}


def problem_of(case: SelectedCase, scale: float) -> Problem:
    (num_heads, _), (head_dim, v_head_dim) = case.heads, case.dims
    return Problem(
        num_heads,
        1,
        head_dim,
        case.dtype,
        case.step.page_size,
        v_head_dim=v_head_dim,
        scale=scale,
        pool=PoolKind.LATENT,
        indexer=EarlierSelection(Indexing(1.0, top=case.width)),
    )


def unchanged(args: SelectedArgs) -> SelectedArgs:
    return args


def attended(case: SelectedCase, target: Target, changed: Callable[[SelectedArgs], SelectedArgs] = unchanged) -> float:
    """Runs a case by the row and returns its largest error. Scratch and the queries of padded tokens are NaN.

    changed: returns the same step in other memory
    Raises AssertionError if an output is not close to the reference, or a token without keys is not zero.
    """
    built = build_selected(case, torch.device("cpu"))
    args = changed(built.args)
    args.q[len(case.step.places) :] = float("nan")
    problem, num_tokens = problem_of(case, built.scale), len(args.q)
    pool = PoolSize(len(args.pages.k), args.tokens.max_kv_len, num_tokens)
    assert not (*ROW.limits.refusals(problem, target, pool), *ROW.serves(Indexing(1.0, top=case.width)))
    bound = ROW.bind(problem, target, pool)
    words = bound.workspace_words(PaddedShape(StepKind.MIXED, num_tokens, num_tokens))
    args = args._replace(lse=None, workspace=torch.full((words,), float("nan")))
    bound.attend(args)
    assert_attention_close(args.out, built.reference, case.dtype)
    empty = built.reference_lse.isneginf()
    assert not args.out[empty].any(), "a token without keys got something else than zero"
    return float((args.out.double() - built.reference).abs().max())


def with_leftovers(args: SelectedArgs) -> SelectedArgs:
    """Returns the step with units of an earlier one past every count."""
    selection = args.selection
    assert isinstance(selection, SelectedKeys)
    listed = torch.arange(selection.width) < selection.counts[:, :, None]
    return args._replace(selection=selection._replace(units=torch.where(listed, selection.units, 0)))


def in_wide_rows(args: SelectedArgs) -> SelectedArgs:
    """Returns the step with rows of pages, queries and outputs further apart, and NaN between them."""

    def apart(rows: Tensor) -> Tensor:
        wide = torch.full((*rows.shape[:-1], rows.shape[-1] + 64), float("nan"), dtype=rows.dtype)
        wide[..., : rows.shape[-1]] = rows
        return wide[..., : rows.shape[-1]]

    k = apart(args.pages.k)
    pages = replace(args.pages, k=k, v=k[..., : args.out.shape[2]])
    return args._replace(q=apart(args.q), out=apart(args.out), pages=pages)
