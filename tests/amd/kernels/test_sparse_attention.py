"""Attention over a selection: each token sees the listed tokens up to its own, and nothing else."""

import pytest
import torch

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.refs import sparse
from rocm_attn.kernels.refs.attention import seq_of_tokens
from rocm_attn.kernels.refs.sparse import selected_attention
from rocm_attn.kernels.sparse.arguments import LastTokens, SelectedArgs, SelectedKeys, SparseTokens
from rocm_attn.kernels.sparse.attention import launch_selected_segments
from rocm_attn.kernels.sparse.cuts import segment_cut
from rocm_attn.machine.target import detect_target
from tests.amd.kernels.attention_cases import UNTOUCHED, Case, Tensors, assert_served, build
from tests.amd.kernels.matrix_unit import use_matrix_unit
from tests.amd.kernels.segment_cases import run_extend
from tests.amd.kernels.sparse_cases import (
    SelectedCase,
    Step,
    build_selected,
    run_attention,
)
from tests.amd.kernels.test_segments import tiles_at
from tests.amd.runner.metered_memory import MeteredMemory

STEP = Step([50, 1, 33], [3, 1, 1], tail=1)
CASES = {
    "tokens": SelectedCase(STEP),
    "a_set_for_each_kv_head": SelectedCase(STEP, sets=2, sinks=True),
    "blocks": SelectedCase(STEP, unit_tokens=4, dims=(24, 40), heads=(6, 2)),
    "dense": SelectedCase(STEP, dense=True, width=50, sinks=True),
    "latent": SelectedCase(STEP, heads=(4, 1), dims=(48, 32), latent=True, sinks=True),
    "latent_without_a_rotated_part": SelectedCase(STEP, heads=(4, 1), dims=(32, 32), latent=True),
    "token_scales": SelectedCase(STEP, encoding=Encoding.E4M3FN, scales=Scales.TOKEN),
    "head_scales": SelectedCase(STEP, encoding=Encoding.E5M2, scales=Scales.HEAD, sets=2),
    "latent_scales": SelectedCase(
        STEP, heads=(4, 1), dims=(48, 32), latent=True, encoding=Encoding.E4M3FN, scales=Scales.LAYER
    ),
    "records": SelectedCase(
        STEP, heads=(4, 1), dims=(152, 128), latent=True, encoding=Encoding.E4M3FN, scales=Scales.GROUP, sinks=True
    ),
    "records_of_v4": SelectedCase(
        STEP, heads=(4, 1), dims=(512, 512), latent=True, encoding=Encoding.E4M3FN, scales=Scales.FOOTER, sinks=True
    ),
    "footers_of_three_groups": SelectedCase(
        STEP, heads=(4, 1), dims=(256, 256), latent=True, encoding=Encoding.E4M3FNUZ, scales=Scales.FOOTER
    ),
    "records_of_three_groups": SelectedCase(
        STEP, heads=(4, 1), dims=(384, 384), latent=True, encoding=Encoding.E4M3FNUZ, scales=Scales.GROUP, unit_tokens=2
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_the_twin_is_right(case: SelectedCase, kernel_device: torch.device) -> None:
    problem = build_selected(case, kernel_device)
    selected_attention(problem.args, scale=problem.scale)
    problem.assert_served()


@pytest.mark.fast(4)
@every_case
def test_the_twin_is_right_however_little_memory_it_may_hold(
    case: SelectedCase, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin takes a part of one token's selection at a time, but at least one key."""
    problem = build_selected(case, kernel_device)
    words = 8 * 3 * sum(case.dims) * case.heads[0]
    for most in ("_MOST_WORDS", "_MOST_WORDS_ON_GPU"):
        monkeypatch.setattr(sparse, most, words)
    with MeteredMemory(0) as memory:
        selected_attention(problem.args, scale=problem.scale)
    problem.assert_served()
    of_a_token = 4 * 8 * case.heads[0] * sum(case.dims)  # q and the merged output
    assert memory.most_held() <= 4 * words + of_a_token


@pytest.mark.fast(3, interpreted=2)
@every_case
def test_every_token_sees_its_selection(case: SelectedCase, kernel_device: torch.device) -> None:
    for programs in (1, 40):
        run_attention(detect_target(kernel_device).arch, build_selected(case, kernel_device), programs)


nightly = pytest.mark.nightly
DENSE_CASES = (
    pytest.param(Case([66, 65], [2, 1], sinks=True), 4, id="blocks"),
    pytest.param(Case([130, 65, 1], [9, 1, 1]), 1, id="tokens", marks=nightly),
    pytest.param(
        Case([90, 129], [4, 2], heads=(6, 2), dims=(80, 48), page_size=5, tail=3, spread=True),
        4,
        id="odd",
        marks=nightly,
    ),
    pytest.param(Case([66], [2], heads=(71, 1), dims=(32, 32), page_size=7), 1, id="many_heads", marks=nightly),
    pytest.param(Case([70], [3], kv=Encoding.E4M3FN, scales=Scales.TOKEN), 4, id="codes", marks=nightly),
)


@pytest.mark.parametrize(("case", "unit_tokens"), DENSE_CASES)
def test_a_selection_of_everything_gives_the_bits_of_deterministic_attention(
    case: Case, unit_tokens: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_matrix_unit(monkeypatch)
    dense = build(case, kernel_device)
    tiles = tiles_at(kernel_device, case)
    run_extend(dense, tiles=tiles)
    assert_served(dense)
    args = selected_everything(dense, unit_tokens)
    cut = segment_cut(args.selection.width * unit_tokens, heads=args.heads, tiles=tiles)
    words = cut.words(len(args.q), case.dims[1])
    workspace = torch.full((words,), float("nan"), device=kernel_device)
    assert args.lse is not None
    for selection in (args.selection, LastTokens(args.selection.width * unit_tokens)):
        given = args._replace(workspace=workspace, selection=selection)
        args.out.fill_(UNTOUCHED)
        launch_selected_segments(given, scale=dense.scores.scale, tiles=tiles, by_pairs=False)
        assert torch.equal(args.out, dense.out)
        assert torch.equal(args.lse, dense.lse)


def selected_everything(dense: Tensors, unit_tokens: int) -> SelectedArgs:
    """Returns a step of dense attention as one over selections, with out and LSE of its own."""
    seq_of_token, is_token = seq_of_tokens(dense.q_indptr, len(dense.q))
    position = (
        dense.kv_len[seq_of_token]
        - dense.q_indptr[seq_of_token + 1]
        + torch.arange(len(dense.q), device=dense.q.device)
    )
    tokens = SparseTokens(
        dense.row_of_seq[seq_of_token],
        torch.where(is_token, position, 0).int(),
        dense.q_indptr[-1:],
        max(dense.case.q_len),
        dense.table.shape[1] * dense.case.page_size,
    )
    counts = torch.where(is_token, position // unit_tokens + 1, 0).int()
    width = -(-max(dense.case.kv_len) // unit_tokens) + 3
    unit = torch.arange(width, device=dense.q.device)
    units = torch.where(unit < counts[:, None], unit, -1).int()
    given = dense.args()
    return SelectedArgs(
        q=given.q,
        pages=given.pages,
        table=given.table,
        tokens=tokens,
        selection=SelectedKeys(units[:, None].contiguous(), counts[:, None].contiguous(), unit_tokens),
        out=torch.full_like(dense.out, UNTOUCHED),
        lse=torch.full_like(dense.lse, UNTOUCHED),
        sinks=given.sinks,
        workspace=given.workspace,
    )
