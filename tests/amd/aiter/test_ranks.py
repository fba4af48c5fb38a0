"""Ranks of one model take the same kernels and the same graphs, whatever each rank finds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.machine.agreement import alone, found_by_any
from rocm_attn.selection import probe as kernel_probe
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.aiter.serving import CPU, GFX942, plain_problem
from tests.amd.aiter.signatures import E4048607
from tests.amd.aiter.stand_in import install
from tests.amd.graphs.small_models import Lazy, Tiny, serve
from tests.amd.ranks import among_all, on_every_rank


def test_findings_of_one_rank_hold_for_all_and_name_it() -> None:
    assert found_by_any([{}, {"kernel": "wrong"}, {"kernel": "also wrong"}]) == {"kernel": "on rank 1: wrong"}


def kernels_of(rank: int, agree_with_others: bool) -> list[str]:
    """Returns the lines of a rank's selection. On the second rank, AITER's decode kernel gives zeros."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_probe, "edge_run", lambda *arguments: None)  # random rows show what is wrong
        aiter = install(E4048607, patch)
        right = aiter.bodies["paged_attention_ragged"]

        def wrong(call: Mapping[str, Any]) -> None:
            right(call)
            call["out"].zero_()

        if rank == 1:
            aiter.bodies["paged_attention_ragged"] = wrong
        runtime = build_runtime(
            [plain_problem()],
            RuntimeOptions(num_pages=8, max_num_seqs=2, max_kv_len=64, provider="aiter"),
            device=CPU,
            target=GFX942,
            agree=among_all() if agree_with_others else alone,
        )
        chosen = runtime.selections[0]
        return [*chosen.lines(), *chosen.refusal_lines()]


def graphs_of(rank: int) -> list[str]:
    """Returns the reason why graphs are off on a rank. On the second rank, a graph is dead."""
    tiny = Tiny.build(CPU, "torch", [4])
    tiny.runtime.agree = among_all()
    recorder = recorder_for(CPU)
    runner = StepRunner(tiny.runtime, tiny.forward, Lazy(recorder) if rank == 1 else recorder)
    outs: list[Tensor] = serve(runner, tiny.runtime)
    assert all(bool(out.isfinite().all()) for out in outs)
    return [runner.counters.graphs_off, str(runner.counters.replays)]


def test_a_kernel_that_is_wrong_on_one_rank_is_used_on_none(tmp_path: Path) -> None:
    first, second = on_every_rank(kernels_of, tmp_path, True)
    assert first == second
    assert f"{StepKind.DECODE.value}: aiter.unified_attention" in first
    assert any("paged_attention_ragged: on rank 1: switched off by its probe" in line for line in first)


def test_ranks_that_do_not_ask_each_other_take_different_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kernels_of(0, False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    second = kernels_of(1, False)
    assert "decode: aiter.paged_attention_ragged" in first
    assert "decode: aiter.unified_attention" in second


def test_a_graph_that_is_wrong_on_one_rank_serves_on_none(tmp_path: Path) -> None:
    first, second = on_every_rank(graphs_of, tmp_path)
    assert first == second
    assert first[0].startswith("on rank 1: the graph of decode of 4 sequences differs from the eager run")
    assert first[1] == "0"
