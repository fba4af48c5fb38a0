"""The command line: usage errors, exit codes, and the contents of stdout and stderr."""

import io
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rocm_attn.cli import DONE, FAILED, INTERRUPTED, main
from rocm_attn.cli.arguments import described_model
from rocm_attn.cli.parser import build_parser
from rocm_serve.cli.generate import OrderedText
from rocm_serve.cli.options import ON_GENERATE, ON_SERVE, SERVER
from rocm_serve.models.places import find_model
from rocm_serve.options import EngineOptions
from rocm_serve.server.options import ServerOptions
from tests.amd.forked import run_python
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.hf_models import small_hf_model, write_gguf

# It does not say how long a text may be.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def config_file(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_every_flag_of_generate_that_serves_is_a_field_of_the_engines_options() -> None:
    parsed = build_parser().parse_args(["generate", "a prompt"])
    given = {name: getattr(parsed, name) for name in ON_GENERATE}
    assert EngineOptions(**given) == EngineOptions()
    assert {field.name for field in fields(EngineOptions)} - set(given) == {
        *("capture_after", "max_kv_len", "kv_bytes", "host_kv_bytes", "priority_aging", "state_checkpoints")
    }


def test_every_flag_of_serve_is_a_field_of_the_engines_options_or_of_the_servers() -> None:
    parsed = build_parser().parse_args(["serve"])
    assert EngineOptions(**{name: getattr(parsed, name) for name in ON_SERVE}) == EngineOptions()
    assert ServerOptions(**{name: getattr(parsed, name) for name in SERVER}) == ServerOptions()
    assert build_parser().parse_args(["serve", "--host-kv-bytes", str(2**36)]).host_kv_bytes == 2**36
    assert {field.name for field in fields(EngineOptions)} - set(ON_SERVE) == {"capture_after"}
    assert {field.name for field in fields(ServerOptions)} == set(SERVER)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        (["--page-size", "auto"], ("page_size", "auto")),
        (["--page-size", "32"], ("page_size", 32)),
        (["--no-graphs"], ("graphs", False)),
        (["--num-pages", "2"], ("num_pages", 2)),
        (["--swa-pages", "0"], ("swa_pages", 0)),
        (["--hang-after", "0.5"], ("hang_after", 0.5)),
        (["--check-every", "7"], ("check_every", 7)),
        (["--flight-record", "last.json"], ("flight_record", Path("last.json"))),
        (["--evidence", "wrong.evidence"], ("evidence", Path("wrong.evidence"))),
        (["--pool", "vectorized"], ("pool", "vectorized")),
    ],
)
def test_a_flag_gives_its_field_a_value_of_the_right_type(flag: list[str], value: tuple[str, object]) -> None:
    name, wanted = value
    got = getattr(build_parser().parse_args(["generate", *flag]), name)
    assert (got, type(got)) == (wanted, type(wanted))


def test_help_is_printed_without_importing_torch() -> None:
    commands = ("", "generate", "serve", "explain", "env", "doctor")
    code = (
        "import contextlib, sys\nfrom rocm_attn.cli import main\n"
        f"for command in {commands}:\n    with contextlib.suppress(SystemExit):\n"
        "        main([*command.split(), '--help'])\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    assert run_python("-c", code).count("usage: rocm-attn") == len(commands)


# From SmolLM2-135M-Instruct's config.json.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


def test_explain_names_the_kernel_of_every_step_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", config_file(tmp_path, LLAMA), "--arch", "gfx942"]) == DONE
    printed = capsys.readouterr()
    assert "4 layers (0-3): 32 query heads over 8 KV heads, head_dim 128, bfloat16, pages of 16" in printed.out
    for kind in ("decode", "extend", "mixed"):
        assert f"  {kind}: aiter." in printed.out
    assert "for AITER 0.1.21 in development and ROCm 7.2.4; at start a runtime drops kernels" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    "command",
    [
        ["explain"],
        pytest.param(["capture-plan", "--max-batch-size", "4"], marks=pytest.mark.nightly),
        pytest.param(["prewarm", "--provider", "torch", "--max-kv-len", "64"], marks=pytest.mark.nightly),
    ],
)
def test_commands_that_read_a_config_take_a_gguf_file(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_gguf(small_hf_model("Llama"), tmp_path / "model.gguf")
    assert main([*command, str(model), "--arch", "gfx942", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["arch"] == "gfx942"


@pytest.mark.nightly
def test_a_gguf_file_describes_its_models_attention(tmp_path: Path) -> None:
    of_gguf = described_model(str(find_model("smollm2")))
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    of_json = described_model(str(tmp_path))
    assert of_gguf.geometry == of_json.geometry
    assert of_gguf.max_kv_len(None) == of_json.max_kv_len(None) == 8192
    assert of_gguf.max_kv_len(64) == of_json.max_kv_len(64) == 64


def test_explain_json_is_one_object_with_the_same_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", config_file(tmp_path, LLAMA), "--arch", "sm_90", "--page-size", "64", "--json"]) == DONE
    explained = json.loads(capsys.readouterr().out)
    assert explained["arch"] == "sm_90"
    (kind,) = explained["layer_kinds"]
    assert kind["layers"] == kind["reads"] == [0, 1, 2, 3]
    assert kind["problem"]["page_size"] == 64
    assert kind["provider"] == "triton"
    assert set(kind["kernels"]) == {"decode", "extend", "prefill", "mixed", "shared"}
    assert "decode: aiter.unified_attention: arch sm_90 is not one of gfx942, gfx950" in kind["refusals"]


def test_explain_takes_a_pool_and_says_what_it_is_served_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", config_file(tmp_path, LLAMA), "--arch", "gfx942"]
    assert main([*command, "--pool", "vectorized", "--page-size", "1024"]) == DONE
    printed = capsys.readouterr().out
    assert "bfloat16, pages of 1024, vectorised pages\n  decode: aiter.pa_decode_gluon\n" in printed
    assert main([*command, "--pool", "auto", "--page-size", "auto", "--json"]) == DONE
    explained = json.loads(capsys.readouterr().out)
    assert (explained["page_size"], explained["pool"]) == (16, "linear")
    assert "vectorised pages of 32: some layers have no kernel" in explained["page_sizes"]


def test_explain_lists_every_reason_when_layers_are_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {**GEMMA2, "head_dim": 640}
    assert main(["explain", config_file(tmp_path, wide), "--arch", "gfx942"]) == FAILED
    printed = capsys.readouterr()
    assert "2 layers (0, 2): " in printed.out
    assert "2 layers (1, 3): " in printed.out
    assert "not served: decode: triton.decode: head_dim 640 is outside 1..512" in printed.out
    assert "kinds of layer have no kernel on gfx942" in printed.err


def test_env_reports_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == DONE
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["python"].startswith("3.")
    assert facts["versions"]["torch"]
    assert isinstance(facts["devices"], list)
    assert main(["env"]) == DONE
    assert "torch " in capsys.readouterr().out


def test_env_does_not_say_that_a_torch_whose_driver_fails_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rocm_attn.cli.env._devices", Mock(side_effect=RuntimeError("No HIP GPUs are available")))
    assert main(["env"]) == DONE
    said = "not known: torch fails to describe them (No HIP GPUs are available); run rocm-attn doctor"
    assert said in capsys.readouterr().out


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("rocm_attn.cli.env.run", Mock(side_effect=KeyboardInterrupt))
    assert main(["env"]) == INTERRUPTED
    assert capsys.readouterr().err == "rocm-attn: interrupted\n"


def test_a_missing_extra_names_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["generate", "x"]) == FAILED
    remedy = "gguf is not installed; run in a checkout of rocm_attn: pip install '.[gguf]'"
    assert capsys.readouterr().err.splitlines()[-1] == f"rocm-attn: {remedy}"


def test_the_laboratory_without_the_engine_names_the_remedy() -> None:
    code = "import sys; sys.modules['rocm_serve'] = None\nfrom rocm_attn.cli import main; sys.exit(main(['kernels']))"
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    remedy = "rocm_serve is not installed; run in a checkout of rocm_attn: pip install . ./rocm_serve"
    assert (finished.returncode, finished.stderr) == (FAILED, f"rocm-attn: {remedy}\n")


def test_texts_that_grow_together_are_printed_one_after_the_other() -> None:
    out = io.StringIO()
    texts = OrderedText(out, ["# a", "# b", "# c"], 3)
    texts.add(1, "b1 ")
    texts.add(0, "a1 ")
    assert out.getvalue() == "# a\na1 "
    texts.finish(1)
    texts.add(0, "a2")
    texts.add(2, "c1 ")
    assert out.getvalue() == "# a\na1 a2"
    texts.finish(0)
    assert out.getvalue() == "# a\na1 a2\n\n# b\nb1 \n\n# c\nc1 "
    texts.add(2, "c2")
    texts.finish(2)
    assert out.getvalue() == "# a\na1 a2\n\n# b\nb1 \n\n# c\nc1 c2\n"
