"""Prewarming compiles the kernels that serving will need, once, and reports it."""

import errno
import itertools
import json
import logging
import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from rocm_attn.capture import prewarm as capture_prewarm
from rocm_attn.capture.kernel_bundle import save_bundle
from rocm_attn.capture.prewarm import PrewarmReport, prewarm
from rocm_attn.cli import BAD_INPUT, DONE, FAILED, INTERRUPTED, main
from rocm_attn.cli.prewarm import bundle_facts
from rocm_attn.cli.signals import signals_to
from rocm_attn.errors import BadSetting
from rocm_attn.kernels import compile_only
from rocm_attn.machine.target import known_target, target_elsewhere
from rocm_attn.problem import Problem
from rocm_attn.step.options import RuntimeOptions

# One worker runs them, because the first prewarm is done once for all of them.
pytestmark = pytest.mark.xdist_group("prewarm")

# With the installed Triton its own kernel decodes.
ARCH, DECODE = "gfx942", "_cdna_decode_kernel"
CPU = torch.device("cpu")
PROBLEM = Problem(8, 2, 64, torch.bfloat16, 16, v_head_dim=64, scale=0.125)
# Those of COMMAND, so that it finds all kernels of the first prewarm.
SIZES = RuntimeOptions(max_num_seqs=4, max_kv_len=256, num_pages=64)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
COMMAND = ("--arch", ARCH, "--max-batch-size", "4", "--num-pages", "64")


_FRESH_DEVICE_IDS = itertools.count(5_000_000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty Triton cache on disk."""
    use_cache(monkeypatch, tmp_path)
    return tmp_path


def use_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Triton's cache is in a folder. A process keeps loaded kernels by device; each driver gets another.

    Prewarming leaves out picks: test_served_variants.py compares what it compiles of them with what steps need.
    """
    patch.setenv("TRITON_CACHE_DIR", str(folder))
    patch.setattr(compile_only, "_device_id", lambda gpu: next(_FRESH_DEVICE_IDS))
    patch.setattr(capture_prewarm, "_pick", lambda runtime, dtype: None)


@dataclass(frozen=True)
class Warm:
    """One prewarm of PROBLEM and SIZES: its report, and the cache that it left."""

    report: PrewarmReport
    folder: Path


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model's file of settings."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def first_prewarm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    folder = tmp_path_factory.mktemp("prewarmed")
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, folder)
        report = prewarmed()
    return Warm(report, folder)


@pytest.fixture
def warm(first_prewarm: Warm, cache: Path) -> PrewarmReport:
    """The report of a prewarm that has filled this test's cache."""
    shutil.copytree(first_prewarm.folder, cache, dirs_exist_ok=True)
    return first_prewarm.report


def forget(cache: Path, kernel: str) -> None:
    for compiled in {path.parent for path in cache.glob(f"*/{kernel}.*")}:
        shutil.rmtree(compiled)


def prewarmed(problem: Problem = PROBLEM, sizes: RuntimeOptions = SIZES, arch: str = ARCH) -> PrewarmReport:
    """Runs one prewarm for a GPU that is not present, as in a separate process."""
    return prewarm([problem, problem], target_elsewhere(arch), sizes, device=torch.device("cpu"))


def test_what_was_prewarmed_is_compiled_no_second_time(warm: PrewarmReport) -> None:
    first, second = warm, prewarmed()
    assert sum(first.compiled.values()) >= 9
    assert {DECODE, "_extend_kernel", "_store_kernel", "_fill_kernel", "_publish_kernel"} <= set(first.compiled)
    assert first.cached == {}
    assert second.compiled == {}
    assert second.cached == first.compiled


@pytest.mark.nightly
def test_a_pool_above_2_gib_is_prewarmed_with_its_own_code(warm: PrewarmReport) -> None:
    large = prewarmed(sizes=replace(SIZES, num_pages=1 << 21))
    assert {DECODE, "_extend_kernel", "_store_kernel"} <= set(large.compiled)
    assert sum(large.compiled.values()) < sum(warm.compiled.values())


@pytest.mark.nightly
def test_another_arch_has_kernels_of_its_own(warm: PrewarmReport) -> None:
    other = prewarmed(arch="gfx950")
    assert set(other.compiled) == set(warm.compiled)
    assert other.cached == {}


@pytest.mark.usefixtures("warm")
def test_progress_counts_every_step_that_is_run() -> None:
    seen: list[tuple[int, int, str]] = []
    target, device = target_elsewhere(ARCH), torch.device("cpu")
    prewarm([PROBLEM], target, SIZES, device=device, progress=lambda *step: seen.append(step))
    total = seen[-1][1]
    assert [done for done, _, _ in seen] == list(range(total + 1))
    assert [name for _, _, name in seen if not name] == [""]


def test_kernels_that_compile_on_their_gpu_are_not_prewarmed_elsewhere() -> None:
    with pytest.raises(BadSetting, match="AITER compiles its kernels on the GPU that runs them; run prewarm"):
        prewarm([PROBLEM], known_target(ARCH), replace(SIZES, provider="aiter"), device=torch.device("cpu"))


def test_a_model_of_torch_operations_has_nothing_to_compile() -> None:
    report = prewarm([PROBLEM], known_target("cpu"), SIZES, device=torch.device("cpu"))
    assert report.lines() == ["nothing to compile: the chosen kernels are torch operations"]


def test_the_interpreter_compiles_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BadSetting, match="TRITON_INTERPRET is set"):
        prewarmed()


@pytest.mark.usefixtures("warm")
def test_the_command_prints_what_it_compiled(config: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It compiles one kernel; the others are in the cache that another process has filled."""
    forget(cache, "_store_kernel")
    command = ["prewarm", str(config), *COMMAND]
    assert main(command) == DONE
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == f"{config} on {ARCH}, pages of 16 tokens, compiled without running"
    assert "compiled _store_kernel, 2 variants" in printed.out
    assert f"cache {cache}" in printed.out
    assert printed.err == ""
    assert main([*command, "--json"]) == DONE
    reported = json.loads(capsys.readouterr().out)
    assert (reported["arch"], reported["ran"], reported["compiled"]) == (ARCH, False, {})
    assert reported["cached"]["_store_kernel"] == 2  # of few tokens and of many


@pytest.mark.usefixtures("warm")
def test_a_bundle_that_lacks_a_kernel_is_told_from_a_whole_one(
    config: Path,
    cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A whole one leaves nothing to compile in another folder, where Triton's index must name other paths."""
    command = ["prewarm", str(config), *COMMAND]
    folder = tmp_path_factory.mktemp("bundles")
    facts = bundle_facts(target_elsewhere(ARCH))
    save_bundle(folder / "whole", cache, facts)
    forget(cache, "_store_kernel")
    save_bundle(folder / "lacking", cache, facts)
    shutil.rmtree(cache)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "one"))
    assert main([*command, "--check", str(folder / "whole"), "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["compiled"] == {}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "other"))
    assert main([*command, "--check", str(folder / "lacking")]) == BAD_INPUT
    assert "lacks 2 variants that these options need, of _store_kernel; " in capsys.readouterr().err


@pytest.mark.nightly
def test_the_command_writes_a_bundle_of_this_model_alone(
    config: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["prewarm", str(config), *COMMAND, "--json"]
    file = tmp_path_factory.mktemp("bundles") / "kernels.tgz"
    assert main([*command, "--bundle", str(file)]) == DONE
    assert not any(cache.iterdir())
    compiled = json.loads(capsys.readouterr().out)["compiled"]
    assert main([*command, "--check", str(file)]) == DONE
    assert json.loads(capsys.readouterr().out)["cached"] == compiled


def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_attn.cli.prewarm.prewarm", Mock(side_effect=AssertionError("something is compiled")))


def test_a_bundle_that_cannot_be_written_is_refused_before_anything_is_compiled(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_is_compiled(monkeypatch)
    os.mkfifo(pipe := tmp_path / "pipe")
    for file in (tmp_path, pipe, tmp_path / "none" / "kernels.tgz"):
        assert main(["prewarm", str(config), *COMMAND, "--bundle", str(file)]) == BAD_INPUT
        assert f"--bundle {file} cannot be written: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()


def test_a_bundle_that_is_ended_by_sigterm_leaves_no_file(
    config: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("place")

    def ended(*given: object, **named: object) -> None:
        assert len(list(place.iterdir())) == 1
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setattr("rocm_attn.cli.prewarm.prewarm", ended)
    with signals_to(lambda *of_signal: pytest.fail("SIGTERM ends the process at once"), signal.SIGTERM):
        assert main(["prewarm", str(config), *COMMAND, "--bundle", str(place / "kernels.tgz")]) == INTERRUPTED
    assert not list(place.iterdir())


def test_a_cache_that_cannot_be_written_is_refused_in_a_sentence(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_is_compiled(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(config / "cache"))
    sentence = f"Triton's cache {config / 'cache'} cannot be written (Not a directory); set TRITON_CACHE_DIR to another"
    for bundle in ([], ["--check", str(config)]):
        assert main(["prewarm", str(config), *COMMAND, *bundle]) == BAD_INPUT
        assert sentence in capsys.readouterr().err
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    for bundle in ([], ["--check", str(config)]):  # its files went to the current folder
        assert main(["prewarm", str(config), *COMMAND, *bundle]) == BAD_INPUT
        assert "TRITON_CACHE_DIR is empty, and Triton compiles nothing then" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("full", "bundle", "code", "sentence"),
    [
        (
            "load_bundle",
            ["--check", "{config}"],
            BAD_INPUT,
            "{config} into Triton's cache {cache}: [Errno 28] No space",
        ),
        ("prewarm", [], FAILED, "a file cannot be written (No space left on device); make room where Triton's cache"),
    ],
)
def test_a_full_disk_is_a_sentence_about_the_cache(
    full: str,
    bundle: list[str],
    code: int,
    sentence: str,
    config: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        f"rocm_attn.cli.prewarm.{full}", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    )
    named = {"config": config, "cache": cache}
    assert main(["prewarm", str(config), *COMMAND, *(word.format(**named) for word in bundle)]) == code
    assert sentence.format(**named) in capsys.readouterr().err


@pytest.mark.nightly
def test_the_command_prewarms_deterministic_mode(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prewarm", str(config), *COMMAND]
    assert main([*command, "--json", "--deterministic"]) == DONE
    assert json.loads(capsys.readouterr().out)["compiled"]["_segment_decode_kernel"] > 0


@pytest.mark.usefixtures("warm")
def test_the_command_chooses_the_pages_that_are_left_open(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prewarm", str(config), *COMMAND, "--json"]
    assert main([*command, "--page-size", "auto", "--pool", "auto"]) == DONE
    reported = json.loads(capsys.readouterr().out)
    assert (reported["page_size"], reported["pool"]) == (16, "linear")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for")
def test_without_a_gpu_an_arch_must_be_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prewarm", str(config)]) == BAD_INPUT
    assert "name one with --arch" in capsys.readouterr().err


@pytest.mark.usefixtures("warm")
def test_nothing_is_said_of_safeguards_where_kernels_are_only_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rocm_attn"):
        prewarm([PROBLEM], target_elsewhere(ARCH), SIZES, device=CPU)
    assert "safeguards" not in caplog.text
