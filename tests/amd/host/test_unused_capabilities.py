"""`rocm-attn explain` on tiles and on lost performance: only true statements, and the way to gain it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.cli import main
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import Target, known_target
from rocm_attn.machine.tuning_file import TuningFile
from rocm_attn.problem import KVEncoding, PoolKind, Problem, Scales
from rocm_attn.providers.contract import SMALLEST_POOL
from rocm_attn.providers.select import select
from rocm_lab.cost.unused_capabilities import Choice, UnusedCapability, unused_of
from tests.amd.host.test_measured_rows import LAYER, row_of

GFX942, GFX950 = known_target("gfx942"), known_target("gfx950")
CONFIGS = Path(__file__).parents[1] / "aiter" / "configs"
LATENT = Problem(16, 1, 576, torch.bfloat16, 16, v_head_dim=512, scale=0.1, pool=PoolKind.LATENT)


def left(problem: Problem, target: Target, provider: str = "auto") -> list[UnusedCapability]:
    return unused_of(select(problem, target, provider), Choice(target, provider, SMALLEST_POOL, deterministic=False))


def with_triton(arch: str, triton: str) -> Target:
    return replace(known_target(arch), releases=Releases(triton=Release.of(triton)))


def test_another_page_size_that_opens_a_preferred_kernel_is_named_with_its_gate() -> None:
    found = next(
        each for each in left(LATENT, GFX950) if "aiter.mla_prefill_fwd, not triton.latent_extend" in each.what
    )
    assert "page_size 16 is not 1" in found.gate
    assert found.how == "--page-size 1"
    assert found.how_much == "unknown: both were never timed on this arch"
    assert found.seconds is None
    # The statement is true.
    changed = select(replace(LATENT, page_size=1), GFX950, "auto")
    assert changed.kernel(StepKind.EXTEND).entry.name == "aiter.mla_prefill_fwd"


def test_nothing_is_said_of_a_change_that_takes_a_preferred_kernel_away() -> None:
    for arch in (GFX942, GFX950):
        for problem in (LAYER, replace(LAYER, page_size=1), replace(LAYER, has_sinks=True)):
            selection = select(problem, arch, "auto")
            for each in left(problem, arch):
                if not each.how.startswith("--p"):
                    continue
                for how in each.how.split(" or "):
                    flags = dict(zip(how.split()[::2], how.split()[1::2], strict=True))
                    size = int(flags.get("--page-size", problem.page_size))
                    pool = PoolKind.VECTORIZED if flags.get("--pool") == "vectorized" else problem.pool
                    changed = select(replace(problem, page_size=size, pool=pool), arch, "auto")
                    for kind in (StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED):
                        if selection.kernel(kind).entry.provider == "aiter":
                            assert changed.kernel(kind).entry.provider == "aiter"


def test_a_kernel_that_the_triton_release_gates_out_is_named_with_what_was_measured_of_it() -> None:
    (found, _) = left(LAYER, with_triton("sm_90", "3.9.0"))
    assert found.what.startswith("extend by triton.hopper_extend, not triton.extend, mixed by")
    assert found.gate == "it needs Triton 3.6.0, and 3.9.0 is installed"
    assert found.how == "install Triton 3.6.0"
    assert "394 us instead of 535, measured at 1x6144+2048 on one H200" in found.how_much
    assert not [each for each in left(LAYER, with_triton("sm_90", "3.6.0")) if "hopper" in each.what]
    # Nothing is claimed of heads that were never timed.
    dims = replace(LAYER, head_dim=192, v_head_dim=192)
    (found, _) = left(dims, with_triton("sm_90", "3.9.0"))
    assert found.how_much.startswith("unknown")


def test_eight_bits_save_the_time_to_read_half_the_bytes_at_most() -> None:
    found = next(each for each in left(LAYER, GFX942) if "eight bits" in each.what)
    assert found.seconds is not None
    read_once = 64 * 4096 * 8 * 256  # one byte of each element of K and of V
    assert found.seconds.low == pytest.approx(read_once / 4.2e12)
    assert found.seconds.high == pytest.approx(read_once / 3.9e12)
    windowed = next(each for each in left(replace(LAYER, window_left=127), GFX942) if "eight bits" in each.what)
    assert windowed.seconds is not None
    assert windowed.seconds.high == pytest.approx(found.seconds.high / 32)
    coded = replace(LAYER, kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.TOKEN)
    for problem, target in ((coded, GFX942), (LAYER, with_triton("sm_90", "3.6.0"))):
        assert not [each for each in left(problem, target) if "eight bits" in each.what]


def explained(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["explain", str(CONFIGS / "llama-3-8b.json"), "--arch", "gfx942", "--provider", "triton", *options])
    return code, *capsys.readouterr()


def test_explain_reads_a_file_of_measured_tiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "t.json"
    TuningFile((replace(row_of(), tiles=DecodeTiles(64, 4, 1, 4)),)).write(place)
    code, text, _ = explained(capsys, "--tuning", str(place), "--triton-release", "3.7.1")
    assert code == 0
    assert "- 32 layers (0-31): decode: key_block 64, num_warps 4, num_stages 1, programs_per_cu 4; measured on" in text
    code, text, _ = explained(capsys, "--tuning", str(place), "--triton-release", "3.6.0")
    assert f"tuning file {place}: 1 of 1 measured choices are not used: measured with Triton 3.7.1" in text
    assert "; measured on" not in text
    _, text, _ = explained(capsys, "--tuning", str(place), "--triton-release", "3.7.1", "--json")
    (kind,) = json.loads(text)["layer_kinds"]
    assert [row["measured"] for row in kind["tiles"]] == [True, False]
    assert kind["tiles"][0]["tiles"]["key_block"] == 64
    assert main(["cost", str(CONFIGS / "llama-3-8b.json"), "--arch", "gfx942", "--provider", "triton", "--json"]) == 0
    (kind,) = json.loads(capsys.readouterr().out)["layer_kinds"]
    assert {"what", "gate", "how_much", "how", "seconds_saved"} == kind["faster"][0].keys()
