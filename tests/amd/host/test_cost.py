"""Predicted times: their parts, and the cases without a prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.kernels.attention.cuts import merge_shape
from rocm_attn.kernels.tuning.measured import TileTable
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_lab.bench.batch_spec import Group
from rocm_lab.cost.cost import FIGURES, GPUS, SHAPES, predicted, predictions
from rocm_lab.cost.published import published_decodes
from rocm_lab.cost.static_figures import CDNA
from tests.amd.host.test_measured_rows import row_of

LLAMA = Problem(
    num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, dtype=torch.bfloat16, page_size=16, scale=128**-0.5
)


def on(arch: str, triton: str = "3.8.0") -> Target:
    """Returns the arch alone, with a Triton with which paged decode serves."""
    return replace(known_target(arch), releases=Releases(triton=Release.of(triton)))


WITH_CDNA = "3.9.0"
every_arch = pytest.mark.parametrize("arch", sorted(GPUS))


@every_arch
def test_every_shape_has_a_range_around_its_middle(arch: str) -> None:
    found = list(predictions(LLAMA, on(arch)))
    assert [prediction.shape for prediction in found] == list(SHAPES)
    for prediction in found:
        for numbers in (prediction.seconds, prediction.speed):
            assert 0 < numbers.low < numbers.middle < numbers.high
        assert prediction.seconds.holds(prediction.seconds.middle)
        assert not prediction.seconds.holds(2 * prediction.seconds.high)


@every_arch
def test_no_decode_reads_faster_than_streams_do(arch: str) -> None:
    for shape in (Group(1, 1, 8191), Group(1024, 1, 8191)):
        found = predicted(LLAMA, on(arch), shape)
        assert found is not None
        assert found.speed.high < GPUS[arch].hbm[1]
        assert found.speed.middle == pytest.approx(
            shape.num_seqs * shape.kv_len * 8 * 2 * 128 * 2 / found.seconds.middle
        ), "K and V of eight heads of 128, two bytes an element"


@pytest.mark.parametrize("compute_units", [80, 256, 304])
@pytest.mark.parametrize("programs_per_cu", [1, 2, 8])
def test_a_row_is_merged_in_a_few_steps_where_all_are_alike(compute_units: int, programs_per_cu: int) -> None:
    programs = compute_units * programs_per_cu
    for num_rows in range(3, programs + 1):
        assert 4 * merge_shape(num_rows, programs, 4, 128).parts >= programs // num_rows


def test_windows_read_fewer_keys() -> None:
    shape = Group(64, 1, 4095)
    whole, window = (predicted(problem, on("gfx942"), shape) for problem in (LLAMA, replace(LLAMA, window_left=127)))
    assert whole is not None
    assert window is not None
    assert window.seconds.high < whole.seconds.low


@pytest.mark.parametrize(
    ("arch", "problem"),
    [
        ("sm_90", LLAMA),
        ("gfx942", replace(LLAMA, dtype=torch.float32)),
        ("gfx942", replace(LLAMA, v_head_dim=64)),
        ("gfx942", replace(LLAMA, head_dim=80, v_head_dim=80)),
        ("gfx942", replace(LLAMA, kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.HEAD)),
    ],
)
def test_what_has_no_static_figures_has_no_prediction(arch: str, problem: Problem) -> None:
    assert list(predictions(problem, on(arch))) == []


@every_arch
def test_decode_is_predicted_with_the_kernel_that_would_serve(arch: str) -> None:
    ours, paged = (
        {each.shape: each for each in predictions(LLAMA, on(arch, triton))} for triton in (WITH_CDNA, "3.8.0")
    )
    assert {each.kernel for each in ours.values()} == {"triton.cdna_decode"}
    assert {each.kernel for each in paged.values()} == {"triton.decode"}
    # Its break-even latency is above the assumed latency of a load; that of paged decode is not far above it.
    long = Group(64, 1, 4095)
    assert ours[long].seconds.high <= paged[long].seconds.high


@every_arch
def test_measured_tiles_have_no_prediction(arch: str) -> None:
    target, shape = on(arch, WITH_CDNA), Group(1, 1, 255)
    assert predicted(LLAMA, target, shape) is not None
    tiles = next(each.tiles for each in FIGURES.decodes if (each.kernel, each.arch) == (CDNA, arch))
    tuned = replace(target, measured=(row_of(LLAMA, TileTable.CDNA_DECODE, replace(tiles, programs_per_cu=6)),))
    assert predicted(LLAMA, tuned, shape) is None


def test_prompts_have_no_prediction() -> None:
    assert predicted(LLAMA, on("gfx942"), Group(1, 2048, 0)) is None


def test_deterministic_steps_have_no_prediction() -> None:
    assert not list(predictions(LLAMA, on("gfx942", WITH_CDNA), deterministic=True))


def test_decode_is_checked_beside_published_speeds() -> None:
    """Batches are predicted on an MI350X; a single sequence is not always, see docs/cost.md."""
    found = list(published_decodes())
    assert len(found) >= 10
    missed = {(each.source, str(each.prediction.shape)) for each in found if not each.is_inside}
    assert missed == {("triton#2778", "1d32k"), ("triton#2281", "1d8k")}
