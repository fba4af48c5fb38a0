"""The truth test at full length, on a GPU: every provider that serves there, and each fault that it must detect.

Sequences of 2k, 6k, 10k, 40k and 84k tokens, in chunks of more than 8,192, over K pages on both sides of 2 and 4 GiB.
"""

import gc
from dataclasses import replace

import pytest
import torch

from rocm_attn.guards.registry import Guards
from rocm_attn.kernels.cache.page_format import Encoding
from rocm_attn.kernels.sparse.arguments import Indexing, LastUnit
from rocm_attn.problem import AllKeys, Indexer, KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.select import Selection, select
from rocm_attn.truth.check import TruthPlan, TruthReport
from rocm_attn.truth.wide_pages import wrapping_pages
from tests.amd.faulty_kernels import faulty, with_launches
from tests.amd.system.test_truth import assert_all_found, coded, offsets_wrap_at, reading, select_once, truth, wide

pytestmark = pytest.mark.gpu

PLAN = TruthPlan(provider="triton")
DENSE = Problem(16, 4, 128, torch.bfloat16, 64, v_head_dim=128, scale=128**-0.5)
LATENT = Problem(16, 1, 576, torch.bfloat16, 64, v_head_dim=512, scale=192**-0.5, pool=PoolKind.LATENT)
TOKENS = Indexing(128**-0.5, top=2048)
BLOCKS = Indexing(128**-0.5, top=16, unit_keys=128, last=1)
POOLS = Indexing(128**-0.5, top=512, key_tokens=4, last_unit=LastUnit.ADDED)
LAYERS = {
    "dense": DENSE,
    "latents": LATENT,
    "tokens": replace(LATENT, indexer=Indexer(8, 128, TOKENS)),
    "blocks": replace(DENSE, indexer=Indexer(4, 128, BLOCKS)),
    "pools": replace(LATENT, indexer=Indexer(4, 128, POOLS)),
}


def found(problem: Problem, device: torch.device, plan: TruthPlan = PLAN, guards: Guards | None = None) -> TruthReport:
    """Returns the report on the needles of a layer over large pages."""
    report = truth([problem], device, wide(problem, plan), guards)
    assert report.pool_bytes > 4 << 30
    return report


def assert_missed_at_every_length(report: TruthReport) -> None:
    """Checks that a fault shows in each sequence, however short."""
    assert [tally.passed for tally in report.tallies[0]] == [False] * len(PLAN.lengths)


@pytest.mark.parametrize("is_coded", [False, True], ids=["as q", "eight bits"])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_needle_is_found_at_every_length(kind: str, is_coded: bool, device: torch.device) -> None:
    """Quantise, store, index, top-k and attend, all of it captured and replayed."""
    problem = coded(LAYERS[kind]) if is_coded else LAYERS[kind]
    report = found(problem, device)
    assert max(PLAN.lengths) > 84_000
    assert PLAN.most_tokens > 8192
    assert_all_found(report)


@pytest.mark.parametrize("encoding", [KVEncoding.E4M3FN, KVEncoding.E4M3FNUZ], ids=lambda encoding: encoding.name)
def test_every_needle_is_found_in_records_at_every_length(encoding: KVEncoding, device: torch.device) -> None:
    """The selections of DeepSeek-V3.2 over fp8_ds_mla."""
    assert_all_found(found(coded(LAYERS["tokens"], encoding, Scales.GROUP), device))


@pytest.mark.parametrize("kind", LAYERS)
def test_torch_finds_every_needle_at_every_length(kind: str, device: torch.device) -> None:
    """The readable kernels. Those that select launch a few tokens at a time: too many launches for a graph.

    They gather the index keys of each token, so keys are few and shorter here. Keys of 64 elements were too short: two
    of the tokens' needles were lost to noise.
    """
    problem = coded(LAYERS[kind])
    if isinstance(problem.indexer, Indexer):
        problem = replace(problem, indexer=replace(problem.indexer, num_heads=2, head_dim=96))
    graphs = isinstance(problem.indexer, AllKeys)
    report = found(problem, device, replace(PLAN, provider="torch", graphs=graphs))
    assert_all_found(report, replayed=graphs)
    assert all(": torch." in kernel for kernel in report.kernels[0])


@pytest.fixture(autouse=True)
def memory_of_one_test() -> None:
    """The previous test's pools, of other sizes, would leave no room for those of this one."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kind", LAYERS)
def test_every_needle_is_found_in_deterministic_mode(kind: str, device: torch.device) -> None:
    report = found(LAYERS[kind], device, replace(PLAN, deterministic=True))
    assert report.passed, "\n".join(map(str, report.misses))


@pytest.mark.parametrize("encoding", [KVEncoding.E4M3FNUZ, KVEncoding.E5M2], ids=lambda encoding: encoding.name)
def test_every_needle_is_found_in_codes_of_other_hardware(encoding: KVEncoding, device: torch.device) -> None:
    report = found(coded(DENSE, encoding), device)
    assert report.passed, "\n".join(map(str, report.misses))


@pytest.mark.parametrize(
    ("written", "read"), [(KVEncoding.E4M3FNUZ, Encoding.E4M3FN), (KVEncoding.E4M3FN, Encoding.E4M3FNUZ)]
)
def test_a_wrong_encoding_shows_at_every_length(written: KVEncoding, read: Encoding, device: torch.device) -> None:
    def for_another(selection: Selection) -> Selection:
        """Runs kernels that were chosen for pages of the other encoding over these."""
        problem = replace(selection.problem, kv_encoding=KVEncoding(read.value))
        kernels = select(problem, selection.target, "triton").kernels
        return faulty(reading(read), replace(selection, kernels=kernels))

    assert_missed_at_every_length(found(coded(DENSE, written), device, guards=with_launches(for_another)))


@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_that_is_off_by_one_shows_at_every_length(by: int, device: torch.device) -> None:
    windowed = replace(DENSE, window_left=1023, has_sinks=True)

    def with_another_window(selection: Selection) -> Selection:
        problem = selection.problem
        other = select(replace(problem, window_left=problem.window_left + by), selection.target, "triton")
        return replace(selection, kernels=other.kernels)

    report = found(windowed, device, guards=with_launches(with_another_window))
    assert_missed_at_every_length(report)
    assert {miss.visible for miss in report.misses} == {by < 0}


def test_a_stale_selection_shows_at_every_length(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    select_once(monkeypatch)
    guards = Guards().without("fresh_selection")
    assert_missed_at_every_length(found(LAYERS["tokens"], device, replace(PLAN, graphs=False), guards))


def test_offsets_of_32_bits_show_at_every_length(device: torch.device) -> None:
    wraps_at = wrapping_pages([DENSE], wide(DENSE, PLAN).num_pages)[-1]
    guards = offsets_wrap_at(wraps_at, page_size=DENSE.page_size)
    report = found(DENSE, device, replace(PLAN, graphs=False), guards)
    assert_missed_at_every_length(report)
    assert all(miss.visible for miss in report.misses)
