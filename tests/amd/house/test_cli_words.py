"""Words of the command line: refused in one sentence, with the word that was meant, before any work is done."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest

import rocm_attn as ra
import rocm_serve
from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.errors import BadSetting
from rocm_attn.machine.gpus import GPUS
from rocm_attn.machine.target import KNOWN_TARGETS
from tests.amd.house.source_tree import ROOT
from tests.amd.house.test_cli import LLAMA, config_file


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["explian", "config.json"],
            "argument COMMAND: invalid choice: 'explian'; did you mean explain? (see rocm-attn",
        ),
        (["bench", "kernls"], "invalid choice: 'kernls'; did you mean kernels? (see rocm-attn bench --help)"),
        (["serve", "--page-szie", "3"], "unrecognized arguments: --page-szie; did you mean --page-size?"),
        (["explain", "config.json", "--arhc", "gfx942"], "unrecognized arguments: --arhc; did you mean --arch?"),
        (["serve", "--enable-prefix-caching"], "vLLM's --enable-prefix-caching is --prefix-caching here"),
        (["serve", "--tensor-parallel-size", "8"], "vLLM's --tensor-parallel-size is --tp here"),
        (["capture-plan", "config.json", "--max-num-seqs=4"], "vLLM's --max-num-seqs is --max-batch-size here"),
        (["serve", "--enable-lora"], "unrecognized arguments: --enable-lora; adapters are not served; merge them into"),
        (["serve", "--api-key=SECRET"], "unrecognized arguments: --api-key; vLLM's --api-key is --api-key-file here"),
        (
            ["serve", "--api-key", "SECRET"],
            "unrecognized arguments: --api-key; vLLM's --api-key is --api-key-file here",
        ),
        (
            ["serve", "extra"],
            "rocm-attn serve: error: unrecognized arguments: extra; if that is the model, give it as --model extra",
        ),
        (["generate", "--provider", "tritn", "x"], "invalid choice: 'tritn'; did you mean triton?"),
        (["generate", "--provider", "x", "x"], "invalid choice: 'x' (choose from auto, cpu, torch, triton, aiter)"),
        (["capture-plan", "x", "--gpu", "mi301"], "invalid choice: 'mi301' (choose from mi300x, mi308x, "),
        (["kernels", "--quiet"], "rocm-attn kernels: error: unrecognized arguments: --quiet (see"),
        (["generate", "--page-size", "abc", "x"], "argument --page-size: 'abc' is not a whole number, or auto"),
        (
            ["generate", "--page-size", "0", "x"],
            "argument --page-size: 0 is below 1, the smallest allowed value, or auto",
        ),
        (["explain", "config.json"], "the following arguments are required: --arch"),
        (["explain", "config.json", "--arch", "cpu", "--num-pages", "1"], "--num-pages: 1 is below 2"),
        (["explain", "config.json", "--arch", "cpu", "--tp", "2147483647"], "--tp: 2147483647 is above 1024"),
        (["serve", "--max-kv-len", "1"], "--max-kv-len: 1 is below 2"),
        ([], "COMMAND"),
        (["serve", "--port=--"], "argument --port: '--' is not a whole number"),
        (["generate", "--provider=--", "x"], "argument --provider: invalid choice: '--' (choose from auto"),
        (["serve", "--port", "-1"], "--port: -1 is below 0"),
        (["serve", "--max-batch-size", "0"], "--max-batch-size: 0 is below 1"),
        (["serve", "--chunk", "0"], "--chunk: 0 is below 1"),
        (["generate", "--max-new-tokens", "0", "x"], "--max-new-tokens: 0 is below 1"),
        (["generate", "--chunk", "2147483648", "x"], "--chunk: 2147483648 is above 2147483647"),
        (["soak", "--seed", "9" * 30], f"--seed: {'9' * 30} is above 2147483647"),
        (["generate", "--temperature", "nan", "x"], "--temperature: nan is not at least 0"),
        (["generate", "--top-p", "1.5", "x"], "--top-p: 1.5 is not above 0 and at most 1"),
        (["capture-plan", "--weights-gib", "1e300", "x"], "argument --weights-gib: 1e300 is above 1e+15"),
        (["truth", "dense", "--pool-gib", "1e300"], "argument --pool-gib: 1e300 is above 1e+15"),
        (["bench", "traffic", "--spread", "100000"], "argument --spread: 100000 is above 10"),
        (["generate", "--regex", "", "x"], "argument --regex: it is empty; give a value, or leave the option out"),
        (["prewarm", "--check=", "x"], "argument --check: it is empty; give a value, or leave the option out"),
        (["soak", "--device", ""], "argument --device: it is empty; give a value, or leave the option out"),
        (
            ["truth", "dense", "--providers", "torch,cuda"],
            "--providers: 'cuda' is not one of auto, cpu, torch, triton, aiter",
        ),
        (
            ["capture-plan", "config.json", "--arch", "gfx942", "--drafts", "8x4,1000x1000"],
            "make 1000000 draft tokens per sequence",
        ),
    ],
)
def test_a_wrong_word_is_refused_in_one_line_by_its_own_command(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == BAD_INPUT
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert complaint in line
    assert "SECRET" not in line, "it may be read by others"
    assert printed.out == ""


PLAN = ("capture-plan", "--max-batch-size", "4")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("explain", "{list}", "--arch", "gfx942"), "{list} holds JSON that is no object"),
        (("explain", "{broken}", "--arch", "gfx942"), "download the model's files again, or name another file"),
        (("explain", "{bare}", "--arch", "gfx942"), "architectures is None"),
        (("explain", "a" * 300, "--arch", "gfx942"), "aaa cannot be used (File name too long); look at its path"),
        (("explain", "{model}", "--arch", "mi250x"), "arch 'mi250x' is not known; choose one of gfx942, gfx950"),
        (("explain", "{model}", "--arch", "gfx941"), "or a GPU: mi300x"),
        (
            ("explain", "{model}", "--arch", "gfx942", "--pool", "vectorized", "--page-size", "4"),
            "page_size is 4 in a vectorised pool; its vectors of 16 bytes hold 8 elements",
        ),
        (("explain", "{model}", "--arch", "gfx942", "--aiter-release", "latest"), "is 'latest'; give a release number"),
        (
            ("explain", "{model}", "--arch", "gfx942", "--rocm-release", "7"),
            "--rocm-release is '7'; give a release num",
        ),
        (("explain", "{model}", "--arch", "gfx942", "--aiter-release", "0.1.14"), "AITER 0.1.14 is older than v0.1.15"),
        (("explain", "{model}", "--arch", "sm_90", "--aiter-release", "0.1.20"), "--aiter-release needs an AMD arch"),
        (("explain", "{model}", "--arch", "gfx942", "--tuning", "/nowhere"), "name one that `rocm-attn tune` wrote"),
        (("explain", "{model}", "--arch", "gfx942", "--engine", "vllm"), "an engine and its release, as in vllm@0.33"),
        (("explain", "{model}", "--arch", "gfx942", "--kv-scales", "head"), "choose kv_dtype fp8, or kv_scales auto"),
        ((*PLAN, "{model}", "--arch", "cpu"), "give --max-kv-len"),
        ((*PLAN, "{model}", "--arch", "cpu", "--max-kv-len", "64", "--capture-sizes", "8,4"), "capture_sizes: "),
        ((*PLAN, "/nowhere", "--arch", "cpu"), "there is no file"),
        ((*PLAN, "{model}"), "give --gpu, as mi300x, which says how many tokens fit, or --arch, as gfx942"),
        (
            (*PLAN, "{model}", "--gpu", "h200", "--arch", "gfx942"),
            "--gpu h200 is sm_90, and --arch is gfx942; leave --arch out",
        ),
        (
            (*PLAN, "{model}", "--gpu", "h200", "--gpu-memory-share", "1.5"),
            "--gpu-memory-share is 1.5; it must be above 0 and at most 1",
        ),
        (
            (*PLAN, "{model}", "--arch", "gfx942", "--gpu-memory-share", "0.5"),
            "--gpu-memory-share is of a GPU's memory, and there is no --gpu; give it, as mi300x",
        ),
        (("tune", "32x8", "--dry-run"), "or query heads x KV heads x head dim, as in 32x8x128"),
        (("truth", "dnse"), "or one of dense, latent, tokens, pools, blocks"),
        (
            ("truth", "dense", "--device", "cpu", "--kv-encodings", "fp7"),
            "encoding 'fp7' is not known; give all, or one of as-q, e4m3fn",
        ),
        (("soak", "--device", "tpu"), "device 'tpu' is not known"),
        (("soak", "--device", "cuda:99"), "device 'cuda:99' does not exist: torch sees "),
        (("soak", "--recurrent", "--speculative"), "states of --recurrent go on token after token"),
        (
            ("bench", "serve", "--url", "http://127.0.0.1:1", "--trace", "missing.jsonl"),
            "missing.jsonl cannot be read",
        ),
        (("replay-step", "{list}"), "its JSON is no object); give a file that --flight-record has written"),
        (
            ("replay-step", "{bare}", "--simulate", "--step", "0", "--device", "cpu"),
            "--simulate runs the one step of its evidence, on no device; leave out --step, --device",
        ),
        (("replay-step", "{bare}"), "its JSON names no format); give a file that --flight-record has written"),
        (("replay-step", "/nowhere"), "No such file or directory); give a file that --flight-record has written"),
        (
            ("read-report", "{list}"),
            "its JSON is no object); name the file that `bash scripts/test.sh rocm` has written",
        ),
        (
            ("read-report", "/nowhere"),
            "the report /nowhere cannot be read (No such file or directory); name another file",
        ),
        (("serve", "--served-model-name", ""), "served_model_name is empty; give a name, or leave it out"),
        (("cycles", "{empty}"), "{empty} has no file that ends in one of"),
        (("serve", "--api-key-file", "/nowhere"), "(No such file or directory); give a file with one per line"),
        (("serve", "--chat-template", "/nowhere"), "leave it out for the model's own"),
        (("generate", "--json-schema", "/nowhere", "x"), "give the schema itself, or a file that holds it"),
    ],
)
def test_a_wrong_file_or_value_is_named_with_what_to_give(
    arguments: tuple[str, ...], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"model": config_file(tmp_path, LLAMA), "empty": str(tmp_path / "empty")}
    for name, text in (("list", "[1]"), ("broken", "{"), ("bare", "{}")):
        places[name] = str(tmp_path / f"{name}.json")
        Path(places[name]).write_text(text)
    assert main([word.format(**places) for word in arguments]) == BAD_INPUT
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert remedy.format(**places) in line
    assert printed.out == ""


@pytest.mark.parametrize(
    "wrong",
    [
        ("--speculative", "foo"),
        ("--speculative", "draft:/nowhere"),
        ("--speculative", "eagle:/nowhere"),
        ("--flight-record", "/nowhere/last.json"),
        ("--evidence", "/nowhere/wrong.evidence"),
        ("--model", "/nowhere", "--dtype", "float32"),
    ],
)
@pytest.mark.parametrize(("command", "reads"), [("generate", "loaded_engine"), ("serve", "EngineProcess")])
def test_words_are_checked_before_weights_are_read(
    command: str,
    reads: str,
    wrong: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(f"rocm_serve.cli.{command}.{reads}", Mock(side_effect=AssertionError("weights are read")))
    prompts, port = (["x"], []) if command == "generate" else ([], ["--port", "0"])
    assert main([command, *wrong, *port, *prompts]) == BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "/nowhere" in line or "speculative 'foo' is not known" in line


@pytest.mark.parametrize(("name", "arch"), [("mi300x", "gfx942"), ("MI355X", "gfx950"), ("h200", "sm_90")])
def test_a_gpus_name_stands_for_its_arch(
    name: str, arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", config_file(tmp_path, LLAMA), "--arch", name, "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["arch"] == arch


def test_every_gpu_of_the_table_has_a_known_arch_and_says_where_its_bytes_are_from() -> None:
    for name, gpu in GPUS.items():
        assert name == name.lower()
        assert gpu.arch in KNOWN_TARGETS
        assert gpu.memory_bytes >= 80 * 10**9
        assert gpu.source


def test_versions_are_printed_and_are_those_of_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == DONE
    names = ("rocm-attn", "rocm-serve", "rocm-lab")
    assert capsys.readouterr().out == ", ".join(f"{name} {metadata.version(name)}" for name in names) + "\n"
    assert ra.__version__ == metadata.version("rocm-attn")
    assert rocm_serve.__version__ == metadata.version("rocm-serve")


def test_a_misspelt_name_is_suggested() -> None:
    with pytest.raises(AttributeError, match=r"module 'rocm_attn' has no attribute 'Probelm'; did you mean Problem\?"):
        ra.Probelm  # type: ignore[attr-defined]  # noqa: B018


def test_a_device_that_torch_does_not_know_is_refused_in_a_sentence() -> None:
    with pytest.raises(BadSetting, match="device 'rocm' is not known; use 'cpu', 'cuda' or 'cuda:1'"):
        ra.build_runtime([], ra.RuntimeOptions(num_pages=2, max_num_seqs=1, max_kv_len=16), device="rocm")


def test_a_memory_that_is_full_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["truth", "dense", "--device", "cpu", "--lengths", "200", "--pool-gib", "4000"]
    assert main(command) == FAILED
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("rocm-attn: out of memory (")
    assert sentence.endswith("; ask for fewer pages, tokens or sequences")


# A torch that is missing, and one whose libraries are.
TORCHES = {
    "absent": ("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "torch is not installed; "),
    "broken": (
        "raise OSError('libtorch_hip.so: cannot open shared object file')",
        "torch cannot be imported (libtorch_hip.so: cannot open shared object file); rocm-attn doctor says",
    ),
}


def with_torch(state: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command over a torch in one of the states of TORCHES."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(TORCHES[state][0])
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "rocm_attn.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("state", list(TORCHES))
@pytest.mark.parametrize("command", ["explain", "serve"])
def test_without_torch_a_command_answers_with_one_sentence(state: str, command: str, tmp_path: Path) -> None:
    explained = (config_file(tmp_path, LLAMA), "--arch", "gfx942")
    words = {"explain": explained, "serve": ("--model", str(tmp_path), "--port", "0")}
    done = with_torch(state, tmp_path, command, *words[command])
    assert (done.returncode, done.stdout) == (FAILED, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rocm-attn: {TORCHES[state][1]}")


@pytest.mark.parametrize("state", list(TORCHES))
def test_env_reports_without_torch_and_says_why_there_is_none(state: str, tmp_path: Path) -> None:
    done = with_torch(state, tmp_path, "env", "--json")
    assert (done.returncode, done.stderr) == (DONE, "")
    facts = json.loads(done.stdout)
    assert facts["versions"]["rocm-attn"] == ra.__version__
    assert facts["torch_error"]
    assert facts["devices"] == []


def test_every_command_describes_itself_and_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("explain", "capture-plan", "prewarm", "truth", "kernels", "guards", "doctor", "env", "serve")
    for command in (*alone, *(f"bench {name}" for name in ("kernels", "compare", "plot", "serve", "traffic"))):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        printed = capsys.readouterr().out
        description = printed.partition("\n\n")[2].partition("\n\n")[0]
        assert description.strip().endswith("."), command
        assert not description.startswith("options"), command
        assert re.search(r"exit codes: 0 done, 1 (the job failed|a result was wrong[^,]*),\s+2 wrong usage", printed), (
            command
        )
