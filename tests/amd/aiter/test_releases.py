"""A kernel's faults in some releases are refused there, with the release in the reason, and served in others.

Releases that were never read: who says so, in which words, and which ones are not built.
"""

import importlib
import json
import logging
import re
import runpy
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.cli import main
from rocm_attn.machine import aiter_releases
from rocm_attn.machine.aiter_marks import FLOAT16_IN_SPLITS, SMALL_TILES_AT_512, Mark
from rocm_attn.machine.aiter_releases import not_read, releases, too_old, written_for
from rocm_attn.machine.aiter_switches import SWITCHES
from rocm_attn.machine.releases import UNKNOWN, Release, ReleaseRange, Releases, aiter_not_read, installed_releases
from rocm_attn.machine.target import IMAGE_RELEASES, KNOWN_TARGETS, Target, known_target
from rocm_attn.problem import UNLIMITED_WINDOW, KVEncoding, Problem
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import SMALLEST_POOL, PoolSize
from rocm_attn.selection import kernels
from tests.amd.aiter.checks import EIGHT_BITS, ContractBroken
from tests.amd.aiter.explained import config_of
from tests.amd.aiter.latent_functions import mla_decode_fwd
from tests.amd.aiter.serving import in_eight_bits, latent_problem, plain_problem, vectorised_problem, world
from tests.amd.aiter.signatures import E4048607
from tests.amd.aiter.signatures import Release as Signatures
from tests.amd.aiter.stand_in import install
from tests.amd.house.source_tree import ROOT

WIDE = plain_problem(16, dims=(128, 128))


def test_releases_are_in_the_order_in_which_they_were_made() -> None:
    in_order = ["0.1.16rc1", "0.1.16", "v0.1.16.post1", "0.1.16.post3", "0.1.17", "0.1.19", "0.1.19.post1", "0.1.20"]
    in_order += ["0.1.20.post1.dev3", "0.1.20.post1", "0.1.20.post2.dev139+gc16d44bd2", "0.1.20.post2"]
    in_order += ["0.1.21.dev46+ge4048607a", "0.1.21"]
    releases = [Release.of(text) for text in in_order]
    assert releases == sorted(set(releases))


def test_a_build_has_what_the_release_before_it_has_and_may_lack_what_the_next_one_has() -> None:
    names = {
        "0.1.20.dev12+gd9e5ef7": ("0.1.20 in development", "0.1.19", "0.1.20"),
        "0.1.19.post3.dev139": ("0.1.19.post3 in development", "0.1.19.post2", "0.1.19.post3"),
    }
    for text, (name, earlier, later) in names.items():
        build = Release.of(text)
        assert str(build) == name
        assert build not in ReleaseRange(before=Release.of(earlier))
        assert build in ReleaseRange(before=Release.of(later))
        assert build in ReleaseRange(Release.of(later), Release.of("9.0"))
        assert build not in ReleaseRange(Release.of("0.1.21"), Release.of("9.0"))
    assert Release.of("0.1.20.dev12") in ReleaseRange(before=Release.of("0.1.19.post1"))


@pytest.mark.parametrize("text", ["", "later", "0", "unknown+g123"])
def test_what_is_no_release_is_not_known_and_may_be_any(text: str) -> None:
    assert Release.of(text) == UNKNOWN
    assert UNKNOWN in ReleaseRange(Release.of("0.1.16"), Release.of("0.1.18"))


@pytest.mark.parametrize(
    "build", ["3.9.0+git1234567", "3.9.0.dev20260801", "3.9.0.dev", "3.9.0.dev0+gabc", "3.9.0rc1", "3.9.0a1", "3.9.0b2"]
)
def test_a_build_of_a_commit_or_before_a_release_is_not_the_release(build: str) -> None:
    """A kernel that is allowed for named releases was not tested with such a build."""
    assert Release.of("3.8.0") < Release.of(build) < Release.of("3.9.0")
    assert str(Release.of(build)) == "3.9.0 in development"


@pytest.mark.parametrize("build", ["3.9.0", "3.9.0+rocm7.2.0.gita272dfa8", "3.9.0+cu130"])
def test_a_release_that_was_built_for_a_gpu_is_the_release(build: str) -> None:
    assert Release.of(build) == Release.of("3.9.0")


def test_torchs_hip_names_the_rocm_release() -> None:
    in_7_2 = ReleaseRange(Release.of("7.2"), Release.of("7.3"))
    assert Release.of("7.2.53211-e1a6bc5663") in in_7_2
    assert Release.of("7.2.4") in in_7_2
    assert Release.of("7.2.53211-a1b6bc5663") == Release.of("7.2.53211"), "a hash is no candidate"
    for other in ("6.4.43484-123eb5128", "7.1.25424", "7.3.0"):
        assert Release.of(other) not in in_7_2


def test_the_releases_of_the_image_are_those_that_it_is_built_from() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"rocm/pytorch:rocm{IMAGE_RELEASES.rocm}_" in dockerfile
    # 46 commits after the tag v0.1.20, as git describes it.
    assert "AITER_COMMIT=e4048607" in dockerfile
    assert IMAGE_RELEASES.aiter == Release.of(E4048607.version)
    assert all(target.releases == IMAGE_RELEASES for target in KNOWN_TARGETS.values() if target.is_amd)


def on(arch: str, *, aiter: str = "0.1.21.dev46", rocm: str = "7.0.2") -> Target:
    return replace(known_target(arch), releases=Releases(Release.of(rocm), Release.of(aiter)))


def refusals(
    name: str, kind: StepKind, problem: Problem, target: Target, pool: PoolSize = SMALLEST_POOL
) -> tuple[str, ...]:
    (row,) = (row for row in ENTRIES if row.name == f"aiter.{name}" and row.kind is kind)
    return row.refusals(problem, target, pool)


EXPANDED = plain_problem(16, heads=(128, 128), dims=(192, 128), dtype=torch.bfloat16, wants_lse=True)
D512 = plain_problem(128, dims=(512, 512))

UNIFIED, BATCH = "unified_attention", "mha_batch_prefill_func"
VARLEN = "flash_attn_varlen_func"


class Fault(NamedTuple):
    """A kernel's fault: where it shows, the last release that has it, and the first without."""

    name: str
    kind: StepKind
    problem: Problem
    last: str
    first: str
    pool: PoolSize = SMALLEST_POOL


FOUR_GIB = PoolSize(8, -(-(2**32) // (128 * 192 * 2)), 1)
BY_AITER: Mapping[str, Fault] = {
    "D 512 in decode": Fault(UNIFIED, StepKind.DECODE, D512, "0.1.19", "0.1.19.post1"),
    "D 512 in decode on pages of 64": Fault(UNIFIED, StepKind.DECODE, replace(D512, page_size=64), "0.1.15", "0.1.20"),
    "D 512 in extend": Fault(UNIFIED, StepKind.EXTEND, replace(D512, page_size=16), "0.1.19", "0.1.19.post1"),
    "D 512 in mixed steps": Fault(UNIFIED, StepKind.MIXED, D512, "0.1.16", "0.1.19.post2"),
    "float16 in splits": Fault(UNIFIED, StepKind.DECODE, WIDE, "0.1.16.post6", "0.1.17"),
    "keys of 4 GiB": Fault(VARLEN, StepKind.PREFILL, EXPANDED, "0.1.19.post2", "0.1.20", FOUR_GIB),
}


@pytest.mark.parametrize("fault", BY_AITER.values(), ids=BY_AITER)
def test_a_fault_is_refused_up_to_the_release_that_ended_it(fault: Fault) -> None:
    def reasons(aiter: str) -> tuple[str, ...]:
        return refusals(fault.name, fault.kind, fault.problem, on("gfx942", aiter=aiter), fault.pool)

    (own,) = reasons(fault.last)
    assert own.endswith(f"; here {fault.last})")
    assert reasons(fault.first) == ()
    unknown = own.replace(f"here {fault.last}", "here of unknown release")
    assert unknown in reasons("a build of our own")


def test_a_mark_tells_what_a_build_between_releases_has() -> None:
    """SGLang's pin d9e5ef7 calls itself 0.1.20.dev12 and lacks a fix of 0.1.19.post1."""

    def reasons(aiter: str, *marks: Mark) -> tuple[str, ...]:
        target = on("gfx942", aiter=aiter)
        target = replace(target, releases=replace(target.releases, marks=frozenset(marks)))
        return refusals(UNIFIED, StepKind.EXTEND, D512, target)

    (reason,) = reasons("0.1.20.dev12")
    assert reason.endswith(" of LDS (AITER before 0.1.19.post1; here 0.1.20 in development)")
    assert reasons("0.1.20.dev12", SMALL_TILES_AT_512) == reasons("built here", SMALL_TILES_AT_512) == ()
    assert reasons("0.1.20.dev12", FLOAT16_IN_SPLITS) == (reason,)
    assert reasons("0.1.19", SMALL_TILES_AT_512), "a release says what it has"
    assert reasons("0.1.19.post2.dev1") == reasons("0.1.21.dev46") == ()


def test_marks_are_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    assert installed_releases().marks == frozenset()
    file = tmp_path / "aiter" / SMALL_TILES_AT_512.file
    file.parent.mkdir(parents=True)
    (tmp_path / "aiter" / "__init__.py").write_text("raise AssertionError('it was imported')")
    file.write_text(f"def select():\n    {SMALL_TILES_AT_512.text}\n        pass\n")
    importlib.invalidate_caches()
    assert installed_releases().marks == {SMALL_TILES_AT_512}


def test_pages_in_eight_bits_do_not_meet_the_faults_of_wide_elements() -> None:
    wide, float16 = in_eight_bits(replace(D512, dtype=torch.bfloat16)), in_eight_bits(WIDE)
    decode = (UNIFIED, StepKind.DECODE)
    assert refusals(*decode, replace(wide, page_size=64), on("gfx942", aiter="0.1.19")) == ()
    assert refusals(*decode, float16, on("gfx942", aiter="0.1.16")) == ()


def test_pages_of_one_token_are_for_head_dim_128() -> None:
    one = replace(WIDE, page_size=1)
    assert refusals(BATCH, StepKind.EXTEND, one, on("gfx942")) == ()
    wide = replace(one, head_dim=256, v_head_dim=256)
    (reason,) = refusals(BATCH, StepKind.EXTEND, wide, on("gfx942"))
    assert reason == "pages of one token are tested at head_dim 128 alone (every release)"


def with_switch(target: Target, *switches: str) -> Target:
    return replace(target, releases=replace(target.releases, switches=switches))


def test_opus_is_refused_without_the_switch_that_avoids_it() -> None:
    prefill = (VARLEN, StepKind.PREFILL)
    problem = replace(EXPANDED, num_q_heads=16, num_kv_heads=16, wants_lse=False)
    for aiter, is_refused in {"0.1.17": False, "0.1.18": True, "0.1.20.post1": True, "0.1.21": False}.items():
        target = on("gfx950", aiter=aiter)
        assert bool(refusals(*prefill, problem, target)) == is_refused
        for served in (with_switch(target, "AITER_DISABLE_FMHA_OPUS=1"), on("gfx942", aiter=aiter)):
            assert refusals(*prefill, problem, served) == ()
        assert refusals(*prefill, replace(problem, wants_lse=True), target) == ()
    for value in ("0", "00", "", "true"):  # AITER reads a number, and no word turns its kernel off
        off = with_switch(on("gfx950", aiter="0.1.20"), f"AITER_DISABLE_FMHA_OPUS={value}")
        (reason,) = refusals(*prefill, problem, off)
    assert "may end in a TypeError; AITER_DISABLE_FMHA_OPUS=1 avoids it (AITER from 0.1.18 and before 0.1.21" in reason
    assert refusals(*prefill, problem, known_target("gfx950")) == (), "the image has the fix"


@pytest.mark.parametrize(("arch", "refused"), [("gfx942", {128}), ("gfx950", {64, 128})])
def test_a_switch_that_leaves_out_scales_is_refused(arch: str, refused: set[int]) -> None:
    decode = ("mla_decode_fwd+get_mla_metadata_v1[fp8]", StepKind.DECODE)
    for heads in (8, 16, 32, 64, 120, 128):
        problem = in_eight_bits(latent_problem(heads), arch=arch)
        reasons = refusals(*decode, problem, with_switch(on(arch), "AITER_ENABLE_EXPERIMENTAL=1"))
        assert bool(reasons) == (-(-heads // 16) * 16 in refused)
        assert all(" selects a kernel that ignores the scales of " in each for each in reasons)
        for off in ((), ("AITER_ENABLE_EXPERIMENTAL=0",), ("QKV_VERSION=EXPERIMENTAL",)):
            assert refusals(*decode, problem, with_switch(on(arch), *off)) == ()


def test_the_switch_that_leaves_out_scales_is_refused_for_verify_steps_on_gfx950() -> None:
    verify = ("mla_decode_fwd+get_mla_metadata_v1[fp8, verify]", StepKind.VERIFY)
    for arch, is_refused in (("gfx950", True), ("gfx942", False)):
        problem, here = in_eight_bits(latent_problem(8), arch=arch), on(arch)
        reasons = refusals(*verify, problem, with_switch(here, "AITER_ENABLE_EXPERIMENTAL=1"))
        assert any("ignores the scales of four tokens of 16 heads; unset it" in each for each in reasons) == is_refused
        assert refusals(*verify, problem, here) == ()


def test_switches_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in SWITCHES:
        monkeypatch.delenv(each.name, raising=False)
    assert installed_releases().switches == ()
    monkeypatch.setenv("QKV_VERSION", "EXPERIMENTAL")
    monkeypatch.setenv("AITER_LOG_LEVEL", "INFO")
    assert installed_releases().switches == ("QKV_VERSION=EXPERIMENTAL",)


@pytest.mark.parametrize("name", [BATCH, f"{BATCH}[vectorised]"])
@pytest.mark.parametrize("kind", [StepKind.EXTEND, StepKind.MIXED])
def test_causal_batch_prefill_is_refused_on_gfx950_with_rocm_7_2(name: str, kind: StepKind) -> None:
    problem = vectorised_problem() if name.endswith("]") else WIDE
    (reason,) = refusals(name, kind, problem, on("gfx950", rocm="7.2.53211-abc"))
    assert reason.startswith("causal attention without a soft cap is miscompiled for gfx950 (ROCm from 7.2 and ")
    assert reason.endswith("before 7.3; here 7.2.53211)")
    for target in (on("gfx950", rocm="7.1.1"), on("gfx950", rocm="7.3.0"), on("gfx942", rocm="7.2.4")):
        assert refusals(name, kind, problem, target) == ()
    capped, both_ways = replace(problem, logits_soft_cap=30.0), replace(problem, window_right=UNLIMITED_WINDOW)
    for each in (capped, both_ways):
        assert refusals(name, kind, each, on("gfx950", rocm="7.2.4")) == ()


def test_ragged_decode_is_refused_slopes_that_it_would_cap() -> None:
    slopes = replace(WIDE, has_alibi_slopes=True)
    ragged = ("paged_attention_ragged", StepKind.DECODE)
    (reason,) = refusals(*ragged, replace(slopes, logits_soft_cap=30.0), on("gfx942"))
    assert reason.startswith("it caps logits with their ALiBi slopes added")
    for each in (slopes, replace(WIDE, logits_soft_cap=30.0)):
        assert refusals(*ragged, each, on("gfx942")) == ()


COMPOSABLE = [(VARLEN, StepKind.PREFILL), (BATCH, StepKind.EXTEND)]


@pytest.mark.parametrize(("name", "kind"), COMPOSABLE)
def test_slopes_are_for_sequences_whose_positions_have_16_bits(name: str, kind: StepKind) -> None:
    slopes = replace(WIDE, has_alibi_slopes=True)
    assert refusals(name, kind, slopes, on("gfx942"), PoolSize(8, 1 << 16, 1)) == ()
    (reason,) = refusals(name, kind, slopes, on("gfx942"), PoolSize(8, (1 << 16) + 1, 1))
    assert reason == "its ALiBi slopes are limited to sequences of up to 65536 tokens (every release)"
    (reason,) = refusals(name, kind, replace(slopes, wants_lse=True), on("gfx942"))
    assert reason == "it returns no log-sum-exp for layers with ALiBi slopes"


LATENT_ROWS = [row for row in ENTRIES if "mla_" in row.name and not row.not_bound]


@pytest.mark.parametrize("row", LATENT_ROWS, ids=lambda row: f"{row.name}-{row.kind.value}")
def test_a_latent_pool_ends_at_4_gib_a_layer(row: Any) -> None:
    latent = latent_problem(16) if KVEncoding.LIKE_Q in row.limits.encodings else in_eight_bits(latent_problem(16))
    row_bytes = 576 * latent.page_format.encoding.dtype.itemsize
    most = (2**32 - 1) // row_bytes
    assert most < 2**24, "where page ids are multiplied by their low 24 bits"
    assert row.refusals(latent, on("gfx942"), PoolSize(most, 1024, 8)) == ()
    (reason,) = row.refusals(latent, on("gfx942"), PoolSize(most + 1, 1024, 8))
    assert "bytes, and its offsets reach" in reason or reason.endswith(
        "more than 4 GiB, the limit of its offsets (every release)"
    )


@pytest.mark.parametrize("heads", [16, 48, 32, 64, 128])
def test_latents_in_eight_bits_pass_4_gib_on_gfx950_in_groups_of_16_heads(heads: int) -> None:
    problem, pool = in_eight_bits(latent_problem(heads), arch="gfx950"), PoolSize(2**32 // 576 + 1, 1024, 8)
    decode = ("mla_decode_fwd+get_mla_metadata_v1[fp8]", StepKind.DECODE)
    (reason,) = refusals(*decode, problem, on("gfx950", aiter="0.1.19"), pool)
    assert reason.startswith("the latents of a layer take more than 4 GiB, the limit of its offsets")
    since = refusals(*decode, problem, on("gfx950", aiter="0.1.19.post1"), pool)
    assert [each.split(" (")[0] for each in since] == [f"{reason.split(' (')[0]}"] * (heads in (32, 64, 128))


def test_the_stand_ins_read_no_farther_than_the_real_ones() -> None:
    """Runs on the meta device, where a pool of gigabytes costs nothing. A call within reach is not refused."""

    indptr = torch.empty(5, dtype=torch.int32, device="meta")
    latent = torch.empty(2**32 // 1152 + 1, 1, 1, 576, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ContractBroken, match="byte offsets wrap at 4 GiB"):
        mla_decode_fwd(
            E4048607,
            EIGHT_BITS["gfx942"],
            {
                "q": torch.empty(4, 16, 576, dtype=torch.bfloat16, device="meta"),
                "kv_buffer": latent,
                "qo_indptr": indptr,
                "num_kv_splits": 1,
            },
        )


@pytest.mark.parametrize(
    "version",
    [
        "v0.1.20",
        "0.1.20.post1+rocm7.2",
        "0.1.19.post2",
        "0.1.21.dev46",
        "0.1.21.dev46+ge4048607a",
        "0.1.21.dev46+ge4048607a5.d20261001",
        "e4048607a535ace3a2b51ded31b1c8c2d45c0879",
        "e4048607",
    ],
)
def test_a_release_that_was_read_is_known_by_each_of_its_names(version: str) -> None:
    assert not_read(version) == ""


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.1.29+rocm7.2", "AITER 0.1.29+rocm7.2 was never read;"),
        ("0.1.22", "AITER 0.1.22 was never read beyond its release notes;"),
        ("v0.1.23", "AITER v0.1.23 was never read beyond its title;"),
        ("0.2.0", "AITER 0.2.0 was never read;"),
        ("0.1.20.post9", "AITER 0.1.20.post9 was never read;"),
        ("0.1.21.dev47+g1234567", "AITER 0.1.21.dev47+g1234567 was never read;"),
        ("0.1.21.dev46+g1234567", "AITER 0.1.21.dev46+g1234567 was never read;"),
        ("0.1.20rc1", "AITER 0.1.20rc1 was never read;"),
        ("d9e5ef7ce08ee7045d583aed768cff41aa9210fe", "AITER d9e5ef7ce08ee7045d583aed768cff41aa9210fe was never read;"),
        ("", "AITER's release is not known;"),
    ],
)
def test_another_release_is_said_to_be_unread_in_one_sentence(version: str, said: str) -> None:
    sentence = not_read(version)
    assert sentence == f"{said} this version of rocm_attn was written for {written_for()}"


def test_the_releases_are_in_the_order_in_which_they_were_made() -> None:
    in_order = [Release.of(each.name) for each in releases()]
    assert in_order == sorted(set(in_order))
    # Reading stops somewhere, and nothing after it was read.
    was_read = [each.was_read for each in releases()]
    assert was_read == sorted(was_read, reverse=True)
    assert {each.read for each in releases()} <= {"tree", "functions", "notes", "title", "nothing"}


def test_the_image_has_the_newest_commit_that_was_read() -> None:
    newest = [each for each in releases() if each.read == "tree"][-1]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^ARG AITER_COMMIT=(\S+)$", dockerfile, re.MULTILINE) == [newest.commit]
    assert Release.of(newest.name) == IMAGE_RELEASES.aiter
    assert aiter_not_read(IMAGE_RELEASES.aiter) == ""


def test_the_range_is_written_once() -> None:
    first = written_for().split()[1]
    for folder in ("rocm_attn", "rocm_lab", "rocm_serve"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "aiter_releases.py":
                assert f"{first} to v" not in path.read_text(), path


@pytest.mark.parametrize(
    ("version", "may_build", "said"),
    [
        ("e4048607a535ace3a2b51ded31b1c8c2d45c0879", True, "was read"),
        ("v0.1.19", True, "AITER v0.1.19 was read"),
        ("v0.1.23", True, "was never read beyond its title; "),
        ("0.1.30", True, "AITER 0.1.30 was never read; "),
        ("v0.1.14.post1", False, "AITER v0.1.14.post1 is older than v0.1.15, the first that is served"),
    ],
)
def test_a_build_is_told_of_its_release_before_it_starts(
    version: str, may_build: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["aiter_releases.py", version])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(aiter_releases.__file__), run_name="__main__")
    printed = capsys.readouterr()
    assert said in (printed.out if may_build else printed.err)
    assert (printed.out + printed.err).count("\n") == 1
    assert ended.value.code == (0 if may_build else 1)


@pytest.mark.parametrize("version", ["v0.1.15", "0.1.15.post1", "0.1.29", "", "e4048607", "a build of our own"])
def test_a_release_from_the_first_on_and_one_that_is_not_known_are_not_too_old(version: str) -> None:
    assert too_old(version) == ""


def explained(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["explain", str(config_of("llama-3-8b")), "--arch", "gfx942", *options]) == 0
    return capsys.readouterr().out


def test_explain_marks_the_kernels_of_a_release_that_was_never_read(capsys: pytest.CaptureFixture[str]) -> None:
    printed = explained(capsys, "--aiter-release", "0.1.23")
    assert "AITER v0.1.23 was never read beyond its title; " in printed
    assert "  decode: aiter.paged_attention_ragged (not read)\n" in printed
    assert "  shared: triton.shared_prefix\n" in printed, "a kernel that is not AITER's was read"
    assert json.loads(explained(capsys, "--aiter-release", "0.1.23", "--json"))["aiter_not_read"]
    for release in ("0.1.20", "0.1.20.post1"):
        assert "not read" not in explained(capsys, "--aiter-release", release)
    assert json.loads(explained(capsys, "--json"))["aiter_not_read"] == ""


def test_a_release_that_is_not_known_counts_as_unread() -> None:
    assert aiter_not_read(UNKNOWN).startswith("AITER's release is not known;")


def test_a_release_that_was_never_read_serves_after_its_probe_and_a_log_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels._warn_once.cache_clear()
    install(Signatures("0.1.29", E4048607.parameters), monkeypatch)
    with caplog.at_level(logging.WARNING, logger=kernels.__name__):
        world(plain_problem(16, dims=(128, 128)))
    (said,) = [record.getMessage() for record in caplog.records if "never read" in record.getMessage()]
    assert said.startswith("AITER 0.1.29 was never read; ")
    assert said.endswith("its kernels serve because their parameters agree and their probe passed")
