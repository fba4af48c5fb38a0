"""A Triton kernel is chosen, described and sized without Triton, which only launches need."""

import subprocess

import pytest

from rocm_attn.cli import DONE, FAILED, main
from tests.amd.aiter.explained import config_of
from tests.amd.forked import run_forked

CHOICE = """
import sys
import torch
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select

before = "triton" in sys.modules
problem = Problem(32, 8, 128, torch.bfloat16, 16, custom_mask=True)
for deterministic in (False, True):
    layers = problem if not deterministic else Problem(32, 8, 128, torch.bfloat16, 16)
    for kind, kernel in select(layers, known_target("gfx942"), "triton", deterministic=deterministic).kernels.items():
        shape = PaddedShape(kind, 4, 8)
        assert kernel.bound.describe()
        assert kernel.bound.schedule.words(shape) > 0
        assert kernel.bound.workspace_words(shape) >= 0
assert not before, "torch imports Triton by itself"
assert "triton" not in sys.modules
from rocm_attn.providers.triton_later import triton_launches
assert triton_launches.OPS.store_kv is not None
assert "triton" in sys.modules
"""


def test_triton_is_imported_by_the_first_launch_and_not_by_the_choice() -> None:
    done = run_forked(CHOICE)
    assert done.returncode == 0, done.stderr


# The command line without an installed Triton.
COMMANDS = """
import sys
sys.modules["triton"] = None
from rocm_attn.cli import main
sys.exit(main({arguments!r}))
"""


def without_triton(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Returns the exit code and the output of a command."""
    return run_forked(COMMANDS.format(arguments=arguments))


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("llama-3-8b", ("--arch", "gfx942"), marks=pytest.mark.nightly),
        ("llama-3-8b", ("--arch", "gfx950", "--deterministic", "--split-steps")),
        ("gpt-oss-120b", ("--arch", "gfx942", "--provider", "triton", "--drafts", "3x4")),
        (
            "deepseek-v3",
            ("--arch", "sm_90"),
        ),
    ],
)
def test_a_capture_is_planned_without_triton_as_with_it(
    model: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--max-batch-size", "8", "--max-kv-len", "4096", "--triton-release", "3.9.0")
    command = ("capture-plan", str(config_of(model)), *sizes, *options)
    done = without_triton(*command)
    assert (done.returncode, done.stderr) == (DONE, "")
    assert main(command) == DONE
    assert done.stdout == capsys.readouterr().out


def test_prewarm_says_in_a_sentence_that_it_needs_triton() -> None:
    done = without_triton("prewarm", str(config_of("llama-3-8b")), "--arch", "gfx942")
    assert (done.returncode, done.stdout) == (FAILED, "")
    *_, sentence = done.stderr.splitlines()
    assert sentence.startswith("rocm-attn: triton is not installed; it compiles kernels; torch for a GPU ")
    assert sentence.endswith("run: pip install 'triton>=3.6'")
    assert "Traceback" not in done.stderr
